"""Products of a plan with points and directions, as second derivatives need them.

A plan multiplies matrices (m, k). Points (m, d), numbers (s, m) and directions (s, m, d) stand side
by side in one, so that as many as possible share a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from otdd_flash.operators.build import CostInputs
from otdd_flash.operators.origins import less_origin
from otdd_flash.operators.plan import Factors, Plan
from otdd_flash.solver.conjugate_gradients import inverse
from otdd_flash.solver.directions import ALL, Directions, Part, Points

# Products y_k y_l, k <= l, of a point up to which their images under the plan are kept.
MOST_MOMENTS = 256


class PlanPoints:
    """A plan and the points of its sides, about an origin near them, in its type."""

    def __init__(self, plan: Plan, epsilon: float, inputs: CostInputs, origin: Tensor) -> None:
        self.plan, self.epsilon = plan, epsilon
        self.factor = 2 * inputs.cost.squared.lambda_x
        self._origin = origin.to(plan.dtype)
        self._sides = [side.features for side in (inputs.source, inputs.target)]

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
        """(m, d)."""
        return less_origin(self._sides[1], self._origin)

    def here(self, values: Tensor) -> Tensor:
        """In the plan's type."""
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
    def by_row(self) -> Tensor:
        """1 / r (n,), 0 where there is no mass."""
        return self.here(inverse(self.plan.rows))

    @cached_property
    def images(self) -> Tensor:
        """P y (n, d)."""
        return self.plan.times(self.y[ALL])

    @cached_property
    def transposed_images(self) -> Tensor:
        """P^T x (m, d)."""
        return self.plan.transposed_times(self.x[ALL])

    def directions(self, given: Tensor, *, of_y: bool = False) -> Directions:
        """Directions (s, n, d) of x, or of y, less their means."""
        return Directions(given, self.c if of_y else self.r)

    def products(
        self, a: Directions, numbers: Tensor, *, transposed: bool = False
    ) -> Iterator[tuple[Part, Tensor]]:
        """P A with P q (s', k), or P^T A with P^T q, for directions A of the other side and q."""
        found = self._times(beside(a.values, numbers), transposed=transposed)
        yield Part(ALL, ALL, found[..., :-1]), found[..., -1]

    def columns_change(self, t: Tensor, *, transposed: bool = False) -> Any:
        """What `changed` takes of t (s, m), or if `transposed` of t (s, n)."""
        values = (self.x if transposed else self.y)[ALL]
        return self._times(t[..., None] * values, transposed=transposed)

    def columns_change_beside(self, t: Tensor, numbers: Tensor) -> tuple[Any, Tensor]:
        """The same of t (s, m), and P q (s, n): one pass for both where the first needs one."""
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
        """(P o W) y for W = t1 1^T + 1 t2^T + 2 L (A y^T + x B^T), or its transpose times x.

        Args:
            a: A of x.
            b: B of y; 0 for None.
            rows: t1 (s, n), or if `transposed` t2 (s, m).
            columns: of `columns_change`, of the other.
            transposed: as said.
        """
        images = self.transposed_images if transposed else self.images
        moved = self._moved(a, b, transposed=transposed)
        torch.add(columns, moved, alpha=self.factor, out=moved)
        for part, numbers in zip(moved, rows, strict=True):
            part.addcmul_(numbers[:, None], images)
        yield Part(ALL, ALL, moved)

    def _moved(self, a: Directions, b: Directions | None, *, transposed: bool) -> Tensor:
        """(P o (A y^T + x B^T)) y (s, n, d), or its transpose times x."""
        y = self.y[ALL]
        if b is None and not transposed and self._row_moments is not None:
            return torch.einsum("nkl,snl->snk", self._row_moments, a.values)
        changes = [(a.values, y)]
        if b is not None:
            changes.append((self.x[ALL], b.values))
        if transposed:
            return weighted(self.plan.transposed_times, self.x[ALL], changes)
        return weighted(self.plan.times, y, changes)

    def _times(self, values: Tensor, *, transposed: bool) -> Tensor:
        """P V (s, n, k) for V (s, m, k), or P^T V."""
        times = self.plan.transposed_times if transposed else self.plan.times
        return _apart(times(_as_columns(values)), len(values))

    @cached_property
    def _row_moments(self) -> Tensor | None:
        """sum_j P_ij y_j y_j^T (n, d, d), for few coordinates."""
        return _moments(self.plan.times, self.y[ALL])


def weighted(times: Callable[..., Tensor], values: Tensor, changes: list[Factors]) -> Tensor:
    """(P o sum of L R^T) V (s, n, d), for V (m, d) and pairs L (n, k) and R (m, k).

    They are the same for all directions, or one for each, with a leading dimension.
    """
    count = max(len(side) for pair in changes for side in pair if side.ndim == 3)
    left, right = changes[0] if len(changes) == 1 else _together(changes, count)
    sides = (side.expand(count, *side.shape[-2:]) for side in (left, right))
    found = [times(values, factors) for factors in zip(*sides, strict=True)]
    return found[0][None] if count == 1 else torch.stack(found)


def _together(changes: list[Factors], count: int) -> Factors:
    """Pairs of factors as one, L (count, n, k) and R (count, m, k)."""
    like, width = changes[0][0], sum(left.shape[-1] for left, _ in changes)
    left, right = (like.new_empty((count, side.shape[-2], width)) for side in changes[0])
    first = 0
    for pair, scale in zip(changes, _balances(changes), strict=True):
        last = first + pair[0].shape[-1]
        of_left, of_right = left[..., first:last], right[..., first:last]
        torch.mul(pair[0].expand_as(of_left), scale, out=of_left)
        torch.div(pair[1].expand_as(of_right), scale, out=of_right)
        first = last
    return left, right


def _balances(pairs: list[Factors]) -> Tensor:
    """By which to multiply one side of each and divide the other, for sides of one size.

    Pairs side by side are rounded on one scale.
    """
    norms = [torch.linalg.vector_norm(side, torch.inf) for pair in pairs for side in pair]
    logs = torch.stack(norms).clamp_min(torch.finfo(norms[0].dtype).tiny).log2().view(-1, 2)
    return ((logs[:, 1] - logs[:, 0]) / 2).round().exp2()


def beside(values: Tensor, numbers: Tensor, weights: Tensor | None = None) -> Tensor:
    """V (m, k), or one for each direction, weighted (s, m), and q (s, m), as (s, m, k + 1)."""
    found = numbers.new_empty((*numbers.shape, values.shape[-1] + 1))
    if weights is None:
        found[..., :-1] = values
    else:
        torch.mul(values, weights[..., None], out=found[..., :-1])
    found[..., -1] = numbers
    return found


def _moments(times: Callable[[Tensor], Tensor], points: Tensor) -> Tensor | None:
    """Images (n, d, d) of y_j y_j^T under a plan, None for many coordinates."""
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
    """(s, m, k) as the columns of one matrix (m, s k)."""
    return values.transpose(0, 1).flatten(1)


def _apart(values: Tensor, count: int) -> Tensor:
    """A matrix (n, s k) as (s, n, k)."""
    return values.reshape(len(values), count, -1).transpose(0, 1)
