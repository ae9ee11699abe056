"""Points less an origin near them, which plans are applied to (`solver.centred` says why)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from otdd_flash.operators.labelled_cost import Cut


@dataclass(frozen=True, eq=False)
class LessOrigin:
    """Values that are the points of one side of the cost, less an origin (d,).

    Whoever has the points can make them.
    """

    origin: Tensor

    def __call__(self, which: Cut, points: Tensor) -> Tensor:
        """The values of some points (k, d)."""
        return less_origin(points, self.origin)


def less_origin(points: Tensor, origin: Tensor) -> Tensor:
    """A new copy of points (n, d) about an origin, in its type; subtracted in the wider of both."""
    return (points - origin).to(origin.dtype)
