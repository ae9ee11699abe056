"""Products of a plan with values computed from points, block by block where points are streamed.

Values V are computed from the points of one side, block by block. So neither they nor a result as
large as the points need be on the device at once: the result is assembled where its points are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.host_points import STREAMED_ROWS, Block, HostPoints, slices
from otdd_flash.cost.points import Cut, LessOrigin, Points
from otdd_flash.operators.base import Applied, Operator

ALL = Block(slice(None), slice(None))


class PlanBlock(NamedTuple):
    """The product of a plan with values, for a block of points.

    Attributes:
        block: which points.
        points: (k, d) on the device.
        applied: P V (k, c) and P 1 (k,), or P^T U and P^T 1.
    """

    block: Block
    points: Tensor
    applied: Applied


def plan_blocks(
    operator: Operator,
    potentials: tuple[Tensor, Tensor],
    epsilon: float,
    points: tuple[Points, Points],
    make: Callable[[Cut, Tensor], Tensor],
    *,
    transposed: bool = False,
) -> Iterator[PlanBlock]:
    """Yield P V for all rows, or P^T U for all columns; in blocks where points are streamed.

    Args:
        operator: the cost (n, m) and the masses.
        potentials: f (n,) and g (m,), in units of the cost.
        epsilon: regularisation, in units of the cost.
        points: x (n, d) and y (m, d).
        make: computes the values (k, c) of some points (k, d) of the other side, as
            make(which, points); a `LessOrigin` where `points` are those of the cost.
        transposed: whether the result is of the columns.
    """
    in_blocks = operator.execution.in_blocks
    if in_blocks is not None:
        for own, applied in in_blocks(*potentials, epsilon, make, transposed=transposed):
            yield PlanBlock(own.block, own.points, applied)
        return
    own, other = points[::-1] if transposed else points
    on_points = operator.execution.on_points
    if on_points is not None and isinstance(make, LessOrigin):
        applied = on_points(*potentials, epsilon, make.origin, transposed=transposed)
    else:
        values = make(ALL.rows, other[ALL.rows])
        applied = operator.apply_plan(*potentials, epsilon, values, transposed=transposed)
    yield PlanBlock(ALL, own[ALL.rows], applied)


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
