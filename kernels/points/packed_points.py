"""Points in the order and precision of kernels: class-pure blocks if that pays, float16.

Points are sorted by class and each class is padded to whole blocks of rows. With many small classes
most rows would be padding: then only the whole cloud is padded, and a tile of scores gathers class
distances, which are neighbours in memory because points are sorted.

Coordinates are centred and scaled, as a rule by the power of two that brings the largest into
[2^14, 2^15). A float16 then carries the same 11 significant bits as a TF32 rounding of the
original, and an underflow loses less than 2^-39 of the largest. A second float16 holds the rounding
of the first.

`operators.triton_operator`, `operators.triton_plans` and `passes.block_products` call `pack`; the
first and `operators.ring` call `arrange`. Passes and products of plans read `PackedPoints` and
their `Layout`. A change must keep `squares` those of the coordinates as rounded, and the layout a
function of the labels alone, because each rank computes the layouts of all shards
(`operators.ring`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.tiling import BLOCK_COLUMNS, BLOCK_ROWS

# Rows of class-pure blocks over rows without: beyond it, gathering per score is faster.
MOST_PADDING = 1.5


@triton.jit
def load_scaled(
    points_ptr,  # (N, d), any real type and strides
    centre_ptr,  # (d,) float64
    origin,  # (BLOCK_M,) int64, row of points times their stride
    filled,  # (BLOCK_M,) whether they are points
    o_k,  # (BLOCK_K,)
    d,
    column_stride,
    scale,
):
    """Coordinates o_k of some points, (point - centre) scale in float64; padding is 0."""
    mask = filled[:, None] & (o_k[None, :] < d)
    points = tl.load(
        points_ptr + origin[:, None] + o_k[None, :].to(tl.int64) * column_stride,
        mask=mask,
        other=0.0,
    )
    centre = tl.load(centre_ptr + o_k, mask=o_k < d, other=0.0)
    # (BLOCK_M, BLOCK_K)
    return tl.where(mask, points.to(tl.float64) - centre[None, :], 0.0) * scale


@on_its_device
@triton.jit
def pack_kernel(
    points_ptr,  # (N, d), any real type and strides
    centre_ptr,  # (d,) float64
    origin_ptr,  # (n,) int64
    filled_ptr,  # (n,) bool
    out_ptr,  # (2 n, DIM) float16
    squares_ptr,  # (2, n) float32
    n,
    d,
    row_stride,
    column_stride,
    scale,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_M packed rows: both parts, and the squared norms that they give."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    origin = tl.load(origin_ptr + o_row) * row_stride
    filled = tl.load(filled_ptr + o_row) != 0
    squares_high = tl.zeros((BLOCK_M,), tl.float64)
    squares = tl.zeros((BLOCK_M,), tl.float64)
    for k in range(0, DIM, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        scaled = load_scaled(
            points_ptr, centre_ptr, origin, filled, o_k, d, column_stride, scale
        )  # (BLOCK_M, BLOCK_K)
        high = scaled.to(tl.float32).to(tl.float16)
        low = (scaled - high.to(tl.float64)).to(tl.float32).to(tl.float16)
        o_out = o_row[:, None] * DIM + o_k[None, :]
        tl.store(out_ptr + o_out, high, mask=o_k[None, :] < DIM)
        tl.store(out_ptr + n.to(tl.int64) * DIM + o_out, low, mask=o_k[None, :] < DIM)
        first = high.to(tl.float64)
        both = first + low.to(tl.float64)
        squares_high += tl.sum(first * first, 1)
        squares += tl.sum(both * both, 1)
    tl.store(squares_ptr + o_row, (squares_high / scale / scale).to(tl.float32))
    tl.store(squares_ptr + n + o_row, (squares / scale / scale).to(tl.float32))


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of the rows of a cloud in blocks.

    Attributes:
        position: (N,) packed row of each of the N original points.
        origin: (n,) original row of each packed row; 0 for padding.
        filled: (n,) whether a packed row is a point.
        labels: (n,) int32, class of each packed row.
        block_class: (n / BLOCK_ROWS,) int32, class of each block; 0 if blocks are not pure.
        pure: whether all rows of a block have one class.
    """

    position: Tensor
    origin: Tensor
    filled: Tensor
    labels: Tensor
    block_class: Tensor
    pure: bool

    @property
    def size(self) -> int:
        """Packed rows n, padding included."""
        return self.origin.shape[0]

    @cached_property
    def ordered(self) -> bool:
        """Whether points stand in their own order, with all padding after them."""
        order = torch.arange(len(self.position), device=self.position.device)
        return torch.equal(self.position, order)

    def points_of(self, rows: slice) -> tuple[slice | Tensor, slice | Tensor]:
        """The points (k,) of some packed rows, and which of these rows are theirs (k,)."""
        if self.ordered:
            start, stop = (min(row, len(self.position)) for row in (rows.start, rows.stop))
            return slice(start, stop), slice(0, stop - start)
        places = self.filled[rows].nonzero()[:, 0]
        return self.origin[rows][places], places

    @cached_property
    def _padding(self) -> Tensor:
        return ~self.filled

    def spread(self, values: Tensor, padding: float) -> Tensor:
        """Values (N,) in packed order (n,)."""
        return values[self.origin].masked_fill_(self._padding, padding)


