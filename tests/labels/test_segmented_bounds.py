"""Bounds of terms and divergences hold the truth, to the last bits of float32 and float64."""

from __future__ import annotations

import math

import pytest
import torch
from sinkhorn_cases import make_clouds, true_divergence

from otdd_flash.engine.problems import WeightedPoints
from otdd_flash.formulas.decision import SELF
from otdd_flash.labels import sinkhorn_pairs
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances, solve_in_float64, solve_in_kernels
from otdd_flash.operators.kernel_segments import ClassPool
from otdd_flash.operators.stored_segments import StoredSegments
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_segments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILONS = (1e-4, 1e-2, 0.3, 1.0, 30.0, 1e4)
# Of the truth as computed in float64, relative to its largest part.
SLACK = 1e-14


def cloud(centres, counts, masses=None):
    """So many copies of each centre; masses of all copies of each together."""
    counts = torch.as_tensor(counts)
    points = torch.repeat_interleave(centres, counts, 0)
    share = counts.double() / counts.sum() if masses is None else torch.as_tensor(masses).double()
    each = torch.repeat_interleave(share / counts, counts)
    return WeightedPoints(points.to(DEVICE), each.to(DEVICE))


def draw(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform_value(count, cost, epsilon):
    """Of `count` equal places, `cost` apart, with equal masses: the plan is known by symmetry."""
    # -log((1 + (k - 1) q) / k) without cancellation.
    return -epsilon * math.log1p((count - 1) / count * math.expm1(-cost / epsilon))


def two_clusters(points, counts):
    """A class for each of the counts, half of it at either of two points; cost and value."""
    cost = float((points[0] - points[1]).square().sum())
    clouds = [cloud(points, (count, count)) for count in counts]
    return clouds, cost / 2, lambda epsilon: uniform_value(2, cost, epsilon)


def families(counts, dim=5000):
    """Names, classes with equal measures, mean cost and value by epsilon of any two of them."""
    steps = torch.arange(dim).double()
    line = torch.stack((torch.zeros(dim).double(), 1 + 1e-3 * torch.sin(steps)))
    one_hot = torch.eye(5).double()
    return {
        "clusters": two_clusters(draw(2, 7), counts),
        "far": two_clusters(draw(2, 7, seed=1) + 1e3, counts),
        "integers": two_clusters(torch.tensor([[3.0, -7, 11], [4, 9, 2]]), counts),
        "constant": two_clusters(line, counts[:2]),
        "one_hot": (
            [cloud(one_hot, (count,) * 5) for count in counts],
            1.6,
            lambda epsilon: uniform_value(5, 2.0, epsilon),
        ),
        "equal": ([cloud(draw(1, 4), (count,)) for count in counts], 1.0, lambda epsilon: 0.0),
        "unequal masses": (
            [cloud(torch.eye(2).double(), (count, 3), (0.5, 0.5)) for count in counts],
            1.0,
            lambda epsilon: uniform_value(2, 2.0, epsilon),
        ),
    }


NAMES = list(families((1, 2, 3)))


def solve(how, clouds, pairs, epsilon):
    options = Converged(1e-3, 200)
    if how == "kernels":
        return solve_in_kernels(ClassPool(clouds), pairs, epsilon, options)
    return solve_in_float64(clouds, pairs, epsilon, options)


def check(how, clouds, value, epsilon):
    index = torch.arange(len(clouds), device=DEVICE)
    own = torch.stack((index, index), 1)
    for pairs in (own, torch.combinations(index)):
        terms = solve(how, clouds, pairs, epsilon)
        truth = value(epsilon)
        slack = SLACK * abs(truth)
        assert float(terms.lower.max()) <= truth + slack
        assert float(terms.upper.min()) >= truth - slack
        assert bool((terms.lower <= terms.value).all() & (terms.value <= terms.upper).all())


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", NAMES)
def test_bounds_hold_the_truth_in_float64(name):
    clouds, mean, value = families((1, 8, 37))[name]
    for relative in EPSILONS:
        check("float64", clouds, value, relative * mean)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "relative"),
    [("clusters", 1e-4), ("far", 1e4), ("integers", 0.3), ("constant", 1.0), ("one_hot", 30.0)],
)
def test_bounds_hold_the_truth_in_kernels(name, relative):
    # The interpreter takes a minute for long vectors; a GPU has them below.
    clouds, mean, value = families((1, 9), dim=160)[name]
    check("kernels", clouds, value, relative * mean)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, size) for name in NAMES if name != "constant" for size in (65_536, 300_000)),
        ("constant", 20_000),
    ],
)
def test_bounds_hold_the_truth_of_large_classes(name, size):
    clouds, mean, value = families((size // 5, size // 5 - 17))[name]
    for relative in (0.2, 1.0, 3.0, 100.0, 1e4):
        check("kernels", clouds, value, relative * mean)


# Of random classes, against a reference of small error.


def check_divergences(clouds, found, pairs, epsilon):
    for index, (i, j) in enumerate(pairs.tolist()):
        truth = true_divergence(clouds[i], clouds[j], epsilon)
        # The reference's own error.
        slack = 1e-9 * (1 + abs(truth))
        assert float(found.lower[index]) - slack <= truth <= float(found.upper[index]) + slack


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("seed", "tolerance"), [(k, (1e-1, 1e-3)[k % 2]) for k in range(4)])
def test_bounds_hold_the_truth(seed, tolerance):
    sizes = torch.randint(1, 25, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    clouds = make_clouds(sizes, 1 + seed % 5, seed, weighted=True, spread=0.3 + seed / 2)
    pairs = all_pairs(4)
    epsilon = (0.05, 0.5, 5.0)[seed % 3]
    found = sinkhorn_distances(clouds, pairs, epsilon, tolerance)
    check_divergences(clouds, found, pairs, epsilon)
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
    check_divergences(clouds, found, all_pairs(3), 0.1)


def test_a_plan_without_its_mass_is_as_far_from_its_marginals_as_said():
    """Half of the points in one place, the others far apart: a plan of potential 0 keeps a fourth.

    Its row sums are 3/4 off, and twice half of the mass when it is given mass 1.
    """
    points = torch.zeros(40, 1, dtype=torch.float64)
    points[20:, 0] = 100.0 * torch.arange(1, 21)
    masses = torch.full((40,), 1 / 40, dtype=torch.float64)
    cloud, epsilon = WeightedPoints(points, masses), 0.5
    segments = StoredSegments([(cloud, cloud)], (48, 48))
    found = solve_segments(segments, SELF, epsilon, Converged(1e-3, max_iterations=1))
    plan = (masses[:, None] * masses) * (-(points - points.T).square() / epsilon).exp()
    exact = (plan.sum(1) / plan.sum() - masses).abs().sum()
    assert float((plan.sum(1) - masses).abs().sum()) < 0.8 < 0.9 < float(exact)
    assert float(found.marginal_error) >= float(exact)
