"""What rounding points to float16 changes in costs, about: nothing is proved by it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otdd_flash.operators.float64_rows import Points
from otdd_flash.operators.labelled_cost import LabelledCost

# Points of a side that tell it.
TELLING = 256

# Of the terms of (x - y)^2, in xi^2 and in eta^2.
SIGNS = 1, -2, 1, 1, -2, 1


def float16_rounding(cost: LabelledCost) -> float:
    """Root mean square of C' - C, with C' between points that were rounded to float16.

    Roundings xi_i and eta_j change a cost by 2 lambda_x <x_i - y_j, xi_i - eta_j>, but for their
    squares. If their signs were independent of all else, its square would be on average

        4 lambda_x^2 sum_k E (x_k - y_k)^2 (xi_k^2 + eta_k^2).
    """
    # Triton is not everywhere.
    from otdd_flash.kernels.points.packed_points import power_of_two_scale

    scale = power_of_two_scale(cost.largest)
    x, y = (_telling(points) for points in cost.points)
    powers = (torch.cat((x, y)) - cost.centre).mul_(scale)
    lost = (powers - powers.to(torch.float16)).square_()
    squares = powers.square()
    means = powers.new_zeros((2, len(powers)))
    means[0, : len(x)], means[1, len(x) :] = 1 / len(x), 1 / len(y)
    # On average 1, x_k and x_k^2, without and with xi_k^2: each faces what it is multiplied by.
    first, second, off = means @ powers, means @ squares, means @ lost
    of_one, of_two = means @ powers.mul_(lost), means @ squares.mul_(lost)
    terms = torch.stack((torch.ones_like(off), first, second, off, of_one, of_two))
    products = (terms[:, 0] * terms[:, 1].flip(0)).sum(1).tolist()
    total = math.fsum(map(math.prod, zip(SIGNS, products, strict=True)))
    return 2 * cost.lambda_x / scale**2 * math.sqrt(max(total, 0.0))


def _telling(points: Points) -> Tensor:
    """Return a sample of the points (k, d), on the device."""
    step = max(1, points.shape[0] // TELLING)
    if isinstance(points, Tensor):
        return points[::step]
    return points[torch.arange(0, points.shape[0], step, device=points.device)]
