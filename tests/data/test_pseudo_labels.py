"""Clusters for labels: found, numbered from the largest, the same for all parts of a dataset."""

import numpy as np
import pytest
import torch

from otdd_flash.data import with_pseudo_labels
from otdd_flash.data.pseudo_labels import label_parts
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples

SIZES = (5, 20, 10)


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


def test_the_seed_alone_decides():
    np.random.seed(1)  # noqa: NPY002
    first = with_pseudo_labels(_groups(), 9, seed=4)
    np.random.seed(2)  # noqa: NPY002
    assert torch.equal(first.labels, with_pseudo_labels(_groups(), 9, seed=4).labels)


def test_weightless_points_do_not_attract_a_centre():
    weights = torch.ones(sum(SIZES))
    weights[: SIZES[0]] = 0
    clusters = with_pseudo_labels(_groups(weights), 2, seed=0).labels
    assert len(set(clusters[SIZES[0] : SIZES[0] + SIZES[1]].tolist())) == 1
    assert clusters[SIZES[0]] != clusters[-1]


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
