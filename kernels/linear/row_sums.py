"""The sums of a plan's rows, and whether float16 numbers are what they may sum to.

    out_i = a_i sum_i

`operators.triton_plans` calls `row_sums`.

Shapes: sums (stored, parts, 1) as products leave them, a (N,) masses and out (N,) float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.linear.halves import Unmerged, load_found
from otdd_flash.kernels.passes.plan_terms import ROW_RANGE
from otdd_flash.kernels.points.packed_points import Layout

BLOCK = 1024


@on_its_device
@triton.jit
def row_sums_kernel(
    found_ptr,  # (stored, PARTS, 1) float32, of any strides
    masses_ptr,  # (N,) float64
    position_ptr,  # (N,) int64
    out_ptr,  # (N,) float64
    fits_ptr,  # (programs,) bool
    count,
    row_stride,
    part_stride,
    column_stride,
    whole,
    split,
    slots,
    unit,
    lowest,
    highest,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK points."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < count
    o_row = tl.load(position_ptr + o, mask=mask, other=0)
    sums = load_found(found_ptr, o_row, row_stride, part_stride, whole, split, slots, mask, PARTS)
    sums *= unit
    masses = tl.load(masses_ptr + o, mask=mask, other=0.0)
    tl.store(out_ptr + o, masses * sums, mask=mask)
    fits = ((sums >= lowest) & (sums <= highest)) | (masses <= 0)
    tl.store(fits_ptr + tl.program_id(0), tl.min(fits.to(tl.int32), 0) > 0)


def row_sums(
    found: Unmerged, layout: Layout, masses: Tensor, unit: float = 1.0
) -> tuple[Tensor, bool]:
    """The sums (N,) float64, and whether they are in `ROW_RANGE` over masses; waits for that.

    Args:
        found: sums of rows over their masses and the unit.
        layout: of the rows.
        masses: (N,) float64; the sums of points without are 0, whatever they were.
        unit: of the sums.
    """
    count = len(layout.position)
    programs = triton.cdiv(count, BLOCK)
    out = torch.empty(count, dtype=torch.float64, device=masses.device)
    fits = torch.empty(programs, dtype=torch.bool, device=masses.device)
    row_sums_kernel[(programs,)](
        found.values,
        masses,
        layout.position,
        out,
        fits,
        count,
        *found.places,
        unit,
        *ROW_RANGE,
        PARTS=found.values.shape[1],
        BLOCK=BLOCK,
    )
    return out, all(fits.tolist())
