"""What class distances refuse, and that the message names the value and the way out."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from otdd_flash.errors import DataNotice, InputError
from otdd_flash.labels import (
    Exact,
    Gaussian,
    Means,
    NoLabels,
    Sinkhorn,
    UpperBound,
    exact,
    measure_classes,
    metric_named,
)
from otdd_flash.labels.classes import split_classes
from otdd_flash.labels.many import drop_small_classes
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples


def lone_class():
    return LabeledSamples.from_arrays(np.eye(3), ["cat", "cat", "owl"], name="pets")


def unlabelled():
    return LabeledSamples(torch.eye(3), None, (), name="cells")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("gauss", {}, "unknown labels.method 'gauss'; choose one of: gaussian, sinkhorn"),
        ("sinkhorn", {"epsilon": 0}, "labels.epsilon must be positive and finite, got 0"),
        (
            "sinkhorn",
            {"epsilon": 1, "tolerance": -1},
            "labels.tolerance must be positive and finite, got -1",
        ),
        ("given", {}, "labels.path"),
    ],
)
def test_impossible_metrics_are_refused(name, parameters, message):
    with pytest.raises(InputError, match=message):
        metric_named(name, parameters)


@pytest.mark.parametrize(
    ("metric", "trace"),
    [(Gaussian(), 1), (Gaussian(diagonal=True), 1), (UpperBound(), 1), (Means(), 0)],
)
def test_a_class_of_one_sample_is_a_point_with_zero_covariance(metric, trace):
    samples = lone_class()
    # The means are sqrt(3 / 2) apart; the covariance of the cats has trace 1, the owl's is 0.
    table = measure_classes(samples, samples, metric)
    assert float(table.xy[0, 1]) == pytest.approx(1.5 + trace)


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (Gaussian(), 1),
        (Gaussian(unbiased=False), 0),
        (Means(), 0),
        (Sinkhorn(epsilon=1.0), 0),
    ],
)
def test_classes_of_one_sample_are_told_of_once(metric, told):
    samples = lone_class()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset_distance(samples, samples, labels=metric, epsilon=1.0)
    said = [str(entry.message) for entry in caught if entry.category is DataNotice]
    assert len(said) == told
    assert all("'owl' of pets" in text and "min_class_size=2" in text for text in said)


@pytest.mark.parametrize("method", ["gaussian", "means", "upper_bound", "exact", "given"])
def test_unlabelled_data_say_how_to_label(method, blobs):
    given = measure_classes(blobs((3,), 3), blobs((3,), 3), Means())
    with pytest.raises(
        InputError, match=r"cells has no labels; label it with .*pseudo_labels=kmeans"
    ):
        measure_classes(blobs((3,), 3), unlabelled(), metric_named(method, {"table": given}))


def test_none_takes_unlabelled_data_as_one_class(blobs):
    table = measure_classes(unlabelled(), blobs((3, 4), 5), NoLabels())
    assert torch.equal(table.full, torch.zeros(3, 3, dtype=torch.float64))
    assert (table.names_x, table.names_y) == (("all",), ("0", "1"))


def test_different_feature_dimensions_name_both(blobs):
    pair = blobs((3,), 2, name="left"), blobs((3,), 5, name="right")
    with pytest.raises(InputError, match=r"left has 2 features and right has 5.*extractor=pixels"):
        measure_classes(*pair, Gaussian())


def test_classes_without_mass_are_named():
    labels = torch.tensor([0, 0, 2])
    for samples in (
        LabeledSamples(torch.eye(3), labels, ("a", "empty", "c"), name="gaps"),
        LabeledSamples(torch.eye(3), labels // 2, ("a", "empty"), [1, 1, 0], name="gaps"),
    ):
        with pytest.raises(InputError, match="'empty' of gaps has no sample of positive weight"):
            split_classes(samples)


def test_exact_refuses_classes_too_large(blobs, monkeypatch):
    monkeypatch.setattr(exact, "MAX_PAIRS_OF_POINTS", 100)
    source, target = blobs((11, 9), 3, name="left"), blobs((10,), 3, seed=1, name="right")
    with pytest.raises(
        InputError, match=r"'0' of right \(10 samples\) and '0' of left \(11 samples"
    ):
        measure_classes(source, target, Exact())
    measure_classes(source.keep_classes([1]), target, Exact())


def test_exact_does_not_return_an_unfinished_plan(blobs, monkeypatch):
    monkeypatch.setattr(exact, "MAX_PIVOTS", 2)
    source, target = blobs((40,), 3, name="left"), blobs((40,), 3, seed=1, name="right")
    with pytest.raises(InputError, match=r"'0' of left and class '0' of right did not end well"):
        measure_classes(source, target, Exact())


def test_statistics_must_know_the_classes(blobs):
    source, target = blobs((3, 4), 2, name="left"), blobs((5,), 2, seed=1)
    with pytest.raises(InputError, match="come from whole, which has no class 1 of left"):
        measure_classes(
            source, target, Gaussian(), statistics=(blobs((9,), 2, name="whole"), target)
        )


def test_small_classes_go_with_a_notice_that_names_them():
    with pytest.warns(DataNotice, match=r"classes of pets with fewer than 2 .*: owl \(1\)"):
        kept = drop_small_classes(lone_class(), 2)
    assert kept.class_names == ("cat",)
    assert kept.labels.tolist() == [0, 0]
    assert measure_classes(kept, kept, Gaussian()).xx.tolist() == [[0.0]]
    # Only samples with weight count.
    samples = LabeledSamples(torch.eye(4), torch.tensor([0, 0, 1, 1]), ("a", "b"), [1, 1, 1, 0])
    with pytest.warns(DataNotice, match=r"b \(1\)"):
        assert drop_small_classes(samples, 2).class_names == ("a",)


def test_classes_without_samples_go_silently():
    samples = LabeledSamples(torch.eye(2), torch.tensor([0, 2]), ("a", "empty", "c"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drop_small_classes(samples, None).class_names == ("a", "c")
        assert drop_small_classes(unlabelled(), 5).labels is None
        assert len(drop_small_classes(lone_class(), None)) == 3


def test_nothing_left_is_an_error():
    with pytest.raises(
        InputError, match=r"min_class_size=9 leaves no class of pets.*cat \(2\), owl"
    ):
        drop_small_classes(lone_class(), 9)
    with pytest.raises(InputError, match="min_class_size must be at least 1, got 0"):
        drop_small_classes(lone_class(), 0)
