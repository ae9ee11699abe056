"""Blocks of a plan, whose entries may be weighted, for the library's matrix products.

    Q_ij = b_j exp((f_i + g_j - C_ij) / epsilon) [W_ij],      W = factor sum A B^T + s 1^T + 1 t^T

Rows of Q sum to r_i / a_i before they are weighted, about 1, and are scaled by 2^LOG2_SCALE so that
entries down to 2^-24 of the row keep all their bits. With three parts a block, A and B are sums hi
+ lo of two float16, of which hi hi + hi lo + lo hi is accumulated in float32. Products of
`block_products` compute their blocks by `PlanBlocks`. Both parts of a block stay below 256 MiB, and
`operators.build.kernel_bytes` counts one of `block_shape` in both parts.

Shapes: A (n, r), B (m, r), s (n,), t (m,), a block (1 or 2, height, width) float16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.passes.score_terms import PlanTerms, add_bias, row_offsets
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import PackedPoints
from otdd_flash.kernels.tiling import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    Tile,
    gathering_tile,
    load_step,
    narrow_tile,
    operand,
    tile_for,
)

# A block of the plan: 64 MiB a part; of twice as many rows at the most where these are all. In
# blocks that the second-level cache holds, launches and not memory take most of the time.
BLOCK_HEIGHT, BLOCK_WIDTH = 8192, 4096
# Of a plan of up to so many blocks two are made: 112 MiB a part at the most. With few points a host
# takes longer to launch what a block needs than a GPU to compute it.
FEW_BLOCKS = 3.25
# Programs of neighbouring rows run together, so that tiles of y are read from the cache.
GROUP = 8

# A (n, r) and B (m, r), packed.
Pair = tuple[PackedPoints, PackedPoints]


@triton.jit
def add_products(
    out,  # (BLOCK_M, BLOCK_N) float32
    x,  # (2 n, DIM) float16
    y,  # (2 m, DIM) float16
    row,
    column,
    n,
    m,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Products of rows of x with rows of y, added to `out`."""
    STEPS: tl.constexpr = PARTS * ((DIM + BLOCK_K - 1) // BLOCK_K)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        b_x, b_y = load_step(
            x, y, row, column, step, n, m,
            DIM, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, DESCRIPTORS,
        )  # fmt: skip
        out = tl.dot(b_x, b_y.T, out)  # (BLOCK_M, BLOCK_N)
    return out


