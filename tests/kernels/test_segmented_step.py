"""The segmented half-step and its update against dense float64, segment by segment."""

from __future__ import annotations

import math

import pytest
import torch

from otdd_flash.kernels.segmented_step import OVERRUN, RANGE_COLUMNS, segment_tile
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.operators.kernel_segments import KernelSegments, is_small
from otdd_flash.operators.segments import WeightedPoints

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = 0.3
# Sizes of classes, dimension, and pairs of them. The second has a class of several ranges, the
# third only small tiles; in the others small classes meet large ones.
CASES = [
    pytest.param([1, 33, 130], 3, [(2, 0), (2, 1), (1, 0)], id="mixed"),
    pytest.param([RANGE_COLUMNS + 5, 2], 9, [(0, 1)], id="ranges"),
    pytest.param([64, 7, 1], 70, [(0, 1), (0, 2), (1, 2)], id="small"),
    pytest.param([300, 65], 40, [(0, 1)], id="blocks"),
]
LARGE = [
    pytest.param([5000, 4001, 70], 784, [(0, 1), (1, 2), (0, 2)], marks=pytest.mark.gpu),
    pytest.param([64] * 40 + [50, 1], 512, [(i, 41) for i in range(41)], marks=pytest.mark.gpu),
    pytest.param([3000, 2500], 64, [(0, 1)], marks=pytest.mark.gpu),
    pytest.param([700, 129], 4096, [(0, 1)], marks=pytest.mark.gpu),
]


def classes(sizes, dim):
    draw = torch.Generator().manual_seed(sum(sizes) + dim)
    clouds = []
    for k, size in enumerate(sizes):
        points = torch.randn(size, dim, generator=draw) / dim**0.5 * (1 + k) + 5 * k
        masses = torch.rand(size, generator=draw).double() + 0.1
        clouds.append(WeightedPoints(points.to(DEVICE), (masses / masses.sum()).to(DEVICE)))
    return clouds


class Case:
    """The segments of a case, and what they compute with, dense and in float64."""

    def __init__(self, sizes, dim, pairs, *, coarse=False, themselves=False):
        self.clouds, self.sizes, self.pairs = classes(sizes, dim), sizes, pairs
        self.pool = ClassPool(self.clouds)
        index = torch.tensor(pairs, device=DEVICE)
        small = bool(is_small(self.pool.sizes[index]).all())
        rows = index[:, 0].contiguous()
        columns = rows if themselves else index[:, 1].contiguous()
        self.segments = KernelSegments(self.pool, rows, columns, small=small)
        self.whole = self.segments
        if coarse:
            self.segments = self.segments.coarse(1e-3)
        self.parts = 1 if coarse else 3
        draw = torch.Generator().manual_seed(7)
        for potential in self.whole._potentials:
            noise = torch.randn(len(potential), generator=draw).to(DEVICE)
            potential.copy_(potential * 0.3 + noise)

    def points(self, k):
        """The class as the kernels see it."""
        high, low = self.pool.pool.coordinates.double().chunk(2)
        rows = slice(int(self.pool.starts[k]), int(self.pool.starts[k]) + self.sizes[k])
        seen = high[rows] if self.parts == 1 else high[rows] + low[rows]
        return seen * self.pool.scales[k]

    def potentials(self, side):
        counts = [self.sizes[pair[side]] for pair in self.pairs]
        return [part.double() for part in torch.split(self.whole._potentials[side], counts)]

    def softmin(self, segment, side, other):
        """-epsilon log sum_j b_j exp((g_j + 2 x_i . y_j) / epsilon)."""
        pair = self.pairs[segment]
        own, opposite = pair[side], pair[1 - side]
        scores = 2 * self.points(own) @ self.points(opposite).T + other
        logs = self.clouds[opposite].masses.log()
        return -EPSILON * torch.logsumexp(logs + scores / EPSILON, 1)

    def update(self, side, relaxation=1.0, active=None):
        count = len(self.pairs)
        epsilon = torch.full((count,), EPSILON, dtype=torch.float64, device=DEVICE)
        active = torch.ones(count, dtype=torch.bool, device=DEVICE) if active is None else active
        return self.segments.update(side, epsilon, torch.full_like(epsilon, relaxation), active)


def close(case, segment, actual, expected):
    """Within the rounding of the products, and float32's of exponents of this size."""
    size = float(expected.abs().max()) + EPSILON
    atol = float(case.segments.cost_error[segment]) + 3e-6 * size
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("sizes", "dim", "pairs"), CASES + LARGE)
def test_a_plain_update_is_the_softmin(sizes, dim, pairs, side, coarse):
    case = Case(sizes, dim, pairs, coarse=coarse)
    other = case.potentials(1 - side)
    case.update(side)
    for segment, moved in enumerate(case.potentials(side)):
        close(case, segment, moved, case.softmin(segment, side, other[segment]))


@pytest.mark.parametrize(("sizes", "dim", "pairs"), [CASES[0], CASES[2], *LARGE[:2]])
def test_a_class_with_itself_has_one_potential(sizes, dim, pairs):
    case = Case(sizes, dim, [(k, k) for k in range(len(sizes))], themselves=True)
    before = case.potentials(0)
    case.update(0, 0.5)
    for segment, moved in enumerate(case.potentials(0)):
        close(
            case, segment, moved, (before[segment] + case.softmin(segment, 0, before[segment])) / 2
        )


