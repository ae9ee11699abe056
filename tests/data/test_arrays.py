from __future__ import annotations

import warnings
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from otdd_flash.data import load
from otdd_flash.errors import DataNotice, InputError

X = np.arange(12.0).reshape(6, 2)
Y = np.array(["b", "a", "b", "a", "c", "c"])
W = np.arange(6) + 1.0


def _npz(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "a.npz", **arrays)
    return str(folder / "a.npz")


def _table(folder: Path, suffix: str, **columns: Any) -> str:
    path, frame = folder / f"a{suffix}", pd.DataFrame(columns)
    if suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return str(path)


def test_npz_with_labels_and_weights(tmp_path: Path) -> None:
    dataset = load("arrays", path=_npz(tmp_path, x=X, y=Y, w=W))
    np.testing.assert_array_equal(dataset.inputs, X)
    np.testing.assert_array_equal(dataset.weights, W)
    assert dataset.labels.tolist() == [1, 0, 1, 0, 2, 2]
    assert (dataset.class_names, dataset.modality, dataset.name) == (("a", "b", "c"), "array", "a")


def test_npz_with_other_keys(tmp_path: Path) -> None:
    path = _npz(tmp_path, cells=X, kind=Y, mass=W, w=-W)
    dataset = load("arrays", path=path, features="cells", label="kind", weights="mass")
    np.testing.assert_array_equal(dataset.weights, W)
    assert dataset.class_names == ("a", "b", "c")


def test_npz_without_labels_needs_none(tmp_path: Path) -> None:
    dataset = load("arrays", path=_npz(tmp_path, x=X), max_samples=4)
    assert dataset.labels is None
    assert len(dataset) == 4


@pytest.mark.parametrize(
    ("shape", "dtype", "modality", "kept"),
    [
        ((6, 4), np.float32, "array", np.float32),
        ((6, 4, 5), np.uint8, "image", np.uint8),
        ((6, 4, 5), np.int64, "image", np.uint8),
        ((6, 4, 5, 3), np.float32, "image", np.float32),
        ((6, 4, 5, 1), np.uint8, "image", np.uint8),
    ],
)
def test_shapes_tell_vectors_from_images(
    tmp_path: Path, shape: tuple[int, ...], dtype: Any, modality: str, kept: Any
) -> None:
    dataset = load("arrays", path=_npz(tmp_path, x=np.ones(shape, dtype), y=Y))
    assert dataset.modality == modality
    assert dataset.inputs.shape == shape
    assert dataset.inputs.dtype == kept


