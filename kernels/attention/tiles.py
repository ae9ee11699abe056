"""Tiles of the passes of Sinkhorn attention, and what their kernels load and compute alike.

A program has one block of rows of one head, loads it once and streams all columns of that head.
Rows and columns are queries and keys, or keys and queries. Scores and potentials of half types are
multiplied by log2(e) where they are added, one operation a score, for exp2. Of float32 that would
cost digits: large ones cancel before they are multiplied. On a processor blocks are large, as
Triton's interpreter pays for each tile. The three other files of this folder load and compute by
these functions; `otdd_flash.attention.passes` calls `launch`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.errors import InputError

# The narrowest operand of a product on tensor cores.
NARROWEST = 16

# Entries of a matrix of one head, whose places in it, and past its end in the last tile, are int32:
# fewer operations a load.
MOST_ENTRIES = 2**31 - 2**10

LOG2_E = tl.constexpr(1.4426950408889634)


class Blocks(NamedTuple):
    """Rows of a program, columns that it loads at once, warps and stages."""

    rows: int
    columns: int
    warps: int
    stages: int


def blocks_for(kind: str, width: int, dtype: torch.dtype, device: torch.device) -> Blocks:
    """Return the blocks of a pass.

    Args:
        kind: `vector` where the result is a number a row, `matrix` where it is a row of a matrix
            too, `gradient`.
        width: the wider of the padded d and e.
        dtype: of q, k and v.
        device: where they are.
    """
    if device.type != "cuda":
        return Blocks(128, 128, 4, 1)
    wide = width * dtype.itemsize
    if wide <= 128:
        # The fastest of 12 on an H100, at d = e = 64 in float16.
        rows, columns = {"vector": (64, 128), "gradient": (128, 32)}.get(kind, (128, 64))
        return Blocks(rows, columns, 4, 3)
    if wide <= 256:
        rows = 64 if kind == "gradient" else 128
        return Blocks(rows, 128 if kind == "vector" else 64, 8, 2)
    if wide <= 512:
        return Blocks(64, 64 if kind == "vector" else 32, 4 if kind == "vector" else 8, 2)
    return Blocks(32 if kind == "gradient" else 64, 32, 8, 1)


def padded_width(width: int) -> int:
    """The power of two to which coordinates are padded in registers."""
    return max(NARROWEST, int(triton.next_power_of_2(width)))


def launch(
    kernel: Any,
    kind: str,
    points: tuple[Tensor, Tensor],
    scale: float,
    counts: Tensor,
    width: int,
    *given: Tensor | int,
    **constants: Any,
) -> None:
    """Launch a kernel with a program for each block of rows.

    Args:
        kernel: takes rows, columns, counts, n, m and the scale, then `given`.
        kind: of the pass, see `blocks_for`.
        points: rows (H, n, d) and columns (H, m, d), contiguous as all tensors.
        scale: of the scores.
        counts: (H,) int32, how many iterations each head makes.
        width: e where matrices are read, else 0.
        *given: what else it reads and writes; vectors are float32.
        **constants: beyond those of tiles.
    """
    (rows, columns), depth = points, padded_width(points[0].shape[2])
    (heads, n, dim), padded = rows.shape, padded_width(width) if width else 0
    m = columns.shape[1]
    if max(n, m) * max(dim, width) >= MOST_ENTRIES:
        raise InputError(f"a head has {max(n, m):,} points, too many for kernels; use fewer")
    blocks = blocks_for(kind, max(depth, padded), rows.dtype, rows.device)
    # Of float32: three products of TF32 have its accuracy but for some units.
    constants["PRECISION"] = "tf32x3" if rows.dtype == torch.float32 else "tf32"
    constants["HALF"] = rows.dtype != torch.float32
    constants |= {"DIM": dim, "WIDTH": width, "BLOCK_D": depth, "BLOCK_E": padded}
    constants |= {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.columns}
    constants |= {"num_warps": blocks.warps, "num_stages": blocks.stages}
    grid = (heads * triton.cdiv(n, blocks.rows),)
    kernel[grid](rows, columns, counts, n, m, scale, *given, **constants)


@triton.jit
def block_of(n, BLOCK_M: tl.constexpr):
    """The head of a program, int64, and the rows of its block, int32."""
    blocks = tl.cdiv(n, BLOCK_M)
    i_head = (tl.program_id(0) // blocks).to(tl.int64)
    return i_head, (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def load_block(pointer, o_row, rows, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of a matrix (rows, DIM) of a head; 0 past its ends."""
    o_dim = tl.arange(0, BLOCK_D)
    return tl.load(
        pointer + o_row[:, None] * DIM + o_dim[None, :],
        mask=(o_row < rows)[:, None] & (o_dim < DIM)[None, :],
        other=0.0,
    )


@triton.jit
def in_units(values, HALF: tl.constexpr):
    """Exponents, or a scale of them, in the units of `power`."""
    return values * LOG2_E if HALF else values


@triton.jit
def power(exponents, HALF: tl.constexpr):
    """The exponentials of exponents that are `in_units`."""
    return tl.exp2(exponents) if HALF else tl.exp(exponents)


@triton.jit
def logarithm(sums, HALF: tl.constexpr):
    """The inverse of `power`."""
    return tl.log2(sums) if HALF else tl.log(sums)


@triton.jit
def from_units(values, HALF: tl.constexpr):
    """The inverse of `in_units`."""
    return values / LOG2_E if HALF else values
