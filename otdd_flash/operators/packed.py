"""Points as the kernels want them: in class-pure blocks if that pays, and in float16.

Points are sorted by class and each class is padded to whole blocks of rows. With many small classes
that would be mostly padding: then only the whole is padded, and rows keep their order.

Coordinates are centred and scaled by a power of two 2^s so that the largest lies in [2^14, 2^15). A
float16 then carries the same 11 significant bits as a TF32 rounding of the original, and what
underflows is below 2^-39 of the largest. A second float16 holds what the first rounded off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Rows of class-pure blocks over rows without: beyond it, gathering per score is faster.
MOST_PADDING = 1.5


@dataclass(frozen=True, eq=False)
class PackedPoints:
    """One cloud in blocks of rows.

    Attributes:
        coordinates: (2 n, d) float16: n rows of hi parts, then their lo parts; d is padded to a
            multiple of 8, n to whole blocks.
        position: (N,) packed row of each of the N original points.
        origin: (n,) original row of each packed row; 0 for padding.
        filled: (n,) whether a packed row is a point.
        labels: (n,) int32, class of each packed row.
        block_class: (n / block,) int32, class of each block; 0 if blocks are not pure.
        pure: whether all rows of a block have one class.
    """

    coordinates: Tensor
    position: Tensor
    origin: Tensor
    filled: Tensor
    labels: Tensor
    block_class: Tensor
    pure: bool

    def rounded(self, parts: int, exponent: int) -> Tensor:
        """The points (n, d), float64, that a kernel sees with 1 or 3 parts."""
        high, low = self.coordinates.double().chunk(2)
        return (high if parts == 1 else high + low) * 2.0**-exponent

    def squares(self, parts: int, exponent: int) -> Tensor:
        """||x_i||^2 (n,), float64, of the points that a kernel sees."""
        return self.rounded(parts, exponent).square().sum(1)


def power_of_two_scale(*clouds: Tensor) -> int:
    """The s that brings the largest coordinate of all clouds, times 2^s, into [2^14, 2^15)."""
    largest = max(float(points.abs().max()) for points in clouds)
    return 0 if largest == 0 else 14 - math.floor(math.log2(largest))


def pack(
    points: Tensor, labels: Tensor, exponent: int, *, block: int, multiple: int
) -> PackedPoints:
    """Order points (N, d) in blocks of rows, pad, and round.

    Args:
        points: (N, d) float32 or float64, centred.
        labels: (N,) class indices.
        exponent: s, of `power_of_two_scale`.
        block: rows per block.
        multiple: the total is padded to it; a multiple of `block`.
    """
    counts = torch.bincount(labels)
    padded = _up(counts, block)
    pure = int(padded.sum()) <= MOST_PADDING * _up(len(labels), block)
    groups = labels if pure else torch.zeros_like(labels)
    if not pure:
        counts = counts.sum().unsqueeze(0)
        padded = _up(counts, block)
    size = _up(int(padded.sum()), multiple)

    order = torch.argsort(groups, stable=True)
    within = torch.arange(len(labels), device=labels.device)
    within = within - (torch.cumsum(counts, 0) - counts)[groups[order]]
    position = torch.empty_like(order)
    position[order] = (torch.cumsum(padded, 0) - padded)[groups[order]] + within
    origin = torch.zeros(size, dtype=torch.int64, device=labels.device)
    origin[position] = torch.arange(len(labels), device=labels.device)
    filled = torch.zeros(size, dtype=torch.bool, device=labels.device)
    filled[position] = True

    # A block's first row is a point, or the whole block is padding.
    row_labels = torch.where(filled, labels[origin], 0).to(torch.int32)
    block_class = (
        row_labels[::block].contiguous() if pure else torch.zeros_like(row_labels[::block])
    )
    coordinates = _round_twice(points, position, size, exponent)
    return PackedPoints(coordinates, position, origin, filled, row_labels, block_class, pure)


def _up(count: Any, multiple: int) -> Any:
    """The next multiple, of an integer or of each in a tensor."""
    return (count + multiple - 1) // multiple * multiple


def _round_twice(points: Tensor, position: Tensor, size: int, exponent: int) -> Tensor:
    dim = (points.shape[1] + 7) // 8 * 8
    coordinates = torch.zeros((2 * size, dim), dtype=torch.float16, device=points.device)
    scaled = points * 2.0**exponent
    high = scaled.to(torch.float16)
    coordinates[position, : points.shape[1]] = high
    low = (scaled - high.to(points.dtype)).to(torch.float16)
    coordinates[position + size, : points.shape[1]] = low
    return coordinates
