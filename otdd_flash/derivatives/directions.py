"""Directions along which points move, and products of a plan with them, for parts of the points.

Products of a Hessian with directions (`curvature`) need them: `plan_points` multiplies all
directions at once, `packed_plan_points` one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Some directions, or some points.
Which = slice
Rows = slice | Tensor
ALL = slice(None)

# Coordinates up to which a centred copy of directions is kept; larger ones are centred by so many
# at a time.
LOOKED_AT = 1 << 22


class Points(Protocol):
    """Points (n, d) that are read in parts, such as a tensor."""

    def __getitem__(self, rows: Rows) -> Tensor:
        """Return some of the points, (k, d)."""
        ...


class Part(NamedTuple):
    """Products of a plan with some directions, for some points.

    Attributes:
        which: which of the s directions.
        rows: which of the n points.
        points: the products (s', k, d), which the caller may overwrite.
    """

    which: Which
    rows: Rows
    points: Tensor

    @property
    def at(self) -> tuple[Which, Rows]:
        """The part's place among all directions and points."""
        return self.which, self.rows

    def add(self, out: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """Add values of this part, (s', k) or (s', k, d), to its place in `out`."""
        place = out[self.at].add_(values, alpha=scale)
        if isinstance(self.rows, Tensor):
            out[self.at] = place


class Directions:
    """Centred directions: each less its mean, weighted by masses.

    Args:
        given: (s, n, d).
        masses: (n,), weights of the means.

    Attributes:
        total: sum of the masses.
        mean: (s, 1, d).
    """

    def __init__(self, given: Tensor, masses: Tensor) -> None:
        self.given, self.total = given, masses.sum()
        self.mean = torch.einsum("n,snd->sd", masses, given)[:, None] / self.total

    @cached_property
    def _kept(self) -> Tensor | None:
        """The centred directions (s, n, d) if they are small enough to keep, else None."""
        return self.given - self.mean if self.given.numel() <= LOOKED_AT else None

    @property
    def values(self) -> Tensor:
        """The centred directions (s, n, d); read only."""
        return self.given - self.mean if self._kept is None else self._kept

    def at(self, which: Which, rows: Rows) -> Tensor:
        """Return some centred directions of some points (s', k, d); read only."""
        if self._kept is None:
            return self.given[which, rows] - self.mean[which]
        return self._kept[which, rows]

    def dots(self, points: Points) -> Tensor:
        """Return <direction_i, point_i> (s, n), a new tensor."""
        found = [dot(self.at(ALL, rows), points[rows]) for rows in self._rows()]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def largest(self, which: Which) -> float:
        """Return the largest absolute coordinate of some directions."""
        found = [extreme for rows in self._rows() for extreme in self.at(which, rows).aminmax()]
        return float(torch.stack(found).abs().max())

    def _rows(self) -> Iterator[slice]:
        s, n, d = self.given.shape
        height = max(1, LOOKED_AT // (s * d))
        for first in range(0, n, height):
            yield slice(first, min(first + height, n))


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Return <one_i, other_i> over the last dimension."""
    return (one * other).sum(-1)


def inner(one: Tensor, other: Tensor) -> Tensor:
    """Return <one, other> (s,) over points and coordinates."""
    return (one * other).sum((-2, -1))