@dataclass(frozen=True, eq=False)
class PackedPoints:
    """One cloud in blocks of rows.

    Attributes:
        layout: where each point stands.
        coordinates: (2 n, d) float16: n rows of hi parts, then their lo parts; d is padded to a
            multiple of 8.
        squares: (2, n) float32, ||x_i||^2 of the hi parts, and of the sums of both.
        scale: coordinates are the centred points times this.
    """

    layout: Layout
    coordinates: Tensor
    squares: Tensor
    scale: float

    def some(self, rows: slice | Tensor, dim: int) -> Tensor:
        """Return some points (k, dim), float32, as sums of both parts."""
        high, low = self.coordinates[:, :dim].chunk(2)
        places = rows if self.layout.ordered else self.layout.position[rows]
        return high[places].float().add_(low[places]).div_(self.scale)

    def rounded(self, parts: int) -> Tensor:
        """The points (N, d), float64, that a kernel sees with 1 or 3 parts."""
        high, low = self.coordinates.double().chunk(2)
        return (high if parts == 1 else high + low)[self.layout.position] / self.scale


def arrange(labels: Tensor, classes: int) -> Layout:
    """Order N labelled points in blocks of rows.

    Args:
        labels: (N,) class indices below `classes`.
        classes: their number V.
    """
    count = len(labels)
    if classes == 1:
        rows = torch.arange(_up(count, BLOCK_COLUMNS), device=labels.device)
        filled, of_class = rows < count, torch.zeros_like(rows, dtype=torch.int32)
        blocks = of_class[: len(rows) // BLOCK_ROWS]
        return Layout(rows[:count], rows * filled, filled, of_class, blocks, True)
    counts = torch.bincount(labels, minlength=classes)
    padded = _up(counts, BLOCK_ROWS)
    ends = torch.cumsum(padded, 0)
    size = int(ends[-1])
    pure = size <= MOST_PADDING * _up(count, BLOCK_ROWS)
    order = torch.argsort(labels, stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(count, device=labels.device)
    if not pure:
        return _layout(labels, position, _up(count, BLOCK_COLUMNS), pure=False)
    position += ((ends - padded) - (torch.cumsum(counts, 0) - counts))[labels]
    return _layout(labels, position, _up(size, BLOCK_COLUMNS), pure=True)


def pack(points: Tensor, layout: Layout, centre: Tensor, scale: float) -> PackedPoints:
    """Centre, scale and round points (N, d) into a layout.

    Args:
        points: (N, d) of any real type and strides.
        layout: of `arrange`.
        centre: (d,) float64, subtracted.
        scale: of `power_of_two_scale`, or one that makes all coordinates integers up to 2048.
    """
    n, d = layout.size, points.shape[1]
    dim = _up(d, 8)
    coordinates = torch.empty((2 * n, dim), dtype=torch.float16, device=points.device)
    squares = torch.empty((2, n), dtype=torch.float32, device=points.device)
    block_m, block_k = (8, 128) if points.is_cuda else (BLOCK_ROWS, triton.next_power_of_2(dim))
    pack_kernel[(n // block_m,)](
        points,
        centre,
        layout.origin,
        layout.filled,
        coordinates,
        squares,
        n,
        d,
        *points.stride(),
        scale,
        DIM=dim,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return PackedPoints(layout, coordinates, squares, scale)


def power_of_two_scale(largest: float) -> float:
    """The power of two that brings the largest coordinate, times it, into [2^14, 2^15).

    It stays a normal float32: smaller data underflow, larger ones cannot be squared.
    """
    return 1.0 if largest == 0 else 2.0 ** max(-100, min(100, 14 - math.floor(math.log2(largest))))


def _layout(labels: Tensor, position: Tensor, size: int, *, pure: bool) -> Layout:
    origin = torch.zeros(size, dtype=torch.int64, device=labels.device)
    origin[position] = torch.arange(len(labels), device=labels.device)
    filled = torch.zeros(size, dtype=torch.bool, device=labels.device)
    filled[position] = True
    # A block's first row is a point, or the whole block is padding.
    rows = torch.where(filled, labels[origin], 0).to(torch.int32)
    first = rows[::BLOCK_ROWS].contiguous()
    return Layout(position, origin, filled, rows, first if pure else torch.zeros_like(first), pure)


def _up(count: Any, multiple: int) -> Any:
    """The next multiple, of an integer or of each in a tensor."""
    return (count + multiple - 1) // multiple * multiple
