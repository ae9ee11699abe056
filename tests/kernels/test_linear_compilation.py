"""Kernels of linear systems compile for an H200 and spill little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_linear.py")

# Bytes of a thread: some where addresses are not aligned.
MOST_SPILLED = 128


def test_they_compile_and_spill_little() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) == 50
    for name, taken in kernels.items():
        assert taken["shared"] <= 49_152, name
        assert taken["stack"] <= MOST_SPILLED, name
