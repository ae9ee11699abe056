"""Labelled feature vectors: what is accepted, how it is normalised, and what identifies it."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.raw_labels import encode_labels
from otdd_flash.samples import LabeledSamples

FEATURES = torch.arange(12, dtype=torch.float32).reshape(6, 2)
LABELS = torch.tensor([0, 1, 2, 0, 1, 0])
NAMES = ("a", "b", "c")
NAN = float("nan")
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.0, 5.0, 6.0])


def samples(features=FEATURES, labels=LABELS, names=NAMES, weights=None, targets=None):
    return LabeledSamples(features, labels, names, weights, targets=targets)


def with_value(row, column, value):
    features = FEATURES.clone()
    features[row, column] = value
    return features


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": torch.zeros(6)}, r"must be a matrix \(n, d\), got shape \(6,\)"),
        ({"features": torch.zeros(0, 2)}, r"empty: features have shape \(0, 2\)"),
        ({"features": np.array([[None]])}, "must be real numbers"),
        ({"features": with_value(4, 1, float("nan"))}, "1 NaN .* 1 rows .*row 4, column 1"),
        ({"features": with_value(2, 0, float("inf"))}, "infinite .*row 2, column 0"),
        ({"labels": LABELS + 0.5}, "must be class indices, got 0.5 at rows 0, 1, 2"),
        ({"labels": LABELS[:5]}, r"must have shape \(6,\) as features, got \(5,\)"),
        ({"labels": LABELS - 1}, r"must lie in \[0, 3\).* got -1 to 1"),
        ({"labels": torch.eye(6)}, "an indicator of 6 labels, and class_names has 3; give one"),
        ({"labels": torch.eye(6, 3)}, "3 rows have no label, at rows 3, 4, 5"),
        ({"labels": torch.eye(6) * 2}, "of several labels .* give an indicator"),
        ({"targets": LABELS[:5]}, r"must be \(6,\) or \(6, q\), got \(5,\)"),
        ({"targets": torch.tensor([0, NAN, 1, 2, 3, 0])}, "finite numbers, at row 1 are not"),
        ({"labels": LABELS[:, None]}, r"must have shape \(6,\) as .*labels\.ravel\(\)"),
        (
            {"labels": LABELS.half() + 2048, "names": [*map(str, range(3000))]},
            r"got 2048 at rows 0, .* 1 more as torch\.float16",
        ),
        ({"labels": torch.tensor([0, NAN, 1, 2, NAN, 0])}, "2 labels are missing, at rows 1, 4;"),
        ({"labels": LABELS * (1 + 1j)}, "labels must be real, got .*complex"),
        ({"features": FEATURES * 1j}, "features must be real, got .*complex"),
        ({"weights": WEIGHTS.numpy() * 1j}, "weights must be real, got .*complex"),
        ({"weights": WEIGHTS[:5]}, r"must have shape \(6,\) as features, got \(5,\)"),
        ({"weights": -WEIGHTS}, "finite and not negative, got -1 at rows 0, 1, 2, 4, 5;"),
        ({"weights": WEIGHTS / 0}, "finite and not negative, got inf at rows 0, .* 1 more;"),
        ({"weights": WEIGHTS * 0}, "must not all be zero"),
    ],
)
def test_bad_parts_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        samples(**changes)


def test_weights_are_normalised_once_and_missing_ones_are_uniform():
    torch.testing.assert_close(samples(weights=WEIGHTS).masses, WEIGHTS.double() / 17)
    assert samples().weights is None
    assert samples().masses.tolist() == [1 / 6] * 6
    # Their sum overflows.
    for weights in ([1e308] * 6, torch.full((6,), 1e308, dtype=torch.float64)):
        assert samples(weights=weights).masses.tolist() == pytest.approx([1 / 6] * 6)
    # Dividing by a sum of 1 - 2^-53 would change the last digits, and so the fingerprint.
    for seed in range(20):
        weights = torch.rand(6, generator=torch.Generator().manual_seed(seed))
        once = samples(weights=weights)
        assert samples(weights=once.weights).fingerprint == once.fingerprint, seed


def test_unlabelled_samples_are_one_class_without_names():
    unlabelled = LabeledSamples(FEATURES, None, NAMES)
    assert (unlabelled.class_names, unlabelled.class_total) == ((), 1)
    with pytest.raises(InputError, match=r"samples has no labels; label it with .*pseudo_labels"):
        unlabelled.keep_classes([0])


@pytest.mark.parametrize(
    "changed",
    [
        {"features": with_value(5, 1, 11.000001)},
        {"features": FEATURES.double() + 1e-9},
        {"features": FEATURES.flip(0)},
        {"labels": torch.tensor([0, 1, 2, 0, 1, 1])},
        {"labels": None},
        {"names": ("a", "b", "d")},
        {"weights": torch.ones(6)},
    ],
)
def test_the_fingerprint_covers_every_part_and_nothing_else(changed):
    assert samples(**changed).fingerprint != samples().fingerprint
    one, names = samples(weights=WEIGHTS), {"name": "x", "subset_hash": "y"}
    other = LabeledSamples(FEATURES.clone(), LABELS.float(), [*NAMES], 2 * WEIGHTS, **names)
    assert other.fingerprint == one.to("cpu").fingerprint == one.fingerprint


@pytest.mark.parametrize(
    ("labels", "indices", "names"),
    [
        ([7, -3, 7, 100], [1, 0, 1, 2], ("-3", "7", "100")),
        (["dog", "cat", "dog", "é"], [1, 0, 1, 2], ("cat", "dog", "é")),
        (np.array(["b", "a", "b", "c"], dtype=object), [1, 0, 1, 2], ("a", "b", "c")),
        (torch.tensor([2, 0, 2, 9], dtype=torch.uint8), [1, 0, 1, 2], ("0", "2", "9")),
        ([True, False, True, True], [1, 0, 1, 1], ("False", "True")),
        (2.0 * LABELS[:4].double(), [0, 1, 2, 0], ("0", "2", "4")),
        (np.array([np.True_, np.False_] * 2, object), [1, 0, 1, 0], ("False", "True")),
        (np.array([b"b", b"a"] * 2, object), [1, 0, 1, 0], ("a", "b")),
        (np.array(["b", "a"] * 2, np.dtypes.StringDType()), [1, 0, 1, 0], ("a", "b")),
    ],
)
def test_raw_labels_are_numbered_in_sorted_order(labels, indices, names):
    built = LabeledSamples.from_arrays(FEATURES[:4], labels)
    assert built.labels.tolist() == indices
    assert built.class_names == names
    assert built.class_counts.tolist() == np.bincount(indices).tolist()


BIG = 1 << 60


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([BIG + 1, BIG], (f"{BIG}", f"{BIG + 1}")),
        ([BIG + 1, BIG, 1.0], ("1", f"{BIG}", f"{BIG + 1}")),
        ([(1 << 63) + 1, -1], ("-1", f"{(1 << 63) + 1}")),
        (np.array([(1 << 63) + 1, 1 << 63], np.uint64), (f"{1 << 63}", f"{(1 << 63) + 1}")),
        ([(1 << 70) + 1, 1 << 70], (f"{1 << 70}", f"{(1 << 70) + 1}")),
        ([Decimal(BIG + 1), Decimal(BIG)], (f"{BIG}", f"{BIG + 1}")),
        (pd.Series([BIG + 1, BIG], dtype="Int64"), (f"{BIG}", f"{BIG + 1}")),
        (pd.Series([BIG + 1, BIG], dtype="category"), (f"{BIG}", f"{BIG + 1}")),
        (pa.array([BIG + 1, BIG]), (f"{BIG}", f"{BIG + 1}")),
        (np.array([(1 << 24) - 1, 0], np.float32), ("0", f"{(1 << 24) - 1}")),
        (torch.tensor([255, 0], dtype=torch.bfloat16), ("0", "255")),
    ],
)
def test_labels_are_exact(labels, names):
    assert encode_labels(labels)[1] == names


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.5, 1.5], "integers or strings, got float64 such as"),
        ([None, "a"], "1 label is missing, at row 0; leave"),
        (np.array([1.0, 1.8e16]), "got 18000000000000000 at row 1 as float64, which rounds"),
        (np.array([1, 1 << 24], np.float32), "got 16777216 at row 1 as float32, .* give them as"),
        (torch.tensor([256.0], dtype=torch.bfloat16), "got 256 at row 0 as torch.bfloat16"),
        ([1, np.float32(1 << 24)], "got 16777216 at row 1 as float32"),
        (np.array([1, "a"], object), r"got object such as \[1\]; bring all to one type"),
        # NumPy makes text of these, in which two classes are one, and a missing label a class.
        ([1, "1"], r"got object such as \[1\]; bring all to one type"),
        (["a", np.nan], "1 label is missing, at row 1"),
        (["a", "a\0"], "NUL characters, which NumPy drops; strip them"),
        ([[1], [1, 2]], "one for each row, got lists of several lengths"),
    ],
)
def test_labels_that_are_no_classes_or_may_have_been_rounded_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        encode_labels(labels)


@pytest.mark.parametrize(
    ("labels", "advice"),
    [
        (np.array([[0], [1], [1]]), r"take labels\.ravel\(\)$"),
        ([[0], [1], [1]], r"take np\.ravel\(labels\)$"),
        (pd.DataFrame({"y": [0, 1, 1]}), r"take np\.ravel\(labels\)$"),
        (np.array([[0.2, 0.8], [0.7, 0.3]]), "probabilities of classes, .* likeliest is meant"),
        (np.array([[3, 1], [2, 5]]), "of several labels for one row give an indicator"),
        (np.array(3), "give an array of them"),
        (scipy.sparse.csr_array(np.eye(3)), r"give labels\.toarray\(\)$"),
        (pd.Series([[0], [1], [1]]), r"take np\.ravel\(labels\.tolist\(\)\)$"),
        (pa.array([[0], [1], [1]]), r"take np\.ravel\(labels\.to_pylist\(\)\)$"),
        (pa.table({"y": [0, 1, 1]}), r"take np\.ravel\(labels\)$"),
    ],
)
def test_advice_for_labels_of_another_shape_is_right_for_them(labels, advice):
    """The argmax of (n, 1) is class 0 for all."""
    with pytest.raises(InputError, match=f"one-dimensional, .*{advice}"):
        encode_labels(labels)


def test_rows_and_classes_are_taken_with_all_their_parts():
    taken = samples(weights=WEIGHTS).take(torch.tensor([4, 0, 2]), subset_hash="rows")
    assert torch.equal(taken.features, FEATURES[[4, 0, 2]])
    assert (taken.labels.tolist(), taken.class_names) == ([1, 0, 2], NAMES)
    assert taken.subset_hash == "rows"
    torch.testing.assert_close(taken.masses, torch.tensor([5 / 9, 1 / 9, 3 / 9]).double())
    # Renumbered in the order given.
    kept = samples(weights=WEIGHTS).keep_classes([2, 0])
    assert (kept.labels.tolist(), kept.class_names) == ([1, 0, 1, 1], ("c", "a"))
    assert torch.equal(kept.features, FEATURES[[0, 2, 3, 5]])
    torch.testing.assert_close(kept.masses, torch.tensor([0.1, 0.3, 0.0, 0.6]).double())


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_masses_are_the_users_to_change(weights):
    """Changed in place they changed what a dataset is compared by, and its fingerprint stayed."""
    given = samples(weights=weights)
    before, fingerprint = given.masses.clone(), given.fingerprint
    given.masses.numpy()[0] = 7
    given.masses.mul_(2)
    assert torch.equal(given.masses, before)
    assert given.fingerprint == fingerprint
    assert weights is None or torch.equal(given.weights, before)


TABLE = pd.DataFrame({"age": [1.0, 2.0, 4.0], "height": [5.0, 6.0, 9.0], "mass": [7.0, 8.0, 1.0]})
SWAPPED = TABLE[["height", "age", "mass"]]
KINDS = ["a", "b", "a"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: otdd.dataset_distance((pa.Table.from_pandas(TABLE), KINDS), (SWAPPED, KINDS)),
        lambda: otdd.dataset_distance(otdd.embed((TABLE, KINDS)), otdd.embed((SWAPPED, KINDS))),
        lambda: otdd.pairwise_distances([(TABLE, KINDS), (TABLE, KINDS), (SWAPPED, KINDS)]),
        lambda: otdd.sliced_distances([(TABLE, KINDS), (SWAPPED, KINDS)]),
        lambda: otdd.gradient_flow((TABLE, KINDS), (SWAPPED, KINDS)),
        lambda: otdd.extractors.reduce_pca((TABLE, KINDS), (SWAPPED, KINDS), 2, 0),
    ],
)
def test_columns_of_one_name_at_different_places_are_refused(call):
    with pytest.raises(InputError, match=r"column .age. is number 1 of .* and number 2 of "):
        call()


def test_columns_of_files_keep_their_names(tmp_path):
    def written(name, table):
        table.assign(kind=KINDS).to_csv(tmp_path / f"{name}.csv", index=False)
        path = str(tmp_path / f"{name}.csv")
        return otdd.embed(otdd.load("arrays", path=path, label="kind"))

    plain = written("plain", TABLE)
    assert plain.feature_names == ("age", "height", "mass")
    with pytest.raises(InputError, match=r"'age' is number 1 of plain.* number 2 of swapped"):
        otdd.dataset_distance(plain, written("swapped", SWAPPED))


def test_names_of_other_columns_and_of_arrays_are_not_compared():
    other = TABLE.rename(columns={"height": "length"})
    assert otdd.dataset_distance((TABLE, KINDS), (other, KINDS)).value == 0
    swapped = otdd.dataset_distance((TABLE, KINDS), (SWAPPED.to_numpy(), KINDS), epsilon=1.0)
    assert swapped.value > 1
    projected, _ = otdd.extractors.reduce_pca((TABLE, KINDS), (TABLE, KINDS), 2, 0)
    assert projected.feature_names is None
