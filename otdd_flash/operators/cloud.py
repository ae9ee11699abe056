"""A labelled point cloud with its cached statistics.

A cloud is part of several costs: those with other clouds, and that with itself. Its statistics are
computed once for all of them, and for all steps of a flow towards it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from otdd_flash.operators.float64_rows import Extent, Points, extent, squared_distances
from otdd_flash.operators.host_points import HostPoints

T = TypeVar("T")


class Distances(NamedTuple):
    """Squared distances of a cloud from a centre c.

    Attributes:
        squares: ||x_i - c||^2 (n,), float64.
        farthest: the largest of these, ().
        highest: that on the support, ().
        mean: sum_i a_i ||x_i - c||^2, ().
    """

    squares: Tensor
    farthest: Tensor
    highest: Tensor
    mean: Tensor

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """`farthest`, `highest` and `mean`."""
        return self.farthest, self.highest, self.mean


class Cloud:
    """Points with their masses, labels and cached statistics.

    Args:
        points: (n, d), on the device or streamed to it.
        masses: (n,) float64 that sum to 1.
        labels: (n,) class indices.
        equal: all masses are 1 / n.

    Attributes:
        known: cached results for all costs, by name.
    """

    def __init__(
        self, points: Points, masses: Tensor, labels: Tensor, *, equal: bool = False
    ) -> None:
        self.points, self.masses, self.labels, self._equal = points, masses, labels, equal
        self.known: dict[Hashable, Any] = {}

    def kept(self, name: Hashable, find: Callable[[], T]) -> T:
        """Call `find` once for this name and return its result from then on."""
        if name not in self.known:
            self.known[name] = find()
        found: T = self.known[name]
        return found

    @cached_property
    def extent(self) -> Extent:
        return extent(self.points, self.masses)

    def distances(self, centre: Tensor) -> Distances:
        """Compute the distances from a centre (d,) float64."""
        squares = self._squares(centre)
        farthest = highest = squares.max()
        if not self._equal:
            highest = squares.masked_fill(self._absent, 0.0).max()
        return Distances(squares, farthest, highest, self.masses @ squares)

    def class_masses(self, classes: int) -> Tensor:
        """Return the mass of each class (V,)."""
        return self.kept(
            ("classes", classes), lambda: mass_per_class(self.masses, self.labels, classes)
        )

    def share(self, rows: slice | Tensor, name: Hashable) -> tuple[Tensor, float]:
        """Return masses (k,) of some rows over their sum, and the sum; cached by `name`."""

        def find() -> tuple[Tensor, float]:
            whole = self.masses
            if not self._equal:
                return normalised(whole[rows])
            # The host need not wait to know the sum.
            count = len(range(len(whole))[rows] if isinstance(rows, slice) else rows)
            return whole.new_full((count,), 1 / max(1, count)), count / len(whole)

        return self.kept(("share", name), find)

    @cached_property
    def _absent(self) -> Tensor:
        """Which points have no mass (n,)."""
        return self.masses <= 0

    def _squares(self, centre: Tensor) -> Tensor:
        points = self.points
        if not isinstance(points, HostPoints):
            return squared_distances(points, centre)

        def find() -> Tensor:
            # Also for the cost of the cloud with itself.
            mean = self.extent.mean
            about, about_mean = squared_distances(points, centre, mean).unbind()
            points.recalled("squares", (mean,), lambda: about_mean)
            return about

        return points.recalled("squares", (centre,), find)


def mass_per_class(masses: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The sum of masses (n,) in each of so many classes (V,)."""
    return masses.new_zeros(classes).index_add_(0, labels, masses)


def normalised(masses: Tensor) -> tuple[Tensor, float]:
    """Masses over their sum, and the sum; where that is 0 as they are, and 1."""
    mass = float(masses.sum()) or 1.0
    return masses / mass, mass
