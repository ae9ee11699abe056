"""Segments' costs and the errors of their passes are those that their files derive, and no more."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from otdd_flash.engine.evidence.two_passes import TRIFLE
from otdd_flash.engine.segments import Evaluation, WeightedPoints
from otdd_flash.kernels.adder import UNIT, adder_of, chain_error
from otdd_flash.kernels.segments.evaluation import Vectors
from otdd_flash.kernels.segments.step import (
    CHAIN_PRODUCTS,
    DIGITS,
    PARTIAL,
    PARTS,
    RANGE_COLUMNS,
    RANGES,
    ROWS,
)
from otdd_flash.operators import kernel_segments
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.operators.kernel_segments import KernelSegments, table_of
from otdd_flash.operators.stored_segments import StoredSegments
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.segmented import solve_cross_terms

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


def in_kernels(pairs: list[tuple[int, int]] = PAIRS) -> KernelSegments:
    rows, columns = torch.tensor(pairs, device=DEVICE).T.contiguous()
    return KernelSegments(ClassPool(CLOUDS), rows, columns, small=True)


def stored(pairs: list[tuple[int, int]] = PAIRS) -> StoredSegments:
    return StoredSegments([(CLOUDS[i], CLOUDS[j]) for i, j in pairs], SHAPE)


def assert_near(found: Tensor, expected: list[float] | float) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-12, atol=0)


def test_costs_of_kernels_are_those_of_centred_classes() -> None:
    segments, facts = in_kernels(), [Facts(cloud) for cloud in CLOUDS]
    assert_near(segments.mean_cost, [facts[i].variance + facts[j].variance for i, j in PAIRS])
    whole = [
        float(one.masses @ torch.cdist(one.points, two.points).square() @ two.masses)
        for one, two in ((CLOUDS[i], CLOUDS[j]) for i, j in PAIRS)
    ]
    assert_near(segments.offset, whole)
    assert_near(segments.cost_spread, [4 * facts[i].reach * facts[j].reach for i, j in PAIRS])


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
    segments, pool = in_kernels(), ClassPool(CLOUDS)
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
    """P of a class, as `class_pool` has it."""
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


@pytest.mark.parametrize("dim", [1, 5, 289])
def test_whole_digits_are_as_large_as_exact_products_allow(dim: int) -> None:
    """Norms up to 2^12 and coordinates below 2^11, rounding included: few of either are wasted."""
    lengths = torch.tensor([-1.0, -0.5, 0.5, 1.0], dtype=torch.float64, device=DEVICE)
    points = 1e3 * lengths[:, None].expand(4, dim)
    pool = ClassPool([WeightedPoints(points, torch.full_like(lengths, 0.25))])
    whole = pool.pool.coordinates.double().unflatten(0, (DIGITS, -1))[1, :4]
    norm, largest = float(whole.norm(dim=1).max()), float(whole.abs().max())
    assert norm <= 2**12
    assert largest < 2**11
    assert largest == 2**11 - 1 if dim == 1 else norm >= 2**12 - 1 - dim**0.5


def test_the_coarse_form_is_off_by_one_rounding_and_moves_the_same_potentials() -> None:
    segments = in_kernels()
    coarse = segments.coarse(1e-3)
    assert coarse._vectors.columns is segments._vectors.columns
    assert coarse._vectors.rows is segments._vectors.rows
    errors, none = coarse.errors, torch.zeros(len(PAIRS)).double().to(DEVICE)
    unit = none + UNIT
    rounded = segments.mean_cost * UNIT
    expected = rounded, rounded, none, 2 * unit, unit, *4 * (none,)
    for found, one in zip(errors, expected, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("themselves", [False, True])
def test_every_range_of_columns_has_sums_of_its_own(themselves: bool) -> None:
    """Three rows of two ranges and the large class's rows of one, or these of two."""
    count = RANGE_COLUMNS + 5
    pool = ClassPool([cloud_of(count, 0, 1), cloud_of(3, 1, 1)])
    large, few = torch.tensor([[0], [1]], device=DEVICE)
    sides = (large, large) if themselves else (few, large)
    segments = KernelSegments(pool, *sides, small=False)
    for numbers in segments._sums:
        assert len(numbers) == (2 * count if themselves else count)


def test_kernels_start_from_potentials_that_are_none_within_a_class() -> None:
    """-||y'||^2 for every column: with -2 x' . y' that is the whole cost at potential 0."""
    segments = in_kernels()
    expected = torch.cat([-Facts(CLOUDS[j]).points.square().sum(1) for _, j in PAIRS])
    vectors = segments._vectors.columns
    torch.testing.assert_close(vectors.candidate, expected.float(), rtol=1e-6, atol=0)
    for vector in vectors[1:]:
        assert not bool(vector.any())
    assert len(vectors.remembered) == 2 * segments.memory * len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("themselves", [False, True])
