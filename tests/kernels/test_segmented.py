"""Passes of many segments and their moves against dense float64, segment by segment."""

from __future__ import annotations

import pytest
import torch
from kernel_evaluations import evaluation_of

from otdd_flash.engine.problems import Move, WeightedPoints
from otdd_flash.engine.quasi_newton_kernels import KernelVectors
from otdd_flash.kernels.adder import UNIT
from otdd_flash.kernels.segments.evaluation import (
    BLOCK,
    blocks_of,
    first_blocks,
    segmented_softmin,
    segmented_totals,
)
from otdd_flash.kernels.segments.step import PARTIAL, RANGES, ROWS, Sums
from otdd_flash.operators.kernel_segments import MEMORY, ClassPool, KernelSegments, is_small

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = 0.3
# Sizes of classes, dimension, and pairs of them: small classes meet large ones, which have several
# blocks.
CASES = [
    pytest.param([1, 33, 130], 3, [(2, 0), (2, 1), (1, 0)], id="mixed"),
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

    def __init__(self, sizes, dim, pairs, *, zeros=False):
        self.clouds, self.sizes, self.pairs = classes(sizes, dim), sizes, pairs
        self.pool = ClassPool(self.clouds)
        index = torch.tensor(pairs, device=DEVICE)
        small = bool(is_small(self.pool.sizes[index]).all())
        self.segments = KernelSegments(self.pool, *index.T.contiguous(), small=small)
        self.vectors = KernelVectors(self.segments, self.segments.first, MEMORY)
        if zeros:
            # Every third mass is taken for 0 by what reads potentials.
            self.pool.pool.masses[::3] = 0
        draw = torch.Generator().manual_seed(7)
        potential = self.vectors.columns.candidate
        noise = torch.randn(len(potential), generator=draw).to(DEVICE)
        potential.copy_(potential * 0.3 + noise)

    def evaluate(self):
        epsilon = torch.full((len(self.pairs),), EPSILON, dtype=torch.float64, device=DEVICE)
        active = torch.ones(len(self.pairs), dtype=torch.bool, device=DEVICE)
        return evaluation_of(*self.vectors.evaluate(epsilon, active))

    def fill_vectors(self):
        """Numbers for what was kept and remembered before, of the size of differences."""
        draw = torch.Generator().manual_seed(11)
        vectors = self.vectors.columns
        for k, vector in enumerate(vectors[1:]):
            noise = torch.randn(len(vector), generator=draw).to(DEVICE) * EPSILON
            vector.copy_(noise + vectors.candidate if k == 1 else noise)

    def columns(self, name):
        """A vector of the columns of every segment, (m,) or (2 MEMORY, m) float64."""
        rows = 2 * MEMORY if name == "remembered" else 1
        counts = [rows * self.sizes[pair[1]] for pair in self.pairs]
        parts = torch.split(getattr(self.vectors.columns, name).double(), counts)
        return [part.view(rows, -1) if rows > 1 else part for part in parts]

    def masses(self, segment, side):
        k = self.pairs[segment][side]
        return self.pool.pool.masses[int(self.pool.starts[k]) :][: self.sizes[k]]


NAMES = ("candidate", "kept", "residual", "level", "remembered")


def exact_softmin(own, opposite, g, epsilon):
    """Of the cost between centred points, float64."""
    x, y = (side.points.double() for side in (own, opposite))
    scores = 2 * (x - own.masses @ x) @ (y - opposite.masses @ y).T + g
    return -epsilon * torch.logsumexp(opposite.masses.log() + scores / epsilon, 1)


def wrong(clouds, epsilon, noise):
    """Errors of f after evaluating potentials of size `noise`, and their bound: of one pair."""
    pool = ClassPool(clouds)
    rows, columns = (torch.tensor([k], device=DEVICE) for k in (0, 1))
    segments = KernelSegments(pool, rows, columns, small=False)
    candidate = segments.first
    vectors = KernelVectors(segments, candidate, MEMORY)
    draw = torch.Generator().manual_seed(3)
    candidate.copy_(noise * torch.randn(len(candidate), generator=draw).to(DEVICE))
    level = torch.tensor([epsilon], dtype=torch.float64, device=DEVICE)
    vectors.evaluate(level, torch.ones(1, dtype=torch.bool, device=DEVICE))
    f, g = vectors.rows.double(), candidate.double()
    error = (f - exact_softmin(*clouds, g, epsilon)).abs()
    errors = segments.errors
    return error, errors.largest + epsilon * errors.sums + UNIT * f.abs()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [*CASES, *LARGE[2:]])
