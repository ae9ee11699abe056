"""Terms whose exact value is known: bounds hold it, to the last bits of float32 and float64."""

from __future__ import annotations

import math

import pytest
import torch

from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.labels.kernel_terms import solve_in_kernels
from otdd_flash.labels.sinkhorn_pairs import solve_in_float64
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.solver.schedules.converged import Converged

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


# Every fourth epsilon, others for every family.
IN_KERNELS = [(name, relative) for k, name in enumerate(NAMES) for relative in EPSILONS[k % 4 :: 4]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "relative"), IN_KERNELS)
def test_bounds_hold_the_truth_in_kernels(name, relative):
    # The interpreter takes a minute for long vectors; a GPU has them below.
    clouds, mean, value = families((1, 13), dim=160)[name]
    check("kernels", clouds, value, relative * mean)


@pytest.mark.slow
def test_large_epsilon_is_not_all_rounding():
    """Bounds of what float32 sums are a few of its units times epsilon wide."""
    clouds, mean, _ = families((5, 13))["clusters"]
    terms = solve("kernels", clouds, torch.tensor([[0, 1]], device=DEVICE), 1e3 * mean)
    width = float((terms.upper - terms.lower)[0])
    assert width < 100 * 2.0**-24 * 1e3 * mean + 2e-3 * 4 * mean


@pytest.mark.gpu
@pytest.mark.parametrize("size", [65_536, 300_000])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "constant"])
def test_bounds_hold_the_truth_of_large_classes(name, size):
    clouds, mean, value = families((size // 5, size // 5 - 17))[name]
    for relative in (0.2, 1.0, 3.0, 100.0, 1e4):
        check("kernels", clouds, value, relative * mean)


@pytest.mark.gpu
def test_bounds_hold_the_truth_of_long_vectors():
    clouds, mean, value = families((4000, 2500))["constant"]
    for relative in EPSILONS:
        check("kernels", clouds, value, relative * mean)
