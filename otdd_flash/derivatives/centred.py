"""Products of a plan with points relative to an origin near them, against cancellation.

The rounding error of a sum sum_j P_ij y_j is proportional to the size of its terms. For points far
from 0 and close to each other, that is their distance from 0, while only their spread matters:

    sum_j P_ij y_j / r_i = o + sum_j P_ij (y_j - o) / r_i,      r = P 1,

for any o. With o near the points' mean, only the spread is rounded, and the final sum with o once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from otdd_flash.cost.points import Points, less_origin, weighted_mean
from otdd_flash.derivatives.plan_blocks import Assembled
from otdd_flash.operators.base import Operator


def origin_near(clouds: Iterable[tuple[Points, Tensor]], dtype: torch.dtype) -> Tensor:
    """Return the mean (d,) of the means of clouds, each points (n, d) and masses (n,), as `dtype`.

    It need not be exact, as results do not depend on the origin.
    """
    # A cloud on both sides is read once.
    means = [
        _near(points, masses) if isinstance(points, Tensor) else weighted_mean(points, masses)
        for points, masses in dict.fromkeys(clouds)
    ]
    origin = means[0].to(dtype)
    return origin if len(means) == 1 else torch.stack([mean.to(dtype) for mean in means]).mean(0)


def mean_near(points: Tensor, masses: Tensor) -> Tensor:
    """Return the mean (d,) of points (n, d) with masses (n,) up to their rounding, as float64."""
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
    """Return sum_j P_ij y_j / r_i - o, the barycentric map of the plan, less the origin.

    Args:
        operator: the cost (n, m) and the masses.
        f: (n,) potential, in units of the cost.
        g: (m,) potential.
        epsilon: regularisation, in units of the cost.
        points: x (n, d) and y (m, d).
        origin: o (d,), in the type of the operator.

    Returns:
        (n, d) in the type of the operator, on the device that stores x.
    """
    found = Assembled(points[0])
    for block, _, (image, masses) in operator.plan(f, g, epsilon).blocks(
        points, lambda _, y: less_origin(y, origin)
    ):
        found.put(block, image / masses.to(image.dtype).unsqueeze(1))
    return found.rows
