"""Kernels of small matrices compile for an H200 and keep what they hold in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_batched.py")


def test_nothing_is_spilled() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) > 8
    for name, taken in kernels.items():
        assert taken["shared"] <= 232_448, name
        # A gradient of 128 x 128 and what it is of are half of all registers of 16 warps, and the
        # log domain, where few matrices go, needs half of them again. Where registers are capped,
        # which was measured to be faster, it alone spills them.
        spills = name == "backward 128" or taken["capped"]
        assert taken["stack"] <= (320 if spills else 0), name
