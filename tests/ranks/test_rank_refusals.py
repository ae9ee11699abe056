"""What several processes are refused before any work, on hardware that is not here."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore

from otdd_flash.commands import exit_codes, ranks
from otdd_flash.errors import InputError
from otdd_flash.ranks import Ranks


def test_nccl_moves_no_tensors_of_the_host() -> None:
    here = object.__new__(Ranks)
    here._backends = {"cuda": "nccl"}
    with pytest.raises(InputError, match=r"nccl, which moves no tensors of device=cpu"):
        here.device_of(torch.device("cpu"))


@pytest.mark.parametrize("rank", ["0", "3"])
def test_more_processes_than_gpus_are_told_once(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    store = HashStore()
    monkeypatch.setattr(ranks, "_store", lambda: store)
    monkeypatch.setattr(ranks, "_end_as_meant", lambda: None)
    # Of a second machine: the first one may have enough.
    place = (("RANK", str(8 + int(rank))), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "4"))
    for key, value in place:
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as end:
        ranks._joined()
    assert end.value.code == exit_codes.BAD_INPUT
    said = capfd.readouterr().err
    expected = "4 processes on a machine of 2 GPUs; start torchrun with --nproc-per-node 2"
    assert (expected in " ".join(said.split())) == (rank == "0")
    # A restart does not try again.
    assert store.check([ranks.REFUSED]) == (rank == "0")
