"""The real loading code of `datasets` on local files; the hub is not reachable here."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest

from otdd_flash.data import load
from otdd_flash.errors import DataNotice, InputError

TEXTS = ["good film", "bad film", "fine", "awful", "great", "poor"]
LABELS = [1, 0, 1, 0, 1, 0]
PLAIN = {"text": TEXTS, "label": LABELS}
ODD = (1 << 60) + 1


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    """The library, with a cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def _table(columns, **names):
    """A dataset, some columns of which are of classes with these names."""
    import datasets

    table = datasets.Dataset.from_dict(columns)
    for column, classes in names.items():
        table = table.cast_column(column, datasets.ClassLabel(names=classes))
    return table


def _parquet(folder, columns, **names):
    # Every file has a name of its own: the library keeps what it has read by the name.
    path = folder / f"{len(list(folder.iterdir()))}.parquet"
    _table(columns, **names).to_parquet(path)
    return str(path)


def _rows(path, rows):
    """Rows (dicts) as csv or json lines."""
    if path.suffix == ".csv":
        pd.DataFrame(rows, dtype=object).to_csv(path, index=False)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_what_a_file_holds_is_read_and_what_is_chosen_said(tmp_path):
    unused, grades = {"grade": ["bad", "good", "unused"]}, {"grade": ["bad", "good"]}
    grade, words = "labels are its column 'grade', the only one of class", ["good", "bad"] * 3
    text, graded = "inputs are its column of kind text: text", {"text": TEXTS, "grade": LABELS}
    numbers = {"a": [1, 2], "b": [0.5, 1.5], "mass": [1.0, 2.0], "label": ["x", "y"]}
    vectors = {"embedding": [[1.0, 0.5], [2.0, 1.5]], "label": ["x", "y"]}
    table, one = [[1, 0.5], [2, 1.5]], {"input": "text"}
    negative = {"text": TEXTS, "label": [-1] * 6}
    for columns, names, options, inputs, labels, said in (
        (graded, unused, {**one, "label": "grade"}, TEXTS, words, ["left out: unused"]),
        (graded, grades, {}, TEXTS, words, [grade, text]),
        (numbers, {}, {"weights": "mass"}, table, ["x", "y"], ["column 'label'", "a, b"]),
        (vectors, {}, {}, table, ["x", "y"], ["column 'label'", "embedding"]),
        (negative, {"label": ["a", "b"]}, one, TEXTS, None, ["all its labels are negative"]),
    ):
        path = _parquet(tmp_path, columns, **names)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dataset = load("huggingface", path=path, **options)
        case = columns, options
        notices = " ".join(str(one.message) for one in caught if one.category is DataNotice)
        assert bool(notices) == bool(said), case
        assert all(part in notices for part in said), (case, notices)
        assert all(choice in notices for choice in dataset.choices), case
        assert dataset.modality == ("text" if inputs is TEXTS else "array"), case
        assert np.array_equal(np.array([*dataset.inputs]), np.array(inputs)), case
        found = labels and [dataset.class_names[c] for c in dataset.labels]
        assert found == labels, case
        if "weights" in options:
            assert dataset.weights.tolist() == [1, 2]


def test_texts_are_read_from_every_format_and_split(tmp_path, datasets):
    rows = [{"text": text, "label": label + 7} for text, label in zip(TEXTS, LABELS, strict=True)]
    for suffix in ("csv", "json", "jsonl"):
        dataset = load("huggingface", path=_rows(tmp_path / f"a.{suffix}", rows), max_samples=4)
        assert dataset.class_names == ("7", "8"), suffix
        assert list(dataset.inputs) == [TEXTS[row] for row in dataset.rows], suffix
    table = _table(PLAIN, label=["bad", "good"])
    table.save_to_disk(tmp_path / "plain")
    splits = {"train": table.select(range(4)), "validation": table.select([4, 5])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "divided")
    assert len(load("huggingface", path=str(tmp_path / "plain"))) == 6
    validation = load("huggingface", root=tmp_path, path="divided", split="validation")
    assert list(validation.inputs) == TEXTS[4:]
    assert list(load("huggingface", root=tmp_path, path="divided", split="all").inputs) == TEXTS
    for path, said in (("divided", "choose one of: train, validation"), ("plain", "no splits")):
        with pytest.raises(InputError, match=rf"unknown split 'test'.*{said}"):
            load("huggingface", root=tmp_path, path=path, split="test")


