"""Gaussians that move: their statistics, the distances between them, and the gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_flows import blobs, bures_table

import otdd_flash as otdd
from otdd_flash.flows.gaussians import Gaussians
from otdd_flash.samples import LabeledSamples

METRICS = {
    "full": otdd.labels.Gaussian(),
    "biased": otdd.labels.Gaussian(unbiased=False),
    "diagonal": otdd.labels.Gaussian(diagonal=True),
    "means": otdd.labels.Means(),
}


def uneven(seed: int) -> LabeledSamples:
    """Weighted classes of 2, 3 and 8 points in 4 dimensions: covariances of rank 1, 2 and 4."""
    samples = blobs(13, 4, seed=seed, classes=3)
    labels = torch.tensor([0] * 2 + [1] * 3 + [2] * 8)
    weights = torch.rand(13, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return replace(samples, labels=labels, weights=weights + 0.1)


def test_they_are_the_statistics_of_the_classes() -> None:
    samples = replace(uneven(0), weights=None)
    full, diagonal = (Gaussians.of(samples, METRICS[kind]) for kind in ("full", "diagonal"))
    for label in range(3):
        points = samples.features[samples.labels == label]
        covariance = torch.cov(points.T)
        torch.testing.assert_close(full.means[label], points.mean(0))
        torch.testing.assert_close(full.spreads[label].T @ full.spreads[label], covariance)
        torch.testing.assert_close(diagonal.spreads[label].square(), covariance.diagonal())
    assert Gaussians.of(samples, METRICS["means"]).spreads is None
    assert len(full) == 3
    assert set(full.variables) == {"means", "spreads"}


@pytest.mark.parametrize("kind", METRICS)
def test_their_distances_are_those_of_the_label_methods(kind: str) -> None:
    metric, source, target = METRICS[kind], uneven(0), uneven(1)
    own, theirs = Gaussians.of(source, metric), Gaussians.of(target, metric)
    whole = otdd.class_distances([source, target], metric)
    expected = whole.between(0, 1).full
    table = own.table(theirs, expected[3:, 3:])
    torch.testing.assert_close(table, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(bures_table(own, theirs), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["biased", "diagonal", "means"])
def test_gradients_are_those_of_the_distances(kind: str) -> None:
    """Where covariances have full rank; elsewhere the distance has kinks."""
    own = Gaussians.of(blobs(14, 2), METRICS[kind])
    theirs = Gaussians.of(blobs(14, 2, seed=1, classes=3), METRICS[kind])
    parts = [part.requires_grad_() for part in own.variables.values()]

    def table(*moved: torch.Tensor) -> torch.Tensor:
        named = dict(zip(own.variables, moved, strict=True))
        return Gaussians.from_variables(named).table(theirs, torch.ones(3, 3))

    assert torch.autograd.gradcheck(table, parts)


def test_only_what_moves_is_measured_and_differentiated() -> None:
    own, theirs = (Gaussians.of(uneven(seed), METRICS["full"]) for seed in (0, 1))
    within = torch.full((3, 3), 7.0)
    table = own.table(theirs, within)
    assert torch.equal(table[3:, 3:], within.double())
    assert torch.equal(table, table.T)
    assert not bool(table.diagonal()[:3].any())


def test_a_sign_of_a_deviation_means_nothing() -> None:
    own, theirs = (Gaussians.of(uneven(seed), METRICS["diagonal"]) for seed in (0, 1))
    flipped = Gaussians(own.means, -own.spreads)
    zeros = torch.zeros(3, 3)
    torch.testing.assert_close(flipped.table(theirs, zeros), own.table(theirs, zeros))


def test_taken_gaussians_are_at_no_distance_from_their_copies() -> None:
    for metric in METRICS.values():
        own, theirs = Gaussians.of(uneven(0), metric), Gaussians.of(uneven(1), metric)
        taken = own.take(torch.tensor([2, 0, 2]))
        table = taken.table(theirs, torch.zeros(3, 3))
        assert float(table[0, 2]) == pytest.approx(0, abs=1e-9)
        torch.testing.assert_close(table[1, 3:], own.table(theirs, torch.zeros(3, 3))[0, 3:])


def test_a_class_of_one_sample_has_zero_covariance() -> None:
    samples = replace(blobs(3), labels=torch.tensor([0, 0, 1]))
    for metric in ("full", "biased"):
        assert len(Gaussians.of(samples, METRICS[metric])) == 2
