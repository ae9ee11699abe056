"""The Sinkhorn half-step of many small transport problems in one launch.

A segment is a problem between two classes of one pool of points. For its rows i and columns j,

    h_i + log2 s_i = log2 sum_j 2^(x_i . y_j scale + log2 b_j + g_j log2(e) / epsilon)

with the segment's own potential g (m,), epsilon and scale. Points are those of a class without its
mean: a product x_i . y_j is all of ||x_i - y_j||^2 that does not depend on i or j alone, and terms
of one of them are left to the potentials.

The pool holds each class in consecutive rows. A tile that reaches past its class reads points of
the next one, which count for nothing: their columns have no mass, their rows are not stored. So
nothing is padded but the end of the pool, and a potential takes as much memory as its class.

One program owns a block of rows of a segment and a range of its columns; a segment that is not
active ends at once. It stores the sums of its range, which `segmented_softmin` and
`segmented_evaluation` merge. The ranges must depend on the segment alone, so that its numbers do
not change with the segments beside it.

Rounded points give the coarse form, whose sums prove nothing. The exact form has points of three
digits, x = h + l + r in units of their class: h are whole numbers of norm at most 2^12, l is the
rest x - h, rounded to float16, and r the rest of that. Then

    x . y = [h . h'] + [h . l' + l . h' + l . l' + h . r' + r . h'] + dropped:

the first bracket is a whole number of size at most 2^24 and exact in float32, whatever adds it up
(`adder`); the second is some hundred times smaller, and so are its errors. It is summed in chains
of `CHAIN_PRODUCTS`. A logit is kept as a whole number and a rest. Its parts are the bias, made in
float64, and h . h' scale, whose factors are cut into pieces of 12 bits so that the products are
exact. Maxima are rounded up to whole numbers, so that shifts are exact; the remainder after the
shift is the exponent itself, and its rounding is relative to it. Exponentials are added in eights
in float32, and the eights in float64.

`operators.kernel_segments` calls `segmented_step` and bounds the errors that remain, so a change of
this arithmetic must change those bounds (`tests/operators/test_segment_errors.py`). `matrix` and
`stored` make `Sums` too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.tiling import (
    BLOCK_ROWS,
    Tile,
    gathering_tile,
    load_tile,
    narrow_tile,
    operand,
    tile_for,
)

LOG2_E = math.log2(math.e)

# Columns of one range, whatever the tile.
RANGE_COLUMNS = 2048
# A problem between classes of at most so many points takes tiles of this size.
SMALL = 64
# Rows that a pool needs after its last point, in each of its blocks of digits.
OVERRUN = 256
# Blocks of the pool: rounded points, and the digits h, l and r.
DIGITS = 4
# Products of digits in a score of the exact form, h h' the last of them.
PARTS = 6
# Products of one chain of smaller digits.
CHAIN_PRODUCTS = 256
# Exponentials that are added in float32.
TERMS_IN_FLOAT32 = 8

# Columns of a table of segments.
ROW_START, ROWS, ROW_OFFSET, COLUMN_START, COLUMNS, COLUMN_OFFSET, PARTIAL, RANGES = range(8)


@triton.jit
def load_digits(
    x,  # (4 n, DIM) float16: rounded points, h, l, r
    y,  # the same
    row,
    column,
    step,
    n,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """The tiles of one step: of rounded points, or over h l', l h', l l', h r', r h' and h h'."""
    K_BLOCKS: tl.constexpr = (DIM + BLOCK_K - 1) // BLOCK_K
    k = (step % K_BLOCKS) * BLOCK_K
    if PARTS == 6:
        part = step // K_BLOCKS
        row += n * tl.where((part == 1) | (part == 2), 2, tl.where(part == 4, 3, 1))
        column += n * tl.where((part == 0) | (part == 2), 2, tl.where(part == 3, 3, 1))
    b_x = load_tile(x, row, k, BLOCK_M, BLOCK_K, DIM, DESCRIPTORS)
    b_y = load_tile(y, column, k, BLOCK_N, BLOCK_K, DIM, DESCRIPTORS)
    return b_x, b_y


@triton.jit
def exact_bias(p_masses, p_potential, o_column, m_column, inverse):
    """log2 b_j + g_j log2(e) / epsilon as a whole number and a rest, (BLOCK_N,) float32 each."""
    bias = tl.load(p_masses + o_column, mask=m_column, other=-1e30)
    potential = tl.load(p_potential + o_column, mask=m_column, other=0.0)
    bias += potential.to(tl.float64) * inverse
    whole = tl.floor(bias + 0.5).to(tl.float32)
    return whole, (bias - whole.to(tl.float64)).to(tl.float32)


@triton.jit
def power_of_two(exponent):
    """2^k of whole k <= 0, float64; 0 below -126."""
    biased = (tl.maximum(exponent, -127.0) + 127.0).to(tl.int32)
    return (biased << 23).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def sum_rows(terms, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EIGHT: tl.constexpr):
    """Sums of rows (BLOCK_M, BLOCK_N): of eight terms in float32, then in float64."""
    eights = tl.sum(tl.reshape(terms, (BLOCK_M, BLOCK_N // EIGHT, EIGHT)), 2)
    return tl.sum(eights.to(tl.float64), 1)


@on_its_device
@triton.jit
def segmented_step_kernel(
    x,  # (4 n, DIM) float16, blocks of BLOCK_M rows
    y,  # the same, blocks of BLOCK_N rows
    log2_masses_ptr,  # (n,) float64
    potential_ptr,  # (entries,) float32
    programs_ptr,  # (programs, 2) int32: segment, and which of its programs
    segments_ptr,  # (S, 8) int64
    active_ptr,  # (S,) int8
    epsilon_ptr,  # (S,) float64
    factors_ptr,  # (S,) float64, of products
    highest_ptr,  # (partial entries,) float32
    sums_ptr,  # (partial entries,) float64
    n,
    LOG2_E: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAIN: tl.constexpr,
    EIGHT: tl.constexpr,
    RANGE: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """One program per range of columns of one block of BLOCK_M rows of a segment."""
    i_segment = tl.load(programs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    i_program = tl.load(programs_ptr + 2 * tl.program_id(0) + 1)
    p_segment = segments_ptr + 8 * i_segment
    row_start, rows = tl.load(p_segment).to(tl.int32), tl.load(p_segment + 1).to(tl.int32)
    column_start, columns = tl.load(p_segment + 3).to(tl.int32), tl.load(p_segment + 4).to(tl.int32)
    ranges = tl.load(p_segment + 7).to(tl.int32)
    i_block, i_range = i_program // ranges, i_program % ranges
    first = i_range * RANGE
    blocks = tl.minimum(RANGE, tl.cdiv(columns, BLOCK_N) - first)
    active = tl.load(active_ptr + i_segment)
    blocks = tl.where(active != 0, blocks, 0)
    stored_rows = tl.where(active != 0, rows, 0)
    inverse = LOG2_E / tl.load(epsilon_ptr + i_segment)
    exact_scale = inverse * tl.load(factors_ptr + i_segment)
    scale = exact_scale.to(tl.float32)
    # Its first 12 bits, and the others.
    high_scale = (scale.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    low_scale = (exact_scale - high_scale.to(tl.float64)).to(tl.float32)
    p_masses = log2_masses_ptr + column_start
    p_potential = potential_ptr + tl.load(p_segment + 5)

    K_BLOCKS: tl.constexpr = (DIM + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = PARTS * K_BLOCKS
    sums = tl.zeros((BLOCK_M,), tl.float64)
    highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PARTS > 1:
        smaller = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for t in tl.range(0, blocks * STEPS, num_stages=STAGES):
        column = (first + t // STEPS) * BLOCK_N
        step = t % STEPS
        b_x, b_y = load_digits(
            x, y, row_start + i_block * BLOCK_M, column_start + column, step, n,
            DIM, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS,
        )  # fmt: skip
        scores = tl.dot(b_x, b_y.T, scores)  # (BLOCK_M, BLOCK_N)
        if PARTS > 1:
            chain_ends = (step % CHAIN == CHAIN - 1) | (step == STEPS - K_BLOCKS - 1)
            if (step < STEPS - K_BLOCKS) & chain_ends:
                smaller += scores
                scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if step == STEPS - 1:
            o_column = column + tl.arange(0, BLOCK_N)
            m_column = o_column < columns
            whole, rest = exact_bias(p_masses, p_potential, o_column, m_column, inverse)
            if PARTS > 1:
                smaller = smaller * scale + rest[None, :]
                top = tl.max(scores * scale + smaller + whole[None, :], 1)
                raised = tl.maximum(highest, tl.ceil(top))
                # The nearest multiple of 2^12: 1.5 2^35 leaves no bits below.
                high = (scores + 51539607552.0) - 51539607552.0
                smaller += (scores - high) * high_scale + scores * low_scale
                terms = tl.exp2((high * high_scale + (whole[None, :] - raised[:, None])) + smaller)
                sums = sums * power_of_two(highest - raised)
                sums += sum_rows(terms, BLOCK_M, BLOCK_N, EIGHT)
                smaller = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            else:
                logits = scores * scale + (whole + rest)[None, :]
                raised = tl.maximum(highest, tl.ceil(tl.max(logits, 1)))
                sums = sums * power_of_two(highest - raised)
                sums += tl.sum(tl.exp2(logits - raised[:, None]), 1).to(tl.float64)
            highest = raised
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    o_row = i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < stored_rows
    o_out = tl.load(p_segment + 6) + i_range.to(tl.int64) * rows + o_row
    tl.store(highest_ptr + o_out, highest, mask=m_row)
    tl.store(sums_ptr + o_out, sums, mask=m_row)


class Pool(NamedTuple):
    """The points of all classes, each without its class's mean, class after class.

    Attributes:
        coordinates: (4 n, d) float16, n rows of rounded points, then of their digits h, l and r; of
            each block the last `OVERRUN` rows are padding, and d is padded to a multiple of 8.
        log2_masses: (n,) float64.
        masses: (n,) float64.
    """

    coordinates: Tensor
    log2_masses: Tensor
    masses: Tensor


class Sums(NamedTuple):
    """Sums over ranges of columns, (partial entries,) each.

    Attributes:
        highest: float32, the highest logit of a row in a range, rounded up to a whole number; of
            `matrix.sweep` a logit near it.
        sums: float64, of the exponentials of base 2, so shifted.
    """

    highest: Tensor
    sums: Tensor


def segment_tile(dim: int, parts: int, small: bool, device: torch.device) -> tuple[int, Tile]:
    """Rows of a tile, and the tile."""
    if not small:
        # The exact form has two tiles of sums.
        return BLOCK_ROWS, tile_for(dim, device) if parts == 1 else gathering_tile(device)
    return SMALL, narrow_tile(device)._replace(columns=SMALL)


def ranges_of(columns: Tensor) -> Tensor:
    """How many ranges segments have, given their numbers of columns."""
    return (columns + RANGE_COLUMNS - 1) // RANGE_COLUMNS


def programs_of(table: Tensor, small: bool) -> Tensor:
    """The programs (P, 2) int32 of a table of segments (S, 8)."""
    height = SMALL if small else BLOCK_ROWS
    counts = (table[:, ROWS] + height - 1) // height * table[:, RANGES]
    segments = torch.arange(len(table), device=table.device)
    owners = torch.repeat_interleave(segments, counts)
    starts = (counts.cumsum(0) - counts)[owners]
    index = torch.arange(len(owners), device=table.device) - starts
    return torch.stack((owners, index), 1).to(torch.int32)


def segmented_step(
    pool: Pool,
    parts: int,
    small: bool,
    programs: Tensor,
    table: Tensor,
    active: Tensor,
    epsilon: Tensor,
    factors: Tensor,
    potential: Tensor,
    out: Sums,
) -> None:
    """Sums of all rows of all active segments over each range of their columns.

    Args:
        pool: the points.
        parts: 1 product of rounded points, or `PARTS` products of digits.
        small: whether no class has more than `SMALL` points.
        programs: of `programs_of`.
        table: (S, 8) int64 with the columns named above: where in the pool a segment's rows and
            columns start and how many they are, where their potentials start, where its sums
            start in `out`, and its number of ranges.
        active: (S,) bool, segments to work on.
        epsilon: (S,) float64, in units of the cost.
        factors: (S,) float64, of products of coordinates, in units of the cost.
        potential: (entries,) float32, of the columns.
        out: overwritten for active segments.
    """
    coordinates = pool.coordinates
    dim = coordinates.shape[1]
    height, tile = segment_tile(dim, parts, small, coordinates.device)
    segmented_step_kernel[(len(programs),)](
        operand(coordinates, height, tile),
        operand(coordinates, tile.columns, tile),
        pool.log2_masses,
        potential,
        programs,
        table,
        active.view(torch.int8),
        epsilon,
        factors,
        *out,
        coordinates.shape[0] // DIGITS,
        LOG2_E=LOG2_E,
        DIM=dim,
        PARTS=parts,
        BLOCK_M=height,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        CHAIN=CHAIN_PRODUCTS // tile.depth,
        EIGHT=TERMS_IN_FLOAT32,
        RANGE=RANGE_COLUMNS // tile.columns,
        STAGES=tile.stages,
        DESCRIPTORS=tile.descriptors,
        num_warps=tile.warps,
    )