@pytest.mark.slow
def test_bad_columns_and_paths_are_named(tmp_path):
    ab = ["a", "b"]
    text = {"text": ab, "label": [0, 1]}
    records = r"label=label of .* in row 0, and labels are integers, texts, numbers or lists"
    for columns, options, message in (
        ({"id": [1, 2], **text}, {}, "input=COLUMN.* id, text"),
        ({"s": ab, "t": ab, "label": [0, 1]}, {}, "input=COLUMN.* s, t"),
        ({**text, "y": [0, 1]}, {}, "any of label, y; choose with"),
        (text, {"input": "t"}, "no column 't'.*: text, label"),
        ({"a": [1, 2], **text}, {"input": ["a", "text"]}, r"got a \(number\), text \(text\)"),
        ({"text": ab, "label": ["p", None]}, {}, "1 label is missing, at row 1; drop_unlabelled="),
        ({"text": [], "label": []}, {}, "damaged or empty"),
        ({"text": ab, "label": [{"k": 1}] * 2}, {}, records),
    ):
        with pytest.raises(InputError, match=message):
            load("huggingface", path=_parquet(tmp_path, columns), **options)
    (tmp_path / "a.parquet").write_bytes(b"damaged")
    (tmp_path / "a.txt").write_text("x")
    for path, message in (
        ("nowhere.parquet", "does not exist"),
        ("a.parquet", "cannot read"),
        ("a.txt", "must end in"),
        ("someone/something", r"'someone/something' is no local path.*download=true"),
    ):
        with pytest.raises(InputError, match=message):
            load("huggingface", root=tmp_path, path=path)
    path = _parquet(tmp_path, {"text": ["a", None], "label": [0, 1]})
    with pytest.raises(InputError, match=r"row 1 of .* has nothing in its column 'text'"):
        load("huggingface", path=path).inputs[1]