@pytest.mark.parametrize("epsilon", [1e-2, 1e4])
def test_softmins_are_within_their_errors(sizes, dim, pairs, epsilon):
    clouds = [Case(sizes, dim, pairs).clouds[k] for k in pairs[0]]
    error, bound = wrong(clouds, epsilon, 1.0)
    assert bool((error <= bound).all())


@pytest.mark.slow
def test_whole_numbers_lose_nothing_but_the_last_bits():
    """Of one-hot points, so that exponents are known; potentials are far above epsilon."""
    points = torch.eye(40).repeat_interleave(7, 0).to(DEVICE)
    clouds = [
        WeightedPoints(part, torch.full((len(part),), 1 / len(part)).double().to(DEVICE))
        for part in (points, points[:133])
    ]
    error, bound = wrong(clouds, 0.02, 1e3)
    assert bool((error <= bound).all())
    # With logits in one float32 it would be a unit of the potentials, beside what f loses.
    assert float(bound.max()) < UNIT * (5 * 1e3 + 40)


def seen(case, segment):
    """From the vectors as they are, in the order of `Evaluation` without rows."""
    g, fresh, kept, residual, remembered = (
        case.columns(name)[segment]
        for name in ("candidate", "fresh", "kept", "residual", "remembered")
    )
    b, step, difference = case.masses(segment, 1), g - kept, residual - fresh
    change, support = (-fresh / EPSILON).exp(), b > 0
    return (
        b @ g,
        b @ g.abs(),
        g[support].min(),
        g[support].max(),
        b @ (change - 1).abs(),
        b @ change,
        b @ step,
        b @ difference,
        b @ fresh,
        b @ (step * step),
        b @ (step * difference),
        b @ (difference * difference),
        b @ (step * fresh),
        b @ (difference * fresh),
        remembered @ (b * difference),
        remembered @ (b * fresh),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [*CASES, *LARGE[:2]])
def test_numbers_of_an_evaluation(sizes, dim, pairs):
    # A class of one point keeps its mass.
    case = Case(sizes, dim, pairs, zeros=1 not in sizes)
    # Near the marginals, where exponentials do not drown each other.
    case.evaluate()
    case.vectors.columns.candidate.add_(case.vectors.columns.fresh)
    case.fill_vectors()
    evaluation = case.evaluate()
    for segment in range(len(pairs)):
        # The last number is another name for one of them.
        for found, expected in zip(evaluation[2:-1], seen(case, segment), strict=True):
            each = torch.cat(found, 1) if isinstance(found, tuple) else found
            torch.testing.assert_close(each[segment], expected, rtol=1e-6, atol=1e-6)


COUNTS = {"rows": [1, BLOCK, BLOCK + 1, 70, 3], "columns": [BLOCK + 1, 2, 40, 1, BLOCK]}


def drawn(counts, width):
    """Partial numbers, none of them near 0, where minima and maxima would be those of nothing."""
    draw = torch.Generator().manual_seed(width)
    signs = torch.randn(sum(counts), 1, generator=draw).sign()
    numbers = torch.rand(sum(counts), width, generator=draw, dtype=torch.float64) + 1
    return (numbers * signs).to(DEVICE)


@pytest.mark.parametrize(("of_rows", "of_columns"), [(2, 14), (3, 17)])
@pytest.mark.parametrize("themselves", [False, True])
def test_totals_are_sums_and_two_extremes(themselves, of_rows, of_columns):
    width = of_columns + 4 * (8 if themselves else 4)
    rows = None if themselves else drawn(COUNTS["rows"], of_rows)
    parts = rows, drawn(COUNTS["columns"], width)
    active, firsts = torch.tensor([True, True, False, True, True], device=DEVICE), []
    for counts in COUNTS.values():
        owners = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))
        blocks = torch.stack((owners, torch.zeros_like(owners)), 1).to(DEVICE, torch.int32)
        firsts.append(first_blocks(blocks, 5))
    rows, columns = segmented_totals(*parts, *firsts, active)
    for k, part in enumerate(torch.split(parts[1], COUNTS["columns"])):
        expected = part.sum(0)
        expected[2], expected[3] = part[:, 2].min(), part[:, 3].max()
        if active[k]:
            torch.testing.assert_close(columns[k], expected, rtol=1e-14, atol=1e-13)
    if themselves:
        assert torch.equal(rows[active], columns[active, :2])
        return
    for k, part in enumerate(torch.split(parts[0], COUNTS["rows"])):
        if active[k]:
            torch.testing.assert_close(rows[k], part.sum(0), rtol=1e-14, atol=1e-13)


