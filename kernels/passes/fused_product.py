"""A plan times some columns, fused: every tile of the plan is multiplied where it was computed.

    out = Q V,      Q_ij = b_j exp((f_i + g_j - C_ij) / epsilon)

Scores are those of `half_step`; rows of Q sum to about 1 and are scaled by 2^LOG2_SCALE meanwhile,
as in `block_products`. A tile of Q is rounded to float16 and multiplied on tensor cores, with
float32 sums; a column of ones in V gives the sums of the rounded numbers that are multiplied, while
the sums Q 1 that are returned are of the numbers before rounding. With three parts a tile and V are
sums hi + lo, of which hi hi + hi lo + lo hi is taken. Tensor cores truncate what they add to long
sums, so the products of tiles are added up outside of them.

One program owns a block of rows, whose coordinates it holds if they are few, and a range of column
blocks. V has COLUMNS columns, a power of two, and EXTRA more, which is what a number per point
beside its coordinates needs. `operators.triton_plans` calls `apply_plan_fused` for one product, and
makes a `FusedProduct` for many. `operators.build` reads `HELD_COORDINATES`, above which products
store blocks of the plan; `engine.conjugate_gradients_kernels` pads columns to `NARROW`.

A change must keep that a column of ones gives the sums of the rounded numbers, which `FusedPlan` of
`triton_plans` takes as the sums of its plan; that three parts are as exact as its `PRECISION` says;
and that tiles fit the shared memory of every card (`tests/kernels/test_compilation.py`).

Work: 2 n m (d + k) operations on tensor cores, times the parts, and n m exponentials; nothing of
size n m is stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.linear.halves import Unmerged
from otdd_flash.kernels.passes.score_terms import (
    LOG2_SCALE,
    PlanTerms,
    add_bias,
    plan_terms,
    row_offsets,
)
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.tiling import (
    BLOCK_ROWS,
    Ranges,
    Tile,
    column_ranges,
    gathering_tile,
    load_step,
    load_tile,
    narrow_tile,
    operand,
    shared_memory,
)

# Columns of V at once: those of one product of a tensor core, and the most that registers hold.
NARROW, WIDE = 16, 128
# Coordinates of a block of rows that are held, columns of a tile then, and how many are in flight.
HELD_COORDINATES, HELD_COLUMNS, STAGES = 128, 64, 2
# Bytes for biases, labels and barriers.
MISCELLANEOUS = 2048


@triton.jit
def multiply(
    high,  # (BLOCK_M, BLOCK_N) float16
    low,  # (BLOCK_M, BLOCK_N) float16, read if PARTS is 3
    values_ptr,  # (m, COPIES, WIDTH) float16
    o_column,  # (BLOCK_N,)
    first,
    unit,
    out,  # (BLOCK_M, COLUMNS) float32
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A tile times COLUMNS columns of V from `first` on, times a unit, added to `out`."""
    COPIES: tl.constexpr = 1 if PARTS == 1 else 2
    o_value = (first + tl.arange(0, COLUMNS))[None, :]
    p_values = values_ptr + o_column.to(tl.int64)[:, None] * (COPIES * WIDTH) + o_value
    values = tl.load(p_values)
    product = tl.dot(high, values)
    if PARTS == 3:
        product = tl.dot(low, values, product)
        product = tl.dot(high, tl.load(p_values + WIDTH), product)
    return out + product * unit


