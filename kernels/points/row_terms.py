"""What a row adds to the scores of all columns where a plan is computed, in base-2 logarithms.

    row_term_i = (f_i - lambda_x ||x_i||^2) log2(e) / epsilon + LOG2_SCALE

Shapes: f (N,) and masses (N,) in the points' own order; squares and row terms (n,) in packed order.
Rows of padding are not there, nor are those of points without mass where masses are given.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.kernels.tiling import BLOCK_COLUMNS

# Q is scaled by 2^10: rows whose sums lie in this range neither overflow nor lose bits.
LOG2_SCALE = 10
ROW_RANGE = 2.0**-5, 2.0**5
# The exponent of a row that is not there.
NOTHING = -1e30


@on_its_device
@triton.jit
def row_terms_kernel(
    potential_ptr,  # (N,) float32, in units of the cost
    masses_ptr,  # (N,) float64, read if MASSES
    origin_ptr,  # (n,) int64
    filled_ptr,  # (n,) bool
    squares_ptr,  # (n,) float32, in units of the cost
    out_ptr,  # (n,) float32
    scale,
    raised,
    nothing,
    MASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK rows."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tl.load(filled_ptr + o) != 0
    origin = tl.load(origin_ptr + o)
    if MASSES:
        there = there & (tl.load(masses_ptr + origin, mask=there, other=0.0) > 0)
    potential = tl.load(potential_ptr + origin, mask=there, other=0.0)
    term = (potential - tl.load(squares_ptr + o)) * scale + raised
    tl.store(out_ptr + o, tl.where(there, term, nothing))


def row_terms(
    potential: Tensor, masses: Tensor | None, layout: Layout, squares: Tensor, scale: float
) -> Tensor:
    """The row terms (n,), float32.

    Args:
        potential: f (N,) float32, in units of the cost.
        masses: (N,) float64, of which points without are not there; all are for None.
        layout: of the rows.
        squares: (n,) float32, lambda_x ||x_i||^2.
        scale: log2(e) / epsilon.
    """
    out = torch.empty(layout.size, dtype=torch.float32, device=potential.device)
    row_terms_kernel[(layout.size // BLOCK_COLUMNS,)](
        potential,
        potential if masses is None else masses,
        layout.origin,
        layout.filled,
        squares,
        out,
        scale,
        float(LOG2_SCALE),
        NOTHING,
        MASSES=masses is not None,
        BLOCK=BLOCK_COLUMNS,
    )
    return out
