"""Row and column sums of a plan from one evaluation of each entry, to bounds that are proved.

    r_i = sum_j p_ij,   c_j = sum_i p_ij,   p_ij = 2^e_ij
    e_ij = scale S_ij + u_i + v_j - W[l_i, l_j]

with the products S of `digits`, which int8 tensor cores add without rounding, and potentials, norms
and masses in the terms u and v. Shapes: x (n, d) and y (m, d); all sums in float64. S is known to
what `digits` says, a sum of entries to `SUM_ERROR`.

Pairs of digits add up by levels s + t, each in accumulators of its own, so that a tile of digits is
loaded once for all its pairs. Levels then join to one int32 N, B S for digits of base B; scaled
points are so short on both sides (`DigitSide.scale`) that |B S| stays below 2^31. With one digit N
= S. Four digits of few coordinates keep a second int32 M of levels 2 and 3, B S = N + M / B^2.

One program owns a block of rows and a range of column blocks. Its loop runs over (column block, K
block) as one flat sequence, so that loads are in flight across column blocks. Entries are computed
a quarter of a tile at a time: all at once would not fit registers. Points are cut into digits a
chunk at a time, so memory does not grow with their number but for the sums. Between a cloud and
itself only tiles on and above the diagonal are computed; each gives its sums of columns to the
mirrored rows, and a tile on the diagonal half of both, so that the sums are those of an exactly
symmetric plan. `operators.fixed_point` calls `plan_marginals`.

Work: n m d D (D + 1) / 2 int8 products for D digits, n m exponentials, 4 n m operations in float64.

A tile, `marginal_tile`, has rows that divide `tiling.BLOCK_ROWS`, as a tile has one class distance
where a layout is pure; its columns are 64 or 128, of which the kernel takes quarters.

Entries from integer scores and their sums over a part of a tile, `sum_piece`, have stated errors:

    p_ij = 2^e_ij,   e_ij = scale (N_ij + M_ij / B^2) + u_i + v_j - W[l_i, l_j]

`operators.fixed_point` makes bounds on sums from the errors below, so a change must keep them upper
bounds (`tests/kernels/test_plan_marginals.py`). N and M are int32 sums of products of digits in
base B (`points.digits`), so that (N + M / B^2) / B is the score of two points, or N with one digit;
M is there for four digits of few coordinates only (`FRACTIONS`). Here `scale` is that of N, the one
of S over B, or that of S with one digit. u and v are float64: potentials, norms and logarithms of
masses. W are class distances, l the classes of the points.

Errors hold in the worst case and on every card; a unit is 2^-24:

- e is computed in float64. Its roundings, seven with M and five without, are at most 2^-50 of
  |scale N| + |u| + |v| + |W|.
- p is known to 5 units: e is rounded to a multiple of 2^-23, which is 0.7 units of p, and cut into
  k + t, 0 <= t < 1; the hardware's 2^t is known to 2^-22, 4 units; 2^k is exact. Entries below
  2^-125 count as 0, those from 2^128 on make a sum infinite. Terms are finite.
- In float32 an entry takes part in at most 11 additions of a column and 5 of a row, whatever their
  order; then float64 takes over.

So a sum of the p of the computed e is known to `SUM_ERROR` of itself, plus 2^-125 for each entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.points.digits import base_of, keeps_fractions, pack_digits, padded_dim
from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.kernels.tiling import BLOCK_ROWS, Tile, load_tile, operand, pipeline_stages

# Column blocks of a program, fewer if that would leave less than so many programs.
BLOCKS_PER_PROGRAM = 8
PROGRAMS = 1024
# Programs of so many blocks of rows run together: their digits, and those of the columns, stay in
# the second-level cache.
GROUP = 32


@on_its_device
@triton.jit(do_not_specialize=["blocks_per_program", "diagonal", "costs_width"])
def plan_marginals_kernel(
    x,  # (DIGITS x_rows, DIM) int8
    y,  # (DIGITS y_rows, DIM) int8
    row_term_ptr,  # (height,) float64
    column_term_ptr,  # (width,) float64
    labels_x_ptr,  # (height,) int32
    labels_y_ptr,  # (width,) int32
    costs_ptr,  # (V_x, costs_width) float64
    row_sums_ptr,  # (ranges, height) float64
    column_sums_ptr,  # (height / BLOCK_M, width) float64
    x_rows,
    y_rows,
    y_first,  # row of y that is the first column
    height,
    width,
    blocks_per_program,
    diagonal,  # row that the first column is, if TRIANGLE
    costs_width,
    product_scale: tl.float64,  # of N
    DIM: tl.constexpr,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    GATHER: tl.constexpr,
    TRIANGLE: tl.constexpr,
    FRACTIONS: tl.constexpr,
):
    """One program per range of column blocks of one block of BLOCK_M rows."""
    row_blocks = height // BLOCK_M
    per_group = tl.num_programs(0) // row_blocks * GROUP
    first_in_group = tl.program_id(0) // per_group * GROUP
    group = tl.minimum(row_blocks - first_in_group, GROUP)
    row = (first_in_group + tl.program_id(0) % per_group % group) * BLOCK_M
    i_range = tl.program_id(0) % per_group // group
    first = i_range * blocks_per_program
    end = tl.minimum(first + blocks_per_program, width // BLOCK_N)
    if TRIANGLE:
        first = tl.maximum(first, (row - diagonal) // BLOCK_N)
    o_row = row + tl.arange(0, BLOCK_M)
    o_costs = tl.load(labels_x_ptr + o_row) * costs_width
    p_costs = costs_ptr + tl.load(labels_x_ptr + row) * costs_width

    K_BLOCKS: tl.constexpr = (DIM + BLOCK_K - 1) // BLOCK_K
    PIECE: tl.constexpr = BLOCK_N // 4
    LOG_PIECE: tl.constexpr = 5 if BLOCK_N == 128 else 4
    SHIFT: tl.constexpr = 8 if BASE == 256 else 7
    row_sums = tl.zeros((BLOCK_M, 4), tl.float64)
    level_0 = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    if DIGITS > 1:
        level_1 = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        level_2 = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    if DIGITS > 3:
        level_3 = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for t in tl.range(0, tl.maximum(end - first, 0) * K_BLOCKS, num_stages=STAGES):
        column = (first + t // K_BLOCKS) * BLOCK_N
        k = t % K_BLOCKS * BLOCK_K
        x_0 = load_tile(x, row, k, BLOCK_M, BLOCK_K, DIM, DESCRIPTORS)
        y_0 = load_tile(y, y_first + column, k, BLOCK_N, BLOCK_K, DIM, DESCRIPTORS)
        if DIGITS > 1:
            x_1 = load_tile(x, x_rows + row, k, BLOCK_M, BLOCK_K, DIM, DESCRIPTORS)
            y_1 = load_tile(y, y_rows + y_first + column, k, BLOCK_N, BLOCK_K, DIM, DESCRIPTORS)
            x_2 = load_tile(x, 2 * x_rows + row, k, BLOCK_M, BLOCK_K, DIM, DESCRIPTORS)
            y_2 = load_tile(y, 2 * y_rows + y_first + column, k, BLOCK_N, BLOCK_K, DIM, DESCRIPTORS)
        if DIGITS > 3:
            x_3 = load_tile(x, 3 * x_rows + row, k, BLOCK_M, BLOCK_K, DIM, DESCRIPTORS)
            y_3 = load_tile(y, 3 * y_rows + y_first + column, k, BLOCK_N, BLOCK_K, DIM, DESCRIPTORS)
        level_0 = tl.dot(x_0, y_0.T, level_0, out_dtype=tl.int32)  # (BLOCK_M, BLOCK_N)
        if DIGITS > 1:
            level_1 = tl.dot(x_0, y_1.T, level_1, out_dtype=tl.int32)
            level_1 = tl.dot(x_1, y_0.T, level_1, out_dtype=tl.int32)
            level_2 = tl.dot(x_0, y_2.T, level_2, out_dtype=tl.int32)
            level_2 = tl.dot(x_1, y_1.T, level_2, out_dtype=tl.int32)
            level_2 = tl.dot(x_2, y_0.T, level_2, out_dtype=tl.int32)
        if DIGITS > 3:
            level_3 = tl.dot(x_0, y_3.T, level_3, out_dtype=tl.int32)
            level_3 = tl.dot(x_1, y_2.T, level_3, out_dtype=tl.int32)
            level_3 = tl.dot(x_2, y_1.T, level_3, out_dtype=tl.int32)
            level_3 = tl.dot(x_3, y_0.T, level_3, out_dtype=tl.int32)
        if t % K_BLOCKS == K_BLOCKS - 1:
            scores = level_0
            level_0 = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
            fractions = scores
            if FRACTIONS:
                fractions = (level_2 << SHIFT) + level_3
            elif DIGITS > 3:
                level_2 += (level_3 + BASE // 2) >> SHIFT
            if DIGITS > 3:
                level_3 = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
            if DIGITS > 1:
                scores = (scores << SHIFT) + level_1
                if not FRACTIONS:
                    scores += (level_2 + BASE // 2) >> SHIFT
                level_1 = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
                level_2 = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
            row_term = tl.load(row_term_ptr + o_row)
            if not GATHER:
                row_term -= tl.load(p_costs + tl.load(labels_y_ptr + column))
            left, right = halve_columns(scores, BLOCK_M, BLOCK_N)
            s_0, s_1 = halve_columns(left, BLOCK_M, BLOCK_N // 2)
            s_2, s_3 = halve_columns(right, BLOCK_M, BLOCK_N // 2)
            f_0, f_1, f_2, f_3 = s_0, s_1, s_2, s_3
            if FRACTIONS:
                left, right = halve_columns(fractions, BLOCK_M, BLOCK_N)
                f_0, f_1 = halve_columns(left, BLOCK_M, BLOCK_N // 2)
                f_2, f_3 = halve_columns(right, BLOCK_M, BLOCK_N // 2)
            rows_0, columns_0 = sum_piece(
                s_0, f_0, row_term, o_costs, column, column_term_ptr, labels_y_ptr, costs_ptr,
                product_scale, BLOCK_M, PIECE, LOG_PIECE, GATHER, FRACTIONS, BASE,
            )  # fmt: skip
            rows_1, columns_1 = sum_piece(
                s_1, f_1, row_term, o_costs, column + PIECE, column_term_ptr, labels_y_ptr,
                costs_ptr, product_scale, BLOCK_M, PIECE, LOG_PIECE, GATHER, FRACTIONS, BASE,
            )  # fmt: skip
            rows_2, columns_2 = sum_piece(
                s_2, f_2, row_term, o_costs, column + 2 * PIECE, column_term_ptr, labels_y_ptr,
                costs_ptr, product_scale, BLOCK_M, PIECE, LOG_PIECE, GATHER, FRACTIONS, BASE,
            )  # fmt: skip
            rows_3, columns_3 = sum_piece(
                s_3, f_3, row_term, o_costs, column + 3 * PIECE, column_term_ptr, labels_y_ptr,
                costs_ptr, product_scale, BLOCK_M, PIECE, LOG_PIECE, GATHER, FRACTIONS, BASE,
            )  # fmt: skip
            of_rows = ((rows_0 + rows_1) + (rows_2 + rows_3)).to(tl.float64)
            columns_0 = join_columns(columns_0, columns_1, BLOCK_M // 16, PIECE)
            columns_2 = join_columns(columns_2, columns_3, BLOCK_M // 16, PIECE)
            of_columns = join_columns(columns_0, columns_2, BLOCK_M // 16, 2 * PIECE)
            of_columns = tl.sum(of_columns, 0).to(tl.float64)
            if TRIANGLE:
                # A block on the diagonal gives half of each sum.
                share = tl.where(diagonal + column < row + BLOCK_M, 0.5, 1.0)
                of_rows *= share
                of_columns *= share
            row_sums += of_rows
            p_columns = column_sums_ptr + (row // BLOCK_M).to(tl.int64) * width + column
            tl.store(p_columns + tl.arange(0, BLOCK_N), of_columns)
    tl.store(row_sums_ptr + i_range.to(tl.int64) * height + o_row, tl.sum(row_sums, 1))


class DigitSide(NamedTuple):
    """One side of a plan.

    Attributes:
        points: (N, d) of any real type and strides.
        layout: their order in blocks, n packed rows.
        centre: (d,) float64, the same on both sides.
        scale: v = (x - centre) scale has coordinates in [-127, 127] and |v| <= `digits.longest`.
            With one digit v are integers and all |S| < 2^31. The same on both sides. d is at most
            100,000, so that sums of products of digits are int32.
        term: (n,) float64, u or v of the exponents in packed order; -1e30 for padding and for
            points without mass.
    """

    points: Tensor
    layout: Layout
    centre: Tensor
    scale: float
    term: Tensor


def plan_marginals(
    rows: DigitSide,
    columns: DigitSide,
    costs: Tensor | None,
    product_scale: float,
    digits: int,
    *,
    symmetric: bool = False,
    stripes: Sequence[tuple[int, int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums of the rows and of the columns of a plan.

    Args:
        rows: n packed rows.
        columns: m packed rows.
        costs: (V_x, V_y) float64, subtracted from exponents; None for zeros.
        product_scale: of S in exponents.
        digits: 1, 3 or 4.
        symmetric: whether both sides are one and costs symmetric; `columns` is not read then.
        stripes: first and end, multiples of `tiling.BLOCK_ROWS`, of the packed rows whose entries
            are summed; of a symmetric plan those from the diagonal on. None for all rows.

    Returns:
        (n,) and (m,) float64 in packed order; twice the same tensor if `symmetric`.
    """
    if digits not in (1, 3, 4):
        raise ValueError(f"digits must be 1, 3 or 4, got {digits}")
    columns = rows if symmetric else columns
    n, m = rows.layout.size, columns.layout.size
    of_rows = torch.zeros(n, dtype=torch.float64, device=rows.term.device)
    of_columns = of_rows if symmetric else of_rows.new_zeros(m)
    launch = _Launch(rows, columns, costs, product_scale, digits, symmetric)
    height, width = chunk_sizes(padded_dim(rows.points.shape[1]) * digits)
    parts = [(0, n)] if stripes is None else stripes
    for top, bottom in (piece for part in parts for piece in pieces(*part, height)):
        x = _packed(rows, digits, top, bottom)
        left = top if symmetric else 0
        while left < m:
            within = symmetric and left < bottom
            right = min(left + width, bottom if within else m)
            if within:
                # The columns are among the rows, and rows past them are below the diagonal.
                row_sums, column_sums = launch(x, x, top, right, left, right, left - top)
                of_rows[top:right].add_(row_sums)
            else:
                y = _packed(columns, digits, left, right)
                row_sums, column_sums = launch(x, y, top, bottom, left, right, 0)
                of_rows[top:bottom].add_(row_sums)
            of_columns[left:right].add_(column_sums)
            left = right
    return of_rows, of_columns


