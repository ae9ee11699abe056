"""The script that counts what of the package a call enters."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trace import ROOT, VERSION, traced

TOY = {
    "toy/outer.py": """
from functools import cached_property
from toy.inner import leaf, rows

def top(call):
    total = sum(leaf(k) for k in [j for j in range(3)]) + (lambda: leaf(1))()
    total += sum({k: leaf(k) for k in {i for i in (1, 2)}}.values())
    # Functions of others, which call ours.
    return total + Holder().held + sorted(rows(2), key=leaf)[0] + call(leaf)

def unused():
    return leaf(0)

class Holder:
    @cached_property
    def held(self):
        def within():
            return leaf(7)
        return within()
""",
    "toy/inner.py": """
def leaf(k):
    return k and leaf(k - 1)

def rows(count):
    for k in range(count):
        yield leaf(k)
""",
    "other.py": "def call(function):\n    return function(9)\n",
}


def test_functions_files_and_depth_of_a_package_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lambdas, comprehensions and generator expressions neither count nor deepen the stack."""
    for name, code in TOY.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    from other import call
    from toy.outer import top

    found = traced(lambda: top(call), tmp_path, ("toy",))
    assert found.files == {
        "toy/inner.py": ["leaf", "rows"],
        "toy/outer.py": ["top", "Holder.held", "Holder.held.<locals>.within"],
    }
    assert found.functions == 5
    # top, then ten of leaf(9) to leaf(0), `call` of the other file between them; top, held, within
    # and eight of leaf(7) are as deep.
    assert found.depth == 11
    assert sys.getprofile() is None


@pytest.mark.slow
def test_the_script_prints_figures_and_names() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.trace", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    if sys.version_info[:2] != VERSION:
        assert re.fullmatch(r"the trace is counted in Python 3\.11.*this is 3\..*\n", run.stdout)
        return
    head, distance, loss, modules, *_ = run.stdout.splitlines()
    assert head.split() == ["files", "functions", "depth"]
    for line, file in ((distance, "otdd_flash/otdd.py"), (loss, "otdd_flash/solver/loss.py")):
        files, functions, depth = map(int, line.split()[-3:])
        assert depth < files < functions
        assert file in run.stdout
    names = re.findall(r"^  (otdd_flash[\w.]+)$", run.stdout, re.M)
    assert {"otdd_flash.otdd", "otdd_flash.kernels.tiling"} <= {*names}
    assert re.findall(r"\d+", modules) == [
        str(sum(name.startswith("otdd_flash.kernels") is kernel for name in names))
        for kernel in (False, True)
    ]
