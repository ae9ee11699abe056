"""Points as the kernels want them: sorted by class, each class padded to whole blocks, in float16.

Coordinates are centred and scaled by a power of two 2^s so that the largest lies in [2^14, 2^15). A
float16 then carries the same 11 significant bits as a TF32 rounding of the original, and what
underflows is below 2^-39 of the largest. A second float16 holds what the first rounded off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedPoints:
    """One cloud in class-pure blocks of rows.

    Attributes:
        coordinates: (2 n, d) float16: n rows of hi parts, then their lo parts; d is padded to a
            multiple of 8, n to whole blocks.
        position: (N,) packed row of each of the N original points.
        origin: (n,) original row of each packed row; 0 for padding.
        filled: (n,) whether a packed row is a point.
        labels: (n,) class of each packed row.
        block_class: (n / block,) int32, class of each block.
    """

    coordinates: Tensor
    position: Tensor
    origin: Tensor
    filled: Tensor
    labels: Tensor
    block_class: Tensor

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
    points: Tensor, labels: Tensor, classes: int, exponent: int, *, block: int, multiple: int
) -> PackedPoints:
    """Sort points (N, d) by class, pad every class to `block` rows and all to `multiple`, round.

    Args:
        points: (N, d) float32 or float64, centred.
        labels: (N,) class indices in [0, classes).
        classes: how many there are; empty ones take no rows.
        exponent: s, of `power_of_two_scale`.
        block: rows per class-pure block.
        multiple: the total is padded to it; a multiple of `block`.
    """
    device = points.device
    counts = torch.bincount(labels, minlength=classes)
    padded = (counts + block - 1) // block * block
    starts = torch.cumsum(padded, 0) - padded
    total = int(padded.sum())
    size = (total + multiple - 1) // multiple * multiple

    order = torch.argsort(labels, stable=True)
    within = (
        torch.arange(len(labels), device=device) - (torch.cumsum(counts, 0) - counts)[labels[order]]
    )
    position = torch.empty_like(order)
    position[order] = starts[labels[order]] + within
    origin = torch.zeros(size, dtype=torch.int64, device=device)
    origin[position] = torch.arange(len(labels), device=device)
    filled = torch.zeros(size, dtype=torch.bool, device=device)
    filled[position] = True
    last_class = int(labels.max())
    row_class = torch.full((size,), last_class, dtype=torch.int64, device=device)
    row_class[:total] = torch.repeat_interleave(torch.arange(classes, device=device), padded)

    coordinates = _round_twice(points, position, size, exponent)
    block_class = row_class[::block].to(torch.int32).contiguous()
    return PackedPoints(coordinates, position, origin, filled, row_class, block_class)


def _round_twice(points: Tensor, position: Tensor, size: int, exponent: int) -> Tensor:
    dim = (points.shape[1] + 7) // 8 * 8
    coordinates = torch.zeros((2 * size, dim), dtype=torch.float16, device=points.device)
    scaled = points * 2.0**exponent
    high = scaled.to(torch.float16)
    coordinates[position, : points.shape[1]] = high
    low = (scaled - high.to(points.dtype)).to(torch.float16)
    coordinates[position + size, : points.shape[1]] = low
    return coordinates