def test_npy_pair(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", [5, 3, 5, 3, 9, 9])
    np.save(tmp_path / "w.npy", W)
    dataset = load(
        "arrays", root=tmp_path, path="x.npy", labels_path="y.npy", weights="w.npy", classes=[9, 5]
    )
    np.testing.assert_array_equal(dataset.inputs, X[[0, 2, 4, 5]])
    np.testing.assert_array_equal(dataset.weights, W[[0, 2, 4, 5]])
    assert dataset.class_names == ("9", "5")
    assert dataset.labels.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("label", ["species", "Label", "y"])
def test_tables_find_their_label_column(tmp_path: Path, suffix: str, label: str) -> None:
    path = _table(tmp_path, suffix, a=X[:, 0], **{label: Y}, b=X[:, 1], mass=W)
    dataset = load("arrays", path=path, weights="mass")
    np.testing.assert_array_equal(dataset.inputs, X)
    np.testing.assert_array_equal(dataset.weights, W)
    assert dataset.class_names == ("a", "b", "c")


def test_tables_with_named_columns_and_integer_labels(tmp_path: Path) -> None:
    path = _table(tmp_path, ".csv", a=X[:, 0], b=X[:, 1], kind=[3, 1, 3, 1, 8, 8], note=Y)
    dataset = load("arrays", path=path, label="kind", features=["b"])
    np.testing.assert_array_equal(dataset.inputs, X[:, 1:])
    assert dataset.class_names == ("1", "3", "8")


def test_categories_are_labels(tmp_path: Path) -> None:
    path = _table(tmp_path, ".parquet", a=X[:, 0], kind=pd.Categorical(Y))
    assert load("arrays", path=path).class_names == ("a", "b", "c")


def test_an_unlabelled_table_is_noticed(tmp_path: Path) -> None:
    path = _table(tmp_path, ".csv", a=X[:, 0], b=X[:, 1])
    with pytest.warns(DataNotice, match="taken as unlabelled.*its columns are: a, b"):
        assert load("arrays", path=path).labels is None


def test_labels_from_a_file_leave_all_columns_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", Y)
    path = _table(tmp_path, ".csv", a=X[:, 0], y=X[:, 1])
    dataset = load("arrays", path=path, labels_path=str(tmp_path / "y.npy"))
    np.testing.assert_array_equal(dataset.inputs, X)
    assert dataset.class_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("suffix", "columns", "options", "said"),
    [
        (
            ".csv",
            {"a": X[:, 0], "kind": Y},
            {},
            [
                "labels are its column 'kind', the only one of text",
                "inputs are its other column: a",
            ],
        ),
        (
            ".parquet",
            {"a": X[:, 0], "Target": W, "kind": W},
            {},
            ["labels are its column 'Target', by its name", "its 2 other columns: a, kind"],
        ),
        (".csv", {"a": X[:, 0], "kind": Y}, {"label": "kind"}, ["inputs are its other column: a"]),
        (".csv", {"a": X[:, 0], "kind": Y}, {"features": ["a"]}, ["labels are its column 'kind'"]),
        (".csv", {"a": X[:, 0], "kind": Y}, {"features": "a", "label": "kind"}, []),
        (".npz", {"x": X, "y": Y}, {}, []),
        (".npz", {"x": X, "y": Y, "w": W}, {}, ["weights are its key 'w'"]),
        (".npz", {"x": X, "y": Y, "w": W}, {"weights": "w"}, []),
        (".npz", {"x": X, "labels": Y}, {}, ["taken as unlabelled", "not read: labels"]),
        (".npz", {"x": X, "y": Y, "more": W}, {}, ["not read: more"]),
        (".npz", {"x": X, "y": Y}, {"labels_path": "y.npy"}, ["not read: y"]),
    ],
)
def test_what_a_reader_chooses_is_said_once_and_kept(
    tmp_path: Path, suffix: str, columns: dict[str, Any], options: dict[str, Any], said: list[str]
) -> None:
    np.save(tmp_path / "y.npy", Y)
    make = _npz if suffix == ".npz" else lambda folder, **some: _table(folder, suffix, **some)
    path = make(tmp_path, **columns)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = load("arrays", root=tmp_path, path=path, **options)
    notices = [str(one.message) for one in caught if one.category is DataNotice]
    assert len(notices) == bool(said)
    assert len(dataset.choices) == len(said)
    for part, choice in zip(said, dataset.choices, strict=True):
        assert part in choice
        assert choice in notices[0]
    assert dataset.take([0, 2]).choices == dataset.choices


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("a.csv", {"label": ""}, "label of arrays must not be empty"),
        ("a.csv", {"features": ""}, "features of arrays must not be empty"),
        ("a.csv", {"weights": " "}, "weights must not be empty"),
        ("a.csv", {"path": ""}, "path of arrays must name a file or folder, got ''"),
        ("a.csv", {"root": ""}, "root must name a file or folder, got ''"),
        ("a.csv", {"split": ""}, "split must not be empty"),
        ("a.csv", {"label": "kind", "labels_path": "y.npy"}, "and not both"),
        ("y.npy", {"label": "kind"}, "label=kind has no meaning for .*labels_path"),
        ("y.npy", {"features": "a"}, "features=a has no meaning"),
        ("twice.csv", {}, "several columns 'label'"),
    ],
)
def test_what_would_be_left_out_in_silence_is_refused(
    tmp_path: Path, name: str, options: dict[str, Any], match: str
) -> None:
    np.save(tmp_path / "y.npy", X)
    _table(tmp_path, ".csv", a=X[:, 0], kind=Y)
    (tmp_path / "twice.csv").write_text("a,label,label\n1,2,0\n3,4,1\n")
    with pytest.raises(InputError, match=match):
        load("arrays", **{"root": tmp_path, "path": str(tmp_path / name), **options})


def test_a_nameless_first_column_is_no_input(tmp_path: Path) -> None:
    pd.DataFrame({"a": X[:, 0], "label": Y}).to_csv(tmp_path / "a.csv")
    with pytest.warns(DataNotice, match="first column has no name"):
        dataset = load("arrays", path=str(tmp_path / "a.csv"))
    np.testing.assert_array_equal(dataset.inputs, X[:, :1])


