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
    # Of a side, on average: x_k, x_k^2, and xi_k^2 times 1, x_k and x_k^2.
    means = []
    for points in cost.points:
        count = points.shape[0]
        rows = torch.arange(0, count, max(1, count // TELLING), device=cost.a.device)
        centred = torch.sub(points[rows], cost.centre) * scale
        squares, lost = centred.square(), (centred.to(torch.float16) - centred).square_()
        found = torch.stack((centred, squares, lost, centred * lost, squares * lost))
        means.append(found.mean(1).unbind(0))
    products = torch.zeros_like(cost.centre)
    for (one, square, *_), (*_, lost, first, second) in (means, means[::-1]):
        products += square * lost - 2 * one * first + second
    return 2 * cost.lambda_x / scale**2 * math.sqrt(max(float(products.sum()), 0.0))
