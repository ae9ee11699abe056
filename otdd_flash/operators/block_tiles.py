"""Pairs of blocks of a cost, and what is put together of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.points import Cut, LabelledCost
from otdd_flash.operators.base import Applied, Epsilon, Operator
from otdd_flash.operators.packed_blocks import Packing, There

# How far from a guess, in epsilon, a softmin may be: sums beside it are within 2^90 of 1.
FAR = 90 * math.log(2)

# build(cost): the operator of a cost whose points are on the device.
Build = Callable[[LabelledCost], "BlockOperator"]


class BlockOperator(Operator, Protocol):
    """An operator that says how accurate it is, point by point, and how it packs points."""

    @property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): costs of accurate `marginals` are off by at most row_i + column_j."""
        ...

    @property
    def rounding(self) -> float:
        """The mean error of costs beside that, where they are stored."""
        ...

    @property
    def packing(self) -> Packing | None:
        """How it packs the points of its cost; None where it takes them as they are."""
        ...

    def softmin_part(
        self, potential: Tensor, epsilon: Epsilon, near: Tensor | None, *, columns: bool
    ) -> Tensor:
        """The softmin of rows, or of columns, where `near` is that of a cost this is a part of.

        It may be infinite where it adds less than rounding to the whole, if `near` is near that.
        """
        ...

    def softmin_pair(self, f: Tensor, g: Tensor, epsilon: Epsilon) -> tuple[Tensor, Tensor]:
        """`softmin_part` of rows near f (n,) and of columns near g (m,).

        Both are one where f is g, of a cloud with itself.
        """
        ...


class Tile(NamedTuple):
    """A block of rows and one of columns.

    Attributes:
        sides: both.
        operator: the cost between them, of masses that sum to 1 on each side that has any.
        masses: of the rows and of the columns, in the whole; 0 where all of a block's are.
        diagonal: they are one block, whose cost is of a cloud with itself.
    """

    sides: tuple[There, There]
    operator: BlockOperator
    masses: tuple[float, float]
    diagonal: bool

    @property
    def rows(self) -> Cut:
        """The tile's rows in the whole cost, on the device."""
        return self.sides[0].block.rows

    @property
    def columns(self) -> Cut:
        """The tile's columns in the whole cost, on the device."""
        return self.sides[1].block.rows

    def beside(self, there: There, side: int) -> tuple[There, There]:
        """Return the sides with another block in the place of one of them."""
        one, other = self.sides
        return (one, there) if side else (there, other)

    def some(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Cut both potentials to the tile's rows and columns; one tensor on the diagonal."""
        of_rows = f[self.rows]
        return of_rows, of_rows if self.diagonal else g[self.columns]

    @property
    def mass(self) -> float:
        """The product of both masses."""
        return self.masses[0] * self.masses[1]


class AppliedBlock(NamedTuple):
    """What a plan makes of values, for some points of the side of the result."""

    own: There
    applied: Applied


# make(rows, points): what is multiplied (k, c), for some points (k, d) of the other side.
Make = Callable[[Cut, Tensor], Tensor]


class Joined:
    """Softmins over blocks on their way to one, in float64.

    Args:
        like: (n,) float64, where.
        epsilon: in units of the cost.
    """

    def __init__(self, like: Tensor, epsilon: Epsilon) -> None:
        self._epsilon, self._logs = epsilon, torch.full_like(like, -torch.inf)

    def add(self, rows: slice | Tensor, found: Tensor, mass: float) -> None:
        """Add the softmin (k,) of some rows over a block of this mass, unless that is 0."""
        if mass == 0:
            return
        logs = torch.log(torch.tensor(mass, dtype=torch.float64)) - found.double() / self._epsilon
        self._logs[rows] = torch.logaddexp(self._logs[rows], logs)

    def are_near(self, guess: Tensor) -> Tensor:
        """Whether all softmins are so near a guess that float32 holds the sums beside it, ()."""
        return ((self.potential - guess).abs() <= FAR * self._epsilon).all()

    @property
    def potential(self) -> Tensor:
        """The softmin (n,) over the blocks so far, in units of the cost."""
        return -self._epsilon * self._logs
