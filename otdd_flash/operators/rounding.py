"""What rounding points to float16 changes in costs, about: an estimate, by which nothing is proved."""

from __future__ import annotations

import math

import torch

from otdd_flash.operators.labelled_cost import LabelledCost

# Points of a side that tell it.
TELLING = 1024


def float16_rounding(cost: LabelledCost) -> float:
    """Root mean square of C' - C, with C' between points that were rounded to float16.

    Roundings xi_i and eta_j change a cost by 2 lambda_x <x_i - y_j, xi_i - eta_j>, but for their
    squares. If they were independent of all else, its square would be on average

        4 lambda_x^2 sum_k E (x_k - y_k)^2 (E xi_k^2 + E eta_k^2).
    """
    # Triton is not everywhere.
    from otdd_flash.kernels.points.packed_points import power_of_two_scale

    scale = power_of_two_scale(cost.largest)
    spread = torch.zeros_like(cost.centre)
    lost, means = torch.zeros_like(spread), []
    for points in cost.points:
        count = points.shape[0]
        rows = torch.arange(0, count, max(1, count // TELLING), device=cost.a.device)
        centred = (points[rows].double() - cost.centre) * scale
        rounded = centred.to(torch.float16).double()
        spread += centred.square().mean(0)
        lost += (rounded - centred).square().mean(0)
        means.append(centred.mean(0))
    spread -= 2 * means[0] * means[1]
    return 2 * cost.lambda_x / scale**2 * math.sqrt(max(float(spread @ lost), 0.0))
