"""Gradients through plans that are optimal for their own sums, many small matrices at once.

A plan P = a b^T exp((f + g - C) / epsilon) (n, m) with sums r = P 1 and c = P^T 1 moves with its
cost and masses. For a cotangent G = dL/dP, and cotangents s, t of what it is solved for by rows and
by columns, one symmetric system tells how,

    diag(r) u + P v   = (G o P) 1 + s
    P^T u + diag(c) v = (G o P)^T 1 + t.

With it dL/dC = -P o (G - u 1^T - 1 v^T) / epsilon, and dL/da = u and dL/db = v along the simplex
(Luise et al. 2018, Differential properties of Sinkhorn approximation for learning with Wasserstein
distance; Eisenberger et al. 2022, A unified framework for implicit Sinkhorn differentiation). Those
set r and c to what they converge to. With the sums that the plan has, there is a solution however
early it was left.

By e = ((G o P) 1 + s) / r, u = e - P v / r and the scaling w = c^(1/2) o v there is left

    (I - A^T A) w = c^(-1/2) o ((P o (G - e 1^T))^T 1 + t),
    A = diag(r)^(-1/2) P diag(c)^(-1/2),

of eigenvalues in [0, 1]. A is applied as it stands and A^T A never formed. The matrix takes c^(1/2)
to 0, and residuals keep no part along it. Conjugate gradients solve it, each matrix by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.plan import SUM_UNITS

# Of residuals over right-hand sides.
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}

# Steps over the rows of the matrix: as many as it has are enough but for rounding.
STEPS_PER_ROW = 2

# Entries of matrices that are solved for at once, to stay in the cache of a core.
ENTRIES_AT_ONCE = 1 << 16


class Adjoint(NamedTuple):
    """Of B plans.

    Attributes:
        weighted: P o (G - u 1^T - 1 v^T) (B, n, m), of the type that plans and cotangents have
            together.
        rows: u (B, n), float32 or float64; 0 where a row of the plan is.
        columns: v (B, m), likewise; u + t and v - t are as good for any number t.
    """

    weighted: Tensor
    rows: Tensor
    columns: Tensor


def adjoint(
    plans: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None = None,
    column_cotangents: Tensor | None = None,
) -> Adjoint:
    """Solve for the gradient of a function of B plans, of their optimality and not of a loop.

    A matrix is left at a residual of 1e-6, in float64 1e-12, over the right-hand side, or where its
    direction has no curvature but for rounding, as between the blocks of a decomposable matrix. One
    whose cotangents are not finite gets NaN. All get what they get alone, bit for bit.

    Args:
        plans: P (B, n, m), not negative, float16 to float64; computed in float32 or float64.
        cotangents: G (B, n, m).
        row_cotangents: s (B, n), 0 by default.
        column_cotangents: t (B, m), likewise. Only with sum s = sum t there is a solution, and what
            the sums differ by is left out.
    """
    result = torch.promote_types(plans.dtype, cotangents.dtype)
    dtype = torch.promote_types(result, torch.float32)
    count, n, m = plans.shape
    found = Adjoint(
        plans.new_empty((count, n, m), dtype=result),
        plans.new_empty((count, n), dtype=dtype),
        plans.new_empty((count, m), dtype=dtype),
    )
    height = max(1, ENTRIES_AT_ONCE // max(n * m, 1))
    for first in range(0, count, height):
        part = slice(first, first + height)
        # Matrices last: operations then run along them, whatever their shape.
        plan, cotangent = (
            given[part].to(dtype).permute(1, 2, 0).contiguous() for given in (plans, cotangents)
        )
        by_row, by_column = (
            None if given is None else given[part].to(dtype).T
            for given in (row_cotangents, column_cotangents)
        )
        if n < m:
            v, u = _solve(plan.transpose(0, 1), cotangent.transpose(0, 1), by_column, by_row)
        else:
            u, v = _solve(plan, cotangent, by_row, by_column)
        found.weighted[part] = (plan * (cotangent - u[:, None] - v)).permute(2, 0, 1)
        found.rows[part], found.columns[part] = u.T, v.T
    return found


def _solve(
    plan: Tensor, cotangent: Tensor, by_row: Tensor | None, by_column: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both u (n, s) and v (m, s) of s matrices (n, m, s), by a system of m rows."""
    c = _sum(plan.clone(), 0)
    # 1 / r itself may overflow.
    per_row, per_column = (_inverse_root(sums) for sums in (_sum(plan.clone(), 1), c))
    e = _sum(plan * cotangent, 1)
    if by_row is not None:
        e += by_row
    e *= per_row
    e *= per_row
    right = _sum(plan * (cotangent - e[:, None]), 0)
    if by_column is not None:
        right += by_column

    def times(values: Tensor) -> Tensor:
        images = per_row * _sum(plan * (per_column * values), 1)
        return values - per_column * _sum(plan * (per_row * images)[:, None], 0)

    v = per_column * _conjugate_gradients(times, per_column * right, c.sqrt())
    return e - per_row * (per_row * _sum(plan * v, 1)), v


def _conjugate_gradients(times: Callable[[Tensor], Tensor], right: Tensor, null: Tensor) -> Tensor:
    """Solutions (m, s) of s systems, orthogonal to their null vectors (m, s)."""
    unit = torch.finfo(right.dtype).eps / 2
    null = null * _inverse_root(_dot(null, null))

    def in_range(values: Tensor) -> Tensor:
        return values - null * _dot(null, values)

    left = in_range(right)
    # 0, or NaN where the right-hand side is not finite.
    values = 0 * left
    direction, size = left, _dot(left, left)
    goal, length = TOLERANCES[right.dtype] ** 2 * size, size
    active = size > 0
    for _ in range(STEPS_PER_ROW * len(right)):
        image = times(direction)
        energy = _dot(direction, image)
        active &= energy > SUM_UNITS * unit * length
        if not bool(active.any()):
            break
        step = torch.where(active, size / energy, 0)
        values += step * direction
        left = in_range(left - step * image)
        after = _dot(left, left)
        kept = torch.where(active, after / size, 0)
        direction = left + kept * direction
        # Residuals are orthogonal to the directions before them.
        size, length = after, after + kept.square() * length
        active &= size > goal
    return values


def _inverse_root(sums: Tensor) -> Tensor:
    return torch.where(sums > 0, 1 / sums.sqrt(), 0)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return _sum(one * other, 0)


def _sum(values: Tensor, dim: int) -> Tensor:
    """Sums along a dimension, by halves in an order that only its length decides; overwrites."""
    while (size := values.shape[dim]) > 1:
        half = (size + 1) // 2
        second = values.narrow(dim, half, size - half)
        values = values.narrow(dim, 0, half)
        values.narrow(dim, 0, size - half).add_(second)
    return values.select(dim, 0)
