"""LabeledDataset: labels of any kind, rows taken, splits joined."""

import numpy as np
import pytest

from otdd_flash.data.dataset import LabeledDataset, concatenate
from otdd_flash.data.lazy_items import LazyItems
from otdd_flash.errors import InputError


def _vectors(labels, n=3, **options):
    inputs = np.arange(n * 2.0).reshape(n, 2)
    return LabeledDataset.from_raw(inputs, labels, modality="array", name="v", **options)


def test_classes_are_the_sorted_distinct_labels():
    for labels, names in (
        ([7, 3, 7], ("3", "7")),
        (["b", "a", "b"], ("a", "b")),
        (np.array([b"b", b"a", b"b"]), ("a", "b")),
        ([True, False, True], ("False", "True")),
    ):
        dataset = _vectors(labels)
        assert dataset.class_names == names
        assert dataset.labels.tolist() == [1, 0, 1]
    hidden = _vectors([-1, -1, -1], class_names=["a", "b"])
    assert (hidden.labels, hidden.class_names) == (None, ())


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0.5, 1.0, 2.0], {}, "labels must be integers or strings, got float64"),
        ([0.0, np.nan, np.nan], {}, "2 labels are missing, at rows 1, 2; remove"),
        (np.array(["a", None, "b"], dtype=object), {}, "1 label is missing, at row 1; remove"),
        ([0, 1], {}, "3 inputs, but its labels have shape"),
        ([0, 1, 2], {"class_names": ["a", "b"]}, r"must lie in \[0, 2\).* got 0 to 2"),
        ([0, -1, 1], {"class_names": ["a", "b"]}, "1 label is missing, at row 1; remove"),
        (["a", "b", "a"], {"class_names": ["a", "b"]}, "labels must be class indices"),
        ([0, 1, 1], {"weights": [1.0]}, "its weights have shape"),
        ([0, 1, 1], {"weights": ["x", "y", "z"]}, "weights must be real numbers"),
        ([[0], [1], [1]], {}, "one-dimensional"),
        ([], {"n": 0}, "v is empty"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, options, message):
    with pytest.raises(InputError, match=message):
        _vectors(labels, **options)


def test_rows_that_are_taken_keep_their_numbers():
    dataset = _vectors([0, 1, 2, 3, 4], n=5)
    twice = dataset.take([4, 2, 0]).take([2, 0])
    assert twice.rows.tolist() == [0, 4]
    assert twice.subset_hash == dataset.take([0, 4]).subset_hash
    texts = LabeledDataset.from_raw(["a", "b", "c"], [0, 1, 0], modality="text", name="t")
    assert texts.take([2, 0]).inputs == ["c", "a"]


def test_lazy_items_are_read_only_when_asked_for():
    read = []

    def fetch(row):
        read.append(row)
        return f"text {row}"

    texts = LazyItems(fetch, np.arange(10), [f"{row}.txt" for row in range(10)])
    dataset = LabeledDataset.from_raw(texts, None, modality="text", name="t").take([7, 3, 5])
    assert read == []
    assert dataset.inputs[1:] == ["text 3", "text 5"]
    assert read == [3, 5]
    assert dataset.inputs.paths == ["7.txt", "3.txt", "5.txt"]
    assert list(dataset.inputs) == ["text 7", "text 3", "text 5"]


def test_splits_are_joined_in_order():
    first, second = _vectors([0, 1, 0]), _vectors([1, 1, 0])
    joined = concatenate([first, second], "both")
    np.testing.assert_array_equal(joined.inputs, np.concatenate([first.inputs, second.inputs]))
    assert joined.labels.tolist() == [0, 1, 0, 1, 1, 0]
    assert joined.rows.tolist() == list(range(6))
    parts = [
        LabeledDataset.from_raw([f"{split}{i}" for i in range(n)], None, modality="text", name="t")
        for split, n in (("a", 2), ("b", 3))
    ]
    assert concatenate(parts, "both").inputs[0:5] == ["a0", "a1", "b0", "b1", "b2"]
    for other in (None, ["x", "y", "x"]):
        with pytest.raises(InputError, match="load one split"):
            concatenate([first, _vectors(other)], "both")
