"""Too little memory on the command line: exit code 2 and one message with the bytes."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.operators import memory
from otdd_flash.operators.stored import StoredOperator

pytestmark = pytest.mark.usefixtures("undrawn")


def test_too_little_memory(command, monkeypatch):
    monkeypatch.setattr(memory, "UNASKED", 0)
    monkeypatch.setattr(memory, "free_memory", lambda _: 2000)
    ended = command()
    assert ended.code == 2
    for part in ("not enough memory on cpu", "are needed and 2.0 KiB are free", "max_samples"):
        assert part in ended.error


def test_memory_that_runs_out(command, monkeypatch):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(StoredOperator, "softmin_rows", run_out)
    ended = command()
    assert ended.code == 2
    for part in ("out of memory on cpu", "2.00 GiB", "need at least", "max_samples"):
        assert part in ended.error
