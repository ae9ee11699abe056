"""Passes of many segments and their moves against dense float64, segment by segment."""

from __future__ import annotations

import pytest
import torch
from segmented_cases import CASES, DEVICE, EPSILON, LARGE, MEMORY, Case, close

from otdd_flash.engine.segments import Evaluation, Move, WeightedPoints
from otdd_flash.kernels.adder import PROBED, UNIT, UNPROBED, chain_error
from otdd_flash.kernels.segments.evaluation import segmented_evaluation
from otdd_flash.kernels.segments.totals import BLOCK, first_blocks, segmented_totals
from otdd_flash.operators.class_pool import ClassPool
from otdd_flash.operators.kernel_segments import KernelSegments
from otdd_flash.operators.kernel_vectors import whole_layout

NAMES = ("candidate", "kept", "residual", "level", "remembered")


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("sizes", "dim", "pairs"), CASES + LARGE)
def test_potentials_of_rows_and_residuals_are_softmins(sizes, dim, pairs, coarse):
    case = Case(sizes, dim, pairs, coarse=coarse)
    found = case.evaluate()
    rows, columns, fresh = case.potentials(0), case.potentials(1), case.columns("fresh")
    for segment, (f, g, change) in enumerate(zip(rows, columns, fresh, strict=True)):
        close(case, segment, f, case.softmin(segment, 0, g))
        close(case, segment, change + g, case.softmin(segment, 1, f))
        masses = case.masses(segment, 0)
        torch.testing.assert_close(found.row_value[segment], masses @ f)
        torch.testing.assert_close(found.row_size[segment], masses @ f.abs())


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [CASES[0], CASES[2], *LARGE[:2]])
def test_a_class_with_itself_has_one_potential(sizes, dim, pairs):
    case = Case(sizes, dim, [(k, k) for k in range(len(sizes))], themselves=True)
    found = case.evaluate()
    assert torch.equal(found.row_value, found.value)
    assert torch.equal(found.row_size, found.size)
    for segment, fresh in enumerate(case.columns("fresh")):
        potential = case.potentials(1)[segment]
        close(case, segment, fresh + potential, case.softmin(segment, 0, potential))


@pytest.mark.slow
def test_segments_that_are_not_active_keep_their_potentials():
    case = Case([33, 130, 5], 3, [(1, 0), (1, 2), (0, 2)])
    case.evaluate()
    before = [*case.potentials(0), *case.columns("fresh")]
    case.vectors.columns.candidate.mul_(0.9)
    case.evaluate(torch.tensor([True, False, True], device=DEVICE))
    after = [*case.potentials(0), *case.columns("fresh")]
    same = [torch.equal(one, two) for one, two in zip(before, after, strict=True)]
    assert same == [False, True, False] * 2


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
    candidate = segments._vectors.columns.candidate
    draw = torch.Generator().manual_seed(3)
    candidate.copy_(noise * torch.randn(len(candidate), generator=draw).to(DEVICE))
    level = torch.tensor([epsilon], dtype=torch.float64, device=DEVICE)
    segments.numbers(level, torch.ones(1, dtype=torch.bool, device=DEVICE))
    f, g = segments._vectors.rows.double(), candidate.double()
    error = (f - exact_softmin(*clouds, g, epsilon)).abs()
    errors = segments.errors
    return error, errors.largest + epsilon * errors.sums + UNIT * f.abs()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [CASES[0], CASES[3], LARGE[2], LARGE[3]])
@pytest.mark.parametrize("epsilon", [1e-2, 1.0, 1e4])
def test_softmins_are_within_their_errors(sizes, dim, pairs, epsilon):
    clouds = [Case(sizes, dim, pairs).clouds[k] for k in pairs[0]]
    error, bound = wrong(clouds, epsilon, 1.0)
    assert bool((error <= bound).all())


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1.0, 1e3])
def test_whole_numbers_lose_nothing_but_the_last_bits(noise):
    """Of one-hot points, so that exponents are known; potentials are far above epsilon."""
    points = torch.eye(40).repeat_interleave(7, 0).to(DEVICE)
    clouds = [
        WeightedPoints(part, torch.full((len(part),), 1 / len(part)).double().to(DEVICE))
        for part in (points, points[:133])
    ]
    error, bound = wrong(clouds, 0.02, noise)
    assert bool((error <= bound).all())
    # With logits in one float32 it would be a unit of the potentials, beside what f loses.
    assert float(bound.max()) < UNIT * (5 * noise + 40)


def test_products_keep_more_than_twenty_digits_of_two():
    """Per-point bounds of a random class are some units in the last place of ||x|| ||y||."""
    case = Case([300, 250], 784, [(0, 1)])
    error = float(case.segments.errors.largest[0])
    reach = 2 * float(case.pool.radii[0] * case.pool.radii[1])
    most = 2 if case.pool.chain_error < 400 * UNIT else 24
    assert error < most * UNIT * reach


