"""Files that are written whole or not at all: JSON, tables, tensors, and no link is followed."""

import csv
import errno
import json
import logging
import os
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.files.atomic import lock, replacing, replacing_folder, write_json
from otdd_flash.files.cache import USUAL_FOLDER, TensorCache
from otdd_flash.files.tensor_file import content_hash
from otdd_flash.report.tables import write_matrix_csv
from otdd_flash.shown import csv_cell

ENTRY = {
    "features": torch.arange(12, dtype=torch.float64).reshape(3, 4),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 5),
}


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_a_file_appears_whole_or_the_old_one_stays(tmp_path):
    path = tmp_path / "deep" / "er" / "result.json"
    with replacing(path) as partial:
        assert partial.parent == path.parent
        partial.write_text('{"value": 1}')
        assert not path.exists()

    def stop(error):
        with replacing(path) as partial:
            partial.write_text("half a fi")
            raise error

    with pytest.raises(KeyboardInterrupt):
        stop(KeyboardInterrupt())
    with pytest.raises(InputError, match="No space left"):
        stop(OSError(28, "No space left on device"))
    assert json.loads(path.read_text()) == {"value": 1}
    assert only_file(path.parent) == path
    with pytest.raises(InputError, match=r"cannot write .*json/a\.json"):
        write_json(path / "a.json", {})


def test_json_keeps_order_and_names_the_key_of_what_has_no_form_or_is_not_finite(tmp_path):
    path, content = tmp_path / "r.json", {"value": np.float32(0.5), "names": ["猫"]}
    content["a"] = {"directory": Path("x/y"), "none": None, "seeds": np.arange(2), "of": {}}
    write_json(path, content)
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert list(json.loads(text)) == list(content)
    expected = {"directory": "x/y", "none": None, "seeds": [0, 1], "of": {}}
    assert json.loads(text) == {"value": 0.5, "names": ["猫"], "a": expected}
    for bad in (float("nan"), float("inf"), np.float32("nan"), torch.tensor(-np.inf)):
        with pytest.raises(ValueError, match=r"terms\.xy\[1\] is -?(nan|inf)"):
            write_json(path, {"terms": {"xy": [0.0, bad]}})
    with pytest.raises(TypeError, match=r"config\.solver is a object"):
        write_json(path, {"config": {"solver": object()}})
    assert path.read_text(encoding="utf-8") == text


def test_matrix_csv_survives_nasty_names_at_full_precision(tmp_path):
    names = ["a,b", 'say "hi"', "two\nlines", "", " =1+1", "naïve 猫", "T-shirt/top"]
    matrix = torch.rand(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3
    matrix[0, 0], matrix[1, 1] = 1e-300, 123456789.123456789
    write_matrix_csv(tmp_path / "m.csv", matrix, names, names[::-1], corner="class")
    with (tmp_path / "m.csv").open(encoding="utf-8", newline="") as lines:
        header, *body = csv.reader(lines)
    assert header == ["class", *map(csv_cell, names[::-1])]
    assert [row[0] for row in body] == [*map(csv_cell, names)]
    assert [[float(cell) for cell in row[1:]] for row in body] == matrix.tolist()


def test_nothing_is_written_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("as it was")
    for name in ("result.json", "lock"):
        (tmp_path / name).symlink_to(precious)
    (tmp_path / "adapted").symlink_to(tmp_path / "folder")
    write_json(tmp_path / "result.json", {"value": 1})
    with pytest.raises(OSError, match="symbolic link"):
        lock(tmp_path / "lock")
    with replacing_folder(tmp_path / "adapted") as partial:
        (partial / "file").write_text("new")
    assert precious.read_text() == (tmp_path / "folder" / "file").read_text() == "as it was"
    assert not (tmp_path / "result.json").is_symlink()
    assert (tmp_path / "adapted" / "file").read_text() == "new"
    assert not [*tmp_path.glob(".*")]


# The tensor cache.


def test_the_cache_keeps_names_types_shapes_and_values_also_of_views(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    off = TensorCache(None)
    off.put("key", ENTRY)
    assert (off.active, off.get("key")) == (False, None)
    assert list(tmp_path.iterdir()) == []
    whole = torch.arange(16.0).reshape(4, 4)
    entry = {**ENTRY, "xx": whole[:2], "xy": whole[:, 1:3], "all": whole}
    cache = TensorCache("~/deep/store")
    assert cache.get("key") is None
    cache.put("key", entry)
    found = TensorCache(tmp_path / "deep" / "store").get("key")
    assert found is not None
    assert content_hash(found) == content_hash(entry)
    # An entry under the name of another key is not believed.
    first = only_file(tmp_path / "deep" / "store")
    cache.put("b", {"x": torch.ones(1)})
    (second,) = set(first.parent.iterdir()) - {first}
    os.replace(second, first)
    assert cache.get("key") is None


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped bit": flip_last_byte,
    "cut tail": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "empty": lambda path: path.write_bytes(b""),
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


def test_a_damaged_entry_that_cannot_be_deleted_stops_nothing(tmp_path, caplog, monkeypatch):
    cache = TensorCache(tmp_path)
    cache.put("key", ENTRY)
    DAMAGE["cut tail"](only_file(tmp_path))

    def refuse(*given, **settings):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert cache.get("key") is None
    assert "read-only" in caplog.text
    # The cache is not asked again.
    caplog.clear()
    assert cache.get("key") is None
    assert not caplog.text


def test_unwritable_folder_warns_once_and_goes_on(tmp_path, caplog):
    # A file in the place of the folder refuses writing to every user, root included.
    (tmp_path / "taken").write_text("a file")
    cache = TensorCache(tmp_path / "taken" / "cache")
    for _ in range(2):
        assert cache.get("key") is None
        cache.put("key", ENTRY)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cache_dir=null" in record.getMessage()
    caplog.clear()
    assert TensorCache(os.devnull).get("key") is None
    assert f"{os.devnull} is no folder" in caplog.text
    assert "chmod" not in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_or_an_interruption_leaves_no_partial_file(tmp_path, caplog, monkeypatch):
    import safetensors.torch

    real = safetensors.torch.save_file

    def write_some_then_fail(content, path, **header):
        real({"some": torch.ones(2)}, path)
        with open("/dev/full", "wb", buffering=0) as disk:
            disk.write(b"more")

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", write_some_then_fail)
        TensorCache(tmp_path).put("key", ENTRY)
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        TensorCache(tmp_path).put("key", ENTRY)
    assert list(tmp_path.iterdir()) == []


def write_and_read(folder, writer):
    """Write the entry over and over; whatever is read back is whole."""
    cache, found = TensorCache(folder), []
    for _ in range(20):
        cache.put("key", {"x": torch.full((20_000,), float(writer))})
        found.append(cache.get("key"))
    return all(entry is not None and len(entry["x"].unique()) == 1 for entry in found)


@pytest.mark.slow
def test_two_writers_at_once_never_mix(tmp_path):
    with ProcessPoolExecutor(2) as pool:
        assert all(pool.map(write_and_read, [str(tmp_path)] * 2, [1, 2]))
    assert len(list(tmp_path.iterdir())) == 1


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


def _a_link(folder):
    entry = only_file(folder)
    os.replace(entry, folder.with_name("elsewhere"))
    entry.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda folder: folder.chmod(0o777), "other users may write"),
        (lambda folder: only_file(folder).chmod(0o666), "other users may write"),
        (_a_link, "is a link to elsewhere"),
    ],
    ids=["folder of everyone", "entry of everyone", "link"],
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
