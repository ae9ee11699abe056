"""Directions of points, and what a plan makes of them, for some of the points at once."""

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

# Coordinates up to which directions less their means are kept beside those given; of more, so many
# are computed at a time.
LOOKED_AT = 1 << 22


class Points(Protocol):
    """Points (n, d), of which some are read at a time; a tensor is one."""

    def __getitem__(self, rows: Rows) -> Tensor:
        """Return some of the points, (k, d)."""
        ...


class Part(NamedTuple):
    """What a plan makes of some directions, for some points.

    Attributes:
        which: of s directions.
        rows: of n points.
        points: found for them, (s', k, d), of the caller to change.
    """

    which: Which
    rows: Rows
    points: Tensor

    @property
    def at(self) -> tuple[Which, Rows]:
        """The part's place among all directions and points."""
        return self.which, self.rows

    def add(self, out: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """Add numbers of this part, (s', k) or (s', k, d), to those of all."""
        place = out[self.at].add_(values, alpha=scale)
        if isinstance(self.rows, Tensor):
            out[self.at] = place


class Directions:
    """Directions of points, each less its mean.

    Args:
        given: (s, n, d).
        masses: (n,), that means are over.

    Attributes:
        total: of the masses.
        mean: (s, 1, d).
    """

    def __init__(self, given: Tensor, masses: Tensor) -> None:
        self.given, self.total = given, masses.sum()
        self.mean = torch.einsum("n,snd->sd", masses, given)[:, None] / self.total

    @cached_property
    def _kept(self) -> Tensor | None:
        """The centred directions (s, n, d), if there is room for another copy."""
        return self.given - self.mean if self.given.numel() <= LOOKED_AT else None

    @property
    def values(self) -> Tensor:
        """The centred directions (s, n, d), not to be written."""
        return self.given - self.mean if self._kept is None else self._kept

    def at(self, which: Which, rows: Rows) -> Tensor:
        """Return some directions of some points (s', k, d), not to be written."""
        if self._kept is None:
            return self.given[which, rows] - self.mean[which]
        return self._kept[which, rows]

    def dots(self, points: Points) -> Tensor:
        """<direction_i, point_i> (s, n), anew."""
        found = [dot(self.at(ALL, rows), points[rows]) for rows in self._rows()]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def largest(self, which: Which) -> float:
        """The largest coordinate of some, in absolute value."""
        found = [extreme for rows in self._rows() for extreme in self.at(which, rows).aminmax()]
        return float(torch.stack(found).abs().max())

    def _rows(self) -> Iterator[slice]:
        s, n, d = self.given.shape
        height = max(1, LOOKED_AT // (s * d))
        for first in range(0, n, height):
            yield slice(first, min(first + height, n))


def dot(one: Tensor, other: Tensor) -> Tensor:
    """<one_i, other_i>, over the last dimension."""
    return (one * other).sum(-1)


def inner(one: Tensor, other: Tensor) -> Tensor:
    """<one, other> (s,), over points and their coordinates."""
    return (one * other).sum((-2, -1))
