"""Labels that are read off the Gaussians of particles."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.flows.gaussians import Gaussians, recluster

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
