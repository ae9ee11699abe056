"""What is written of the parts of the package is so: where imports point, what a folder holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# `python -m otdd_flash.study` is a command.
ENTRIES = ("otdd_flash.study.__main__",)


def layers(page: str) -> list[str]:
    """The parts that a page lists, from the top down."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(r"Imports point down only: ([a-z_.,\s`]+)\. The", text)
    assert found is not None, page
    return [part.strip(" `\n") for part in found.group(1).split(",")]


@cache
def modules() -> list[tuple[str, list[str]]]:
    """Every module, with what it imports anywhere but in a method `plot`, which asks report."""
    found = []
    for folder in ("otdd_flash", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            name = name if folder == "otdd_flash" else f"otdd_flash.{name}"
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found.append((name.removesuffix(".__init__"), [*imported(tree)]))
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    parts = ("body", "orelse", "finalbody", "handlers", "cases")
    for node in (node for part in parts for node in getattr(tree, part, ())):
        drawn = isinstance(node, ast.FunctionDef) and node.name == "plot"
        yield from (name for name in imported(node) if not (drawn and is_report(name)))
        if isinstance(node, ast.ImportFrom) and node.module == "otdd_flash":
            yield from (f"otdd_flash.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def is_report(module: str) -> bool:
    return f"{module}.".startswith("otdd_flash.report.")


def place(module: str, parts: list[str]) -> int | None:
    """The layer that a module is of, the one of the longest name that fits."""
    fitting = [part for part in parts if f"{module}.".startswith(f"otdd_flash.{part}.")]
    return parts.index(max(fitting, key=len)) if fitting else None


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/how-it-works.md"])
def test_imports_point_down(page: str) -> None:
    parts = layers(page)
    checked, upward = 0, []
    for module, others in modules():
        own = place(module, parts)
        if own is None or module in ENTRIES:
            continue
        for other in others:
            there = place(other, parts)
            checked += there is not None
            if there is not None and there < own:
                upward.append(f"{module} imports {other}")
    assert checked > 1000
    assert not upward


@pytest.mark.parametrize(
    "package", ["batched", "distributed", "engine", "features", "files", "operators"]
)
def test_a_package_names_all_of_its_modules(package: str) -> None:
    folder = ROOT / "otdd_flash" / package
    text = (folder / "__init__.py").read_text(encoding="utf-8")
    stems = {path.stem for path in folder.glob("[a-z]*.py")}
    assert stems
    assert not {stem for stem in stems if f"`{stem}" not in text}
