"""Files of checkpoints: what is in them, in which order they are written, and what is refused."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from small_flows import CPU, names, shards

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows import nest


def test_a_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = otdd.Checkpoints(tmp_path)
    with monkeypatch.context() as patched:
        patched.setitem(nest.TYPES, "Path", type(Path()))
        patched.setattr(nest, "_fields", lambda part: {"path": str(part)})
        folder.save({"step": 0, "state": Path("/")}, {})
    with pytest.raises(InputError, match=r"whose states are others"):
        folder.load({}, CPU)


SHARING = torch.arange(3.0)
NESTS: list[Any] = [
    {"step": 3, 7: (1.5, None, True), "text": ["a", {}]},
    {"f": SHARING, "g": SHARING, "none": torch.zeros(0, 4), "flag": torch.tensor(True)},
]


@pytest.mark.parametrize("whole", NESTS)
def test_a_state_comes_back_as_it_was(whole: Any) -> None:
    found = nest.put_together(nest.taken_apart(whole), CPU)
    assert repr(found) == repr(whole)
    if "f" in whole:
        assert found["f"] is found["g"]


def test_what_was_on_a_gpu_goes_to_the_device_of_now_and_the_rest_stays() -> None:
    meta = torch.device("meta")
    tensors = nest.taken_apart([torch.arange(3.0), torch.empty(2, device=meta)])
    on_cpu, elsewhere = nest.put_together(
        {key: part if part.device == CPU else torch.ones(2) for key, part in tensors.items()}, meta
    )
    assert on_cpu.tolist() == [0, 1, 2]
    assert elsewhere.device == meta


# Bytes of a file that the disk takes: none of the shard, half of it, the shard but no manifest.
@pytest.mark.parametrize("limit", [1_000, 500_000, 4_100_000])
def test_a_full_disk_is_a_clear_error_and_leaves_the_last_checkpoint(
    limit: int, tmp_path: Path
) -> None:
    folder, settings = otdd.Checkpoints(tmp_path), {"seed": 0}
    folder.save({"step": 3}, settings)
    before = names(tmp_path)
    state = {"step": 4, "points": torch.zeros(1_000_000)}
    long = {**settings, "text": "x" * 5_000_000} if limit > 4_000_000 else settings
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(InputError, match=r"cannot write .*checkpoint.*File too large.*; free"):
            folder.save(state, long)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == before
    assert folder.load(settings, CPU) == {"step": 3, "rows": {}}


def test_the_last_two_checkpoints_are_kept_and_nothing_else(tmp_path: Path) -> None:
    left = tmp_path / "checkpoint" / "step-0.dead.rank-0.rows-0-9.safetensors"
    left.parent.mkdir()
    for step in range(3):
        # As of a write that was killed.
        left.touch()
        otdd.Checkpoints(tmp_path).save({"step": step}, {})
    assert names(tmp_path) == sorted(
        [
            "checkpoint.json",
            *(str(p.relative_to(tmp_path)) for k in (1, 2) for p in shards(tmp_path, k)),
        ]
    )
    assert len(names(tmp_path)) == 3


def test_what_others_keep_there_stays_and_hinders_nobody(tmp_path: Path) -> None:
    """Also a folder, which is not for a sweep to remove."""
    folder = tmp_path / "checkpoint"
    (folder / "step-100").mkdir(parents=True)
    (folder / "step-100.a.rows-0-9.safetensors").mkdir()
    (folder / "step-7.ckpt").touch()
    for step in range(4):
        otdd.Checkpoints(tmp_path).save({"step": step}, {})
    assert (folder / "step-7.ckpt").exists()
    assert [len(shards(tmp_path, step)) for step in range(4)] == [0, 0, 1, 1]


def test_shards_may_be_on_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `checkpoint` a link to there; no file is renamed from one disk to another."""
    other = tmp_path / "disk"
    other.mkdir()
    (tmp_path / "checkpoint").symlink_to(other)
    replaced = os.replace

    def replace_file(source: Path, target: Path) -> None:
        if source.resolve().parent != target.resolve().parent:
            raise OSError(18, "Invalid cross-device link")
        replaced(source, target)

    monkeypatch.setattr(os, "replace", replace_file)
    folder = otdd.Checkpoints(tmp_path)
    folder.save({"step": 3}, {})
    assert folder.load({}, CPU)["step"] == 3
    assert len([*other.iterdir()]) == 1


def test_a_checkpoint_of_other_settings_takes_the_place_of_none(tmp_path: Path) -> None:
    folder = otdd.Checkpoints(tmp_path)
    folder.save({"step": 8}, {"seed": 0})
    folder.save({"step": 2}, {"seed": 1})
    (last,) = shards(tmp_path, 2)
    last.unlink()
    with pytest.raises(InputError, match=r"is missing, and the checkpoint before it does not help"):
        folder.load({"seed": 1}, CPU)


def test_all_is_on_the_disk_before_the_manifest_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replaced = os.fsync, os.replace

    def reached(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def replace_file(source: Path, target: Path) -> None:
        done.append(f"{source.name} is {target.name}")
        replaced(source, target)

    monkeypatch.setattr(os, "fsync", reached)
    monkeypatch.setattr(os, "replace", replace_file)
    otdd.Checkpoints(tmp_path).save({"step": 0}, {})
    (shard,) = shards(tmp_path, 0)
    manifest = "checkpoint.json.partial"
    in_place = f"{manifest} is checkpoint.json"
    assert done == [shard.name, "checkpoint", manifest, in_place, tmp_path.name]
