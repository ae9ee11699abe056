"""A group that was destroyed is gone: no thread of it runs while Python ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool

import otdd_flash as otdd


def threads_that_are_left() -> list[str]:
    """Names of threads of gloo, once its group has been destroyed."""
    otdd.led(lambda ranks: None)
    assert torch.distributed.group.WORLD is not None
    # Imports what would keep the group.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    torch.distributed.destroy_process_group()
    tasks = Path("/proc/self/task")
    names = [(tasks / task / "comm").read_text() for task in os.listdir(tasks)]
    return [name for name in names if "gloo" in name]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux")
@pytest.mark.xdist_group("ranks")
def test_no_thread_outlives_the_group() -> None:
    own = RankPool(2)
    try:
        assert own.run(threads_that_are_left) == [[], []]
    finally:
        own.close()
