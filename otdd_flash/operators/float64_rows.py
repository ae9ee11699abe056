"""Points in float64, a few rows at a time: no float64 copy of all is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.features.file_features import FileFeatures
from otdd_flash.operators.host_points import PIECE_BYTES, HostPoints, slices

# Points (n, d) on the device, or what streams them there.
Points = Tensor | HostPoints

# Coordinates that are in float64 at once: 2 MiB stay near a core's cache. A GPU has room for 32 MiB
# and takes longer to launch a pass over 16 MiB than to run it.
CHUNK_ELEMENTS_CPU = 1 << 18
CHUNK_ELEMENTS_GPU = 1 << 22


class Extent(NamedTuple):
    """Where a cloud lies.

    Attributes:
        mean: sum_i a_i x_i (d,), float64.
        ends: the lowest and the highest value of every coordinate, (d,) each.
    """

    mean: Tensor
    ends: tuple[Tensor, Tensor]


def in_float64(points: Points, centre: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """All rows (N, d), less a centre (d,) float64, in one buffer that the caller may change.

    A few at a time. A GPU centres them as it copies them, in one pass; a CPU would make a copy of
    its own in float64 for that.
    """
    count, dim = points.shape
    elements = CHUNK_ELEMENTS_GPU if points.is_cuda else CHUNK_ELEMENTS_CPU
    size = min(count, max(1, elements // dim))
    buffer = torch.empty((size, dim), dtype=torch.float64, device=points.device)
    held: Iterable[Tensor]
    if isinstance(points, HostPoints):
        # On a GPU few blocks: each has to be waited for.
        blocks = max(1, PIECE_BYTES // (4 * elements)) if points.is_cuda else 1
        held = points.stream(slices(count, blocks * size))
    else:
        held = [points]
    first = 0
    for there in held:
        for rows in torch.split(there, size):
            some = buffer[: len(rows)]
            if centre is None:
                some.copy_(rows)
            elif rows.device.type == "cpu":
                some.copy_(rows).sub_(centre)
            else:
                torch.sub(rows, centre, out=some)
            yield slice(first, first + len(rows)), some
            first += len(rows)


def squared_distances(points: Points, *centres: Tensor) -> Tensor:
    """||x_i - c||^2 (n,), float64, or (k, n) from several centres (d,): rows are read once."""
    shape = len(centres), points.shape[0]
    lengths = torch.empty(shape, dtype=torch.float64, device=points.device)
    alone = centres[0] if len(centres) == 1 else None
    for part, rows in in_float64(points, alone):
        for place, centre in enumerate(centres):
            centred = rows if alone is not None else rows - centre
            torch.linalg.vector_norm(centred, dim=1, out=lengths[place, part])
    found = lengths.square_()
    return found if alone is None else found[0]


def squared_norms(points: Points) -> Tensor:
    """||x_i||^2 (n,), float64."""
    lengths = torch.empty(points.shape[0], dtype=torch.float64, device=points.device)
    for part, rows in in_float64(points):
        torch.linalg.vector_norm(rows, dim=1, out=lengths[part])
    return lengths.square_()


def weighted_sum(points: Points, masses: Tensor, centre: Tensor | None = None) -> Tensor:
    """sum_i a_i x_i (d,), or sum_i a_i (x_i - c), float64, for masses (n,) on the device."""
    total = masses.new_zeros((1, points.shape[1]))
    for part, rows in in_float64(points, centre):
        total.addmm_(masses[None, part], rows)
    return total[0]


def weighted_mean(points: Points, masses: Tensor) -> Tensor:
    """sum_i a_i x_i (d,), float64, for masses (n,) on the device."""
    if isinstance(points, HostPoints):
        return extent(points, masses).mean
    return weighted_sum(points, masses)


def extent(points: Points, masses: Tensor) -> Extent:
    """Where points of masses (n,) lie; those that stream, or are in files, are read once."""
    if isinstance(points, HostPoints):
        return points.recalled("extent", (masses,), partial(_extent_read, points, masses))
    if isinstance(points, FileFeatures):
        return _extent_read(points, masses)
    return Extent(weighted_sum(points, masses), (points.amin(0), points.amax(0)))


def centred(points: Points, centre: Tensor, dtype: torch.dtype) -> Tensor:
    """Points minus a centre (d,), subtracted in float64 and rounded once."""
    out = torch.empty(points.shape, dtype=dtype, device=points.device)
    for part, rows in in_float64(points, centre):
        out[part] = rows
    return out


def _extent_read(points: Points, masses: Tensor) -> Extent:
    total = masses.new_zeros((1, points.shape[1]))
    lowest, highest = torch.full_like(total[0], torch.inf), torch.full_like(total[0], -torch.inf)
    for part, rows in in_float64(points):
        total.addmm_(masses[None, part], rows)
        torch.minimum(lowest, rows.amin(0), out=lowest)
        torch.maximum(highest, rows.amax(0), out=highest)
    return Extent(total[0], (lowest, highest))
