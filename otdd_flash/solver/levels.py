"""Levels of epsilon on the way down to a small one, and when they are not worth their steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The largest factor between levels; they are spaced evenly.
SCALING = 0.5

# The marginal error that ends a level, and the iterations that this takes, about.
LEVEL_TOLERANCE = 0.02
ITERATIONS_PER_LEVEL = 4


def levels_above(epsilon: float, top: float) -> list[float]:
    """Levels from the top down, without epsilon itself; none if one step leads from there to it."""
    if epsilon >= SCALING * top:
        return []
    count = math.ceil(math.log(epsilon / top) / math.log(SCALING))
    return [top * (epsilon / top) ** (i / count) for i in range(count)]


class Extrapolation:
    """A potential as a linear function of epsilon, through those of the last two levels."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, Tensor]] = []

    def add(self, level: float, g: Tensor) -> None:
        """Learn the potential (m,) of a level."""
        self._seen = [*self._seen[-1:], (level, g)]

    def at(self, level: float) -> Tensor:
        """The potential (m,) to expect at the next level; one level must have been seen."""
        nearest, g = self._seen[-1]
        if len(self._seen) == 1:
            return g
        before, old = self._seen[0]
        return torch.lerp(g, old, (level - nearest) / (before - nearest))


class Outlook:
    """Whether iterations at the final epsilon will end before a descent through levels would.

    Well separated points are solved at once at any epsilon. The error's fall since the last look
    forecasts the iterations that remain.
    """

    def __init__(self, tolerance: float, most: int) -> None:
        self.tolerance, self.most = tolerance, most
        self._before: tuple[int, float] | None = None

    def poor(self, iteration: int, error: float) -> bool:
        """Whether an error after some iterations means more than `most` of them; never at first."""
        before, self._before = self._before, (iteration, error)
        if before is None:
            return False
        if not 0 < error < before[1]:
            return True
        fall = math.log(before[1] / error) / (iteration - before[0])
        return iteration + math.log(error / self.tolerance) / fall > self.most
