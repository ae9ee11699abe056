"""Gaussians that move: their statistics, distances and gradients, and labels read off them."""

from dataclasses import replace

import pytest
import torch
from small_flows import blobs, bures_table

import otdd_flash as otdd
from otdd_flash.flows.gaussians import Gaussians, recluster

METRICS = {
    "full": otdd.labels.Gaussian(),
    "biased": otdd.labels.Gaussian(unbiased=False),
    "diagonal": otdd.labels.Gaussian(diagonal=True),
    "means": otdd.labels.Means(),
}

DRAW = torch.Generator().manual_seed(0)
# Three groups of seven Gaussians: the first two differ in spread alone.
GROUPS = torch.arange(21) // 7
MEANS = torch.tensor([[0.0, 0.0], [0.0, 0.0], [9.0, 0.0]], dtype=torch.float64)[GROUPS]
MEANS = MEANS + 0.1 * torch.randn(21, 2, generator=DRAW, dtype=torch.float64)
DEVIATIONS = torch.tensor([[1.0, 1.0], [5.0, 1.0], [1.0, 1.0]], dtype=torch.float64)[GROUPS]
EQUAL = torch.full((21,), 1 / 21, dtype=torch.float64)

WRONG = GROUPS.clone()
WRONG[[0, 8, 9, 20]] = torch.tensor([2, 0, 2, 1])


def uneven(seed):
    """Weighted classes of 2, 3 and 8 points in 4 dimensions: covariances of rank 1, 2 and 4."""
    samples = blobs(13, 4, seed=seed, classes=3)
    labels = torch.tensor([0] * 2 + [1] * 3 + [2] * 8)
    weights = torch.rand(13, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return replace(samples, labels=labels, weights=weights + 0.1)


def test_they_are_the_statistics_of_the_classes():
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
def test_their_distances_are_those_of_the_label_methods(kind):
    metric, source, target = METRICS[kind], uneven(0), uneven(1)
    own, theirs = Gaussians.of(source, metric), Gaussians.of(target, metric)
    whole = otdd.class_distances([source, target], metric)
    expected = whole.between(0, 1).full
    table = own.table(theirs, expected[3:, 3:])
    torch.testing.assert_close(table, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(bures_table(own, theirs), expected, rtol=1e-6, atol=1e-6)


def test_lower_bounds_are_below_the_distances():
    for classes in (3, 6):
        source, metric = blobs(60, 4, classes=classes), METRICS["full"]
        own, target = Gaussians.of(source, metric), Gaussians.of(blobs(9, 4), metric)
        table = own.table(target, torch.zeros(2, 2))
        bounds = own.lower_bounds()
        assert bool((bounds <= table[:classes, :classes] + 1e-12).all())
        assert float(bounds.max()) > 0


def test_groups_are_found_and_keep_the_name_of_their_majority():
    """Signs of deviations and rotations of factors mean nothing."""
    signs = torch.where(torch.rand(21, 2, generator=DRAW) > 0.5, 1.0, -1.0)
    turned = torch.linalg.qr(torch.randn(21, 2, 2, generator=DRAW, dtype=torch.float64)).Q
    for spreads in (DEVIATIONS, signs * DEVIATIONS, turned @ torch.diag_embed(DEVIATIONS)):
        assert torch.equal(recluster(Gaussians(MEANS, spreads), WRONG, EQUAL), GROUPS)
        assert torch.equal(recluster(Gaussians(MEANS, spreads), 2 - WRONG, EQUAL), 2 - GROUPS)


@pytest.mark.parametrize(("heavy", "expected"), [(1, [0, 0, 1]), (40, [0, 1, 1])])
def test_masses_count_as_many_particles_would(heavy, expected):
    """A heavy particle keeps the centre of its cluster away from the one that is in between."""
    places = torch.tensor([[0.0], [5.5], [10.0]], dtype=torch.float64)
    labels, times = torch.tensor([0, 0, 1]), torch.tensor([heavy, 1, 1])
    weighted = recluster(Gaussians(places, None), labels, times.double())
    assert weighted.tolist() == expected
    repeated = Gaussians(places, None).take(torch.arange(3).repeat_interleave(times))
    even = torch.ones(len(repeated), dtype=torch.float64)
    copies = recluster(repeated, labels.repeat_interleave(times), even)
    assert torch.equal(copies, weighted.repeat_interleave(times))
