"""Files of arrays: npz, npy, csv and parquet, what is chosen of them and what is refused."""

import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from refusals import naming

from otdd_flash.data import load
from otdd_flash.errors import DataNotice, InputError

X = np.arange(12.0).reshape(6, 2)
Y = np.array(["b", "a", "b", "a", "c", "c"])
W = np.arange(6) + 1.0


def _npz(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return str(folder / "a.npz")


def _table(folder, suffix, **columns):
    path, frame = folder / f"a{suffix}", pd.DataFrame(columns)
    if suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return str(path)


def _write(folder, suffix, **content):
    return _npz(folder, **content) if suffix == ".npz" else _table(folder, suffix, **content)


A, B = X[:, 0], X[:, 1]
NAMED = {"features": "cells", "label": "kind", "weights": "mass"}
KIND = {"a": A, "kind": Y}
MIXED = {"a": A, "Label": Y, "b": B, "mass": W}
NAN = [0.5, np.nan, *"1234"]
TEXT, OTHER = "labels are its column 'kind', the only one of text", "inputs are its other column: a"
ONE = X[:, :1]


def by(name):
    return f"labels are its column '{name}', by its name"


@pytest.mark.parametrize(
    ("suffix", "content", "options", "inputs", "weights", "said"),
    [
        (".npz", {"x": X, "y": Y}, {}, X, None, []),
        (".npz", {"x": X, "y": Y, "w": W}, {}, X, W, ["weights are its key 'w'"]),
        (".npz", {"cells": X, "kind": Y, "mass": W, "w": -W}, NAMED, X, W, ["not read: w"]),
        (".npz", {"x": X, "y": Y, "more": W}, {}, X, None, ["not read: more"]),
        (".npz", {"x": X, "y": W}, {"labels_path": "y.npy"}, X, None, ["not read: y"]),
        (".csv", KIND, {}, ONE, None, [TEXT, OTHER]),
        (".csv", {**KIND, "b": B, "note": Y}, {"label": "kind", "features": "b"}, B, None, []),
        (".parquet", {"a": A, "kind": pd.Categorical(Y)}, {}, ONE, None, [TEXT, OTHER]),
        (".parquet", {"a": A, "Target": Y, "b": B}, {}, X, None, [by("Target"), "columns: a, b"]),
        (".csv", MIXED, {"weights": "mass"}, X, W, [by("Label"), "2 other columns: a, b"]),
        # Not finite numbers pass here.
        (".csv", {"a": NAN, "y": Y}, {"label": "y"}, np.array(NAN, float), None, [OTHER]),
    ],
)
def test_what_a_file_holds_is_read_and_what_is_chosen_said_once(
    tmp_path, suffix, content, options, inputs, weights, said
):
    np.save(tmp_path / "y.npy", Y)
    path = _write(tmp_path, suffix, **content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = load("arrays", root=tmp_path, path=path, **options)
    np.testing.assert_array_equal(dataset.inputs, np.reshape(inputs, (6, -1)))
    np.testing.assert_array_equal(dataset.weights, weights)
    assert dataset.labels.tolist() == [1, 0, 1, 0, 2, 2]
    assert (dataset.class_names, dataset.modality, dataset.name) == (("a", "b", "c"), "array", "a")
    notices = [str(one.message) for one in caught if one.category is DataNotice]
    assert len(notices) == bool(said)
    for part, choice in zip(said, dataset.choices, strict=True):
        assert part in choice
        assert choice in notices[0]
    assert dataset.take([0, 2]).choices == dataset.choices


def test_shapes_tell_vectors_from_images(tmp_path):
    for shape, dtype, modality, kept in (
        ((6, 4), np.float32, "array", np.float32),
        ((6, 4, 5), np.int64, "image", np.uint8),
        ((6, 4, 5, 3), np.float32, "image", np.float32),
    ):
        dataset = load("arrays", path=_npz(tmp_path, x=np.ones(shape, dtype), y=Y))
        assert (dataset.modality, dataset.inputs.shape) == (modality, shape)
        assert dataset.inputs.dtype == kept


def test_npy_pair(tmp_path):
    for name, values in (("x", X), ("y", [5, 3, 5, 3, 9, 9]), ("w", W)):
        np.save(tmp_path / f"{name}.npy", values)
    given = {"path": "x.npy", "labels_path": "y.npy", "weights": "w.npy", "classes": [9, 5]}
    dataset = load("arrays", root=tmp_path, **given)
    np.testing.assert_array_equal(dataset.inputs, X[[0, 2, 4, 5]])
    np.testing.assert_array_equal(dataset.weights, W[[0, 2, 4, 5]])
    assert dataset.class_names == ("9", "5")
    assert dataset.labels.tolist() == [1, 1, 0, 0]


def test_files_without_labels_and_a_nameless_first_column(tmp_path):
    dataset = load("arrays", path=_npz(tmp_path, x=X), max_samples=4)
    assert (dataset.labels, len(dataset)) == (None, 4)
    with pytest.warns(DataNotice, match="taken as unlabelled.*not read: labels"):
        assert load("arrays", path=_npz(tmp_path, x=X, labels=Y)).labels is None
    with pytest.warns(DataNotice, match="taken as unlabelled.*its columns are: a, b"):
        assert load("arrays", path=_table(tmp_path, ".csv", a=A, b=B)).labels is None
    pd.DataFrame({"a": A, "label": Y}).to_csv(tmp_path / "a.csv")
    with pytest.warns(DataNotice, match="first column has no name"):
        dataset = load("arrays", path=str(tmp_path / "a.csv"))
    np.testing.assert_array_equal(dataset.inputs, X[:, :1])


def test_requests_that_leave_something_out_or_lead_nowhere_are_refused(tmp_path):
    np.save(tmp_path / "y.npy", X)
    _table(tmp_path, ".csv", a=A, kind=Y)
    (tmp_path / "twice.csv").write_text("a,label,label\n1,2,0\n3,4,1\n")
    # Pandas would take the first field for row names and shift the others.
    (tmp_path / "more.csv").write_text("a,label\n1,2,0\n3,4,1\n")
    (tmp_path / "notes.txt").write_text("x")
    for name, options, message in (
        ("a.csv", {"label": ""}, "label of arrays must not be empty"),
        ("a.csv", {"weights": " "}, "weights must not be empty"),
        ("a.csv", {"path": ""}, "path of arrays must name a file or folder, got ''"),
        ("a.csv", {"split": ""}, "split must not be empty"),
        ("a.csv", {"label": "kind", "labels_path": "y.npy"}, "and not both"),
        ("y.npy", {"label": "kind"}, "label=kind has no meaning for .*labels_path"),
        ("y.npy", {"features": "a"}, "features=a has no meaning"),
        ("twice.csv", {}, "several columns 'label'"),
        ("more.csv", {}, "more fields than its first line names"),
        ("notes.txt", {}, "must end in"),
        ("a.csv", {"path": "nowhere.npz"}, "path=nowhere.npz does not exist"),
    ):
        given = {"root": tmp_path, "path": str(tmp_path / name), **options}
        with pytest.raises(InputError, match=message):
            load("arrays", **given)
    for suffix in ("npz", "npy", "csv", "parquet"):
        for content, said in ((b"", ".*is it damaged or empty"), (b"\xff\xfe damaged", "")):
            (path := tmp_path / f"damaged.{suffix}").write_bytes(content)
            with pytest.raises(InputError, match=f"cannot read {path}{said}"):
                load("arrays", path=str(path))


EVEN, ODD = 1 << 60, (1 << 60) + 1
BEYOND = (1 << 63) + 1
UNSIGNED = {"y": np.array([0, BEYOND], np.uint64), "class_names": np.array(["a"])}


BAD = [
    ({"cells": X}, {}, "has no key 'x'; its keys are: cells"),
    ({"x": X, "y": Y}, {"weights": "m"}, "has no weights 'm'.* there are: x, y"),
    ({"x": X, "y": Y}, {"features": ["x", "z"]}, "under one key"),
    ({"x": X, "y": Y[:3]}, {}, "has 6 inputs, but its labels have shape"),
    ({"x": Y, "y": Y}, {}, "inputs must be numbers"),
    ({"x": np.ones((6, 3, 8, 8)), "y": Y}, {}, "channels last"),
    ({"x": W, "y": Y}, {}, r"inputs must have shape \(n, d\)"),
    ({"x": np.array([{}, 1]), "y": Y}, {}, "cannot read .* it holds Python objects"),
    ({"x": X, "y": Y}, {"split": "test"}, "files that have no splits"),
    # What would be rounded.
    ({"x": np.array([[1], [ODD]])}, {}, f"got {ODD} at row 1, column 0"),
    ({"x": np.full((2, 3, 3), ODD)}, {}, "gives integers up to 1152921504606846977"),
    ({"x": X, "w": np.full(6, ODD)}, {}, f"weights must .* got {ODD} at row 0"),
    ({"x": X, "y": Y[:, None]}, {}, r"take labels\.ravel\(\)"),
    ({"x": X[:2], **UNSIGNED}, {}, f"got 0 to {BEYOND}"),
]


def test_bad_archives(tmp_path):
    for arrays, options, message in BAD:
        with naming(message), pytest.raises(InputError, match=message):
            load("arrays", path=_npz(tmp_path, **arrays), **options)


def test_bad_tables(tmp_path):
    missing = "1 label is missing, at row 2; drop_unlabelled=true"
    cases = [
        ({"a": W, "y": Y}, {"label": "k"}, "has no column 'k'; its columns are: a, y"),
        ({"a": W, "y": Y}, {"features": ["b"]}, "has no column 'b'; its columns are: a, y"),
        ({"a": W, "s": Y, "t": Y}, {}, "labels could be any of s, t; choose with label=COLUMN"),
        ({"a": W, "y": Y, "t": Y}, {}, "column 't' of .* holds text"),
        ({"a": W, "y": [1, 2, None, 1, 2, 1]}, {}, missing),
    ]
    for suffix in (".csv", ".parquet"):
        for columns, options, message in cases:
            with pytest.raises(InputError, match=message):
                load("arrays", path=_table(tmp_path, suffix, **columns), **options)
    path = _table(tmp_path, ".parquet", x=pd.array([1, None, ODD], "Int64"), label=[0, 1, 0])
    with pytest.raises(InputError, match=f"got {ODD} at row 2, column 'x'"):
        load("arrays", path=path)


def _read(folder, text, **options):
    (folder / "a.csv").write_text(text)
    return load("arrays", path=str(folder / "a.csv"), **options)


def test_labels_of_a_table_are_exact_beside_a_missing_one(tmp_path):
    """In float64 they were one class."""
    for one, other in ((ODD, EVEN), ((1 << 70) + 1, 1 << 70)):
        text = f"x,label\n1,{one}\n2,{other}\n3,\n4,NA\n"
        with pytest.raises(InputError, match="2 labels are missing, at rows 2, 3; drop_unlabelled"):
            _read(tmp_path, text)
        with pytest.warns(DataNotice, match="2 of 4 rows have no label"):
            dataset = _read(tmp_path, text, drop_unlabelled=True)
        assert dataset.class_names == (str(other), str(one))
        assert dataset.labels.tolist() == [1, 0]
    with pytest.raises(InputError, match=f"got {EVEN} at row 0 as float64, which rounds"):
        _read(tmp_path, f"x,label\n1,{ODD}\n2,1.0\n")


@pytest.mark.parametrize("part", ["x", "w"])
def test_integers_of_a_csv_file_that_float64_rounds_are_refused(tmp_path, part):
    for numbers, row in (
        ((ODD, 1), 0),
        ((0.5, "", f" {ODD}"), 2),
        (("1.152921504606846977e18", 1), 0),
        ((0.5, f"+{ODD}.0"), 1),
        (((1 << 70) + 1, 0.5), 0),
        ((BEYOND, ""), 0),
    ):
        columns = {"x": [1] * len(numbers), "w": [1] * len(numbers), part: numbers}
        rows = "".join(f"{x},a,{w}\n" for x, w in zip(columns["x"], columns["w"], strict=True))
        said = f"float64 holds, got .* at row {row}|missing at row 1"
        with pytest.raises(InputError, match=said):
            _read(tmp_path, f"x,label,w\n{rows}", weights="w")


def test_other_numbers_of_files_are_those_of_float64(tmp_path):
    numbers = ["0.1", "", "7", f"{EVEN}", f"{EVEN}.0", "1e23", f"{1 << 70}"]
    # Digits that tell a number of float64 apart, and 19 of one.
    numbers += [repr(2.0**80 / 3), f"{2.0**80 / 3:.18e}", "-1e300", "1e999"]
    for values in (numbers, numbers[-1:]):
        dataset = _read(tmp_path, "x,label\n" + "".join(f"{value},a\n" for value in values))
        expected = [[float(value or "nan")] for value in values]
        np.testing.assert_array_equal(dataset.inputs, expected)
    count, price = pd.array([1, None, 3], "Int64"), [Decimal("0.10"), Decimal(2), None]
    columns = {"count": count, "price": price, "flag": [True, None, False]}
    path = _table(tmp_path, ".parquet", **columns, label=["a", "b", "a"])
    inputs = load("arrays", path=path, features=list(columns)).inputs
    np.testing.assert_array_equal(inputs, [[1, 0.1, 1], [np.nan, 2, np.nan], [3, np.nan, 0]])
