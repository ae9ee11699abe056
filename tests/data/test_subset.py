"""Classes that are chosen, and rows that are drawn from them."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.subset import stratified_rows, subset
from otdd_flash.errors import DataNotice, InputError


def _dataset(labels, class_names=None):
    n = 60 if labels is None else len(labels)
    inputs, more = np.arange(n, dtype=np.float32)[:, None], {"class_names": class_names}
    weights = np.arange(n) + 1.0
    return LabeledDataset.from_raw(
        inputs, labels, modality="array", name="rows", weights=weights, **more
    )


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    share=st.floats(0, 1),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_proportions_are_kept_with_at_least_one_row_per_class(sizes, share, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    count = len(sizes) + round(share * (len(labels) - len(sizes)))
    rows = stratified_rows(labels, count, np.random.default_rng(seed))
    drawn = np.bincount(labels[rows], minlength=len(sizes))
    assert len(np.unique(rows)) == count
    assert (drawn >= 1).all()
    ideal = np.array(sizes) * count / len(labels)
    if (ideal >= 1).all():
        assert np.abs(drawn - ideal).max() < 1


def test_draws_ignore_the_global_generator_and_agree_on_both_sides():
    dataset = _dataset([0, 1, 2] * 20)
    np.random.seed(1)  # noqa: NPY002
    first = subset(dataset, None, 12, seed=5)
    np.random.seed(2)  # noqa: NPY002
    second = subset(dataset, None, 12, seed=5)
    np.testing.assert_array_equal(first.rows, second.rows)
    assert first.subset_hash == second.subset_hash
    assert first.subset_hash != subset(dataset, None, 12, seed=6).subset_hash


def test_inputs_labels_weights_and_rows_move_together():
    dataset = _dataset([2, 0, 1] * 10)
    drawn = subset(dataset, None, 7, seed=0)
    np.testing.assert_array_equal(drawn.inputs[:, 0], drawn.rows)
    np.testing.assert_array_equal(drawn.weights, drawn.rows + 1)
    np.testing.assert_array_equal(drawn.labels, dataset.labels[drawn.rows])
    assert drawn.subset_hash == hashlib.sha256(drawn.rows.astype("<i8").tobytes()).hexdigest()
    drawn = subset(_dataset(None), None, 9, seed=0)
    assert (drawn.labels, len(np.unique(drawn.rows))) == (None, 9)


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (["c", "a"], ("c", "a")),
        ([2, 0], ("c", "a")),
        ("b", ("b",)),
        ([1, "c"], ("b", "c")),
        (np.array([2, 0]), ("c", "a")),
    ],
)
def test_chosen_classes_keep_their_rows_and_the_order_given(classes, names):
    labels = [0, 1, 2, 2, 1, 0]
    kept = subset(_dataset(labels, ["a", "b", "c"]), classes, None, seed=0)
    assert kept.class_names == names
    assert [kept.class_names[c] for c in kept.labels] == ["abc"[labels[row]] for row in kept.rows]


def test_a_number_that_is_a_class_name_means_that_class():
    dataset = _dataset([10, 1, 0])
    assert dataset.class_names == ("0", "1", "10")
    assert subset(dataset, [10, 1], None, seed=0).class_names == ("10", "1")


def test_impossible_classes_and_sizes_are_refused():
    three = _dataset([0, 1, 2], ["a", "b", "c"])
    one = _dataset([0, 0], ["a", "b"])
    for dataset, classes, size, message in (
        (three, ["z"], None, "unknown class 'z' of rows; choose names or indices of: a, b, c"),
        (three, [3], None, "unknown class 3"),
        (three, [-1], None, "unknown class -1"),
        (three, [0, "a"], None, "names a class twice"),
        (three, [], None, "leaves no class"),
        (three, None, 2, "max_samples=2 is below the 3 classes"),
        (one, ["b"], None, "rows is empty: no rows are of the classes b"),
        (_dataset(None), [0], None, r"no labels; label it with .*pseudo_labels"),
    ):
        with pytest.raises(InputError, match=message):
            subset(dataset, classes, size, seed=0)


def test_missing_rows_and_class_ids_are_said_and_do_not_shift_names():
    with pytest.warns(DataNotice, match="2 of 5 classes have no rows and are left out: a, d"):
        kept = subset(_dataset([4, 1, 2, 1], list("abcde")), None, None, seed=0)
    assert [kept.class_names[c] for c in kept.labels] == ["e", "b", "c", "b"]
    with pytest.warns(DataNotice, match="2 rows, fewer than max_samples=3"):
        assert len(subset(_dataset([0, 1]), None, 3, seed=0)) == 2
