"""What is written of the parts of the package is so: where imports point, what a folder holds."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# `python -m otdd_flash.study` and `python -m otdd_flash.shift` are commands.
ENTRIES = ("otdd_flash.study.__main__", "otdd_flash.shift.__main__")


def layers():
    """The parts that docs/how-it-works.md lists, from the top down."""
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    found = re.search(r"Imports point down only: ([a-z_.,\s`]+)\. The", text)
    assert found is not None
    return [part.strip(" `\n") for part in found.group(1).split(",")]


def modules():
    """Every module, with what it imports anywhere but in a method `plot`, which asks report."""
    found = []
    for folder in ("otdd_flash", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            name = name if folder == "otdd_flash" else f"otdd_flash.{name}"
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found.append((name.removesuffix(".__init__"), [*imported(tree)]))
    return found


def imported(tree):
    parts = ("body", "orelse", "finalbody", "handlers", "cases")
    for node in (node for part in parts for node in getattr(tree, part, ())):
        drawn = isinstance(node, ast.FunctionDef) and node.name == "plot"
        yield from (name for name in imported(node) if not (drawn and is_report(name)))
        if isinstance(node, ast.ImportFrom) and node.module == "otdd_flash":
            yield from (f"otdd_flash.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def is_report(module):
    return f"{module}.".startswith("otdd_flash.report.")


def place(module, parts):
    """The layer that a module is of, the one of the longest name that fits."""
    fitting = [part for part in parts if f"{module}.".startswith(f"otdd_flash.{part}.")]
    return parts.index(max(fitting, key=len)) if fitting else None


@pytest.mark.slow
def test_imports_point_down():
    parts, found = layers(), modules()
    places = {name: place(name, parts) for module, others in found for name in (module, *others)}
    arrows = [
        (module, other)
        for module, others in found
        for other in others
        if module not in ENTRIES and None not in (places[module], places[other])
    ]
    assert len(arrows) > 1000
    upward = [both for both in arrows if places[both[1]] < places[both[0]]]
    assert not upward
