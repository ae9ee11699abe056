"""The names that users import, and what importing them costs.

Public is what `otdd_flash.__all__` lists, and every dotted name in README.md and `docs/`. The
latter stand in public_names.txt, one a line: a name that vanishes from a page is demanded still.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import otdd_flash
from otdd_flash.plugins import GROUP, KINDS

ROOT = Path(__file__).parents[1]
FROZEN = ROOT / "tests" / "public_names.txt"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Of the package that docs/extending.md makes.
OF_OTHERS = {"otdd_flash.extractors.polar"}
DOTTED = re.compile(r"(?<![\w./-])otdd(?:_flash)?((?:\.[A-Za-z_]\w*)+)")
IMPORTED = re.compile(r"^ *from (otdd_flash[\w.]*) import (\([^)]*\)|.*)", re.M)
# Modules in backticks, without the package.
INLINE = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\(\))?`")
HEAVY = ("hydra", "timm", "torchvision", "matplotlib", "datasets", "sklearn", "ot", "pandas")


def test_names_that_type_checkers_see_are_those_that_are_imported_on_use():
    """The imports for type checkers make the same names public as the homes of names."""
    tree = ast.parse(Path(otdd_flash.__file__).read_text(encoding="utf-8"))
    (checked,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    homes = {
        name.asname: statement.module
        for statement in checked.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
    for module in ("extractors", "labels", "nn"):
        assert homes.pop(module) == "otdd_flash"
    assert homes == otdd_flash._HOMES
    assert {*homes, "extractors", "labels", "nn", "__version__"} == {*otdd_flash.__all__}
    assert {*otdd_flash.__all__} == {*dir(otdd_flash)}
    assert all(hasattr(otdd_flash, name) for name in otdd_flash.__all__)


def names_in(text: str, settings: set[str]) -> set[str]:
    """The dotted names of a page, from `otdd_flash` on.

    Args:
        text: of the page.
        settings: keys such as `solver.tolerance`, which look like modules in backticks.
    """
    names = {f"otdd_flash{match[1]}" for match in DOTTED.finditer(text)}
    for module, imported in IMPORTED.findall(text):
        names |= {
            f"{module}.{part.split()[0]}" for part in imported.strip("() \n").split(",") if part
        }
    # Of folders alone: `result` and `samples` are variables on the pages.
    folders = {module.name for module in pkgutil.iter_modules(otdd_flash.__path__) if module.ispkg}
    for name in INLINE.findall(text):
        if name.split(".")[0] in folders and name not in settings and name != "report.html":
            names.add(f"otdd_flash.{name}")
    return names - OF_OTHERS - {"otdd_flash.py"}


def setting_keys() -> set[str]:
    """The keys of the command line that have a dot."""
    import yaml

    keys: set[str] = set()

    def below(content: Any, place: str) -> None:
        for key, part in content.items() if isinstance(content, dict) else ():
            keys.add(f"{place}{key}")
            below(part, f"{place}{key}.")

    for path in (ROOT / "conf").rglob("*.yaml"):
        group = path.relative_to(ROOT / "conf").parent.as_posix()
        below(yaml.safe_load(path.read_text("utf-8")), "" if group == "." else f"{group}.")
    return keys


def resolved(name: str) -> Any:
    """The module, group of entry points or attribute of a dotted name.

    Raises:
        LookupError: there is none.
    """
    if name in {f"{GROUP}{kind}" for kind in KINDS}:
        return name
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        owner, _, last = name.rpartition(".")
        if last in getattr(resolved(owner) if owner else None, "__dataclass_fields__", ()):
            return last
        raise LookupError(name) from None


def moved(name: str, changelog: str) -> bool:
    """Whether a line of the changelog says that a name is moved, renamed or removed."""
    short = name.removeprefix("otdd_flash.")
    said = rf"`(otdd_flash\.|otdd\.)?{re.escape(short)}(\(\))?`"
    bullets = re.split(r"\n(?=- |\n|#)", changelog)
    return any(
        re.search(said, bullet) and re.search(r"\b(moved|renamed|removed)\b", bullet, re.I)
        for bullet in bullets
    )


def test_every_documented_name_is_there_and_frozen():
    settings, frozen = setting_keys(), FROZEN.read_text("utf-8").split()
    assert frozen == sorted(set(frozen))
    for page in PAGES:
        for name in sorted(names_in(page.read_text("utf-8"), settings)):
            assert name in frozen, f"{page.name} shows {name}: add it to {FROZEN.name}"


@pytest.mark.slow
def test_every_public_name_is_kept_or_its_move_is_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    for name in FROZEN.read_text("utf-8").split():
        try:
            resolved(name)
        except LookupError:
            assert moved(name, changelog), (
                f"{name} is public (a page of docs/ names it, or did) and can no longer be "
                f"imported: bring it back, or let a line of CHANGELOG.md say that `{name}` was "
                f"moved, to where, or removed, and take it out of {FROZEN.name} after a release"
            )


def test_no_function_hides_a_module_of_its_name():
    """`otdd_flash.nearest` is a command's module, too: once imported, it is called all the same."""
    folder = Path(otdd_flash.__file__).parent
    modules = {path.stem for path in folder.iterdir() if not path.name.startswith(("_", "."))}
    for name in set(otdd_flash.__all__) & modules:
        module = import_module(f"otdd_flash.{name}")
        assert isinstance(module, ModuleType), name
        assert callable(module) == (name in otdd_flash._HOMES), name


PROGRAM = f"""
import sys, otdd_flash as otdd
print({{"torch", "numpy", *{HEAVY!r}}} & {{*sys.modules}})
for name in otdd.__all__: getattr(otdd, name)
print({{*{HEAVY!r}}} & {{*sys.modules}})
import torch
x = torch.eye(4, requires_grad=True)
otdd.doubly_stochastic(x[None], gradient="implicit").square().sum().backward()
otdd.sinkhorn_loss(x, x.detach() + 1, epsilon=0.5).backward()
otdd.matrix_loss(x, epsilon=0.5).backward()
print({{"torch._dynamo"}} & {{*sys.modules}})
"""


@pytest.mark.slow
def test_importing_the_package_imports_nothing_heavy():
    """Nor do calls import the compiler of PyTorch, which takes seconds."""
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["set()"] * 3
