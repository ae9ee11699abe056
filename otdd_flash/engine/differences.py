"""L-BFGS of many problems side by side, on the products of what each of them remembers.

As in `quasi_newton`, with steps S and residual differences Y in the metric of the masses,

    H r = c r + [S, c Y] [[R^-T (D + c Y^T Y) R^-1, -R^-T], [-R^-1, 0]] [S, c Y]^T r,

R_ij = s_i^T y_j for steps s_i no newer than y_j and 0 for the others, D its diagonal and c = tr D /
tr Y^T Y (Byrd, Nocedal & Schnabel 1994, Representations of quasi-Newton matrices). A number of
slots holds the latest pairs (s, y), and a new pair replaces the oldest one.

R^-1 is updated, never solved with. In order of age R is upper triangular. Without the oldest pair R
loses its first row and column, and the inverse of what is left is R^-1 without its first row and
column. With a new pair R gains a last column (p, d), and

    [[R, p], [0, d]]^-1 = [[R^-1, -R^-1 p / d], [0, 1 / d]],    p = S^T y, d = s^T y.

In memory the rows and columns of R^-1 stand in the order of the slots, not of age.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Differences:
    """What S problems remember; empty slots are 0.

    Attributes:
        slot: (S,) int64, where the next differences go.
    """

    def __init__(self, like: Tensor, memory: int) -> None:
        """For S problems, as many as entries of a tensor (S,), and so many slots."""
        self._inverse = like.new_zeros((len(like), memory, memory))
        self._squares = self._inverse
        self._curvatures = self._inverse[:, 0]
        self.slot = torch.zeros_like(like, dtype=torch.int64)

    def learn(self, sound: Tensor, steps: Tensor, differences: Tensor) -> None:
        """Remember the newest differences of some problems.

        Args:
            sound: (S,) bool, of which.
            steps: (S, memory), products of the newest residual difference with the steps in all
                slots; in its own slot is the newest step.
            differences: (S, memory), likewise with the residual differences.
        """
        here = self.here & sound[:, None]
        row, column = here[:, :, None], here[:, None, :]
        inverse = torch.where(row | column, 0, self._inverse)
        curvature = _dot(here, steps)[:, None]
        last = torch.where(here, 1, -_dot(inverse, steps[:, None])) / curvature
        self._inverse = torch.where(column, last[:, :, None], inverse)
        squares = torch.where(row, differences[:, None, :], self._squares)
        self._squares = torch.where(column, differences[:, :, None], squares)
        self._curvatures = torch.where(here, steps, self._curvatures)
        self.slot = torch.where(sound, (self.slot + 1) % self._inverse.shape[1], self.slot)

    @property
    def here(self) -> Tensor:
        """Where the next differences go, as (S, memory) bool."""
        slots = torch.arange(self._inverse.shape[1], device=self.slot.device)
        return slots == self.slot[:, None]

    def direction(self, steps: Tensor, differences: Tensor) -> Direction:
        """H r, given the products (S, memory) of r with steps and residual differences."""
        squares = self._squares.diagonal(dim1=1, dim2=2).contiguous()
        scale = (self._curvatures.sum(1) / squares.sum(1))[:, None]
        inner = _dot(self._inverse, steps[:, None])
        outer = (
            scale * (_dot(self._squares, inner[:, None]) - differences) + self._curvatures * inner
        )
        outer = _dot(self._inverse.mT.contiguous(), outer[:, None])
        return Direction(scale[:, 0], torch.cat((outer, -scale * inner), 1))

    def keep(self, order: Tensor) -> None:
        self._inverse, self._squares = self._inverse[order], self._squares[order]
        self._curvatures, self.slot = self._curvatures[order], self.slot[order]


class Direction(NamedTuple):
    """scale r + sum_k weights_k remembered_k: (S,), and (S, 2 memory), of steps first.

    Where nothing is remembered they are not finite.
    """

    scale: Tensor
    weights: Tensor


def _dot(one: Tensor, two: Tensor) -> Tensor:
    return (one * two).sum(-1)
