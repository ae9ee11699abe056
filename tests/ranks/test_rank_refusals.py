"""What several processes are refused before any work, and where they go on after a restart."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from otdd_flash.commands import ranks, start
from otdd_flash.errors import BAD_INPUT, InputError


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
    assert end.value.code == BAD_INPUT
    said = capfd.readouterr().err
    expected = "4 processes on a machine of 2 GPUs; start torchrun with --nproc-per-node 2"
    assert (expected in " ".join(said.split())) == (rank == "0")
    # A restart does not try again.
    assert store.check([ranks.REFUSED]) == (rank == "0")


def test_processes_that_do_not_meet_are_told_where_they_were_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(backend: str, **how: object) -> None:
        raise torch.distributed.DistStoreError("Timed out after 1 second\nin a store")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.distributed, "init_process_group", never)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "there", "MASTER_PORT": "29500"}
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InputError) as error:
        ranks._joined()
    for part in ("the 2 processes", "there:29500", "(Timed out after 1 second);", "torchrun"):
        assert part in str(error.value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_before_ranks_have_met_ends_each(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def meet() -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ranks, "_joined", meet)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as end, ranks.together():
        raise AssertionError("they have not met")
    assert end.value.code == start.INTERRUPTED
    assert ("interrupted" in capfd.readouterr().err) == (rank == "0")


@pytest.mark.parametrize("earlier", [b"of another run", None])
def test_a_restart_goes_on_from_the_checkpoint_of_its_own_run_alone(
    earlier: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overwrite=true, what an earlier run left in the directory may have other settings."""
    store, checkpoint = HashStore(), tmp_path / "checkpoint.json"
    monkeypatch.setattr(ranks, "_store", lambda: store)
    monkeypatch.setattr(ranks, "leading", object)
    if earlier is not None:
        checkpoint.write_bytes(earlier)

    def arguments_after(restarts: int) -> list[str]:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        monkeypatch.setattr(sys, "argv", ["flow", "overwrite=true"])
        ranks._go_on_after_restart()
        ranks.remember(tmp_path)
        return sys.argv[2:]

    directory = f"hydra.run.dir='{tmp_path}'"
    assert arguments_after(0) == []
    assert arguments_after(1) == [directory]
    checkpoint.write_bytes(b"of this run")
    assert arguments_after(2) == arguments_after(3) == [directory, "flow.resume=true"]