@pytest.mark.parametrize("relaxation", [0.5, 1.0, 1.9])
def test_over_relaxation_never_lowers_the_dual(relaxation):
    case = Case([33, 130, 1], 3, [(1, 0), (1, 2)])
    before, other = case.potentials(0), case.potentials(1)
    case.update(0, relaxation)
    for segment, moved in enumerate(case.potentials(0)):
        masses = case.clouds[case.pairs[segment][0]].masses
        softmin = case.softmin(segment, 0, other[segment])
        step = (softmin - before[segment]) / EPSILON
        beyond = (relaxation - 1) * step
        expected = torch.where(step > 0, torch.minimum(beyond, step.clamp_min(0).log1p()), beyond)
        close(case, segment, moved, softmin + EPSILON * expected)
        # Of f alone, with the softmin's exponentials: <a, f> - epsilon <a, exp((f - T) / epsilon)>.
        gains = [
            potential - EPSILON * ((potential - softmin) / EPSILON).exp()
            for potential in (moved, before[segment])
        ]
        rise = masses * (gains[0] - gains[1])
        assert float((rise / masses).min()) > -1e-4
        assert relaxation == 0.5 or float(rise.sum()) > 0


@pytest.mark.parametrize(("sizes", "dim", "pairs"), [*CASES, *LARGE[:2]])
def test_what_an_update_has_seen(sizes, dim, pairs):
    case = Case(sizes, dim, pairs)
    # Near the marginals, where exponentials do not drown each other.
    case.update(0)
    case.update(1)
    before, other = case.potentials(0), case.potentials(1)
    seen = case.update(0, 1.5)
    for segment, (potential, opposite) in enumerate(zip(before, other, strict=True)):
        masses = case.clouds[case.pairs[segment][0]].masses
        softmin = case.softmin(segment, 0, opposite)
        marginal = masses * ((potential - softmin) / EPSILON).exp()
        slack = 1e-5 * (1 + float(softmin.abs().max()) / EPSILON)
        for value, expected in (
            (seen.gap, (marginal - masses).abs().sum()),
            (seen.mass, marginal.sum()),
            (seen.value, masses @ potential),
            (seen.size, masses @ potential.abs()),
            (seen.lowest, potential.min()),
            (seen.highest, potential.max()),
            (seen.next_value, masses @ softmin),
            (seen.next_size, masses @ softmin.abs()),
        ):
            assert float(value[segment]) == pytest.approx(float(expected), rel=slack, abs=slack)


def test_segments_that_are_not_active_keep_their_potentials():
    case = Case([33, 130, 5], 3, [(1, 0), (1, 2), (0, 2)])
    before = case.potentials(0)
    case.update(0, active=torch.tensor([True, False, True], device=DEVICE))
    after = case.potentials(0)
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])
    assert not torch.equal(after[2], before[2])


def test_segments_do_not_see_each_other():
    """To the last bit: alone, and among others that come and go."""
    sizes, pairs = [33, 130, 5, 70], [(1, 0), (1, 2), (3, 0), (1, 3)]
    together = Case(sizes, 3, pairs)
    order = torch.tensor([3, 1], device=DEVICE)
    expected = []
    for segment in order.tolist():
        alone = Case(sizes, 3, [pairs[segment]])
        for side in (0, 1):
            start = together.potentials(side)[segment]
            alone.whole._potentials[side].copy_(start)
        alone.update(0)
        alone.update(1)
        expected.append([alone.potentials(side)[0] for side in (0, 1)])
    together.segments.keep(order)
    epsilon = torch.full((2,), EPSILON, dtype=torch.float64, device=DEVICE)
    for side in (0, 1):
        active = torch.ones(2, dtype=torch.bool, device=DEVICE)
        together.segments.update(side, epsilon, torch.ones_like(epsilon), active)
    for place, segment in enumerate(order.tolist()):
        for side in (0, 1):
            assert torch.equal(together.potentials(side)[segment], expected[place][side])


def test_a_pool_rounds_every_class_by_itself():
    """And to 22 bits, about the class's own mean, whatever stands beside it."""
    cloud = classes([40], 6)[0]
    far = WeightedPoints(cloud.points * 1e4 - 3e5, cloud.masses)
    alone, beside = ClassPool([cloud]), ClassPool([far, cloud])
    rows = alone.pool.coordinates[:40]
    assert torch.equal(rows, beside.pool.coordinates[40:80])
    half = len(alone.pool.coordinates) // 2
    assert half == 40 + OVERRUN
    seen = (rows.double() + alone.pool.coordinates[half : half + 40].double()) * alone.scales
    centred = cloud.points.double() - cloud.masses @ cloud.points.double()
    assert float((seen[:, :6] - centred).abs().max()) < 2**-21 * float(centred.abs().max())
    torch.testing.assert_close(alone.variances[0], cloud.masses @ centred.square().sum(1))
    assert math.isclose(float(alone.radii[0]), float(centred.norm(dim=1).max()))
    assert segment_tile(8, 1, True, DEVICE)[0] == 64
