"""Products of a plan with points and directions, as second derivatives need them.

A plan multiplies matrices (m, k). Points (m, d), one value a point and direction (s, m), and
directions (s, m, d) are concatenated to one matrix, so that they share a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from otdd_flash.cost.points import less_origin
from otdd_flash.derivatives.directions import ALL, Directions, Part, Points
from otdd_flash.operators.base import Plan
from otdd_flash.operators.comparison import Comparison

# The most products y_k y_l, k <= l, of a point whose images under the plan are kept.
MOST_MOMENTS = 256


class PlanPoints:
    """The plan of a term and the points of its sides, relative to an origin near, in its type."""

    def __init__(self, plan: Plan, comparison: Comparison, name: str, origin: Tensor) -> None:
        self.plan, self.epsilon = plan, comparison.epsilon
        self.factor = 2 * comparison.ground.squared.lambda_x
        self._origin = origin.to(plan.dtype)
        self._sides = [side.features for side in comparison.sides(name)]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return len(self._sides[0]), len(self._sides[1])

    @cached_property
    def x(self) -> Points:
        """(n, d)."""
        return less_origin(self._sides[0], self._origin)

    @cached_property
    def y(self) -> Points:
        """(m, d); x itself between a cloud and itself."""
        one = self._sides[0] is self._sides[1]
        return self.x if one else less_origin(self._sides[1], self._origin)

    def here(self, values: Tensor) -> Tensor:
        """Return values in the plan's type."""
        return values.to(self.plan.dtype)

    @cached_property
    def r(self) -> Tensor:
        """P 1 (n,)."""
        # Needed anyway, and any product tells the sums.
        _ = self.images
        return self.here(self.plan.rows)

    @cached_property
    def c(self) -> Tensor:
        """P^T 1 (m,)."""
        return self.here(self.plan.columns)

    @cached_property
    def images(self) -> Tensor:
        """P y (n, d)."""
        return self.plan.times(self.y[ALL])

    @cached_property
    def transposed_images(self) -> Tensor:
        """P^T x (m, d)."""
        return self.plan.transposed_times(self.x[ALL])

    def directions(self, given: Tensor, *, of_y: bool = False) -> Directions:
        """Return centred directions of x (s, n, d), or of y."""
        return Directions(given, self.c if of_y else self.r)

    def products(
        self, a: Directions, numbers: Tensor, *, transposed: bool = False
    ) -> Iterator[tuple[Part, Tensor]]:
        """Yield P A and P q (s', k), or P^T A and P^T q, for directions A and numbers q."""
        found = self._times(beside(a.values, numbers), transposed=transposed)
        yield Part(ALL, ALL, found[..., :-1]), found[..., -1]

    def columns_change(self, t: Tensor, *, transposed: bool = False) -> Any:
        """Return `columns` as `changed` takes it, for t2 (s, m), or if `transposed` t1 (s, n)."""
        values = (self.x if transposed else self.y)[ALL]
        return self._times(t[..., None] * values, transposed=transposed)

    def columns_change_beside(self, t: Tensor, numbers: Tensor) -> tuple[Any, Tensor]:
        """Return `columns_change` of t (s, m), and P q (s, n), in one pass."""
        found = self._times(beside(self.y[ALL], numbers, t), transposed=False)
        return found[..., :-1], found[..., -1]

    def changed(
        self,
        a: Directions,
        b: Directions | None,
        rows: Tensor,
        columns: Any,
        *,
        transposed: bool = False,
    ) -> Iterator[Part]:
        """Yield (P o W) y, W = t1 1^T + 1 t2^T + 2 L (A y^T + x B^T), or (P o W)^T x.

        Args:
            a: directions A of x.
            b: directions B of y; None is 0.
            rows: t1 (s, n), or if `transposed` t2 (s, m).
            columns: `columns_change` of the other of both.
            transposed: apply the transpose, to x.
        """
        images = self.transposed_images if transposed else self.images
        moved = self._moved(a, b, transposed=transposed)
        torch.add(columns, moved, alpha=self.factor, out=moved)
        for part, numbers in zip(moved, rows, strict=True):
            part.addcmul_(numbers[:, None], images)
        yield Part(ALL, ALL, moved)

    def _moved(self, a: Directions, b: Directions | None, *, transposed: bool) -> Tensor:
        """Return (P o (A y^T + x B^T)) y (s, n, d), or (P o (A y^T + x B^T))^T x."""
        y, of_x = self.y[ALL], a.values
        if b is None and not transposed and self._row_moments is not None:
            return torch.einsum("nkl,snl->snk", self._row_moments, of_x)
        # One tensor where both sides are equal: the plan then packs it once.
        x = y if self.x is self.y else self.x[ALL]
        of_y = None if b is None else of_x if b is a else b.values
        times, values = self.plan.times, y
        if transposed:
            times, values = self.plan.transposed_times, x
        found = []
        for k, left in enumerate(of_x):
            other = None
            if of_y is not None:
                other = x, left if of_y is of_x else of_y[k]
            found.append(times(values, (left, y), other))
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def _times(self, values: Tensor, *, transposed: bool) -> Tensor:
        """Return P V (s, n, k) for V (s, m, k), or P^T V."""
        times = self.plan.transposed_times if transposed else self.plan.times
        return _apart(times(_as_columns(values)), len(values))

    @cached_property
    def _row_moments(self) -> Tensor | None:
        """sum_j P_ij y_j y_j^T (n, d, d), for few coordinates."""
        return _moments(self.plan.times, self.y[ALL])


def beside(values: Tensor, numbers: Tensor, weights: Tensor | None = None) -> Tensor:
    """Append q (s, m) to V (m, k) or (s, m, k), times weights (s, m) if given: (s, m, k + 1)."""
    found = numbers.new_empty((*numbers.shape, values.shape[-1] + 1))
    if weights is None:
        found[..., :-1] = values
    else:
        torch.mul(values, weights[..., None], out=found[..., :-1])
    found[..., -1] = numbers
    return found


def _moments(times: Callable[[Tensor], Tensor], points: Tensor) -> Tensor | None:
    """Return sum_j P_ij y_j y_j^T (n, d, d); None for too many coordinates."""
    dim = points.shape[1]
    if dim * (dim + 1) // 2 > MOST_MOMENTS:
        return None
    first, second = torch.triu_indices(dim, dim, device=points.device)
    images = times(points[:, first] * points[:, second])
    found = images.new_empty((len(images), dim, dim))
    found[:, first, second] = images
    found[:, second, first] = images
    return found


def _as_columns(values: Tensor) -> Tensor:
    """Reshape (s, m, k) to the columns of one matrix (m, s k)."""
    return values.transpose(0, 1).flatten(1)


def _apart(values: Tensor, count: int) -> Tensor:
    """Reshape a matrix (n, s k) to (s, n, k)."""
    return values.reshape(len(values), count, -1).transpose(0, 1)
