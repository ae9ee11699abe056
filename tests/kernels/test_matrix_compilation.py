"""Kernels over a cost matrix compile for an H200 and keep what they hold in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_matrix.py")


def test_nothing_is_spilled() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) == 27
    for name, taken in kernels.items():
        # A sweep has an SM to itself, and two more rows in shared memory.
        sweeps = name.startswith("sweep")
        assert taken["shared"] <= (196_608 if sweeps else 65_536), name
        # Before it reads any row it holds the longest biases in float64.
        assert taken["stack"] <= (64 if name.startswith("sweep 16384") else 0), name
