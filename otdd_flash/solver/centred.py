"""Plans applied to points about an origin near them, not about 0.

A sum sum_j P_ij y_j in floating point is off by its terms' size times their rounding. Of points far
from 0, next to each other, that is their distance from 0 and not the spread that matters:

    sum_j P_ij y_j / r_i = o + sum_j P_ij (y_j - o) / r_i,      r = P 1,

for any o. With o the points' mean only the spread is rounded, and in the end o + ..., once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from otdd_flash.cost.points import Points, less_origin, weighted_mean
from otdd_flash.operators.base import Operator
from otdd_flash.solver.plan_blocks import Assembled, plan_blocks


def origin_near(clouds: Iterable[tuple[Points, Tensor]], dtype: torch.dtype) -> Tensor:
    """The mean (d,) of the means of clouds, each points (n, d) and masses (n,), as a `dtype`.

    It is near the points, not their exact mean: what is computed about it does not depend on it.
    """
    # A cloud that stands on both sides is read once.
    means = [
        _near(points, masses) if isinstance(points, Tensor) else weighted_mean(points, masses)
        for points, masses in dict.fromkeys(clouds)
    ]
    origin = means[0].to(dtype)
    return origin if len(means) == 1 else torch.stack([mean.to(dtype) for mean in means]).mean(0)


def mean_near(points: Tensor, masses: Tensor) -> Tensor:
    """A point (d,), float64, near the mean of points (n, d) with masses (n,): to their rounding."""
    return _near(points, masses).double()


def _near(points: Tensor, masses: Tensor) -> Tensor:
    """Return the weighted mean, computed in the type of the points."""
    return masses.to(points.dtype) @ points


def conditional_means(
    operator: Operator,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    points: tuple[Points, Points],
    origin: Tensor,
) -> Tensor:
    """sum_j P_ij y_j / r_i - o: where the plan of potentials sends each row on average.

    Args:
        operator: the cost (n, m) and the masses.
        f: (n,) potential, in units of the cost.
        g: (m,) potential.
        epsilon: regularisation, in units of the cost.
        points: x (n, d) and y (m, d).
        origin: o (d,), in the type of the operator.

    Returns:
        (n, d) in the type of the operator, where x is.
    """
    found = Assembled(points[0])
    for block, _, (image, masses) in plan_blocks(
        operator, (f, g), epsilon, points, lambda _, y: less_origin(y, origin)
    ):
        found.put(block, image / masses.to(image.dtype).unsqueeze(1))
    return found.rows
