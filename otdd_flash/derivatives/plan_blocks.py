"""Products of a plan with values computed from points, block by block where points are streamed.

Values V are computed from the points of one side, block by block. So neither they nor a result as
large as the points need be on the device at once: the result is assembled where its points are.
`term_gradient` computes gradients by points in this way, `centred` images of points.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from otdd_flash.cost.host_points import STREAMED_ROWS, Block, HostPoints, slices
from otdd_flash.cost.points import Cut, Points
from otdd_flash.operators.base import ALL


class Assembled:
    """A result that is assembled block by block, on the device of its points.

    Args:
        points: (n, d).
    """

    def __init__(self, points: Points) -> None:
        self._count, self._home = points.shape[0], home_of(points)
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


def home_of(points: Points) -> torch.device:
    """Return the device on which all points are stored."""
    return (points.features if isinstance(points, HostPoints) else points).device


def blocks_of(points: Points) -> Iterator[tuple[Cut, Tensor]]:
    """Yield blocks of points: which ones, and the points (k, d) on the device."""
    if isinstance(points, Tensor):
        yield ALL.rows, points
        return
    blocks = slices(points.shape[0], STREAMED_ROWS)
    for block, there in zip(blocks, points.stream(blocks), strict=True):
        yield block.rows, there
