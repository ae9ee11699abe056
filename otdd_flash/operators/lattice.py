"""Points that are whole multiples of one step, as grey values of 8 bits are.

float16 holds every integer up to 2048. In units of the step, and less a centre on the same lattice,
such points lose nothing to it, and one product of their coordinates is as exact as three.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.host_points import STREAMED_ROWS, slices
from otdd_flash.operators.labelled_cost import LabelledCost, Points

# Steps per unit: of counts and raw grey values, and of grey values divided by 255.
SCALES = (1.0, 255.0)

# float16 holds all integers up to here.
LARGEST_INTEGER = 2048

# How far a multiple of a step that was rounded to float32 may be off, relatively.
ROUNDING = torch.finfo(torch.float32).eps


class Lattice(NamedTuple):
    """Where all points of a cost lie.

    Attributes:
        scale: steps between neighbouring values of a coordinate in one unit of the points.
        centre: (d,) float64, a point of it near the points' centre.
    """

    scale: float
    centre: Tensor


def lattice_of(cost: LabelledCost) -> Lattice | None:
    """The lattice that holds all points, if float16 holds their coordinates on it."""
    # Parts of a cost take the points as the others do, and ask once.
    whole = cost.whole
    if "lattice" not in whole.known:
        whole.known["lattice"] = _found(whole)
    lattice: Lattice | None = whole.known["lattice"]
    return lattice


def _found(cost: LabelledCost) -> Lattice | None:
    scales = [scale for scale in SCALES if cost.largest * scale + 1 <= LARGEST_INTEGER]
    if not scales:
        return None
    sides = list(zip(cost.points, (cost.a, cost.b), strict=True))[: 1 if cost.symmetric else 2]
    squares = [[masses @ _distances(points, scale) for points, masses in sides] for scale in scales]
    # One tensor, so that the host waits once.
    roots = torch.stack([torch.stack(row) for row in squares]).sqrt().mean(1).tolist()
    for scale, root in zip(scales, roots, strict=True):
        if not math.isnan(root):
            centre = (cost.centre * scale).round() / scale
            return Lattice(scale, centre)
    return None


def _distances(points: Points, scale: float) -> Tensor:
    """What `lattice_distance` says of every point (n,)."""
    # Triton is not everywhere.
    from otdd_flash.kernels.points.lattice_distance import lattice_distance

    if isinstance(points, Tensor):
        return lattice_distance(points, scale, ROUNDING)
    blocks = slices(points.shape[0], STREAMED_ROWS)
    return torch.cat([lattice_distance(rows, scale, ROUNDING) for rows in points.stream(blocks)])
