"""Segments' costs and the errors of their passes are those that their files derive, and no more."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from otdd_flash.engine.problems import WeightedPoints
from otdd_flash.formulas.evidence import TRIFLE
from otdd_flash.kernels.adder import UNIT, adder_of, chain_error
from otdd_flash.kernels.segments.step import (
    CHAIN_PRODUCTS,
    PARTS,
)
from otdd_flash.operators.kernel_segments import ClassPool, KernelSegments
from otdd_flash.operators.stored_segments import StoredSegments

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES, DIM = (1, 20, 33, 7), 5
# Of a class with a smaller one and with a larger one, and with one that is a point.
PAIRS = [(2, 1), (3, 2), (2, 0)]
SHAPE = (48, 48)


def cloud_of(size: int, seed: int, dim: int = DIM, far: float = 3.0) -> WeightedPoints:
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(size, dim, generator=draw, dtype=torch.float64) / 4**seed + far * seed
    masses = torch.rand(size, generator=draw, dtype=torch.float64) + 0.1
    return WeightedPoints(points.to(DEVICE), (masses / masses.sum()).to(DEVICE))


CLOUDS = [cloud_of(size, k) for k, size in enumerate(SIZES)]


class Facts:
    """Of one class: its points without their mean, and what is made of their squared norms."""

    def __init__(self, cloud: WeightedPoints) -> None:
        self.mean = cloud.masses @ cloud.points
        self.points = cloud.points - self.mean
        self.size, squares = len(self.points), self.points.square().sum(1)
        self.variance, self.reach = float(cloud.masses @ squares), float(squares.max().sqrt())
        self.peak = self.reach**2 / self.variance if self.size > 1 else 0.0


def assert_near(found: Tensor, expected: list[float] | float) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dim", [1, 8])
def test_the_spread_of_costs_is_nearly_attained_and_never_below(dim: int) -> None:
    """Of two points about the mean the costs -2 x' . y' are -2 and 2, without any rounding."""
    points = torch.zeros(2, dim, dtype=torch.float64, device=DEVICE)
    points[:, 0] = torch.tensor([-1.0, 1.0])
    cloud = WeightedPoints(points, torch.full((2,), 0.5, dtype=torch.float64, device=DEVICE))
    rows, columns = torch.tensor([[0], [1]], device=DEVICE)
    segments = KernelSegments(ClassPool([cloud, cloud]), rows, columns, small=True)
    assert 4.0 < float(segments.cost_spread) < 4.0 * (1 + 1e-12)


def test_errors_of_kernels_are_those_derived() -> None:
    pool = ClassPool(CLOUDS)
    segments = KernelSegments(pool, *torch.tensor(PAIRS, device=DEVICE).T.contiguous(), small=True)
    facts = [Facts(cloud) for cloud in CLOUDS]
    mean, largest, sums, peaks, offsets = [], [], [], [], []
    for i, j in PAIRS:
        x, y = facts[i], facts[j]
        own, other = (_points_and_rest(pool, k) for k in (i, j))
        rest = _pair_rest(pool, i, j)
        deviations = x.variance**0.5, y.variance**0.5
        mean.append(2 * (own * deviations[1] + deviations[0] * other + rest))
        largest.append(2 * (own * y.reach + x.reach * other + rest))
        n = max(x.size, y.size)
        exponents = 11 + math.log(2) * (2 * (math.log2(n) + 1) + 3)
        sums.append(UNIT * exponents * (1 + 2.0**-8) + (n + 512) * 2.0**-52)
        peaks.append(x.peak + y.peak)
        # Means of centred points are 0 but for the rounding of n additions, and meet D in the cost.
        apart = float((x.mean - y.mean).norm())
        drift = float(pool.drifts[i] + pool.drifts[j]) + 2.0**-52 * (n + 4) * sum(deviations)
        moments = x.variance + y.variance + apart**2
        offsets.append(2 * drift * apart + 2.0**-52 * (n + pool.dim + 8) * moments)
    errors = segments.errors
    assert_near(errors.mean, mean)
    assert_near(errors.largest, largest)
    assert_near(errors.sums, sums)
    assert_near(errors.peak, peaks)
    assert_near(errors.offset, offsets)
    assert_near(errors.stored, [UNIT] * len(PAIRS))
    assert_near(errors.exponents, [TRIFLE] * len(PAIRS))


def _points_and_rest(pool: ClassPool, k: int) -> float:
    """P of a class, as `ClassPool` has it."""
    reach, low, rest, lost = pool.norms[k].tolist()
    return lost + pool.chain_error * (low + rest) + 2.0**-50 * reach


def _pair_rest(pool: ClassPool, i: int, j: int) -> float:
    """Q of a pair."""
    (reach, low, rest, lost), (reach_y, low_y, rest_y, lost_y) = pool.norms[[i, j]].tolist()
    digits, digits_y = low + rest, low_y + rest_y
    chains = (digits + lost) * digits_y + digits * (digits_y + lost_y) + low * low_y
    left_out = lost * lost_y + low * rest_y + rest * low_y + rest * rest_y
    return 2.0**-31 * reach * reach_y + left_out + pool.chain_error * chains


@pytest.mark.parametrize("dim", [1, 70, 784])
def test_chains_of_products_are_counted(dim: int) -> None:
    """A unit for each that is added to the others, and eight for what is done to their sum."""
    pool = ClassPool([cloud_of(3, 1, dim)])
    assert pool.dim == -(-dim // 8) * 8
    units = (pool.chain_error - chain_error(CHAIN_PRODUCTS, adder_of(DEVICE))) / UNIT
    # Coordinates come in blocks of 64 at most.
    blocks = -(-dim // 64) * 64
    assert PARTS * blocks / CHAIN_PRODUCTS + 8 <= units
    # One chain may be shorter at the end of its part.
    assert units <= PARTS * (dim + 64) / CHAIN_PRODUCTS + 2 + 8 + 1e-6


def test_errors_of_stored_costs_are_those_derived() -> None:
    """(2 d + 16) v (||x_i|| + ||y_j||)^2 of a cost, points centred by the columns' mean."""
    segments, unit = StoredSegments([(CLOUDS[i], CLOUDS[j]) for i, j in PAIRS], SHAPE), 2.0**-53
    error, mean, largest = (2 * DIM + 16) * unit, [], []
    for i, j in PAIRS:
        centre = Facts(CLOUDS[j]).mean
        squares = [(CLOUDS[k].points - centre).square().sum(1) for k in (i, j)]
        # (s + t)^2 <= 2 s^2 + 2 t^2
        moments = [CLOUDS[k].masses @ part for k, part in zip((i, j), squares, strict=True)]
        mean.append(2 * error * float(sum(moments)))
        largest.append(2 * error * float(sum(part.max() for part in squares)))
    errors = segments.errors
    assert_near(errors.mean, mean)
    assert_near(errors.largest, largest)
    assert_near(errors.peak, [two / one for one, two in zip(mean, largest, strict=True)])
    assert_near(errors.sums, [(max(SHAPE) + 512) * unit] * len(PAIRS))
    # The spread of the costs as they were computed, and what each end may be off by.
    for k, (i, j) in enumerate(PAIRS):
        stored = segments.costs[k, : SIZES[i], : SIZES[j]]
        beyond = segments.cost_spread[k] - (stored.max() - stored.min())
        assert float(beyond) == pytest.approx(2 * largest[k], rel=0.1)
    assert not bool(torch.stack((errors.stored, errors.offset, segments.offset)).any())
