"""Files of checkpoints: what is in them, in which order they are written, and what is refused."""

import os
import resource
from pathlib import Path

import pytest
import torch
from small_flows import CPU, names, shards

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows import checkpoint as nest


def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch):
    folder = otdd.Checkpoints(tmp_path)
    with monkeypatch.context() as patched:
        patched.setitem(nest.TYPES, "Path", type(Path()))
        patched.setattr(nest, "_fields", lambda part: {"path": str(part)})
        folder.save({"step": 0, "state": Path("/")}, {})
    with pytest.raises(InputError, match=r"whose states are others"):
        folder.load({}, CPU)


# Bytes of a file that the disk takes: none of the shard, half of it, the shard but no manifest.
@pytest.mark.parametrize("limit", [1_000, 500_000, 4_100_000])
def test_a_full_disk_is_a_clear_error_and_leaves_the_last_checkpoint(limit, tmp_path):
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


def test_the_last_two_checkpoints_are_kept_and_nothing_else_of_ours(tmp_path):
    """What others keep there stays and hinders nobody, also a folder."""
    folder = tmp_path / "checkpoint"
    (folder / "step-100.a.rows-0-9.safetensors").mkdir(parents=True)
    (folder / "step-7.ckpt").touch()
    for step in range(4):
        # As of a write that was killed.
        (folder / "step-0.dead.rank-0.rows-0-9.safetensors").touch()
        otdd.Checkpoints(tmp_path).save({"step": step}, {})
    ours = [str(path.relative_to(tmp_path)) for k in (2, 3) for path in shards(tmp_path, k)]
    assert len(ours) == 2
    assert names(tmp_path) == sorted(["checkpoint.json", "checkpoint/step-7.ckpt", *ours])


def test_a_checkpoint_of_other_settings_takes_the_place_of_none(tmp_path):
    folder = otdd.Checkpoints(tmp_path)
    folder.save({"step": 8}, {"seed": 0})
    folder.save({"step": 2}, {"seed": 1})
    (last,) = shards(tmp_path, 2)
    last.unlink()
    with pytest.raises(InputError, match=r"is missing, and the checkpoint before it does not help"):
        folder.load({"seed": 1}, CPU)


def test_all_is_on_the_disk_before_the_manifest_takes_its_place(tmp_path, monkeypatch):
    """With `checkpoint` a link to another disk; no file is renamed from one disk to another."""
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoint").symlink_to(tmp_path / "disk")
    done = []
    fsync, replaced = os.fsync, os.replace

    def reached(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def replace_file(source, target):
        assert source.resolve().parent == target.resolve().parent
        done.append(f"{source.name} is {target.name}")
        replaced(source, target)

    monkeypatch.setattr(os, "fsync", reached)
    monkeypatch.setattr(os, "replace", replace_file)
    folder = otdd.Checkpoints(tmp_path / "run")
    folder.save({"step": 0}, {})
    (shard,) = (tmp_path / "disk").iterdir()
    manifest = "checkpoint.json.partial"
    assert done == [shard.name, "disk", manifest, f"{manifest} is checkpoint.json", "run"]
    assert folder.load({}, CPU)["step"] == 0