def test_what_the_hub_gives_is_refused_by_its_name(monkeypatch, datasets):
    def refuse(path, config):
        raise ConnectionError(f"no {path}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(InputError, match=r"the hub's copy cannot be used: no someone/something$"):
        load("huggingface", path="someone/something", download=True)
    table = _table({"a": [1.0, 2.0], "label": [0, 1]})
    splits = datasets.DatasetDict({"train": table, "test": table.select([])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: splits)
    with pytest.raises(InputError, match=r"owner/name is empty: it has no rows in split=test"):
        load("huggingface", path="owner/name", split="test")


def test_rows_without_a_label_can_be_left_out(tmp_path):
    options = {"drop_unlabelled": True, "weights": "w"}
    for labels in ([0.0, None, 1.0], [0, None, 1], ["a", None, "b"]):
        path = _parquet(tmp_path, {"a": [1.0, 2.0, 3.0], "w": [5.0, 6, 7], "label": labels})
        with pytest.warns(DataNotice, match="1 of 3 rows have no label and are left out"):
            dataset = load("huggingface", path=path, **options)
        assert dataset.rows.tolist() == [0, 2]
        assert dataset.labels.tolist() == [0, 1]
        assert dataset.weights.tolist() == [5.0, 7.0]


def test_numbers_and_labels_stay_exact(tmp_path):
    """Seconds since 1970 are 128 apart in float32; pandas makes text of labels beside a gap."""
    seconds = [1.7e9 + i for i in range(6)]
    for place, column in enumerate((seconds, [[value, 0.0] for value in seconds])):
        _table({"t": column, "label": [0, 1] * 3}).save_to_disk(tmp_path / f"{place}")
        found = load("huggingface", path=str(tmp_path / f"{place}"), input="t", label="label")
        assert found.inputs[:, 0].tolist() == seconds
    (tmp_path / "a.csv").write_text(f"x,label\n1,{(1 << 64) - 1}\n2,{(1 << 64) - 2}\n3,\n")
    with pytest.warns(DataNotice, match="1 of 3 rows have no label"):
        found = load("huggingface", path=str(tmp_path / "a.csv"), drop_unlabelled=True)
    assert found.class_names == (str((1 << 64) - 2), str((1 << 64) - 1))
    table = pd.DataFrame({"x": np.array([1 << 63, 1], np.uint64), "label": [ODD, ODD - 1]})
    table.to_parquet(tmp_path / "b.parquet")
    found = load("huggingface", path=str(tmp_path / "b.parquet"), input="x", label="label")
    assert found.inputs.tolist() == [[2.0**63], [1.0]]
    assert found.class_names == (str(ODD - 1), str(ODD))


def test_a_folder_names_no_data_files_outside_of_it(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "folder")
    for place in (tmp_path / "secret.csv", tmp_path / "folder" / "own.csv"):
        place.write_text("text,label\na,x\nb,y\n")
    readme = tmp_path / "folder" / "README.md"
    text = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
    for named in ("../secret.csv", f"{tmp_path}/secret.csv"):
        readme.write_text(text.format(named))
        with pytest.raises(InputError, match="names a data file outside of it"):
            load("huggingface", path=str(tmp_path / "folder"))
    readme.write_text(text.format("own.csv"))
    # Links are followed: what the hub caches consists of them.
    for place in ("folder", "linked"):
        assert len(load("huggingface", path=str(tmp_path / place))) == 2
    with pytest.raises(InputError, match=r"has no configuration 'zz', .*leave config out"):
        load("huggingface", path=str(tmp_path / "folder"), config="zz")


@pytest.mark.parametrize("splits", [False, True])
def test_a_saved_dataset_names_no_data_files_outside_of_it(tmp_path, datasets, *, splits):
    for name in ("own", "other"):
        table = _table(PLAIN)
        (datasets.DatasetDict(train=table) if splits else table).save_to_disk(tmp_path / name)
    assert len(load("huggingface", path=str(tmp_path / "own"))) == 6
    part = "train/" if splits else ""
    state = tmp_path / "own" / part / "state.json"
    up = "../" * state.relative_to(tmp_path).as_posix().count("/")
    state.write_text(state.read_text().replace("data-", f"{up}other/{part}data-"))
    with pytest.raises(InputError, match="names a data file outside of it"):
        load("huggingface", path=str(tmp_path / "own"))


@pytest.mark.slow
def test_integers_that_float64_rounds_are_refused(tmp_path):
    """Beside a missing one or a fraction the library's own readers make float64 of them."""
    for suffix, other, in_folder in (
        ("csv", None, False),
        ("parquet", 1, True),
        ("json", 0.5, True),
    ):
        rows = [{"x": 1, "z": 0.5, "label": 0}, {"x": ODD, "z": 0.5, "label": 1}]
        # A text has no types of columns.
        rows.append({"x": 3 if suffix == "parquet" else other, "z": other, "label": 0})
        path = tmp_path / f"{suffix} {other}" / f"a.{suffix}"
        path.parent.mkdir()
        if suffix == "parquet":
            pd.DataFrame(rows).astype({"x": "Int64"}).to_parquet(path)
        else:
            _rows(path, rows)
        named = str(path.parent if in_folder else path)
        with pytest.raises(InputError, match=f"float64 holds, got {ODD} at row 1"):
            load("huggingface", path=named, input=["x", "z"], label="label")
    for place, (suffix, text, message) in enumerate(
        (
            ("jsonl", '{"x": [%d, 0.5], "label": 0}', f"got {ODD} at row 0"),
            ("csv", "x,label\n%d.0,0\n0.5,1\n", f"got {ODD} at row 0"),
            ("jsonl", '{"x": [1, 2], "label": 0}\n{"x": [1], "label": 1}', "different numbers of"),
        )
    ):
        path = tmp_path / f"{place}.{suffix}"
        path.write_text(text.replace("%d", str(ODD)))
        for given, download in ((str(path), False), (path.as_uri(), True)):
            with pytest.raises(InputError, match=message):
                load("huggingface", path=given, download=download)


def test_files_are_read_without_the_bars_of_the_library(tmp_path, capfd):
    """Commands draw their own progress, and off a terminal bars would be lines."""
    # A name of its own: what the library has read before it reads without a bar.
    (tmp_path / "rows.csv").write_text(f"{tmp_path.name},label\n1,0\n2,1\n")
    load("huggingface", path=str(tmp_path / "rows.csv"), label="label")
    assert "examples" not in capfd.readouterr().err
