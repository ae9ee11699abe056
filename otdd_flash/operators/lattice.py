"""Points that are whole multiples of one step, as grey values of 8 bits are.

float16 holds every integer up to 2048. In units of the step, and less a centre on the same lattice,
such points lose nothing to it, and one product of their coordinates is as exact as three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.host_points import STREAMED_ROWS, slices
from otdd_flash.operators.labelled_cost import LabelledCost

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
        lowest: of all coordinates, in steps.
        highest: likewise.
    """

    scale: float
    centre: Tensor
    lowest: int
    highest: int


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
    lowest, highest = math.inf, -math.inf
    # Triton is not everywhere.
    from otdd_flash.kernels.points.lattice_facts import lattice_facts

    for pieces in _pieces(cost) if scales else ():
        tried = scales[0], scales[-1]
        facts = torch.cat([lattice_facts(rows, tried, ROUNDING) for rows in pieces])
        # One tensor, so that the host waits once.
        *beside, below, above = facts.amax(0).tolist()
        scales = [scale for scale in scales if not beside[tried.index(scale)]]
        if not scales:
            break
        lowest, highest = min(lowest, -below), max(highest, above)
    if not scales:
        return None
    scale = scales[0]
    centre = (cost.centre * scale).round() / scale
    return Lattice(scale, centre, round(lowest * scale), round(highest * scale))


def _pieces(cost: LabelledCost) -> Iterator[list[Tensor]]:
    """All points that the device holds at once, or the next of those that stream."""
    sides = list(cost.points[: 1 if cost.symmetric else 2])
    held = [points for points in sides if isinstance(points, Tensor)]
    if held:
        yield held
    for points in sides:
        if not isinstance(points, Tensor):
            # As a rule the first block says that there is no lattice.
            for rows in points.stream(slices(points.shape[0], STREAMED_ROWS)):
                yield [rows]
