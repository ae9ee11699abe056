"""Dozens of random problems: the true divergence lies inside every interval."""

from __future__ import annotations

import pytest
import torch
from sinkhorn_cases import make_clouds, true_divergence

from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.labels import sinkhorn_pairs, transport_terms
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


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tolerance", [1e-1, 1e-3])
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
@pytest.mark.parametrize("iterations", [1, 2, 7, 30])
def test_bounds_hold_the_truth_however_early_a_solve_stops(iterations, monkeypatch):
    monkeypatch.setattr(
        sinkhorn_pairs, "Converged", lambda tolerance: Converged(tolerance, iterations)
    )
    clouds = make_clouds((4, 9, 17), weighted=True)
    found = sinkhorn_distances(clouds, all_pairs(3), 0.1)
    assert bool(torch.isfinite(torch.stack(found)).all())
    check(clouds, found, all_pairs(3), 0.1)


def test_bounds_hold_between_classes_of_very_different_sizes():
    """The truth is a solve to a much smaller error, whose own interval is much narrower."""
    clouds = make_clouds((1, 2, 7, 64, 129, 400), dim=4, weighted=True)
    pairs = all_pairs(6)
    rough, fine = (sinkhorn_distances(clouds, pairs, 0.2, tol) for tol in (1e-2, 1e-6))
    assert bool((rough.lower <= fine.upper).all())
    assert bool((rough.upper >= fine.lower).all())
    assert bool((rough.lower <= fine.values + 1e-9).all())
    assert bool((rough.upper >= fine.values - 1e-9).all())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_bounds_hold_the_truth_in_kernels(seed, monkeypatch):
    """Their float32 rounding included."""
    monkeypatch.setattr(transport_terms, "kernels_run_on", lambda _: True)
    clouds = make_clouds((3, 1, 12), 1 + 2 * seed, seed, weighted=True, spread=(1, 5, 0.2)[seed])
    # Far from each other: nothing of that may reach the rounding.
    clouds = [type(c)(c.name, c.points + 100.0 * k, c.weights) for k, c in enumerate(clouds)]
    pairs = all_pairs(3)
    for epsilon, tolerance in ((1.0, 1e-1), (5.0, 1e-3)):
        found = sinkhorn_distances(clouds, pairs, epsilon, tolerance)
        check(clouds, found, pairs, epsilon)
        width = found.upper - found.lower
        assert float(width.max()) < 10 * tolerance * float(1 + 25 * (seed == 1)) * 5


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
