"""Gradients through plans that are optimal for their own sums, many small matrices at once.

A plan P = a b^T exp((f + g - C) / epsilon) (n, m) with sums r = P 1 and c = P^T 1 changes with its
cost and masses. For a cotangent G = dL/dP, and cotangents s (n,) of f / epsilon and t (m,) of g /
epsilon, the gradients come from one symmetric system,

    diag(r) u + P v   = (G o P) 1 + s
    P^T u + diag(c) v = (G o P)^T 1 + t.

With it dL/dC = -P o (G - u 1^T - 1 v^T) / epsilon, and dL/da = u and dL/db = v along the simplex
(Luise et al. 2018, Differential properties of Sinkhorn approximation for learning with Wasserstein
distance; Eisenberger et al. 2022, A unified framework for implicit Sinkhorn differentiation). These
authors set r and c to the masses, to which the sums converge. With the sums that the plan has, the
system has a solution however early the iterations ended.

With e = ((G o P) 1 + s) / r, u = e - P v / r and w = c^(1/2) o v it becomes

    (I - A^T A) w = c^(-1/2) o ((P o (G - e 1^T))^T 1 + t),
    A = diag(r)^(-1/2) P diag(c)^(-1/2),

with eigenvalues in [0, 1]. A is applied as it stands and A^T A never formed. The matrix takes
c^(1/2) to 0, so residuals must keep no part along it. Conjugate gradients solve the system of each
matrix by itself, so that it gets the same bits among any others: here, or in
`kernels.batched.small_adjoint`, which is given `LIMITS`. A change must be made in both
(`tests/batched/test_adjoint.py`, `tests/kernels/test_small_adjoint.py`).

`batched.balance` calls `plan_gradient` and, for problems with masses, `gradient_with_masses`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.batched.chunks import Products, parts, side_by_side, sum_by_halves
from otdd_flash.kernels.batched.problems import Cotangents, Problems, within
from otdd_flash.operators.base import SUM_UNITS


class Limits(NamedTuple):
    """The limits at which the iterations of a matrix end.

    Attributes:
        tolerance: of a residual over the right-hand side.
        rounding: a direction's curvature p^T S p over p^T p that rounding alone may make.
        smallest: sums below it are 0.
        steps_per_row: of the system, which as many steps as rows solve but for rounding.
    """

    tolerance: float
    rounding: float
    smallest: float
    steps_per_row: int = 2


LIMITS = {
    dtype: Limits(tolerance, SUM_UNITS * torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12))
}


class Adjoint(NamedTuple):
    """The solution of the linear systems of B plans.

    Attributes:
        weighted: P o (G - u 1^T - 1 v^T) (B, n, m), of the type that plans and cotangents have
            together.
        rows: u (B, n), float32 or float64; 0 where a row of the plan is.
        columns: v (B, m), float32 or float64; 0 where a column of the plan is. u + t and v - t are
            as good for any number t.
    """

    weighted: Tensor
    rows: Tensor
    columns: Tensor


def adjoint(
    plans: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None = None,
    column_cotangents: Tensor | None = None,
    *,
    in_triton: bool = False,
    sides: bool = True,
) -> Adjoint:
    """Solve for the gradient of a function of B plans, of their optimality and not of a loop.

    A matrix is left at a residual of 1e-6, in float64 1e-12, over the right-hand side, or where its
    direction has no curvature but for rounding, as between the blocks of a decomposable matrix. One
    whose cotangents are not finite gets NaN. All get what they get alone, bit for bit.

    Args:
        plans: P (B, n, m), not negative, float16 to float64; computed in float32 or float64.
        cotangents: G (B, n, m).
        row_cotangents: s (B, n), 0 by default.
        column_cotangents: t (B, m), 0 by default. Only with sum s = sum t there is a solution, and
            the difference of the sums is left out.
        in_triton: whether the kernel solves, for up to 128 rows and columns.
        sides: whether u and v are asked for, which are empty otherwise.
    """
    count, n, m = plans.shape
    result = torch.promote_types(plans.dtype, cotangents.dtype)
    dtype, kept = torch.promote_types(result, torch.float32), count if sides else 0
    found = Adjoint(
        plans.new_empty((count, n, m), dtype=result),
        plans.new_empty((kept, n), dtype=dtype),
        plans.new_empty((kept, m), dtype=dtype),
    )
    sums = row_cotangents, column_cotangents
    if in_triton:
        from otdd_flash.kernels.batched.small_adjoint import small_adjoint

        small_adjoint(plans, cotangents, *sums, found, **LIMITS[dtype]._asdict())
        return found
    for part in parts(plans):
        s, t = (None if one is None else one[part].to(dtype).T for one in sums)
        weighted, u, v = _in_torch(plans[part], cotangents[part], s, t, dtype)
        found.weighted[part] = weighted
        if sides:
            found.rows[part], found.columns[part] = u.T, v.T
    return found


def plan_gradient(plans: Tensor, cotangents: Tensor, *, in_triton: bool = False) -> Tensor:
    """P o (G - u 1^T - 1 v^T) (B, n, m) alone; arguments as for `adjoint`."""
    return adjoint(plans, cotangents, in_triton=in_triton, sides=False).weighted


def gradient_with_masses(
    problems: Problems,
    plans: Tensor,
    rows: Tensor,
    columns: Tensor,
    given: Cotangents,
    *,
    in_triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of plans and potentials by x / t (B, n, m), a (B, n) and b (B, m).

    By x / t it is P o (G - u 1^T - 1 v^T), by a it is the sum of (P / a) o (G - 1 v^T) along rows,
    and by b that of (P / b) o (G - u 1^T) along columns. The potential of a row or column without
    mass is a softmin, and its cotangent adds the derivative of that softmin to all three.

    Args:
        problems: with masses; iterations and tolerance are not read.
        plans: P (B, n, m), as `rows` and `columns` a result of `balance` for the problems.
        rows: t log phi (B, n).
        columns: t log gamma (B, m).
        given: cotangents of the three.
        in_triton: whether the kernel solves.
    """
    x = -1 * problems.matrices if problems.negated else problems.matrices
    scale, sizes, cotangents = problems.scale.reshape(-1, 1, 1), problems.sizes, given.matrices
    dtype, unit = rows.dtype, scale[:, :, 0].to(rows.dtype)
    assert problems.a is not None
    assert problems.b is not None
    a, b = problems.a.to(dtype).expand_as(rows), problems.b.to(dtype).expand_as(columns)
    s, t = (
        torch.zeros_like(of) if one is None else one / unit
        for one, of in ((given.rows, rows), (given.columns, columns))
    )
    logs = (x + rows[:, :, None] + columns[:, None]) * scale.to(dtype)
    # Potentials of rows and columns without mass, softmins, are those of the iteration before,
    # whose entries may overflow. With their sums made 1 they are those of the plan at hand.
    without_a, without_b = a[:, :, None] == 0, b[:, None] == 0
    logs = logs - torch.where(without_a, _log_sum(logs + b[:, None].log(), 2), 0)
    logs = logs - torch.where(without_b, _log_sum(logs + a[:, :, None].log(), 1), 0)
    per_mass = logs.exp()
    # A pair of a row and a column without mass has no say, and may overflow.
    there = ~(without_a & without_b)
    if sizes is not None:
        one, other = (within(sizes, side, size) for side, size in enumerate(x.shape[1:]))
        there &= one[:, :, None] & other[:, None]
    per_mass = torch.where(there, per_mass, 0)
    s_free, t_free = torch.where(a > 0, 0, s), torch.where(b > 0, 0, t)
    by_row = per_mass * b[:, None] * s_free[:, :, None]
    by_column = per_mass * a[:, :, None] * t_free[:, None]
    plan = plans.to(dtype)
    weighted, u, v = adjoint(
        plan,
        cotangents.to(dtype),
        s - s_free - by_column.sum(2),
        t - t_free - by_row.sum(1),
        in_triton=in_triton,
    )
    by_logits = weighted - by_row - by_column
    by_a = (per_mass * (b[:, None] * (cotangents - v[:, None]) - t_free[:, None])).sum(2)
    by_b = (per_mass * (a[:, :, None] * (cotangents - u[:, :, None]) - s_free[:, :, None])).sum(1)
    return by_logits, by_a, by_b