@on_its_device
@triton.jit
def plan_block_kernel(
    x,  # (2 n, DIM) float16
    y,  # (2 m, DIM) float16
    bias_ptr,  # (m,) float32
    row_term_ptr,  # (n,) float32
    costs_ptr,  # (V_x, costs_width) float32
    row_classes_ptr,  # int32, of `row_offsets`
    column_classes_ptr,  # int32, of `add_bias`
    a,  # (2 n, RANK) float16, read if PAIRS
    b,  # (2 m, RANK) float16, read if PAIRS
    other_a,  # (2 n, RANK) float16, read if PAIRS is 2
    other_b,  # (2 m, RANK) float16, read if PAIRS is 2
    row_numbers_ptr,  # (n,) float32, read if NUMBERS
    column_numbers_ptr,  # (m,) float32, read if NUMBERS
    out_ptr,  # (LOW ? 2 height : height, width) float16
    sums_ptr,  # (width / BLOCK_N, height) float32
    first_row,
    first_column,
    height,
    width,
    n,
    m,
    scale,
    costs_width,
    costs_scale,
    factor_scale,
    scale_ratio,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    PAIRS: tl.constexpr,
    NUMBERS: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """One program per tile (BLOCK_M, BLOCK_N) of the block."""
    i_program = tl.program_id(0)
    per_group = GROUP * (width // BLOCK_N)
    first_in_group = (i_program // per_group) * GROUP
    group = tl.minimum(height // BLOCK_M - first_in_group, GROUP)
    i_row = first_in_group + (i_program % per_group) % group
    i_column = (i_program % per_group) // group
    row, column = first_row + i_row * BLOCK_M, first_column + i_column * BLOCK_N
    o_row, o_column = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)

    scores = add_products(
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x, y, row, column, n, m,
        DIM, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DESCRIPTORS,
    )  # fmt: skip
    o_costs = row_offsets(row_classes_ptr, row // BLOCK_M, o_row, costs_width, CLASSES)
    logits = add_bias(
        scores * scale, tl.load(bias_ptr + o_column), column, o_costs,
        column_classes_ptr, costs_ptr, costs_scale, BLOCK_N, CLASSES,
    )  # fmt: skip
    plan = tl.exp2(logits + tl.load(row_term_ptr + o_row)[:, None])
    o_block_row = i_row * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(sums_ptr + i_column * height + o_block_row, tl.sum(plan, 1))
    if PAIRS > 0:
        weights = add_products(
            tl.zeros((BLOCK_M, BLOCK_N), tl.float32), a, b, row, column, n, m,
            RANK, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DESCRIPTORS,
        )  # fmt: skip
        if PAIRS == 2:
            weights = add_products(
                weights * scale_ratio, other_a, other_b, row, column, n, m,
                RANK, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DESCRIPTORS,
            )  # fmt: skip
        weights *= factor_scale
        if NUMBERS:
            weights += tl.load(row_numbers_ptr + o_row)[:, None]
            weights += tl.load(column_numbers_ptr + o_column)[None, :]
        plan = plan * weights
    o_out = o_block_row.to(tl.int64)[:, None] * width
    o_out += i_column * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    high = plan.to(tl.float16)
    tl.store(out_ptr + o_out, high)
    if LOW:
        low = (plan - high.to(tl.float32)).to(tl.float16)
        tl.store(out_ptr + height.to(tl.int64) * width + o_out, low)


def plan_tile(depth: int, device: torch.device, *, factors: bool, gather: bool) -> Tile:
    """The tile for products of `depth` coordinates.

    Two blocks of accumulators need more registers than four warps have.
    """
    if gather:
        return gathering_tile(device)
    return narrow_tile(device)._replace(warps=8) if factors else tile_for(depth, device)


class Weighting(NamedTuple):
    """The weights of entries, as a kernel reads them.

    Attributes:
        factors: A and B of each pair; in place of one that is not read any tensor, as every
            descriptor of a matrix takes a launch microseconds.
        rank: their coordinates.
        pairs: how many there are.
        numbers: s and t, over the unit.
        scale: of the products of the last pair, over the unit.
        ratio: of the products of the first pair, over those of the last.
        unit: the divisor of weighted entries.
    """

    factors: tuple[object, ...]
    rank: int = 0
    pairs: int = 0
    numbers: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0
    ratio: float = 1.0
    unit: float = 1.0


class PlanBlocks:
    """Fills blocks of Q, of the same potentials.

    Args:
        rows: n packed points.
        columns: m packed points.
        scores: how they make scores.
        terms: of the potentials.
        weighted: whether entries are weighted.
    """

    def __init__(
        self,
        rows: Side,
        columns: Side,
        scores: Scores,
        terms: PlanTerms,
        *,
        weighted: bool = False,
    ) -> None:
        self.rows, self.columns, self.scores = rows.points, columns.points, scores
        self.terms, self.device = terms, terms.bias.device
        self.dim = self.rows.coordinates.shape[1]
        self.tile = plan_tile(
            self.dim * scores.parts,
            self.device,
            factors=weighted,
            gather=not rows.points.layout.pure,
        )
        self._points = self._operands(self.rows, self.columns)
        self._not_read = (terms.bias, terms.bias)
        self.unweighted = Weighting(self._not_read * 2)

    def weighting(
        self,
        pairs: Sequence[Pair],
        most: float,
        factor: float = 1.0,
        numbers: tuple[Tensor, Tensor] | None = None,
    ) -> Weighting:
        """Weights of entries, W = factor (A B^T + ...) + s 1^T + 1 t^T.

        Args:
            pairs: one or two of A (n, r) and B (m, r), packed as the points.
            most: a bound of their sizes, such as `largest_weight`.
            factor: positive.
            numbers: s (n,) and t (m,) float32 in packed order; 0 for None.
        """
        # The pair on the finer scale goes first, so that its products do not overflow on the other.
        pairs = sorted(pairs, key=lambda pair: pair[0].scale * pair[1].scale, reverse=True)
        scales = [left.scale * right.scale for left, right in pairs]
        unit = 2.0 ** math.ceil(math.log2(max(most, 1e-30)))
        operands = [self._operands(*pair) for pair in pairs]
        return Weighting(
            operands[0] + (operands[1] if len(operands) == 2 else self._not_read),
            pairs[0][0].coordinates.shape[1],
            len(pairs),
            None if numbers is None else (numbers[0] / unit, numbers[1] / unit),
            factor / (scales[-1] * unit),
            scales[-1] / scales[0],
            unit,
        )

    @property
    def _sizes(self) -> tuple[int, int]:
        return block_shape(self.rows.layout.size, self.columns.layout.size)

    def heights(self) -> Iterator[slice]:
        """Yield the rows of one block after the other."""
        n, (height, _) = self.rows.layout.size, self._sizes
        for row in range(0, n, height):
            yield slice(row, min(row + height, n))

    def buffer(self) -> Tensor:
        """Allocate the blocks of a pass, float16."""
        height, width = self._sizes
        return torch.empty(self._stored * height * width, dtype=torch.float16, device=self.device)

    def blocks(
        self,
        rows: slice,
        buffer: Tensor,
        weighting: Weighting | None = None,
        sums: list[Tensor] | None = None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """The columns of one block of some rows after the other, and it.

        Args:
            rows: of `heights`.
            buffer: overwritten with every block.
            weighting: of the entries.
            sums: those of the rows are put here, (tiles, height) each, to be added up.
        """
        height, m, stored = rows.stop - rows.start, self.columns.layout.size, self._stored
        for column in range(0, m, self._sizes[1]):
            columns = slice(column, min(column + self._sizes[1], m))
            width = columns.stop - column
            block = buffer[: stored * height * width].view(stored, height, width)
            tile_sums = self(block, rows.start, column, weighting)
            if sums is not None:
                sums.append(tile_sums)
            yield columns, block

    @property
    def _stored(self) -> int:
        return 2 if self.scores.parts == 3 else 1

    def __call__(
        self, block: Tensor, row: int, column: int, weighting: Weighting | None = None
    ) -> Tensor:
        """Write Q, or Q o W, from (row, column) on to `block` (1 or 2, height, width).

        A block of one part takes no lo parts, however many the points have.

        Returns:
            Sums of the rows of each tile, (tiles, height), to be added up.
        """
        tile, (_, height, width) = self.tile, block.shape
        by = weighting or self.unweighted
        sums = torch.empty((width // tile.columns, height), device=self.device)
        layout, terms = self.rows.layout, self.terms
        plan_block_kernel[(height // BLOCK_ROWS * (width // tile.columns),)](
            *self._points,
            terms.bias,
            terms.row_term,
            terms.classes.costs,
            terms.classes.rows,
            terms.classes.columns,
            *by.factors,
            *((terms.bias, terms.bias) if by.numbers is None else by.numbers),
            block,
            sums,
            row,
            column,
            height,
            width,
            layout.size,
            self.columns.layout.size,
            self.scores.scale * terms.scale,
            terms.classes.costs.shape[1],
            terms.scale,
            by.scale,
            by.ratio,
            DIM=self.dim,
            RANK=by.rank,
            PAIRS=by.pairs,
            NUMBERS=by.numbers is not None,
            PARTS=self.scores.parts,
            LOW=len(block) == 2,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            STAGES=tile.stages,
            GROUP=GROUP,
            DESCRIPTORS=tile.descriptors,
            CLASSES=terms.classes.kind,
            num_warps=tile.warps,
        )
        return sums

    def _operands(self, left: PackedPoints, right: PackedPoints) -> tuple[object, object]:
        return (
            operand(left.coordinates, BLOCK_ROWS, self.tile),
            operand(right.coordinates, self.tile.columns, self.tile),
        )


def block_shape(n: int, m: int) -> tuple[int, int]:
    """Choose the height and width of a block of a plan (n, m).

    It has all rows if these are few, then half of all columns, as blocks cost launches.
    """
    height = n if n < 2 * BLOCK_HEIGHT else BLOCK_HEIGHT
    room = BLOCK_HEIGHT * BLOCK_WIDTH
    if height == n and n * m <= FEW_BLOCKS * room:
        blocks = 1 if n * m <= room else 2
        return n, triton.cdiv(m, blocks * BLOCK_COLUMNS) * BLOCK_COLUMNS
    fitting = room // height // BLOCK_COLUMNS * BLOCK_COLUMNS
    return height, min(m, BLOCK_WIDTH, fitting)


def largest_weight(
    pairs: Sequence[Pair], factor: float = 1.0, numbers: tuple[Tensor, Tensor] | None = None
) -> float:
    """A bound on all weights, by Cauchy-Schwarz; arguments as for `PlanBlocks.weighting`."""
    sizes = [side.squares[1].max() for pair in pairs for side in pair]
    sizes += [] if numbers is None else [side.abs().max() for side in numbers]
    found: list[float] = torch.stack(sizes).tolist()
    of_pairs = (math.sqrt(found[2 * k] * found[2 * k + 1]) for k in range(len(pairs)))
    return factor * sum(of_pairs) + sum(found[2 * len(pairs) :])
