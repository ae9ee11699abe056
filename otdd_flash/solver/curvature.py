"""Second derivatives of OT_epsilon by the points, along directions, in closed form.

The gradient 2 L (r x - P y), L = lambda_x, moves with the points and with the plan. Along A (n, d)
of x and B (m, d) of y the cost changes by C'_ij = 2 L <x_i - y_j, A_i - B_j> and the plan, whose
sums r and c stay, by

    dP = P o (w1 + w2^T - C') / epsilon,      dP 1 = 0,  dP^T 1 = 0,

a linear system for w1 (n,) and w2 (m,), see `schur`. So (Ye et al. 2026, arXiv:2602.03067, Theorem
5, for any plan and both clouds)

    T_x = 2 L (r o A - P B - dP y)
    T_y = 2 L (c o B - P^T A - dP^T x).

With u = <x, A>, v = <y, B> by rows and e = (P v - <A, P y> - <x, P B>) / r the sums of P o C' are

    s1 = 2 L r o (u + e)
    s2 - P^T (s1 / r) = 2 L (c o v - <P^T A, y> - <B, P^T x> - P^T e)

and with t1 = w1 - 2 L u = 2 L e - P w2 / r and t2 = w2 - 2 L v

    epsilon dP y   = t1 o P y + P (t2 o y) + 2 L (P o (A y^T + x B^T)) y
    epsilon dP^T x = t2 o P^T x + P^T (t1 o x) + 2 L (P o (A y^T + x B^T))^T x.

Of these the row sums of P o A y^T with y are M_i A_i, M_i = sum_j P_ij y_j y_j^T, one pass for all
directions where d is small. Points count from an origin near them, as dP 1 = 0 allows, and a
direction is taken without its mean, whose image is known: T_x = 2 L r o (mean A - mean B).

Between a cloud and itself, both arguments moving, B = A and both potentials are one:

    (diag(r) + P) w = 2 L (r o (u + e) + P u),     e = -(<x, P A> + <A, P x>) / r
    T = 4 L (r o A - P A - dP x).

A system is solved to a residual, s - S w2 or s - (diag(r) + P) w, by which column sums of
epsilon dP are off. As for a plan whose sums move, residual o y joins epsilon dP^T x, and residual o
x that of a self term. With <w2, residual> / epsilon the curvature <(A, B), T (A, B)> then is off by
the square of the residual only, and the system's share of it at most the exact one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import CostInputs
from otdd_flash.solver.plan_points import PlanPoints, beside, both, weighted
from otdd_flash.solver.schur import CGOptions, SchurSystem, SelfSystem, Solution, Solver
from otdd_flash.solver.term.result import TransportTerm

# Coordinates of all points along all directions that are there at once.
ELEMENTS = 1 << 25


class Along(NamedTuple):
    """Second derivatives along s directions.

    Attributes:
        x: (s, n, d) of the gradient by x, float64, or float32 where products are.
        y: (s, m, d) of that by y; None where nothing asks for it.
        curvature: (s,) float64, <direction, derivative>.
        iterations: (s,) int64, of conjugate gradients.
        residual: (s,) of the linear system, over its right-hand side.
        converged: (s,) bool.
    """

    x: Tensor
    y: Tensor | None
    curvature: Tensor
    iterations: Tensor
    residual: Tensor
    converged: Tensor


class CrossCurvature:
    """Of OT_epsilon between two clouds, at the potentials of a term.

    Args:
        operator: the cost that `inputs` describe.
        term: potentials f (n,) and g (m,), and epsilon.
        inputs: clouds and ground cost, squared Euclidean distances.
        cg: how the linear systems are solved.
    """

    def __init__(
        self, operator: Operator, term: TransportTerm, inputs: CostInputs, cg: CGOptions
    ) -> None:
        self._at = at = PlanPoints(operator, (term.f, term.g), term.epsilon, inputs)
        quick, system = at.plan.quick, SchurSystem(at.plan, cg.damping)
        rounded = system if quick is at.plan else SchurSystem(quick, cg.damping)
        self._solver = Solver(system, rounded, cg)

    def along(self, a: Tensor, b: Tensor | None = None) -> Along:
        """Along A (s, n, d) of x and B (s, m, d) of y; without B, y stands still.

        The derivative of the gradient by y is asked for by a B, which may be 0.
        """
        a = self._at.here(a)
        return self._along_x(a) if b is None else self._along_both(a, self._at.here(b))

    def _along_x(self, given: Tensor) -> Along:
        at, factor, images = self._at, self._at.factor, self._at.images
        r, by_row = at.r, at.by_row
        shift, a = _less_mean(given, r)
        e = -by_row * _dot(a, images)
        of_a, of_e = both(at.transposed_times, beside(a, e))
        right = -_dot(of_a, at.y) - of_e
        # As large as the points: what is not needed for a while is given up, here and below.
        del of_a, of_e
        solved = self._solve(right)
        w2 = at.here(solved.values.T)
        if at.row_moments is None:
            moved = weighted(at.plan.times, at.y, [(a, at.y)])
        else:
            moved = torch.einsum("nkl,snl->snk", at.row_moments, a)
        del a
        moved.mul_(factor)
        of_y, of_w2 = both(at.times, beside(at.y, torch.ones_like(w2)).mul_(w2[..., None]))
        moved.add_(of_y)
        t1 = factor * e - by_row * of_w2
        del of_y, of_w2
        for part, of_images in zip(moved, t1, strict=True):
            part.addcmul_(of_images[:, None], images)
        a = given - shift
        by_x = moved.mul_(-factor / at.epsilon)
        by_x.add_((a + shift).mul_(factor * r[:, None]))
        # Means and what is left are orthogonal.
        curvature = factor * r.sum() * shift.square().sum((1, 2)) + _dot(a, by_x).sum(1)
        return _along(by_x.contiguous(), None, curvature, solved, at.epsilon)

    def _along_both(self, a: Tensor, b: Tensor) -> Along:
        at, x, y, factor = self._at, self._at.x, self._at.y, self._at.factor
        images, transposed_images = at.images, at.transposed_images
        r, c = at.r, at.c
        (mean_a, a), (mean_b, b) = _less_mean(a, r), _less_mean(b, c)
        shift, v = mean_a - mean_b, _dot(y, b)
        of_b, of_v = both(at.times, beside(b, v))
        e = at.by_row * (of_v - _dot(a, images) - _dot(x, of_b))
        of_a, of_e = both(at.transposed_times, beside(a, e))
        solved = self._solve(c * v - _dot(b, transposed_images) - _dot(of_a, y) - of_e)
        w2 = at.here(solved.values.T)
        t2, changes = w2 - factor * v, [(a, y), (x, b)]
        moved = weighted(at.plan.times, y, changes)
        of_y, of_w2 = both(at.times, beside(t2[..., None] * y, w2))
        t1 = factor * e - at.by_row * of_w2
        moved = moved.mul_(factor) + of_y + t1[..., None] * images
        by_x = factor * (r[:, None] * (a + shift) - of_b - moved / at.epsilon)
        moved = weighted(at.plan.transposed_times, x, changes).mul_(factor)
        moved += at.transposed_times(t1[..., None] * x) + t2[..., None] * transposed_images
        moved += at.here(solved.left.T)[..., None] * y
        by_y = factor * (c[:, None] * (b - shift) - of_a - moved / at.epsilon)
        curvature = factor * r.sum() * shift.square().sum((1, 2))
        curvature += _dot(a, by_x).sum(1) + _dot(b, by_y).sum(1)
        return _along(by_x, by_y, curvature, solved, at.epsilon)

    def _solve(self, right: Tensor) -> Solution:
        return self._solver.solve((self._at.factor * right.double()).T)


class SelfCurvature:
    """Of OT_epsilon between a cloud and itself, both arguments moving; arguments as above."""

    def __init__(
        self, operator: Operator, term: TransportTerm, inputs: CostInputs, cg: CGOptions
    ) -> None:
        self._at = at = PlanPoints(operator, (term.f, term.f), term.epsilon, inputs)
        quick, system = at.plan.quick, SelfSystem(at.plan, cg.damping)
        rounded = system if quick is at.plan else SelfSystem(quick, cg.damping)
        self._solver = Solver(system, rounded, cg)

    def along(self, a: Tensor) -> Along:
        """Along A (s, n, d)."""
        at, x, factor, images = self._at, self._at.x, self._at.factor, self._at.images
        r = at.r
        _, a = _less_mean(at.here(a), r)
        u = _dot(x, a)
        of_a, of_u = both(at.times, beside(a, u))
        right = r * u - _dot(x, of_a) - _dot(a, images) + of_u
        solved = self._solver.solve((factor * right.double()).T)
        t = (at.here(solved.values.T) - factor * u)[..., None]
        moved = weighted(at.plan.times, x, [(a, x), (x, a)]).mul_(factor)
        moved += at.times(t * x) + t * images
        moved += at.here(solved.left.T)[..., None] * x
        by_x = 2 * factor * (r[:, None] * a - of_a - moved / at.epsilon)
        # Both potentials, so twice.
        return _along(by_x, None, _dot(a, by_x).sum(1), solved, at.epsilon / 2)


def _along(
    by_x: Tensor, by_y: Tensor | None, curvature: Tensor, solved: Solution, epsilon: float
) -> Along:
    curvature = curvature.double() + (solved.values * solved.left).sum(0) / epsilon
    return Along(by_x, by_y, curvature, solved.iterations, solved.residual, solved.converged)


def in_parts(run: Callable[[slice], Along], directions: int, coordinates: int) -> Along:
    """All directions, as many at once as memory is meant to hold, of so many coordinates each."""
    size = max(1, ELEMENTS // coordinates)
    parts = [run(slice(first, first + size)) for first in range(0, directions, size)]
    if len(parts) == 1:
        return parts[0]
    x, y, *rest = zip(*parts, strict=True)
    by_y = None if any(part is None for part in y) else torch.cat(y)
    return Along(torch.cat(x), by_y, *(torch.cat(part) for part in rest))


def _less_mean(directions: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """The mean (s, 1, d) of directions (s, n, d) over masses (n,), and what is left of them."""
    mean = torch.einsum("n,snd->sd", masses, directions)[:, None] / masses.sum()
    return mean, directions - mean


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """<one_i, other_i>, over the last dimension."""
    return (one * other).sum(-1)