def random_move(count):
    draw = torch.Generator().manual_seed(count)

    def numbers(*size):
        return torch.randn(count, *size, generator=draw, dtype=torch.float64).to(DEVICE)

    index = torch.arange(count, device=DEVICE)
    ends = index % 2 == 0
    return Move(
        *(index % 4 < 2, index % 3 > 0, index % MEMORY),
        *(numbers(), numbers(), numbers(), numbers()),
        *(ends, torch.where(ends, numbers().abs(), 0), numbers(2 * MEMORY)),
    )


def moved(case, move, segment):
    """Candidate, kept, residual, level and remembered after a move."""
    g, fresh, kept, residual, level, remembered = (
        case.columns(name)[segment].clone()
        for name in ("candidate", "fresh", "kept", "residual", "level", "remembered")
    )
    slot, support = int(move.slot[segment]), case.masses(segment, 1) > 0
    if move.learnt[segment]:
        step = g - kept - move.mean_step[segment]
        change = residual - fresh - move.mean_difference[segment]
        remembered[slot] = torch.where(support, step, 0)
        remembered[slot + MEMORY] = torch.where(support, change, 0)
    if move.kept[segment]:
        kept, residual = g, fresh
    g = kept + move.scale[segment] * residual + move.shift[segment]
    g = torch.where(support, g + move.weights[segment] @ remembered, kept + residual)
    ahead = g + move.extrapolation[segment] * (g - level)
    return ahead, kept, residual, g if move.ends[segment] else level, remembered


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [CASES[0], *LARGE[:2]])
def test_a_move_is_its_formula(sizes, dim, pairs):
    case = Case(sizes, dim, pairs, zeros=True)
    case.fill_vectors()
    move = random_move(len(pairs))
    active = torch.arange(len(pairs), device=DEVICE) != 1
    expected = [moved(case, move, segment) for segment in range(len(pairs))]
    before = [case.columns(name) for name in NAMES]
    case.vectors.move(move.numbers, active)
    for place, name in enumerate(NAMES):
        for segment, vector in enumerate(case.columns(name)):
            if active[segment]:
                torch.testing.assert_close(vector, expected[segment][place], rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(vector, before[place][segment])


def test_ranges_of_columns_are_added_each_from_its_own_maximum():
    """Of a row whose highest comes first, one where it comes last, and one of equal ones."""
    highest = torch.tensor([3.0, -1.0, 2.0, 1.0, 4.0, 2.0, 0.0, 4.0, 2.0], device=DEVICE)
    sums = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.5, 1.0, 1.0, 1.0, 2.0], device=DEVICE).double()
    table = torch.zeros((1, 8), dtype=torch.int64, device=DEVICE)
    table[0, ROWS], table[0, PARTIAL], table[0, RANGES] = 3, 0, 3
    masses = torch.full((3,), 1 / 3, dtype=torch.float64, device=DEVICE)
    epsilon, potential = torch.full_like(masses[:1], EPSILON), torch.empty(3, device=DEVICE)
    active = torch.ones(1, dtype=torch.bool, device=DEVICE)
    given = masses, blocks_of(table), table, active, epsilon, potential
    partial = segmented_softmin(Sums(highest, sums), *given)
    expected = -EPSILON * (sums * highest.double().exp2()).view(3, 3).sum(0).log()
    torch.testing.assert_close(potential.double(), expected, rtol=1e-6, atol=0)
    totals = torch.stack((masses @ expected, masses @ expected.abs()))
    torch.testing.assert_close(partial[0], totals, rtol=1e-6, atol=0)
