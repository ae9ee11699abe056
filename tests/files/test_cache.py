"""The tensor cache: exact, atomic, and never in the way of a run."""

import errno
import logging
import os
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from otdd_flash.files.cache import USUAL_FOLDER, TensorCache
from otdd_flash.files.tensor_file import content_hash

ENTRY = {
    "features": torch.arange(12, dtype=torch.float64).reshape(3, 4),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 5),
}


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_round_trip_keeps_names_types_shapes_and_values(tmp_path):
    cache = TensorCache(tmp_path / "deep" / "folder")
    assert cache.get("key") is None
    cache.put("key", ENTRY, {"dataset": "tiny"})
    found = TensorCache(tmp_path / "deep" / "folder").get("key")
    assert found is not None
    assert content_hash(found) == content_hash(ENTRY)
    assert cache.get("another key") is None


def test_views_of_one_storage_are_kept(tmp_path):
    whole = torch.arange(16.0).reshape(4, 4)
    cache = TensorCache(tmp_path)
    cache.put("blocks", {"xx": whole[:2], "xy": whole[:, 1:3], "all": whole})
    found = cache.get("blocks")
    assert found is not None
    assert torch.equal(found["xy"], whole[:, 1:3])
    found["xx"].fill_(-1)
    again = cache.get("blocks")
    assert again is not None
    assert torch.equal(again["xx"], whole[:2])


def test_home_is_expanded_and_none_turns_the_cache_off(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cache = TensorCache(None)
    cache.put("key", ENTRY)
    assert (cache.active, cache.get("key")) == (False, None)
    assert list(tmp_path.iterdir()) == []
    TensorCache("~/store").put("key", ENTRY)
    assert only_file(tmp_path / "store").suffix == ".safetensors"


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped bit": flip_last_byte,
    "cut tail": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "cut header": lambda path: path.write_bytes(path.read_bytes()[:5]),
    "empty": lambda path: path.write_bytes(b""),
    "other content": lambda path: path.write_bytes(b"not safetensors at all"),
}


def test_damaged_entry_is_deleted_and_missing(tmp_path, caplog):
    cache = TensorCache(tmp_path)
    for case, damage in DAMAGE.items():
        cache.put("key", ENTRY)
        path = only_file(tmp_path)
        damage(path)
        with caplog.at_level(logging.WARNING):
            assert cache.get("key") is None, case
        assert "damaged" in caplog.text
        assert str(path) in caplog.text
        assert not path.exists()
        caplog.clear()
    cache.put("key", ENTRY)
    assert cache.get("key") is not None


def test_entry_under_the_name_of_another_key_is_not_believed(tmp_path):
    cache = TensorCache(tmp_path)
    cache.put("a", ENTRY)
    first = only_file(tmp_path)
    cache.put("b", {"x": torch.ones(1)})
    (second,) = set(tmp_path.iterdir()) - {first}
    os.replace(second, first)
    assert cache.get("a") is None


def test_unwritable_folder_warns_once_and_goes_on(tmp_path, caplog):
    # A file in the place of the folder refuses writing to every user, root included.
    (tmp_path / "taken").write_text("a file")
    cache = TensorCache(tmp_path / "taken" / "cache")
    assert cache.get("key") is None
    for _ in range(2):
        cache.put("key", ENTRY)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cache_dir=null" in record.getMessage()
    assert cache.get("key") is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_warns_and_leaves_no_partial_file(tmp_path, caplog, monkeypatch):
    import safetensors.torch

    real = safetensors.torch.save_file

    def write_some_then_fail(content, path, **header):
        real({"some": torch.ones(2)}, path)
        with open("/dev/full", "wb", buffering=0) as disk:
            disk.write(b"more")

    monkeypatch.setattr(safetensors.torch, "save_file", write_some_then_fail)
    TensorCache(tmp_path).put("key", ENTRY)
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        TensorCache(tmp_path).put("key", ENTRY)
    assert list(tmp_path.iterdir()) == []


def write_and_read(folder, writer):
    """Write the entry over and over; whatever is read back is whole."""
    cache = TensorCache(folder)
    for _ in range(20):
        cache.put("key", {"x": torch.full((20_000,), float(writer))})
        found = cache.get("key")
        if found is None or len(found["x"].unique()) != 1:
            return False
    return True


@pytest.mark.slow
def test_two_writers_at_once_never_mix(tmp_path):
    with ProcessPoolExecutor(2) as pool:
        assert all(pool.map(write_and_read, [str(tmp_path)] * 2, [1, 2]))
    assert len(list(tmp_path.iterdir())) == 1


def test_hash_sees_names_shapes_types_and_values():
    x = torch.zeros(2, 3)
    variants = [
        {"x": x},
        {"y": x},
        {"x": x.reshape(3, 2)},
        {"x": x.to(torch.int32)},
        {"x": x + 1},
        {"x": x, "y": x},
    ]
    assert len({content_hash(variant) for variant in variants}) == len(variants)
    assert content_hash({"a": x, "b": x + 1}) == content_hash({"b": x + 1, "a": x})


def test_a_folder_is_its_owners_alone_unless_a_group_may_share_it(tmp_path):
    folder = tmp_path / "new" / "cache"
    TensorCache(folder).put("key", ENTRY)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o600
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o770)
    TensorCache(shared).put("key", ENTRY)
    assert stat.S_IMODE(only_file(shared).stat().st_mode) == 0o660
    assert TensorCache(shared).get("key") is not None


def _everyone(folder):
    folder.chmod(0o777)


def _everyone_the_entry(folder):
    only_file(folder).chmod(0o666)


def _a_link(folder):
    entry = only_file(folder)
    os.replace(entry, folder.with_name("elsewhere"))
    entry.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (_everyone, "other users may write"),
        (_everyone_the_entry, "other users may write"),
        (_a_link, "is a link to elsewhere"),
    ],
)
def test_an_entry_that_may_be_anybodys_is_neither_read_nor_replaced(harm, why, tmp_path, caplog):
    folder = tmp_path / "cache"
    TensorCache(folder).put("key", ENTRY)
    harm(folder)
    content = only_file(folder).read_bytes()
    assert TensorCache(folder).get("key") is None
    TensorCache(folder).put("key", {"x": torch.ones(1)})
    assert only_file(folder).read_bytes() == content
    assert caplog.text.count(why) == 2


def test_what_is_no_folder_is_said_to_be_none(caplog):
    assert TensorCache(os.devnull).get("key") is None
    assert f"{os.devnull} is no folder" in caplog.text
    assert "chmod" not in caplog.text


@pytest.mark.parametrize("harm", ["group", "owner"])
def test_the_usual_folder_is_shared_with_nobody(harm, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Path(USUAL_FOLDER).expanduser()
    TensorCache(USUAL_FOLDER).put("key", ENTRY)
    assert TensorCache(USUAL_FOLDER).get("key") is not None
    if harm == "group":
        folder.chmod(0o770)
    else:
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert TensorCache(USUAL_FOLDER).get("key") is None
    assert caplog.text.count("cannot read the cache") == 1
