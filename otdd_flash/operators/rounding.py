"""What rounding points to float16 changes in costs, about: nothing is proved by it."""

from __future__ import annotations

import math

import torch

from otdd_flash.operators.labelled_cost import LabelledCost

# Points of a side that tell it.
TELLING = 256


def float16_rounding(cost: LabelledCost) -> float:
    """Root mean square of C' - C, with C' between points that were rounded to float16.

    Roundings xi_i and eta_j change a cost by 2 lambda_x <x_i - y_j, xi_i - eta_j>, but for their
    squares. If their signs were independent of all else, its square would be on average

        4 lambda_x^2 sum_k E (x_k - y_k)^2 (xi_k^2 + eta_k^2).
    """
    # Triton is not everywhere.
    from otdd_flash.kernels.points.packed_points import power_of_two_scale

    scale = power_of_two_scale(cost.largest)
    # Of a side: 1, x_k, x_k^2 without and with xi_k^2, on average.
    moments = []
    for points in cost.points:
        count = points.shape[0]
        rows = torch.arange(0, count, max(1, count // TELLING), device=cost.a.device)
        centred = (points[rows].double() - cost.centre) * scale
        lost = (centred.to(torch.float16).double() - centred).square()
        powers = torch.ones_like(centred), centred, centred.square()
        means = [[power.mean(0), (power * lost).mean(0)] for power in powers]
        moments.append(tuple(zip(*means, strict=True)))
    (x, lost_x), (y, lost_y) = moments
    products = sum(
        one[2] * other[0] - 2 * one[1] * other[1] + one[0] * other[2]
        for one, other in ((x, lost_y), (lost_x, y))
    )
    return 2 * cost.lambda_x / scale**2 * math.sqrt(max(float(products.sum()), 0.0))
