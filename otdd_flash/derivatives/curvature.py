"""Second derivatives of OT_epsilon by the points, along directions, in closed form.

`hessian.DivergenceCurvature` makes a `CrossCurvature` and, with debiasing, a `SelfCurvature` for
each self term whose points move, and sums their derivatives. Second derivatives must stay
symmetric, damped ones too, and the curvature without debiasing must stay a lower bound
(`tests/derivatives/test_hessian.py`).

The gradient 2 L (r x - P y), L = lambda_x, changes with the points and with the plan. Along
directions A (n, d) of x and B (m, d) of y the cost changes by C'_ij = 2 L <x_i - y_j, A_i - B_j>,
and the plan, whose marginals r and c are held fixed, by

    dP = P o (w1 + w2^T - C') / epsilon,      dP 1 = 0,  dP^T 1 = 0,

a linear system for w1 (n,) and w2 (m,), see `plan_system`. So (Theorem 5 of Ye et al. 2026,
arXiv:2602.03067, here for any plan and both clouds)

    T_x = 2 L (r o A - P B - dP y)
    T_y = 2 L (c o B - P^T A - dP^T x).

With the row-wise products u = <x, A>, v = <y, B> and e = (P v - <A, P y> - <x, P B>) / r, the row
sums s1 and column sums s2 of P o C' satisfy

    s1 = 2 L r o (u + e)
    s2 - P^T (s1 / r) = 2 L (c o v - <P^T A, y> - <B, P^T x> - P^T e)

and with t1 = w1 - 2 L u = 2 L e - P w2 / r and t2 = w2 - 2 L v

    epsilon dP y   = t1 o P y + P (t2 o y) + 2 L (P o (A y^T + x B^T)) y
    epsilon dP^T x = t2 o P^T x + P^T (t1 o x) + 2 L (P o (A y^T + x B^T))^T x.

Here (P o A y^T) y has the rows M_i A_i, M_i = sum_j P_ij y_j y_j^T: one pass for all directions
where d is small. Coordinates are relative to an origin near the points, as dP 1 = 0 allows. The
mean of a direction is subtracted, as its image is known: T_x = 2 L r o (mean A - mean B).

Where marginals are relaxed they give way, dP 1 = -r o w1 / rho_x and dP^T 1 = -c o w2 / rho_y.
With alpha = 1 + epsilon / rho_x, and beta = 1 + epsilon / rho_y,

    alpha r o w1 + P w2 = s1,    P^T w1 + beta c o w2 = s2
    T_x = 2 L (r o A - P B + (dP 1) o x - dP y),

the right-hand side of w2 has e / alpha - (1 - 1 / alpha) u in the place of e, and

    t1 = (2 L e - P w2 / r) / alpha - 2 L (1 - 1 / alpha) u
    -epsilon dP 1 = r o ((1 - 1 / alpha) (2 L (u + e) - P w2 / r)).

The image of constants is not known then, and directions are not centred.

For a self term OT(x, x), whose two arguments move together, B = A and there is one potential:

    (alpha diag(r) + P) w = 2 L (r o (u + e) + P u),     e = -(<x, P A> + <A, P x>) / r
    T = 4 L (r o A - P A - dP x).

The residual of an approximate solution, s - S w2 or s - (alpha diag(r) + P) w, is the error of the
column sums of epsilon dP. So residual o y is added to epsilon dP^T x, as for a plan whose marginals
change, and residual o x in a self term. With relaxed marginals the change of the sums, -epsilon
(dP^T 1) o y, is added with it. With <w2, residual> / epsilon added, the error of the curvature
<(A, B), T (A, B)> is of second order in the residual, and the system's share of it is a lower
bound.

A damped solution has delta c o w2, or delta r o w, beside its residual. Both are added, and the
part that they add to all rows of T_x alike is subtracted where marginals are exact: T stays
symmetric, and the image of constants remains exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.facts import SIDES
from otdd_flash.derivatives.plan_points import (
    Directions,
    Part,
    Points,
    dot,
    inner,
    plan_points,
)
from otdd_flash.derivatives.plan_system import CGOptions, PlanSystem, Solution
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.term import TransportTerm

# Coordinates of directions, over all points, that are processed at once.
ELEMENTS = 1 << 25


class Along(NamedTuple):
    """Second derivatives along s directions.

    Attributes:
        x: (s, n, d), of the gradient by x, float64, or float32 where products are.
        y: (s, m, d), of the gradient by y; None if not asked for.
        curvature: (s,) float64, <direction, derivative>.
        iterations: (s,) int64, of conjugate gradients.
        residual: (s,), relative residual of the linear system.
        converged: (s,) bool.
    """

    x: Tensor
    y: Tensor | None
    curvature: Tensor
    iterations: Tensor
    residual: Tensor
    converged: Tensor


class CrossCurvature:
    """Second derivatives of OT_epsilon between two clouds, at the potentials of a term.

    Args:
        comparison: the clouds at epsilon, with squared Euclidean distances.
        term: potentials f (n,) and g (m,), and epsilon.
        cg: how the linear systems are solved.
    """

    def __init__(self, comparison: Comparison, term: TransportTerm, cg: CGOptions) -> None:
        self._at = at = plan_points(comparison, "xy", (term.f, term.g))
        diagonal = comparison.constraints.diagonal(term.epsilon)
        self._system = PlanSystem(at.plan, cg, at.plan.quick, diagonal=diagonal)
        # alpha - 1, and whether shifts of one side against the other have a known image.
        self._softness, self._exact = diagonal[0] - 1, comparison.constraints.exact

    @cached_property
    def _by_row(self) -> Tensor:
        """1 / (alpha r) (n,), 0 where there is no mass. Reading it computes r."""
        return self._at.here(self._system.matrix.by_row[:, 0])

    def along(self, a: Tensor, b: Tensor | None = None) -> Along:
        """Differentiate along A (s, n, d) of x and B (s, m, d) of y; without B, y is fixed.

        The gradient by y is differentiated only if a B is given, which may be 0.
        """
        a = self._at.here(a)
        return self._along_x(a) if b is None else self._along_both(a, self._at.here(b))

    def _along_x(self, given: Tensor) -> Along:
        at, factor, r = self._at, self._at.factor, self._at.r
        a = at.directions(given, centred=self._exact)
        e = a.dots(at.images).mul_(self._by_row).neg_()
        yielding = self._yielding(a)
        moved = e if yielding is None else e - yielding
        solved = self._solve(self._right(a, moved), moved)
        w2 = at.here(solved.values.T)
        columns, of_w2 = at.columns_change_beside(w2, w2)
        t1, lost = self._rows_change(e, of_w2, yielding)
        by_x = torch.empty_like(given)
        # The means of directions and the centred directions are orthogonal.
        curvature = a.mean.square().sum((1, 2)).mul_(factor * a.total)
        for part in at.changed(a, None, t1, columns):
            _add_lost(part, lost, at.x)
            changed, own = part.points.mul_(-factor / at.epsilon), factor * r[part.rows, None]
            by_x[part.at] = found = changed.addcmul_(given[part.at], own)
            curvature[part.which].add_(inner(a.at(*part.at), found))
        self._less_shared(a.total, a.mean, by_x)
        return _along(by_x, None, curvature, solved, at.epsilon)

    def _along_both(self, given_a: Tensor, given_b: Tensor) -> Along:
        at, y, factor = self._at, self._at.y, self._at.factor
        r, c = at.r, at.c
        a = at.directions(given_a, centred=self._exact)
        b = at.directions(given_b, of_y=True, centred=self._exact)
        shift, v = a.mean - b.mean, b.dots(y)
        by_x, by_y = torch.empty_like(given_a), torch.empty_like(given_b)
        e = self._row_sums(a, b, v, by_x)
        yielding = self._yielding(a)
        moved = e if yielding is None else e - yielding
        right = c * v - b.dots(at.transposed_images)
        right += self._right(a, moved, by_y)
        solved = self._solve(right, moved)
        w2, left = at.here(solved.values.T), at.here(self._system.columns_lost(solved))
        t2 = w2 - factor * v
        columns, of_w2 = at.columns_change_beside(t2, w2)
        t1, lost = self._rows_change(e, of_w2, yielding)
        curvature = shift.square().sum((1, 2)).mul_(factor * a.total)
        for part in at.changed(a, b, t1, columns):
            _add_lost(part, lost, at.x)
            own = a.at(*part.at)
            rest = r[part.rows, None] * (own + shift[part.which]) - by_x[part.at]
            by_x[part.at] = found = factor * (rest - part.points / at.epsilon)
            curvature[part.which].add_(inner(own, found))
        columns = at.columns_change(t1, transposed=True)
        for part in at.changed(a, b, t2, columns, transposed=True):
            own = b.at(*part.at)
            moved = part.points.add_(left[part.at][..., None] * y[part.rows])
            rest = c[part.rows, None] * (own - shift[part.which]) - by_y[part.at]
            by_y[part.at] = found = factor * (rest - moved / at.epsilon)
            curvature[part.which].add_(inner(own, found))
        self._less_shared(a.total, shift, by_x, by_y)
        return _along(by_x, by_y, curvature, solved, at.epsilon)

    def _less_shared(
        self, total: Tensor, shift: Tensor, by_x: Tensor, by_y: Tensor | None = None
    ) -> None:
        """Subtract in place what damping adds to the sums of derivatives (s, n, d).

        The exact sums are 2 L total shift, for the shift (s, 1, d) of all x against all y.
        """
        if self._system.matrix.damping == 0 or not self._exact:
            return
        shared = torch.sub(by_x.sum(1, keepdim=True) / total, shift, alpha=self._at.factor)
        by_x.addcmul_(self._at.r[:, None], shared, value=-1)
        if by_y is not None:
            by_y.addcmul_(self._at.c[:, None], shared)

    def _yielding(self, a: Directions) -> Tensor | None:
        """Return (1 - 1 / alpha) u (s, n); None of an exact side."""
        if self._softness == 0:
            return None
        return a.dots(self._at.x).mul_(self._softness / (1 + self._softness))

    def _rows_change(
        self, e: Tensor, of_w2: Tensor, yielding: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return t1 (s, n), and -epsilon dP 1 (s, n) of a relaxed side, None of an exact one.

        Args:
            e: e / alpha (s, n).
            of_w2: P w2 (s, n).
            yielding: as `_yielding` returns it.
        """
        factor = self._at.factor
        t1 = torch.addcmul(factor * e, self._by_row, of_w2, value=-1)
        if yielding is None:
            return t1, None
        # Before u is subtracted, which may be far larger.
        lost = torch.add(factor * yielding, t1, alpha=self._softness).mul_(self._at.r)
        return t1.sub_(yielding, alpha=factor), lost

    def _row_sums(self, a: Directions, b: Directions, v: Tensor, out: Tensor) -> Tensor:
        """Return e / alpha (s, n) of the module docstring; write P B to `out`."""
        at, found = self._at, out.new_empty(out.shape[:2])
        for part, numbers in at.products(b, v):
            dots = dot(a.at(*part.at), at.images[part.rows]) + dot(at.x[part.rows], part.points)
            found[part.at] = self._by_row[part.rows] * (numbers - dots)
            out[part.at] = part.points
        return found

    def _right(self, a: Directions, e: Tensor, out: Tensor | None = None) -> Tensor:
        """Return -<P^T A, y> - P^T e (s, m); write P^T A to `out`."""
        at = self._at
        found = e.new_empty((len(e), at.shape[1]))
        for part, numbers in at.products(a, e, transposed=True):
            found[part.at] = -dot(part.points, at.y[part.rows]) - numbers
            if out is not None:
                out[part.at] = part.points
        return found

    def _solve(self, right: Tensor, e: Tensor) -> Solution:
        """Solve for right-hand sides (s, m), over 2 L; one that is only rounding counts as 0.

        Where a plan matches points one to one, or all points of a side are equal, the exact
        right-hand side is 0, and its rounding need not be in the range of the system.
        """
        metric, given, e = self._system.matrix.metric, right.double().T, e.double()
        in_range = metric.in_range(given)
        # P^T e, one of the terms, is at most as large as e.
        terms = torch.maximum(metric.size(given), (e.square() @ self._at.r.double()).sqrt_())
        significant = metric.size(in_range) > self._at.plan.precision * terms
        return self._system.solve(torch.where(significant, self._at.factor * in_range, 0))


