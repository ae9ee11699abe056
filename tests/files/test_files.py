"""Files that are written whole or not at all: JSON, tables, and no link that is followed."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.files.atomic import replacing, replacing_folder
from otdd_flash.files.json_file import write_json
from otdd_flash.files.locks import lock
from otdd_flash.report.csv_tables import write_matrix_csv
from otdd_flash.shown import csv_cell

NASTY = ["a,b", 'say "hi"', "two\nlines", "", " =1+1", "naïve 猫", "T-shirt/top"]


def read_rows(path):
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.reader(lines))


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"value": 1})

    def stop_halfway():
        with replacing(path) as partial:
            partial.write_text("half a fi")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_halfway()
    assert json.loads(path.read_text()) == {"value": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_lies_in_the_same_folder(tmp_path):
    path = tmp_path / "deep" / "er" / "a.txt"
    with replacing(path) as partial:
        assert partial.parent == path.parent
        partial.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"


def test_an_unwritable_place_and_a_full_disk_are_the_users_errors(tmp_path):
    with pytest.raises(InputError, match="No space left"), replacing(tmp_path / "a.png"):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file/result\.json"):
        write_json(tmp_path / "file" / "result.json", {})


def test_json_keeps_order_and_converts_what_results_hold(tmp_path):
    path = tmp_path / "r.json"
    data = {
        "value": np.float32(0.5),
        "bounds": (torch.tensor(0.25), 1.0),
        "names": ["猫"],
        "a": {"directory": Path("x/y"), "converged": True, "none": None, "seeds": np.arange(2)},
    }
    write_json(path, data)
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert list(json.loads(text)) == list(data)
    assert json.loads(text) == {
        "value": 0.5,
        "bounds": [0.25, 1.0],
        "names": ["猫"],
        "a": {"directory": "x/y", "converged": True, "none": None, "seeds": [0, 1]},
    }


def test_json_names_the_key_of_what_has_no_form_or_is_not_finite(tmp_path):
    path = tmp_path / "r.json"
    write_json(path, {"value": 1})
    for bad in (float("nan"), float("inf"), np.float32("nan"), torch.tensor(-np.inf)):
        with pytest.raises(ValueError, match=r"terms\.xy\[1\] is -?(nan|inf)"):
            write_json(path, {"terms": {"xy": [0.0, bad]}})
    with pytest.raises(TypeError, match=r"config\.solver is a object"):
        write_json(path, {"config": {"solver": object()}})
    assert json.loads(path.read_text()) == {"value": 1}


def test_matrix_csv_survives_nasty_names_at_full_precision(tmp_path):
    rows, columns = NASTY, list(reversed(NASTY))
    matrix = torch.rand(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3
    matrix[0, 0], matrix[1, 1] = 1e-300, 123456789.123456789
    write_matrix_csv(tmp_path / "m.csv", matrix, rows, columns, corner="class")
    header, *body = read_rows(tmp_path / "m.csv")
    assert header == ["class", *map(csv_cell, columns)]
    assert [row[0] for row in body] == [*map(csv_cell, rows)]
    assert [[float(cell) for cell in row[1:]] for row in body] == matrix.tolist()
    with pytest.raises(ValueError, match="cannot have 1 row names"):
        write_matrix_csv(tmp_path / "m.csv", torch.zeros(2, 2), ["a"], ["a", "b"])


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