def pieces(first: int, end: int, height: int) -> list[tuple[int, int]]:
    """Cut rows [first, end) into even pieces of about a height, multiples of `BLOCK_ROWS`.

    A short one at the end would leave multiprocessors idle, for every chunk of columns anew.
    """
    count = max(1, round((end - first) / height))
    blocks = -(-(end - first) // BLOCK_ROWS)
    borders = [first + BLOCK_ROWS * (place * blocks // count) for place in range(count)]
    return [*zip(borders, [*borders[1:], end], strict=True)] if end > first else []


def _packed(side: DigitSide, digits: int, first: int, end: int) -> Tensor:
    """Digits of packed rows [first, end), (digits, end - first, DIM)."""
    points, layout, centre, scale, _ = side
    return pack_digits(points, layout, centre, scale, digits, first, end - first)


class _Launch:
    """Computes the sums of a rectangle of the plan."""

    def __init__(
        self,
        rows: DigitSide,
        columns: DigitSide,
        costs: Tensor | None,
        product_scale: float,
        digits: int,
        symmetric: bool,
    ) -> None:
        self._terms = rows.term.contiguous(), columns.term.contiguous()
        self._digits, self._symmetric = digits, symmetric
        self._base = base_of(rows.points.shape[1])
        self._fractions = keeps_fractions(digits, rows.points.shape[1])
        self._product_scale = product_scale / (1 if digits == 1 else self._base)
        layouts = rows.layout, columns.layout
        if costs is None:
            self._costs = rows.term.new_zeros((1, 1))
            self._labels = [torch.zeros_like(layout.labels) for layout in layouts]
            self._gather = False
        else:
            self._costs = costs.contiguous()
            self._labels = [layout.labels for layout in layouts]
            self._gather = not all(layout.pure for layout in layouts)

    def __call__(
        self, x: Tensor, y: Tensor, top: int, bottom: int, left: int, right: int, y_first: int
    ) -> tuple[Tensor, Tensor]:
        """Sums (bottom - top,) and (right - left,).

        Args:
            x: digits of packed rows from `top` on.
            y: digits of packed columns; those from `left` on are from `y_first` on in it.
            top: first row.
            bottom: end of the rows.
            left: first column.
            right: end of the columns.
            y_first: the row of `y` that holds column `left`.
        """
        device, height, width = x.device, bottom - top, right - left
        rows, tile, registers = marginal_tile(x.shape[2], self._digits, device)
        row_blocks, column_blocks = height // rows, width // tile.columns
        blocks = max(1, min(BLOCKS_PER_PROGRAM, row_blocks * column_blocks // PROGRAMS))
        triangle, ranges = self._symmetric and left < bottom, -(-column_blocks // blocks)
        row_sums = torch.empty((ranges, height), dtype=torch.float64, device=device)
        # Tiles below the diagonal give no sums of columns.
        new = torch.zeros if triangle else torch.empty
        column_sums = new((row_blocks, width), dtype=torch.float64, device=device)
        plan_marginals_kernel[(row_blocks * ranges,)](
            operand(x.flatten(0, 1), rows, tile),
            operand(y.flatten(0, 1), tile.columns, tile),
            self._terms[0][top:bottom],
            self._terms[1][left:right],
            self._labels[0][top:bottom],
            self._labels[1][left:right],
            self._costs,
            row_sums,
            column_sums,
            x.shape[1],
            y.shape[1],
            y_first,
            height,
            width,
            blocks,
            left - top,
            self._costs.shape[1],
            self._product_scale,
            DIM=x.shape[2],
            DIGITS=self._digits,
            BASE=self._base,
            BLOCK_M=rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            STAGES=pipeline_stages(tile, self._gather),
            GROUP=GROUP,
            DESCRIPTORS=tile.descriptors,
            GATHER=self._gather,
            TRIANGLE=triangle,
            FRACTIONS=self._fractions,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=registers,
        )
        return row_sums.sum(0), column_sums.sum(0)


# A chunk of columns, and with it a chunk of rows a multiple as high, are packed at a time. Rows are
# held while all columns pass, so the higher they are the fewer times columns are packed; and with
# few coordinates a launch for narrow chunks takes longer than its work. Sums of columns, of every
# block of rows, take 32 MiB beside the digits.
CHUNK_COLUMNS = 16384
MOST_ROWS = 16384
CHUNK_BYTES = 32 << 20


def chunk_sizes(row_bytes: int) -> tuple[int, int]:
    """Rows and columns whose digits are held at a time, for so many bytes of digits per row.

    Rows are cut evenly, into pieces that may be up to half as high again.
    The first is a multiple of the second, and both are multiples of the widest tile.
    """
    width = CHUNK_COLUMNS
    while width > BLOCK_ROWS and width * row_bytes > CHUNK_BYTES // 2:
        width //= 2
    return width * max(1, min(CHUNK_BYTES // (width * row_bytes), MOST_ROWS // width)), width


class MarginalTile(NamedTuple):
    """Rows of a tile, the rest of it, and the most registers of a thread."""

    rows: int
    tile: Tile
    registers: int | None = None


def marginal_tile(dim: int, digits: int, device: torch.device) -> MarginalTile:
    """The tile for so many coordinates and digits; its depth counts bytes.

    Triton waits for every int8 product. Two programs that share a multiprocessor fill the waits:
    each has half of the registers, so several levels leave room for a smaller tile.
    """
    if device.type != "cuda":
        rows, columns = {1: (128, 128), 3: (64, 128), 4: (64, 64)}[digits]
        return MarginalTile(rows, Tile(columns, 64, rows // 16, 1, descriptors=False))
    if torch.cuda.get_device_capability(device)[0] != 9:
        columns, depth, stages = {1: (128, 64, 3), 3: (64, 64, 2), 4: (64, 32, 3)}[digits]
        return MarginalTile(128, Tile(columns, depth, 8, stages, descriptors=False))
    if digits > 1:
        stages = 2 if digits == 3 and dim <= 64 else 3
        return MarginalTile(64, Tile(128 if digits == 3 else 64, 64, 4, stages, descriptors=True))
    depth, stages = (64, 6) if dim <= 64 else (128, 3)
    return MarginalTile(128, Tile(128, depth, 8, stages, descriptors=True), registers=128)


# Bound on the relative error of a sum: 4 + ln 2 units of each entry, 11 additions, and terms of
# second order and of float64.
ENTRY_ERROR, ADDITION_ERROR = 4.75 * 2.0**-24, 11.25 * 2.0**-24
SUM_ERROR = ENTRY_ERROR + ADDITION_ERROR
# Bound on the error of an exponent, over the sizes of its terms.
EXPONENT_ERROR = 2.0**-50
# Entries below count as 0.
LEAST_ENTRY = 2.0**-125


@triton.jit
def exact_double(integers):
    """Convert int32 to float64.

    The bits of 2^52 + 2^31 + N are put together and the constant subtracted, which is exact; the
    conversion takes four times as long.
    """
    bits = integers.to(tl.uint32, bitcast=True) ^ 0x80000000
    biased = bits.to(tl.uint64) | 0x4330000000000000
    return biased.to(tl.float64, bitcast=True) - 4503601774854144.0


@triton.jit
def power_of_two(exponents):
    """Compute 2^e in float32 of e in float64."""
    bits = exponents.to(tl.int64, bitcast=True)
    # The upper words of 128.5 and of -125.5 as limits; bits of negative numbers grow with their
    # size. e of 128 and more give infinity, below -125 give 0.
    high = tl.minimum((bits >> 32).to(tl.int32), 0x40601000)
    high = tl.minimum(high.to(tl.uint32, bitcast=True), 0xC05F6000)
    bits = (high.to(tl.uint64) << 32) | bits.to(tl.uint32).to(tl.uint64)
    # Next to 1.5 2^29 neighbours are 2^-23 apart: the lower word becomes e 2^23, rounded.
    shifted = bits.to(tl.float64, bitcast=True) + 805306368.0
    fixed = shifted.to(tl.int64, bitcast=True).to(tl.int32)
    # e = k + t: the bits of 1 + t, and of 2^(k - 1), which are 0 for k = -126.
    fraction = (fixed & 0x7FFFFF) | 0x3F800000
    power = fixed - fraction + 0x7E800000
    return tl.exp2(fraction.to(tl.float32, bitcast=True)) * power.to(tl.float32, bitcast=True)


@triton.jit
def halve_columns(scores, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Split (BLOCK_M, WIDTH) into its left and its right half."""
    return tl.split(tl.permute(tl.reshape(scores, (BLOCK_M, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def join_columns(left, right, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Join two (ROWS, WIDTH) to (ROWS, 2 WIDTH)."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, 2 * WIDTH))


@triton.jit
def sum_piece(
    scores,  # (BLOCK_M, WIDTH) int32, N
    fractions,  # (BLOCK_M, WIDTH) int32, M, if FRACTIONS
    row_term,  # (BLOCK_M,) float64, u
    o_costs,  # (BLOCK_M,) int32, the rows' offsets in W, if GATHER
    column,
    column_term_ptr,  # float64, v
    labels_y_ptr,  # int32
    costs_ptr,  # float64, W
    product_scale,  # float64, `scale`
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG_WIDTH: tl.constexpr,
    GATHER: tl.constexpr,
    FRACTIONS: tl.constexpr,
    BASE: tl.constexpr,
):
    """Sum entries from `column` on: rows (BLOCK_M, 4), columns (BLOCK_M / 16, WIDTH) by 16 rows.

    Pairs are added, those of one thread first. 16 rows are those of a warp; of a row four threads
    hold two columns of every eight, and keep their sums apart.
    """
    o_column = column + tl.arange(0, WIDTH)
    exponents = exact_double(scores) * product_scale + row_term[:, None]
    if FRACTIONS:
        exponents += exact_double(fractions) * (product_scale / (BASE * BASE))
    exponents += tl.load(column_term_ptr + o_column)[None, :]
    if GATHER:
        labels_y = tl.load(labels_y_ptr + o_column)
        exponents -= tl.load(costs_ptr + (o_costs[:, None] + labels_y[None, :]))
    plan = power_of_two(exponents)  # (BLOCK_M, WIDTH)
    of_columns = tl.sum(tl.reshape(plan, (BLOCK_M // 16, 2, 8, WIDTH)), 1)
    of_columns = tl.sum(tl.reshape(of_columns, (BLOCK_M // 16, 2, 4, WIDTH)), 1)
    of_columns = tl.sum(tl.reshape(of_columns, (BLOCK_M // 16, 2, 2, WIDTH)), 1)
    of_columns = tl.sum(of_columns, 1)  # (BLOCK_M / 16, WIDTH)
    of_rows = tl.sum(tl.reshape(plan, (BLOCK_M, WIDTH // 8, 4, 2)), 3)
    for _ in tl.static_range(LOG_WIDTH - 3):
        of_rows = tl.sum(tl.reshape(of_rows, (BLOCK_M, 2, of_rows.shape[1] // 2, 4)), 1)
    return tl.reshape(of_rows, (BLOCK_M, 4)), of_columns