class SelfCurvature:
    """Second derivatives of OT_epsilon(x, x), both arguments moving.

    Arguments as above, with the name of the self term, "xx" or "yy".
    """

    def __init__(
        self, comparison: Comparison, name: str, term: TransportTerm, cg: CGOptions
    ) -> None:
        self._at = at = plan_points(comparison, name, (term.f, None))
        diagonal = comparison.constraints.between(*SIDES[name]).diagonal(term.epsilon)
        self._system = PlanSystem(at.plan, cg, at.plan.quick, diagonal=diagonal, symmetric=True)

    def less_half(self, given: Tensor, out: Tensor) -> Along:
        """Differentiate along A (s, n, d); subtract half of the derivatives from `out` (s, n, d).

        The derivatives themselves, as large as the points, are never stored.
        """
        at, x, factor, r = self._at, self._at.x, self._at.factor, self._at.r
        a = at.directions(at.here(given))
        u = a.dots(x)
        right = a.dots(at.images).neg_().addcmul_(r, u)
        curvature = torch.zeros_like(a.mean[:, 0, 0])
        for part, numbers in at.products(a, u):
            own, of_a = a.at(*part.at), part.points
            part.add(right, numbers - dot(x[part.rows], of_a))
            # P A - r o A.
            rest = of_a.addcmul_(own, r[part.rows, None], value=-1)
            curvature[part.which].sub_(inner(own, rest))
            part.add(out, rest, factor)
            del part, own, of_a, rest
        solved = self._system.solve((factor * right.double()).T)
        t = torch.sub(at.here(solved.values.T), u, alpha=factor)
        left = at.here(self._system.columns_lost(solved))
        columns = at.columns_change(t)
        for part in at.changed(a, a, t, columns):
            moved = part.points.addcmul_(left[part.at][..., None], x[part.rows]).div_(at.epsilon)
            curvature[part.which].sub_(inner(a.at(*part.at), moved))
            part.add(out, moved, factor)
        # Twice, as both arguments move.
        return _along(out, None, 2 * factor * curvature, solved, at.epsilon / 2)


def _add_lost(part: Part, lost: Tensor | None, points: Points) -> None:
    """Add in place to the change of P y what the change of the sums of rows does to x."""
    if lost is not None:
        part.points.addcmul_(lost[part.at][..., None], points[part.rows])


def _along(
    by_x: Tensor, by_y: Tensor | None, curvature: Tensor, solved: Solution, epsilon: float
) -> Along:
    unsolved = (solved.values * solved.left).sum(0)
    curvature = torch.add(curvature.double(), unsolved, alpha=1 / epsilon)
    return Along(by_x, by_y, curvature, solved.iterations, solved.residual, solved.converged)


def in_parts(run: Callable[[slice], Along], directions: int, coordinates: int) -> Along:
    """Run all directions, of so many coordinates each, at most ELEMENTS coordinates at a time."""
    size = max(1, ELEMENTS // coordinates)
    parts = [run(slice(first, first + size)) for first in range(0, directions, size)]
    if len(parts) == 1:
        return parts[0]
    x, y, *rest = zip(*parts, strict=True)
    by_y = None if any(part is None for part in y) else torch.cat(y)
    return Along(torch.cat(x), by_y, *(torch.cat(part) for part in rest))
