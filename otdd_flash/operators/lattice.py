"""Points that are whole multiples of one step, as grey values of 8 bits are.

float16 holds every integer up to 2048. In units of the step, and less a centre on the same lattice,
such points lose nothing to it, and one product of their coordinates is as exact as three.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.labelled_cost import LabelledCost, in_float64

# Counts and raw grey values; grey values divided by 255.
STEPS = (1.0, 1 / 255)

# float16 holds all integers up to here.
LARGEST_INTEGER = 2048

# How far a multiple of a step that was rounded to float32 may be off, relatively.
ROUNDING = torch.finfo(torch.float32).eps


class Lattice(NamedTuple):
    """Where all points of a cost lie.

    Attributes:
        step: between neighbouring values of a coordinate, in units of the points.
        centre: (d,) float64, a point of it near the points' centre.
        cost_error: bound on what moving every point onto it changes costs by, taken as the mean
            over an optimal plan, in units of the cost.
    """

    step: float
    centre: Tensor
    cost_error: float


def lattice_of(cost: LabelledCost) -> Lattice | None:
    """The lattice that holds all points, if float16 holds their coordinates on it.

    If points x_i and y_j move by u_i and v_j, C_ij changes by about 2 lambda_x <x_i - y_j,
    u_i - v_j>. By Cauchy and Schwarz the mean over a plan of at most the mean cost is at most
    2 sqrt(lambda_x mean C) (rms u + rms v).
    """
    clouds = list(zip(cost.points, (cost.a, cost.b), strict=True))
    if cost.symmetric:
        clouds = clouds[:1] * 2
    for step in STEPS:
        if cost.largest / step + 1 > LARGEST_INTEGER:
            continue
        errors = [_distance(points, masses, step) for points, masses in clouds]
        if None not in errors:
            moved = sum(error for error in errors if error is not None)
            change = 2 * math.sqrt(cost.lambda_x * cost.mean_cost) * moved
            return Lattice(step, (cost.centre / step).round() * step, change)
    return None


def _distance(points: Tensor, masses: Tensor, step: float) -> float | None:
    """Root mean square distance of points (n, d) from multiples of a step; None if they are not."""
    squares = []
    for part, rows in in_float64(points):
        multiples = rows.div_(step)
        beside = multiples.round().sub_(multiples).abs_()
        on_it = (beside <= multiples.abs_().mul_(ROUNDING)).all()
        squares.append(torch.where(on_it, masses[part] @ beside.square_().sum(1), torch.nan))
        # Most clouds are on none, and show it in the first rows.
        if len(squares) == 1 and not bool(on_it):
            return None
    total = float(torch.stack(squares).sum())
    return None if math.isnan(total) else step * math.sqrt(total)