def test_nan_inputs_pass_here(tmp_path: Path) -> None:
    broken = X.copy()
    broken[2, 1] = np.nan
    dataset = load("arrays", path=_table(tmp_path, ".csv", a=broken[:, 0], b=broken[:, 1], y=Y))
    np.testing.assert_array_equal(dataset.inputs, broken)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"cells": X}, {}, "has no key 'x'; its keys are: cells"),
        ({"x": X, "y": Y}, {"label": "kind"}, "has no key 'kind'; its keys are: x, y"),
        ({"x": X, "y": Y}, {"weights": "m"}, "has no weights 'm'.* there are: x, y"),
        ({"x": X, "y": Y}, {"features": ["x", "z"]}, "under one key"),
        ({"x": X, "y": Y[:3]}, {}, "has 6 inputs, but its labels have shape"),
        ({"x": X, "y": Y, "w": W[:3]}, {}, "its weights have shape"),
        ({"x": X, "y": W + 0.5}, {}, "labels must be integers or strings, got float64"),
        ({"x": X[:0], "y": Y[:0]}, {}, "is empty"),
        ({"x": Y, "y": Y}, {}, "inputs must be numbers"),
        ({"x": np.ones((6, 3, 8, 8)), "y": Y}, {}, "channels last"),
        ({"x": W, "y": Y}, {}, r"inputs must have shape \(n, d\)"),
        ({"x": np.array([{}, 1]), "y": Y}, {}, "cannot read"),
        ({"x": X, "y": Y}, {"split": "test"}, "files that have no splits"),
        ({"x": X, "y": Y}, {"classes": ["d"]}, "unknown class 'd'"),
        ({"x": X, "y": Y}, {"max_samples": 2}, "max_samples=2 is below the 3 classes"),
    ],
)
def test_bad_archives(
    tmp_path: Path, arrays: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load("arrays", path=_npz(tmp_path, **arrays), **options)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"a": W, "y": Y}, {"label": "k"}, "has no column 'k'; its columns are: a, y"),
        ({"a": W, "y": Y}, {"features": ["b"]}, "has no column 'b'; its columns are: a, y"),
        ({"a": W, "y": Y}, {"weights": "m"}, "has no weights 'm'.* there are: a, y"),
        ({"a": W, "s": Y, "t": Y}, {}, "labels could be any of s, t; choose with label=COLUMN"),
        ({"a": W, "y": Y, "t": Y}, {}, "column 't' of .* holds text"),
        ({"y": Y}, {}, "has no input column besides 'y'"),
        ({"a": W, "y": W + 0.5}, {}, "labels must be integers or strings"),
        (
            {"a": W, "y": [1, 2, None, 1, 2, 1]},
            {},
            "1 label is missing, at row 2; drop_unlabelled=true",
        ),
        ({"a": W, "y": ["p", None, "q", "p", None, "q"]}, {}, "2 labels are missing"),
        ({"a": W[:0], "y": W[:0]}, {}, "is empty"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_bad_tables(
    tmp_path: Path, suffix: str, columns: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load("arrays", path=_table(tmp_path, suffix, **columns), **options)


@pytest.mark.parametrize("suffix", ["npz", "npy", "csv", "parquet"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe damaged"])
def test_damaged_files_are_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"cannot read {path}"):
        load("arrays", path=str(path))


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere.npz", "path=nowhere.npz does not exist"), ("notes.txt", "must end in")],
)
def test_paths_that_lead_nowhere(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=message):
        load("arrays", root=tmp_path, path=path)


@pytest.mark.parametrize("first", [0.5, 1])
def test_a_csv_with_more_fields_than_names_is_refused(tmp_path: Path, first: float) -> None:
    """Pandas would take the first field for row names and shift the others."""
    path = tmp_path / "x.csv"
    path.write_text(f"a,label\n{first},2,0\n{first + 2},4,1\n")
    with pytest.raises(InputError, match="more fields than its first line names"):
        load("arrays", path=str(path))


EVEN, ODD = 1 << 60, (1 << 60) + 1
BEYOND = (1 << 63) + 1


def _read(folder: Path, text: str, **options: Any) -> Any:
    (folder / "a.csv").write_text(text)
    return load("arrays", path=str(folder / "a.csv"), **options)


@pytest.mark.parametrize(
    ("one", "other"), [(ODD, EVEN), (BEYOND, BEYOND - 1), ((1 << 70) + 1, 1 << 70)]
)
def test_labels_of_a_table_are_exact_beside_a_missing_one(
    tmp_path: Path, one: int, other: int
) -> None:
    """In float64 they were one class."""
    text = f"x,label\n1,{one}\n2,{other}\n3,\n4,NA\n"
    with pytest.raises(InputError, match="2 labels are missing, at rows 2, 3; drop_unlabelled"):
        _read(tmp_path, text)
    with pytest.warns(DataNotice, match="2 of 4 rows have no label"):
        dataset = _read(tmp_path, text, drop_unlabelled=True)
    assert dataset.class_names == (str(other), str(one))
    assert dataset.labels.tolist() == [1, 0]


def test_labels_of_a_parquet_table_are_exact_beside_a_missing_one(tmp_path: Path) -> None:
    path = _table(tmp_path, ".parquet", x=X[:3, 0], label=pd.array([ODD, EVEN, None], "Int64"))
    with pytest.warns(DataNotice, match="1 of 3 rows have no label"):
        dataset = load("arrays", path=path, drop_unlabelled=True)
    assert dataset.class_names == (str(EVEN), str(ODD))


def test_labels_that_a_csv_file_has_among_floats_are_refused_where_they_were_rounded(
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match=f"got {EVEN} at row 0 as float64, which rounds"):
        _read(tmp_path, f"x,label\n1,{ODD}\n2,1.0\n")


@pytest.mark.parametrize(
    ("numbers", "row"),
    [
        ((ODD, 1), 0),
        ((1, "", ODD), 2),
        ((0.5, ODD), 1),
        ((0.5, "", f" {ODD}"), 2),
        (("1.152921504606846977e18", 1), 0),
        ((0.5, f"+{ODD}.0"), 1),
        (((1 << 70) + 1, 0.5), 0),
        ((BEYOND, 1), 0),
        ((BEYOND, ""), 0),
        ((BEYOND, -1), 0),
        (((1 << 70) + 1, 1), 0),
    ],
)
@pytest.mark.parametrize("part", ["x", "w"])
def test_integers_of_a_csv_file_that_float64_rounds_are_refused(
    tmp_path: Path, numbers: tuple[Any, ...], row: int, part: str
) -> None:
    columns = {"x": [1] * len(numbers), "w": [1] * len(numbers), part: numbers}
    rows = "".join(f"{x},a,{w}\n" for x, w in zip(columns["x"], columns["w"], strict=True))
    with pytest.raises(InputError, match=f"float64 holds, got .* at row {row}|missing at row 1"):
        _read(tmp_path, f"x,label,w\n{rows}", weights="w")


def test_other_numbers_of_a_csv_file_are_those_of_float64(tmp_path: Path) -> None:
    numbers = ["0.1", "", "7", f"{EVEN}", f"{EVEN}.0", "1e23", f"{1 << 70}"]
    # Digits that tell a number of float64 apart, and 19 of one.
    numbers += [repr(2.0**80 / 3), f"{2.0**80 / 3:.18e}", "-1e300", "1e999"]
    for values in (numbers, numbers[-1:]):
        dataset = _read(tmp_path, "x,label\n" + "".join(f"{value},a\n" for value in values))
        expected = [[float(value or "nan")] for value in values]
        np.testing.assert_array_equal(dataset.inputs, expected)


def test_nullable_and_decimal_columns_of_a_parquet_table_are_numbers(tmp_path: Path) -> None:
    count, price = pd.array([1, None, 3], "Int64"), [Decimal("0.10"), Decimal(2), None]
    columns = {"count": count, "price": price, "flag": [True, None, False]}
    path = _table(tmp_path, ".parquet", **columns, label=["a", "b", "a"])
    inputs = load("arrays", path=path, features=list(columns)).inputs
    np.testing.assert_array_equal(inputs, [[1, 0.1, 1], [np.nan, 2, np.nan], [3, np.nan, 0]])
    path = _table(tmp_path, ".parquet", x=pd.array([1, None, ODD], "Int64"), label=[0, 1, 0])
    with pytest.raises(InputError, match=f"got {ODD} at row 2, column 'x'"):
        load("arrays", path=path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.array([[1], [ODD]])}, f"got {ODD} at row 1, column 0"),
        ({"x": np.array([[1], [BEYOND]], np.uint64)}, f"got {BEYOND} at row 1, column 0"),
        ({"x": np.array([[1], [EVEN]], np.longdouble) + 1}, "got 1.15.* at row 1, column 0"),
        ({"x": np.full((2, 3, 3), ODD)}, "gives integers up to 1152921504606846977"),
        ({"x": X, "w": np.full(6, ODD)}, f"weights must .* got {ODD} at row 0"),
        ({"x": X, "y": Y[:, None]}, r"take labels\.ravel\(\)"),
        (
            {"x": X[:2], "y": np.array([0, BEYOND], np.uint64), "class_names": np.array(["a"])},
            f"got 0 to {BEYOND}",
        ),
    ],
)
def test_arrays_that_would_be_rounded_are_refused(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load("arrays", path=_npz(tmp_path, **arrays))


def test_long_floats_that_float64_holds_are_read(tmp_path: Path) -> None:
    path = _npz(tmp_path, x=np.array([[0.1]]).astype(np.longdouble))
    assert load("arrays", path=path).inputs.tolist() == [[0.1]]
