"""Points that are whole multiples of one step, as grey values of 8 bits are.

float16 holds every integer up to 2048. In units of the step, and less a centre on the same lattice,
such points lose nothing to it, and one product of their coordinates is as exact as three.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
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


class _Told(NamedTuple):
    """Of some points: whether one is beside the lattice of each of `SCALES`, and their ends."""

    beside: tuple[bool, bool]
    lowest: float
    highest: float


def _found(cost: LabelledCost) -> Lattice | None:
    scales = [scale for scale in SCALES if cost.largest * scale + 1 <= LARGEST_INTEGER]
    lowest, highest = math.inf, -math.inf
    for told in _told(cost) if scales else ():
        scales = [scale for scale in scales if not told.beside[SCALES.index(scale)]]
        if not scales:
            return None
        lowest, highest = min(lowest, told.lowest), max(highest, told.highest)
    if not scales:
        return None
    scale = scales[0]
    centre = (cost.centre * scale).round() / scale
    return Lattice(scale, centre, round(lowest * scale), round(highest * scale))


def _told(cost: LabelledCost) -> Iterator[_Told]:
    """Yield the lattice facts of both clouds, cached ones first, then block by block."""
    clouds = cost.clouds[: 1 if cost.symmetric else 2]
    yield from (cloud.known["lattice"] for cloud in clouds if "lattice" in cloud.known)
    new = {cloud: cloud.points for cloud in clouds if "lattice" not in cloud.known}
    held = {cloud: points for cloud, points in new.items() if isinstance(points, Tensor)}
    told = _asked(held.values())
    for cloud, each in zip(held, told, strict=True):
        cloud.known["lattice"] = each
    yield from told
    for points in new.values():
        if not isinstance(points, Tensor):
            # As a rule the first block says that there is no lattice.
            for rows in points.stream(slices(points.shape[0], STREAMED_ROWS)):
                yield from _asked([rows])


def _asked(clouds: Collection[Tensor]) -> list[_Told]:
    if not clouds:
        return []
    # Triton is not everywhere.
    from otdd_flash.kernels.points.lattice_facts import lattice_facts

    facts = [lattice_facts(points, SCALES, ROUNDING).amax(0) for points in clouds]
    # One tensor, so that the host waits once.
    return [
        _Told((bool(first), bool(last)), -below, above)
        for first, last, below, above in torch.stack(facts).tolist()
    ]