@pytest.mark.parametrize("coarse", [False, True])
def test_segments_that_are_kept_are_what_they_were(themselves: bool, coarse: bool) -> None:
    pairs = [(k, k) for k in (0, 1, 3)] if themselves else [(1, 3), (3, 0), (0, 1)]
    segments = in_kernels(pairs)
    if themselves:
        rows = torch.tensor([i for i, _ in pairs], device=DEVICE)
        segments = KernelSegments(ClassPool(CLOUDS), rows, rows, small=True)
    if coarse:
        segments = segments.coarse(1e-3)
    before = _numbers(segments)
    order = torch.tensor([2, 0, 1], device=DEVICE)
    for step in (order, order[:2]):
        segments.keep(step)
        before = [numbers[step] for numbers in before]
        for one, two in zip(before, _numbers(segments), strict=True):
            assert torch.equal(one, two)


def test_the_coarse_form_of_what_is_left_is_what_is_left_of_the_coarse_form() -> None:
    order = torch.tensor([2, 0], device=DEVICE)
    first, last = in_kernels(), in_kernels()
    coarse = first.coarse(1e-3)
    for segments in (first, coarse, last):
        segments.keep(order)
    for one, two in zip(_numbers(coarse), _numbers(last.coarse(1e-3)), strict=True):
        assert torch.equal(one, two)


def _numbers(segments: KernelSegments) -> list[Tensor]:
    """An evaluation of the candidates, and what is known of the costs."""
    count = len(segments.mean_cost)
    epsilon = torch.full((count,), 2.0, dtype=torch.float64, device=DEVICE)
    active = torch.ones(count, dtype=torch.bool, device=DEVICE)
    found = Evaluation.of(*segments.numbers(epsilon, active))
    costs = segments.mean_cost, segments.offset, segments.cost_spread
    return [*found, *costs, *segments.errors]


def test_errors_of_stored_costs_are_those_derived() -> None:
    """(2 d + 16) v (||x_i|| + ||y_j||)^2 of a cost, points centred by the columns' mean."""
    segments, unit = stored(), 2.0**-53
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
    assert not bool(torch.stack((errors.stored, errors.offset, segments.offset)).any())


def test_facts_of_stored_costs() -> None:
    segments = stored()
    for k, (i, j) in enumerate(PAIRS):
        one, two = CLOUDS[i], CLOUDS[j]
        cost = (one.points[:, None] - two.points[None]).square().sum(2)
        found = segments.costs[k, : len(one.points), : len(two.points)]
        torch.testing.assert_close(found, cost, rtol=1e-13, atol=1e-12)
        assert_near(segments.mean_cost[k], float(one.masses @ cost @ two.masses))
        spread, largest = float(found.max() - found.min()), float(segments.errors.largest[k])
        # Costs that are kept, and the two of them that may be off.
        assert spread + 2 * largest * (1 - 1e-9) <= float(segments.cost_spread[k])
        assert float(segments.cost_spread[k]) <= spread + 2 * largest + 1e-15 * spread


def test_points_in_one_place_have_no_errors_of_costs() -> None:
    masses = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    cloud = WeightedPoints(torch.ones(3, 2), masses)
    errors = StoredSegments([(cloud, cloud)], (16, 16)).errors
    for numbers in (errors.mean, errors.largest, errors.peak):
        assert float(numbers) == 0


def test_sums_of_segments_do_not_overlap() -> None:
    """Of more rows than columns too."""
    pool = ClassPool(CLOUDS)
    rows, columns = torch.tensor([(2, 1), (3, 2), (1, 2)], device=DEVICE).T
    for table in (table_of(pool, rows, columns), table_of(pool, columns, rows)):
        partial = (table[:, ROWS] * table[:, RANGES]).cumsum(0).tolist()
        assert table[:, PARTIAL].tolist() == [0, *partial[:-1]]


def test_what_a_column_takes_is_what_its_vectors_take() -> None:
    vectors = Vectors.at(torch.zeros(10), kernel_segments.MEMORY)
    taken = sum(part.nbytes for part in vectors)
    assert taken == 10 * kernel_segments.BYTES_PER_COLUMN


def test_problems_that_go_on_keep_their_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others end before them, without a coarse form that does nearly all of it."""
    monkeypatch.setattr(StoredSegments, "coarse", lambda *_: None)
    pairs = [(0, 2), (1, 2), (3, 2), (2, 1)]

    def solved(chosen: list[tuple[int, int]]) -> Tensor:
        return torch.stack(solve_cross_terms(stored(chosen), 0.5, Converged()), 1)

    together = solved(pairs)
    assert len(set(together[:, -1].tolist())) > 2
    for pair, found in zip(pairs, together, strict=True):
        assert torch.equal(solved([pair])[0], found)
