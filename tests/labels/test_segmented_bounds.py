"""Dozens of random problems: the true divergence lies inside every interval."""

from __future__ import annotations

import pytest
import torch
from sinkhorn_cases import make_clouds, true_divergence

from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.labels import sinkhorn_pairs
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances
from otdd_flash.operators.stored_segments import StoredSegments
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.segmented import solve_self_terms

# The reference's own error.
SLACK = 1e-9


def check(clouds, found, pairs, epsilon):
    for index, (i, j) in enumerate(pairs.tolist()):
        truth = true_divergence(clouds[i], clouds[j], epsilon)
        slack = SLACK * (1 + abs(truth))
        assert float(found.lower[index]) - slack <= truth <= float(found.upper[index]) + slack


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("seed", "tolerance"), [(k, (1e-1, 1e-3)[k % 2]) for k in range(8)])
def test_bounds_hold_the_truth(seed, tolerance):
    sizes = torch.randint(1, 25, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    clouds = make_clouds(sizes, 1 + seed % 5, seed, weighted=True, spread=0.3 + seed / 2)
    pairs = all_pairs(4)
    epsilon = (0.05, 0.5, 5.0)[seed % 3]
    found = sinkhorn_distances(clouds, pairs, epsilon, tolerance)
    check(clouds, found, pairs, epsilon)
    # An interval that holds everything would prove nothing.
    costs = [(one.points[:, None] - one.points[None]).square().sum(2).max() for one in clouds]
    assert float((found.upper - found.lower).max()) < 3 * tolerance * (
        float(max(costs)) + float(found.values.max()) + epsilon
    )


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
@pytest.mark.parametrize("iterations", [1, 7])
def test_bounds_hold_the_truth_however_early_a_solve_stops(iterations, monkeypatch):
    monkeypatch.setattr(
        sinkhorn_pairs, "Converged", lambda tolerance: Converged(tolerance, iterations)
    )
    clouds = make_clouds((4, 9, 17), weighted=True)
    found = sinkhorn_distances(clouds, all_pairs(3), 0.1)
    assert bool(torch.isfinite(torch.stack(found)).all())
    check(clouds, found, all_pairs(3), 0.1)


@pytest.mark.slow
def test_bounds_hold_between_classes_of_very_different_sizes():
    """The truth is a solve to a much smaller error, whose own interval is much narrower."""
    clouds = make_clouds((1, 7, 64, 129, 300), dim=4, weighted=True)
    pairs = all_pairs(5)
    rough, fine = (sinkhorn_distances(clouds, pairs, 0.2, tol) for tol in (1e-2, 1e-6))
    assert bool((rough.lower <= fine.upper).all())
    assert bool((rough.upper >= fine.lower).all())
    assert bool((rough.lower <= fine.values + 1e-9).all())
    assert bool((rough.upper >= fine.values - 1e-9).all())


def test_a_plan_without_its_mass_is_as_far_from_its_marginals_as_said():
    """Half of the points in one place, the others far apart: a plan of potential 0 keeps a fourth.

    Its row sums are 3/4 off, and twice half of the mass when it is given mass 1.
    """
    points = torch.zeros(40, 1, dtype=torch.float64)
    points[20:, 0] = 100.0 * torch.arange(1, 21)
    masses = torch.full((40,), 1 / 40, dtype=torch.float64)
    cloud, epsilon = WeightedPoints(points, masses), 0.5
    segments = StoredSegments([(cloud, cloud)], (48, 48))
    found = solve_self_terms(segments, epsilon, Converged(1e-3, max_iterations=1))
    plan = (masses[:, None] * masses) * (-(points - points.T).square() / epsilon).exp()
    exact = (plan.sum(1) / plan.sum() - masses).abs().sum()
    assert float((plan.sum(1) - masses).abs().sum()) < 0.8 < 0.9 < float(exact)
    assert float(found.marginal_error) >= float(exact)