@on_its_device
@triton.jit
def fused_product_kernel(
    x,  # (2 n, DIM) float16
    y,  # (2 m, DIM) float16
    bias_ptr,  # (m,) float32
    row_term_ptr,  # (n,) float32
    costs_ptr,  # (V_x, costs_width) float32
    row_classes_ptr,  # int32, of `row_offsets`
    column_classes_ptr,  # int32, of `add_bias`
    values_ptr,  # (m, COPIES, COLUMNS + EXTRA) float16: hi parts, and lo parts if PARTS is 3
    ranges_ptr,  # (programs, 4) int32: row block, first column block, column blocks, slot
    products_ptr,  # (n + (slots - 1) (n - whole), COLUMNS + EXTRA) float32
    sums_ptr,  # (n + (slots - 1) (n - whole),) float32
    n,
    m,
    whole,
    unit,
    scale,
    costs_width,
    costs_scale,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXTRA: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CLASSES: tl.constexpr,
    HELD: tl.constexpr,
):
    """One program per range of column blocks of one block of BLOCK_M rows."""
    p_range = ranges_ptr + 4 * tl.program_id(0)
    i_block, first, blocks, slot = (
        tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3)
    )  # fmt: skip
    o_row = i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_term = tl.load(row_term_ptr + o_row)
    o_costs = row_offsets(row_classes_ptr, i_block, o_row, costs_width, CLASSES)

    STEPS: tl.constexpr = PARTS * ((DIM + BLOCK_K - 1) // BLOCK_K)
    WIDTH: tl.constexpr = COLUMNS + EXTRA
    sums = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    if EXTRA > 0:
        extra = tl.zeros((BLOCK_M, EXTRA), tl.float32)
    if HELD:
        high_x = load_tile(x, i_block * BLOCK_M, 0, BLOCK_M, BLOCK_K, DIM, DESCRIPTORS)
        if PARTS == 3:
            low_x = load_tile(x, n + i_block * BLOCK_M, 0, BLOCK_M, BLOCK_K, DIM, DESCRIPTORS)
    for j in tl.range(0, blocks, num_stages=STAGES if HELD else 1):
        column = (first + j) * BLOCK_N
        if HELD:
            high_y = load_tile(y, column, 0, BLOCK_N, BLOCK_K, DIM, DESCRIPTORS)
            scores = tl.dot(high_x, high_y.T)  # (BLOCK_M, BLOCK_N)
            if PARTS == 3:
                low_y = load_tile(y, m + column, 0, BLOCK_N, BLOCK_K, DIM, DESCRIPTORS)
                scores = tl.dot(high_x, low_y.T, scores)
                scores = tl.dot(low_x, high_y.T, scores)
        else:
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for step in tl.range(0, STEPS, num_stages=STAGES):
                b_x, b_y = load_step(
                    x, y, i_block * BLOCK_M, column, step, n, m,
                    DIM, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS,
                )  # fmt: skip
                scores = tl.dot(b_x, b_y.T, scores)
        o_column = column + tl.arange(0, BLOCK_N)
        logits = add_bias(
            scores * scale, tl.load(bias_ptr + o_column), column, o_costs,
            column_classes_ptr, costs_ptr, costs_scale, BLOCK_N, CLASSES,
        )  # fmt: skip
        plan = tl.exp2(logits + row_term[:, None])
        sums += tl.sum(plan, 1)
        high = plan.to(tl.float16)
        low = (plan - high.to(tl.float32)).to(tl.float16)
        out = multiply(high, low, values_ptr, o_column, 0, unit, out, WIDTH, COLUMNS, PARTS)
        if EXTRA > 0:
            extra = multiply(
                high, low, values_ptr, o_column, COLUMNS, unit, extra, WIDTH, EXTRA, PARTS
            )
    # Of rows from `whole` on the other slots follow.
    o_out = o_row.to(tl.int64) + tl.where(slot > 0, n + (slot - 1) * (n - whole) - whole, 0)
    tl.store(sums_ptr + o_out, sums * unit)
    p_out = products_ptr + o_out[:, None] * WIDTH
    tl.store(p_out + tl.arange(0, COLUMNS)[None, :], out)
    if EXTRA > 0:
        tl.store(p_out + COLUMNS + tl.arange(0, EXTRA)[None, :], extra)


class _Launch(NamedTuple):
    """The tile, ranges and operands of all launches for V of one width, and COLUMNS and EXTRA."""

    columns: int
    extra: int
    tile: Tile
    ranges: Ranges
    operands: tuple[object, object]


class FusedProduct:
    """Q V for one V after another, of the same potentials.

    Args:
        rows: n packed points.
        columns: m packed points.
        scores: how they make scores.
        terms: of the potentials.
    """

    def __init__(self, rows: Side, columns: Side, scores: Scores, terms: PlanTerms) -> None:
        self._rows, self._columns, self._scores = rows.points, columns.points, scores
        self._terms, coordinates = terms, rows.points.coordinates
        self._most = most_columns(coordinates.shape[1], scores.parts, coordinates.device)
        # By the columns of V.
        self._launches: dict[int, _Launch] = {}

    def __call__(self, values: Tensor) -> tuple[Unmerged, Unmerged]:
        """Q V, of k columns or more, and Q 1, of one; packed rows.

        Args:
            values: V (m, 1, k) float16, or its hi and lo parts (m, 2, k) with three parts.
        """
        count = values.shape[2]
        if count > self._most:
            chunks = values.split(-(-count // -(-count // self._most)), 2)
            found = [self(chunk) for chunk in chunks]
            merged = [
                product.merged()[..., : chunk.shape[2]]
                for chunk, (product, _) in zip(chunks, found, strict=True)
            ]
            return Unmerged.of(torch.cat(merged, 2)), found[0][1]
        if count not in self._launches:
            self._launches[count] = self._prepared(*widths(count))
        launch, terms = self._launches[count], self._terms
        tile, ranges, width = launch.tile, launch.ranges, launch.columns + launch.extra
        if width > count:
            values = torch.nn.functional.pad(values, (0, width - count))
        n, m = self._rows.layout.size, self._columns.layout.size
        whole = BLOCK_ROWS * ranges.whole
        stored = n + (ranges.most - 1) * (n - whole)
        out = torch.empty((stored, width), device=values.device)
        sums = torch.empty(stored, device=values.device)
        fused_product_kernel[(len(ranges.programs),)](
            *launch.operands,
            terms.bias,
            terms.row_term,
            terms.classes.costs,
            terms.classes.rows,
            terms.classes.columns,
            values.contiguous(),
            ranges.programs,
            out,
            sums,
            n,
            m,
            whole,
            2.0**-LOG2_SCALE,
            self._scores.scale * terms.scale,
            terms.classes.costs.shape[1],
            terms.scale,
            DIM=self._rows.coordinates.shape[1],
            COLUMNS=launch.columns,
            EXTRA=launch.extra,
            PARTS=self._scores.parts,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            STAGES=tile.stages,
            DESCRIPTORS=tile.descriptors,
            CLASSES=terms.classes.kind,
            HELD=self._most > NARROW,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        slots = whole, n - whole, ranges.most
        return Unmerged(out[:, None], *slots), Unmerged(sums[:, None, None], *slots)

    def _prepared(self, columns: int, extra: int) -> _Launch:
        x, y, layout = self._rows.coordinates, self._columns.coordinates, self._rows.layout
        given = x.shape[1], columns, self._scores.parts, x.device
        tile = product_tile(*given, pure=layout.pure, held=self._most > NARROW)
        blocks = layout.size // BLOCK_ROWS, self._columns.layout.size // tile.columns
        operands = operand(x, BLOCK_ROWS, tile), operand(y, tile.columns, tile)
        return _Launch(columns, extra, tile, column_ranges(*blocks, tile, x.device), operands)


def most_columns(dim: int, parts: int, device: torch.device) -> int:
    """Columns of V at once: those of a tensor core where coordinates are not held."""
    if dim > HELD_COORDINATES:
        return NARROW
    if device.type != "cuda":
        return WIDE + NARROW
    room = shared_memory(device)
    fitting = (
        columns
        for columns in (WIDE + NARROW, WIDE // 2 + NARROW)
        if shared_bytes(dim, parts, columns) <= room
    )
    return next(fitting, NARROW)


def shared_bytes(dim: int, parts: int, columns: int) -> int:
    """Shared memory of a program that holds coordinates, at the most: rows, tiles in flight, Q."""
    copies, depth = (1 if parts == 1 else 2), _depth(dim)
    in_flight = STAGES * HELD_COLUMNS * (depth + columns)
    return 2 * copies * (BLOCK_ROWS * (depth + HELD_COLUMNS) + in_flight) + MISCELLANEOUS


def widths(count: int) -> tuple[int, int]:
    """COLUMNS and EXTRA for V with so many columns."""
    if count <= NARROW:
        return NARROW, 0
    power = max(NARROW, 1 << (count.bit_length() - 1))
    if count == power:
        return power, 0
    return (power, NARROW) if count <= power + NARROW else (2 * power, 0)


def product_tile(
    dim: int, columns: int, parts: int, device: torch.device, *, pure: bool, held: bool
) -> Tile:
    """The tile for points of so many coordinates and V of so many columns."""
    tile = narrow_tile(device) if pure else gathering_tile(device)
    if not held:
        return tile
    tile = tile._replace(depth=_depth(dim), stages=STAGES)
    if columns == NARROW and parts == 1:
        return tile
    return tile._replace(columns=HELD_COLUMNS, warps=8)


def _depth(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def apply_plan_fused(
    rows: Side,
    columns: Side,
    scores: Scores,
    potentials: tuple[Tensor, Tensor],
    epsilon: float,
    values: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Q V and Q 1 as `apply_plan_blocks` has them, without factors."""
    terms = plan_terms(rows, columns, scores, potentials, epsilon, None)
    product = FusedProduct(rows, columns, scores, terms)
    halves, scales = values
    found = product(halves[:, : 1 if scores.parts == 1 else 2, : len(scales)])
    position = rows.points.layout.position
    out, sums = (part.merged()[:, 0][position] for part in found)
    return out[:, : len(scales)].div_(scales), sums[:, 0]
