"""A group that was destroyed is gone: no thread of it runs while Python ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import otdd_flash as otdd

dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=0, world_size=1)
otdd.led(lambda ranks: None)
assert dist.group.WORLD is not None
# Imports what would keep the group.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
dist.destroy_process_group()
threads = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print([name for name in threads if "gloo" in name])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux")
def test_no_thread_outlives_the_group(tmp_path: Path) -> None:
    run = [sys.executable, "-c", SCRIPT, str(tmp_path / "meeting")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
