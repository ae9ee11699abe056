"""Gaussians that move: their statistics, distances and gradients, and labels read off them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_flows import blobs, bures_table

import otdd_flash as otdd
from otdd_flash.flows.gaussians import Gaussians, recluster
from otdd_flash.samples import LabeledSamples

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

# Another factor of the same covariance: rotated from the left.
ROTATION = torch.linalg.qr(torch.randn(2, 2, generator=DRAW, dtype=torch.float64)).Q
SPREADS = {"deviations": DEVIATIONS, "factors": ROTATION @ torch.diag_embed(DEVIATIONS)}

WRONG = GROUPS.clone()
WRONG[[0, 8, 9, 20]] = torch.tensor([2, 0, 2, 1])


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


@pytest.mark.parametrize("kind", SPREADS)
def test_groups_are_found_and_keep_the_name_of_their_majority(kind: str) -> None:
    found = recluster(Gaussians(MEANS, SPREADS[kind]), WRONG, EQUAL)
    assert torch.equal(found, GROUPS)
    renamed = recluster(Gaussians(MEANS, SPREADS[kind]), 2 - WRONG, EQUAL)
    assert torch.equal(renamed, 2 - GROUPS)


def test_signs_of_deviations_and_rotations_of_factors_mean_nothing() -> None:
    signs = torch.where(torch.rand(21, 2, generator=DRAW) > 0.5, 1.0, -1.0)
    assert torch.equal(recluster(Gaussians(MEANS, signs * DEVIATIONS), WRONG, EQUAL), GROUPS)
    turned = torch.linalg.qr(torch.randn(21, 2, 2, generator=DRAW, dtype=torch.float64)).Q
    factors = turned @ torch.diag_embed(DEVIATIONS)
    assert torch.equal(recluster(Gaussians(MEANS, factors), WRONG, EQUAL), GROUPS)


def test_classes_without_particles_stay_without() -> None:
    found = recluster(Gaussians(MEANS, None), torch.where(GROUPS == 2, 5, 1), EQUAL)
    assert torch.equal(found, torch.where(GROUPS == 2, 5, 1))


def test_one_class_stays_one() -> None:
    assert not bool(recluster(Gaussians(MEANS, None), torch.zeros_like(GROUPS), EQUAL).any())


@pytest.mark.parametrize(("heavy", "expected"), [(1, [0, 0, 1]), (40, [0, 1, 1])])
def test_masses_count_as_many_particles_would(heavy: int, expected: list[int]) -> None:
    """A heavy particle keeps the centre of its cluster away from the one that is in between."""
    places = torch.tensor([[0.0], [5.5], [10.0]], dtype=torch.float64)
    labels, times = torch.tensor([0, 0, 1]), torch.tensor([heavy, 1, 1])
    weighted = recluster(Gaussians(places, None), labels, times.double())
    assert weighted.tolist() == expected
    repeated = Gaussians(places, None).take(torch.arange(3).repeat_interleave(times))
    even = torch.ones(len(repeated), dtype=torch.float64)
    copies = recluster(repeated, labels.repeat_interleave(times), even)
    assert torch.equal(copies, weighted.repeat_interleave(times))


def test_a_particle_without_mass_joins_a_cluster_and_moves_none() -> None:
    places = torch.tensor([[0.0], [1.0], [50.0], [10.0]], dtype=torch.float64)
    masses = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    found = recluster(Gaussians(places, None), torch.tensor([0, 0, 0, 1]), masses)
    assert found.tolist() == [0, 0, 1, 1]