def _log_sum(logs: Tensor, dim: int) -> Tensor:
    """Return log sum exp along a dimension, which stays; 0 where all are forbidden."""
    found = logs.logsumexp(dim, keepdim=True)
    return torch.where(found.isfinite(), found, 0)


def _in_torch(
    plans: Tensor, cotangents: Tensor, s: Tensor | None, t: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """P o (G - u 1^T - 1 v^T) of a chunk of the plans, u (n, s) and v (m, s)."""
    plan, cotangent = side_by_side(plans, dtype), side_by_side(cotangents, dtype)
    if plans.shape[1] < plans.shape[2]:
        v, u = _solve(plan.transpose(0, 1), cotangent.transpose(0, 1), t, s)
    else:
        u, v = _solve(plan, cotangent, s, t)
    return (plan * (cotangent - u[:, None] - v)).permute(2, 0, 1), u, v


def _solve(
    plan: Tensor, cotangent: Tensor, by_row: Tensor | None, by_column: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both u (n, s) and v (m, s) of s matrices (n, m, s), by a system of m rows."""
    limits = LIMITS[plan.dtype]
    along_rows, along_columns = Products(plan, 1), Products(plan, 0)
    c = along_columns(plan.new_ones((1, 1))).clone()
    per_row = _inverse(along_rows(plan.new_ones((1, 1))))
    e = sum_by_halves(plan * cotangent, 1)
    if by_row is not None:
        e += by_row
    e *= per_row
    right = sum_by_halves((cotangent - e[:, None]).mul_(plan), 0)
    if by_column is not None:
        right += by_column
    per_column = _inverse(c).sqrt()

    def times(values: Tensor) -> Tensor:
        images = per_row * along_rows(per_column * values)
        return values - per_column * along_columns(images)

    v = per_column * _conjugate_gradients(times, per_column * right, per_column * c, limits)
    return e - per_row * along_rows(v), v


def _conjugate_gradients(
    times: Callable[[Tensor], Tensor], right: Tensor, null: Tensor, limits: Limits
) -> Tensor:
    """Solutions (m, s) of s systems, orthogonal to their null vectors (m, s)."""
    null = null * _inverse(_dot(null, null)).sqrt()

    def in_range(values: Tensor) -> Tensor:
        return values - null * _dot(null, values)

    left = in_range(right)
    # So that no square overflows or is lost.
    largest = left.abs().amax(0)
    largest = torch.where(largest > 0, largest, 1)
    left = left / largest
    # 0, or NaN where the right-hand side is not finite.
    values = 0 * left
    direction, size = left, _dot(left, left)
    goal, length = limits.tolerance**2 * size, size
    active = size > 0
    for _ in range(limits.steps_per_row * len(right)):
        image = times(direction)
        energy = _dot(direction, image)
        active &= energy > limits.rounding * length
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
    return largest * values


def _inverse(sums: Tensor) -> Tensor:
    return torch.where(sums >= LIMITS[sums.dtype].smallest, 1 / sums, 0)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return sum_by_halves(one * other, 0)