def test_chains_cost_what_the_adder_says():
    """16 products and two extra bits: 17 / 2 + 2 units a step; one product and none: 6."""
    slack = 1 + 2.0**-7
    assert 10.5 * 16 * UNIT <= chain_error(256, PROBED[9]) < 10.5 * 16 * UNIT * slack
    assert 6 * 256 * UNIT <= chain_error(256, UNPROBED) < 6 * 256 * UNIT * slack


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
    """Made by half-steps; and, of one segment, from a softmin that is there already."""
    # A class of one point keeps its mass.
    case = Case(sizes, dim, pairs, zeros=1 not in sizes)
    # Near the marginals, where exponentials do not drown each other.
    case.evaluate()
    case.vectors.columns.candidate.add_(case.vectors.columns.fresh)
    case.fill_vectors()
    evaluation = case.evaluate()
    for segment in range(len(pairs)):
        for found, expected in zip(evaluation[2:], seen(case, segment), strict=True):
            torch.testing.assert_close(found[segment], expected, rtol=1e-6, atol=1e-6)
    if len(pairs) > 1:
        return
    vectors, own = case.vectors.columns, whole_layout(sizes[pairs[0][1]], 1, DEVICE)
    softmin, active = vectors.candidate + vectors.fresh, torch.ones(1, device=DEVICE) > 0
    at = active, torch.full((1,), EPSILON, dtype=torch.float64, device=DEVICE), vectors
    partial = segmented_evaluation(softmin, case.masses(0, 1), own.blocks, own.table, *at)
    numbers = segmented_totals(None, partial, own.first_blocks, own.first_blocks, active)
    for found, number in zip(Evaluation.of(*numbers)[2:], evaluation[2:], strict=True):
        torch.testing.assert_close(found, number, rtol=1e-4, atol=1e-5)


COUNTS = {"rows": [1, BLOCK, BLOCK + 1, 70, 3], "columns": [BLOCK + 1, 2, 40, 1, BLOCK]}


def drawn(counts, width):
    """Partial numbers, none of them near 0, where minima and maxima would be those of nothing."""
    draw = torch.Generator().manual_seed(width)
    signs = torch.randn(sum(counts), 1, generator=draw).sign()
    numbers = torch.rand(sum(counts), width, generator=draw, dtype=torch.float64) + 1
    return (numbers * signs).to(DEVICE)


@pytest.mark.parametrize("width", [14 + 4 * 4, 14 + 4 * 8])
@pytest.mark.parametrize("themselves", [False, True])
def test_totals_are_sums_and_two_extremes(width, themselves):
    parts = None if themselves else drawn(COUNTS["rows"], 2), drawn(COUNTS["columns"], width)
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
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("sizes", "dim", "pairs"), [*CASES, *LARGE[:2]])
def test_a_move_is_its_formula(sizes, dim, pairs, zeros):
    case = Case(sizes, dim, pairs, zeros=zeros)
    case.fill_vectors()
    move = random_move(len(pairs))
    active = torch.arange(len(pairs), device=DEVICE) != 1
    expected = [moved(case, move, segment) for segment in range(len(pairs))]
    before = [case.columns(name) for name in NAMES]
    case.segments.move_by(move.numbers, active)
    for place, name in enumerate(NAMES):
        for segment, vector in enumerate(case.columns(name)):
            if active[segment]:
                torch.testing.assert_close(vector, expected[segment][place], rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(vector, before[place][segment])


@pytest.mark.slow
def test_segments_do_not_see_each_other():
    """To the last bit: alone, and among others that come and go; evaluated and moved."""
    sizes, pairs, order = [33, 300, 5, 70], [(1, 0), (0, 1), (3, 0), (1, 3)], [3, 1]
    together = Case(sizes, 3, pairs)
    together.fill_vectors()
    alone = [Case(sizes, 3, [pairs[segment]]) for segment in order]
    for segment, case in zip(order, alone, strict=True):
        case.copy_vectors(together, segment)
    together.segments.keep(torch.tensor(order, device=DEVICE))
    together.pairs = [pairs[segment] for segment in order]
    whole = together.evaluate()
    for place, case in enumerate(alone):
        for found, number in zip(whole, case.evaluate(), strict=True):
            assert torch.equal(found[place], number[0])
    move, active = random_move(4), torch.ones(4, dtype=torch.bool, device=DEVICE)
    together, alone = Case(sizes, 3, pairs), [Case(sizes, 3, [pair]) for pair in pairs]
    together.fill_vectors()
    for k, case in enumerate(alone):
        case.copy_vectors(together, k)
        case.segments.move_by(move.numbers[k : k + 1].contiguous(), active[:1])
    together.segments.move_by(move.numbers, active)
    for name in NAMES:
        for vector, case in zip(together.columns(name), alone, strict=True):
            assert torch.equal(vector, case.columns(name)[0])
