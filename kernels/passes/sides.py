"""The inputs of passes, `Side` and `Scores`, and how their partial sums become potentials.

`operators.triton_operator` makes `Side` and `Scores`; `operators.triton_plans` changes the `parts`
of scores. All passes of this folder take them, except `plan_marginals`, which has sides of its own,
and `resident_half_step`, which gets tensors. `half_step` makes a `Partial`, which `merge_ranges`
reads.

`merge_ranges` makes potentials from sums over ranges of columns:

    f_i = lambda_x ||x_i||^2 - epsilon ln(2) (h_i + log2 sum_k s_ki 2^(h_ki - h_i))
    h_i = max_k h_ki

`half_step` calls `merge_ranges`; `symmetric_step` and `operators.triton_operator` use the limits
of a sum.

Shapes: h and s (slots, n) in packed order, f (N,) in the points' own order. A block of rows has as
many slots as ranges of columns; further slots are not read. A row whose sum leaves [2^-100, 2^100],
where float32 keeps its precision, marks its block to be done again if `mark` is given.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import LN_2, on_its_device
from otdd_flash.kernels.points.packed_points import PackedPoints
from otdd_flash.kernels.tiling import BLOCK_ROWS


class Side(NamedTuple):
    """One side of a cost, as half-steps read it.

    Attributes:
        points: packed.
        squares: (n,) float32, lambda_x ||x_i||^2 of the points as this precision rounds them.
        log2_masses: (n,) float32, very negative for points without mass and for padding.
    """

    points: PackedPoints
    squares: Tensor
    log2_masses: Tensor


class Scores(NamedTuple):
    """How the products and class distances of two sides become scores, in units of the cost.

    Attributes:
        scale: of a product of packed coordinates, 2 lambda_x over the square of their scale.
        costs: (V_x, V_y) float32, lambda_y W.
        parts: 1 product of hi parts, or 3 products of hi and lo parts.
    """

    scale: float
    costs: Tensor
    parts: int


class Partial(NamedTuple):
    """Sums over ranges of columns.

    Attributes:
        highest: (slots, n) float32, the highest logit of a row in a range, or its shift.
        sums: (slots, n) float32, of the exponentials so shifted.
        slots: (n / BLOCK_ROWS,) int32, ranges of each block of rows.
    """

    highest: Tensor
    sums: Tensor
    slots: Tensor


LEAST_SUM, LARGEST_SUM = 2.0**-100, 2.0**100


@on_its_device
@triton.jit
def merge_ranges_kernel(
    highest_ptr,  # (slots, n) float32
    sums_ptr,  # (slots, n) float32
    slots_ptr,  # (n / BLOCK_ROWS,) int32
    position_ptr,  # (N,) int64
    squares_ptr,  # (n,) float32, in units of the cost
    marked_ptr,  # (n / BLOCK_ROWS,) int32
    out_ptr,  # (N,) float32
    epsilon_ptr,  # () float64
    count,
    n,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MARK: tl.constexpr,
    ONLY_MARKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK points."""
    o_point = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_point = o_point < count
    position = tl.load(position_ptr + o_point, mask=m_point, other=0)
    i_block = position // BLOCK_ROWS
    p_marked = marked_ptr + i_block
    if ONLY_MARKED:
        m_point = m_point & (tl.load(p_marked, mask=m_point, other=0) != 0)
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    slots = tl.load(slots_ptr + i_block, mask=m_point, other=1)
    for slot in range(tl.max(slots, 0)):
        o_partial = slot * n.to(tl.int64) + position
        m_slot = m_point & (slot < slots)
        # Nothing is added where there is nothing, and the first slot is always there.
        partial = tl.load(highest_ptr + o_partial, mask=m_slot, other=-1e30)
        raised = tl.maximum(highest, partial)
        added = tl.load(sums_ptr + o_partial, mask=m_slot, other=0.0)
        sums = sums * tl.exp2(highest - raised) + added * tl.exp2(partial - raised)
        highest = raised
    if MARK:
        # NaN compares as neither, and so is not good.
        good = (sums >= LEAST) & (sums <= LARGEST)
        bad = tl.where(good, 0, 1)
        tl.store(p_marked, bad, mask=m_point & (bad > 0))
    squares = tl.load(squares_ptr + position, mask=m_point, other=0.0)
    factor = (tl.load(epsilon_ptr) * LN_2).to(tl.float32)
    out = squares - factor * (highest + tl.log2(sums))
    tl.store(out_ptr + o_point, out, mask=m_point)


def merge_ranges(
    partial: Partial,
    rows: Side,
    epsilon: Tensor,
    out: Tensor,
    *,
    mark: Tensor | None = None,
    only: Tensor | None = None,
) -> None:
    """Write the potentials of `rows` to `out` (N,).

    Args:
        partial: the sums of the ranges.
        rows: the side whose potential it is.
        epsilon: () float64, in units of the cost.
        out: (N,) float32, overwritten.
        mark: (n / BLOCK_ROWS,) int32, set to 1 for blocks that must be done again.
        only: (n / BLOCK_ROWS,) int32, not 0 for blocks that are written; others keep their values.
    """
    layout = rows.points.layout
    marked = mark if mark is not None else only
    merge_ranges_kernel[(triton.cdiv(len(out), 128),)](
        *partial,
        layout.position,
        rows.squares,
        layout.block_class if marked is None else marked,
        out,
        epsilon,
        len(out),
        layout.size,
        LEAST=LEAST_SUM,
        LARGEST=LARGEST_SUM,
        BLOCK_ROWS=BLOCK_ROWS,
        MARK=mark is not None,
        ONLY_MARKED=only is not None,
        BLOCK=128,
    )
