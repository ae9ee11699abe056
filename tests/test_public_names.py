"""The names that users import, and what importing them costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import otdd_flash

PROMISED = {
    *("LabeledSamples", "load", "embed", "extractors", "dataset_distance", "DistanceResult"),
    *("ClassDistances", "sinkhorn", "sinkhorn_divergence", "__version__"),
    *("SubsampleInterval", "subsample_interval", "NoiseFloor", "noise_floor"),
}
HEAVY = ("hydra", "timm", "torchvision", "matplotlib", "datasets", "sklearn", "ot", "pandas")


def test_promised_names_are_there_and_listed():
    assert set(otdd_flash.__all__) >= PROMISED
    for name in otdd_flash.__all__:
        assert hasattr(otdd_flash, name), name


def test_names_that_type_checkers_see_are_those_that_are_imported_on_use():
    """The imports for type checkers, the homes of names and `__all__` list the same."""
    tree = ast.parse(Path(otdd_flash.__file__).read_text(encoding="utf-8"))
    (checked,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    homes = {
        name.name: statement.module
        for statement in checked.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
    for module in ("extractors", "labels"):
        assert homes.pop(module) == "otdd_flash"
    assert homes == otdd_flash._HOMES
    assert {*homes, "extractors", "labels", "__version__"} == {*otdd_flash.__all__}
    assert {*otdd_flash.__all__} == {*dir(otdd_flash)}


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'otdd_flash' has no attribute 'distence'"):
        _ = otdd_flash.distence


def test_no_function_hides_a_module_of_its_name():
    """`otdd_flash.load` must not be both a function and the module otdd_flash/load.py."""
    folder = Path(otdd_flash.__file__).parent
    modules = {path.stem for path in folder.iterdir() if not path.name.startswith(("_", "."))}
    for name in set(otdd_flash.__all__) & modules:
        assert isinstance(getattr(otdd_flash, name), ModuleType), name


@pytest.mark.slow
def test_importing_the_package_imports_nothing_heavy():
    program = (
        "import sys, otdd_flash\n"
        f"heavy = {HEAVY!r}\n"
        "print({'torch', 'numpy', *heavy} & {*sys.modules})\n"
        "for name in otdd_flash.__all__: getattr(otdd_flash, name)\n"
        "print({*heavy} & {*sys.modules})\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["set()", "set()"]


@pytest.mark.slow
def test_calls_do_not_import_the_compiler_of_pytorch():
    """Its import takes seconds, and only `torch.compile` has a use for it."""
    program = (
        "import sys, torch, otdd_flash as otdd\n"
        "x = torch.eye(4, requires_grad=True)\n"
        "for how in ('unrolled', 'implicit'):\n"
        "    otdd.doubly_stochastic(x[None], gradient=how).square().sum().backward()\n"
        "otdd.sinkhorn_plans(x[None], epsilon=0.5).plans.square().sum().backward()\n"
        "otdd.sinkhorn_loss(x, x.detach() + 1, epsilon=0.5).backward()\n"
        "otdd.matrix_loss(x, epsilon=0.5).backward()\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["False"]
