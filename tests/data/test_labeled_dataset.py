"""Labels of any kind, classes that are chosen, rows that are drawn, and clusters for labels."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otdd_flash.data import with_pseudo_labels
from otdd_flash.data.dataset import LabeledDataset, concatenate
from otdd_flash.data.subset import label_parts, subset
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.samples import LabeledSamples

SIZES = (5, 20, 10)


def _dataset(labels, class_names=None):
    n = 60 if labels is None else len(labels)
    inputs, more = np.arange(n, dtype=np.float32)[:, None], {"class_names": class_names}
    more["weights"] = np.arange(n) + 1.0
    return LabeledDataset.from_raw(inputs, labels, modality="array", name="rows", **more)


def test_splits_are_joined_in_order():
    joined = concatenate([_dataset([0, 1, 0]), _dataset([1, 1, 0])], "both")
    assert joined.inputs[:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert joined.labels.tolist() == [0, 1, 0, 1, 1, 0]
    parts = [
        LabeledDataset.from_raw([f"{s}{i}" for i in range(n)], None, modality="text", name="t")
        for s, n in (("a", 2), ("b", 3))
    ]
    assert concatenate(parts, "both").inputs[0:5] == ["a0", "a1", "b0", "b1", "b2"]
    for other in (None, ["x", "y", "x"]):
        with pytest.raises(InputError, match="load one split"):
            concatenate([_dataset([0, 1, 0]), _dataset(other)], "both")


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), share=st.floats(0, 1))
@settings(max_examples=15, deadline=None)
def test_proportions_are_kept_with_at_least_one_row_per_class(sizes, share):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    count = len(sizes) + round(share * (len(labels) - len(sizes)))
    drawn = np.bincount(subset(_dataset(labels), None, count, seed=0).labels)
    assert drawn.sum() == count
    assert (drawn >= 1).all()
    ideal = np.array(sizes) * count / len(labels)
    if (ideal >= 1).all():
        assert np.abs(drawn - ideal).max() < 1


def test_draws_follow_the_seed_alone_and_move_inputs_labels_and_weights_together():
    dataset, drawn = _dataset([2, 0, 1] * 10), []
    for state in (1, 2):
        np.random.seed(state)  # noqa: NPY002
        drawn.append(subset(dataset, None, 7, seed=5))
    first, second = drawn
    assert first.subset_hash == second.subset_hash
    assert first.subset_hash != subset(dataset, None, 7, seed=6).subset_hash
    assert first.subset_hash == hashlib.sha256(first.rows.astype("<i8").tobytes()).hexdigest()
    np.testing.assert_array_equal(first.inputs[:, 0], first.rows)
    np.testing.assert_array_equal(first.weights, first.rows + 1)
    np.testing.assert_array_equal(first.labels, dataset.labels[first.rows])
    assert first.take([4, 2, 0]).take([2, 0]).rows.tolist() == first.rows[[0, 4]].tolist()
    unlabelled = subset(_dataset(None), None, 9, seed=0)
    assert (unlabelled.labels, len(np.unique(unlabelled.rows))) == (None, 9)


def test_chosen_classes_keep_their_rows_and_the_order_given():
    dataset = _dataset([0, 1, 2, 2, 1, 0], ["a", "b", "c"])
    for classes, names in (
        ("b", ("b",)),
        ([1, "c"], ("b", "c")),
        (np.array([2, 0]), ("c", "a")),
    ):
        kept = subset(dataset, classes, None, seed=0)
        assert kept.class_names == names
        found = [kept.class_names[c] for c in kept.labels]
        assert found == ["abccba"[row] for row in kept.rows], classes
    # A number that is a class name means that class.
    dataset = _dataset([10, 1, 0])
    assert dataset.class_names == ("0", "1", "10")
    assert subset(dataset, [10, 1], None, seed=0).class_names == ("10", "1")
    with pytest.warns(DataNotice, match="2 of 5 classes have no rows and are left out: a, d"):
        kept = subset(_dataset([4, 1, 2, 1], list("abcde")), None, None, seed=0)
    assert [kept.class_names[c] for c in kept.labels] == ["e", "b", "c", "b"]


def test_impossible_labels_classes_and_sizes_are_refused():
    three, one = _dataset([0, 1, 2], ["a", "b", "c"]), _dataset([0, 0], ["a", "b"])
    for dataset, classes, size, message in (
        (three, ["z"], None, "unknown class 'z' of rows; choose names or indices of: a, b, c"),
        (three, [-1], None, "unknown class -1"),
        (three, [0, "a"], None, "names a class twice"),
        (three, [], None, "leaves no class"),
        (three, None, 2, "max_samples=2 is below the 3 classes"),
        (one, ["b"], None, "rows is empty: no rows are of the classes b"),
        (_dataset(None), [0], None, r"no labels; label it with .*pseudo_labels"),
    ):
        with pytest.raises(InputError, match=message):
            subset(dataset, classes, size, seed=0)
    for labels, message in (
        ([0, 1, 2], r"must lie in \[0, 2\).* got 0 to 2"),
        ([0, -1, 1], "1 label is missing, at row 1; remove"),
        (["a", "b", "a"], "labels must be class indices"),
    ):
        with pytest.raises(InputError, match=message):
            _dataset(labels, ["a", "b"])
    assert _dataset([-1, -1, -1], ["a", "b"]).labels is None


# Clusters.


def _groups(weights=None):
    """Three far groups of 5, 20 and 10 points."""
    centres = np.repeat([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]], SIZES, axis=0)
    points = centres + np.random.default_rng(0).standard_normal(centres.shape)
    return LabeledSamples(torch.from_numpy(points), None, (), weights, name="groups")


def test_groups_are_found_and_numbered_from_the_largest():
    for seed in (0, 4, 7):
        labelled = with_pseudo_labels(_groups(), 3, seed)
        assert labelled.labels.tolist() == np.repeat([2, 0, 1], SIZES).tolist()
        assert labelled.class_names == ("cluster 0", "cluster 1", "cluster 2")
        assert torch.equal(labelled.features, _groups().features)
    # Labels that are there are replaced.
    only = LabeledSamples(_groups().features, torch.zeros(35, dtype=torch.int64), ("only",))
    assert len(with_pseudo_labels(only, 3, seed=0).class_names) == 3


def test_fewer_distinct_points_give_fewer_clusters_and_k_must_fit():
    samples = LabeledSamples(torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0]]), None, ())
    labelled = with_pseudo_labels(samples, 4, seed=0)
    assert labelled.labels.tolist() == [1, 1, 0, 0, 0]
    assert labelled.class_names == ("cluster 0", "cluster 1")
    for k in (0, -1, 36):
        with pytest.raises(InputError, match=f"k from 1 to 35, the rows of groups; got {k}"):
            with_pseudo_labels(_groups(), k, seed=0)


def test_parts_of_one_dataset_have_the_same_clusters():
    """Clusters of the rows to test on, found by themselves, were numbered in another way."""
    groups, rows = _groups(), [0, 1, 2, 3, 4, 5, 25]
    train, test = label_parts([groups, groups.take(torch.tensor(rows))], 3, seed=0)
    assert torch.equal(test.labels, train.labels[rows])
    assert test.class_names == train.class_names


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
def test_rows_of_another_part_are_in_a_cluster_that_has_rows():
    """k-means rounds the three large numbers to one, and leaves two of its centres without rows."""
    points = torch.tensor([0.0] * 5 + [1e8, 1e8 + 8, 1e8 + 16])[:, None]
    groups = LabeledSamples(points, None, ())
    for seed in range(3):
        first, second = label_parts([groups, groups], 4, seed=seed)
        assert first.labels.tolist() == [0] * 5 + [1] * 3
        assert torch.equal(second.labels, first.labels)
