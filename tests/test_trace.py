"""The script that counts what of the package a call enters."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.trace import ROOT, VERSION


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
    for line, file in ((distance, "otdd_flash/otdd.py"), (loss, "otdd_flash/derivatives/loss.py")):
        files, functions, depth = map(int, line.split()[-3:])
        assert depth < files < functions
        assert file in run.stdout
    names = re.findall(r"^  (otdd_flash[\w.]+)$", run.stdout, re.M)
    assert {"otdd_flash.otdd", "otdd_flash.operators.build"} <= {*names}
    assert re.findall(r"\d+", modules) == [
        str(sum(name.startswith("otdd_flash.kernels") is kernel for name in names))
        for kernel in (False, True)
    ]
