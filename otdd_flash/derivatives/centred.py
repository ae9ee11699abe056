"""Products of a plan with points: relative to an origin near them, block by block where streamed.

The rounding error of a sum sum_j P_ij y_j is proportional to the size of its terms. For points far
from 0 and close to each other, that is their distance from 0, while only their spread matters:

    sum_j P_ij y_j / r_i = o + sum_j P_ij (y_j - o) / r_i,      r = P 1,

for any o. With o near the points' mean, only the spread is rounded, and o is added once at the end.

Values are computed from the points of one side, block by block, and results are `Assembled` on the
device of their points. So neither streamed points nor their results need be on the device as a
whole; a change must keep this (`tests/derivatives/test_streamed_points.py`).

`gradient` computes derivatives by points in this way. `result` and `flows.maps` call
`conditional_means`, which leaves it to them to add o. `gradient`, `plan_points`, `result`,
`flows.maps` and `flows.stepping` call `origin_near`, `adjoint` and `potentials` call `mean_near`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from otdd_flash.cost.host_points import STREAMED_ROWS, Block, HostPoints, slices
from otdd_flash.cost.points import Cut, Points, less_origin, weighted_mean
from otdd_flash.operators.base import ALL, Operator


class Assembled:
    """A result that is assembled block by block, on the device of its points.

    Args:
        points: (n, d).
    """

    def __init__(self, points: Points) -> None:
        self._count = points.shape[0]
        self._home = (points.features if isinstance(points, HostPoints) else points).device
        self._rows: Tensor | None = None

    def put(self, block: Block, rows: Tensor) -> None:
        """Write the rows (k, c) of some points."""
        if block is ALL:
            self._rows = rows
            return
        if self._rows is None:
            shape = (self._count, *rows.shape[1:])
            self._rows = torch.empty(shape, dtype=rows.dtype, device=self._home)
        self._rows[block.host] = rows.to(self._home)

    @property
    def rows(self) -> Tensor:
        """All rows, (n, c)."""
        assert self._rows is not None
        return self._rows


def blocks_of(points: Points) -> Iterator[tuple[Cut, Tensor]]:
    """Yield blocks of points: which ones, and the points (k, d) on the device."""
    if isinstance(points, Tensor):
        yield ALL.rows, points
        return
    blocks = slices(points.shape[0], STREAMED_ROWS)
    for block, there in zip(blocks, points.stream(blocks), strict=True):
        yield block.rows, there


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
