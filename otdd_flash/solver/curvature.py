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
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator, refined
from otdd_flash.operators.build import CostInputs
from otdd_flash.operators.plan import Factors, plan_of
from otdd_flash.solver.centred import less_origin, origin_near
from otdd_flash.solver.conjugate_gradients import inverse
from otdd_flash.solver.schur import CGOptions, SchurSystem, SelfSystem, Solution, Solver
from otdd_flash.solver.term.result import TransportTerm

# Products y_k y_l, k <= l, of a point up to which their images under the plan are kept.
MOST_MOMENTS = 256

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


class _Points:
    """A plan and the points of its sides, about their origin, in its type."""

    def __init__(
        self,
        operator: Operator,
        potentials: tuple[Tensor, Tensor],
        epsilon: float,
        inputs: CostInputs,
    ) -> None:
        self.epsilon, self.factor = epsilon, 2 * inputs.cost.squared.lambda_x
        self.plan = plan_of(refined(operator), *potentials, epsilon)
        sides = [side.features for side in (inputs.source, inputs.target)]
        clouds = zip(sides, (operator.a, operator.b), strict=True)
        self._origin = origin_near(clouds, operator.dtype).to(self.plan.dtype)
        self._sides = sides

    @cached_property
    def x(self) -> Tensor:
        """(n, d)."""
        return less_origin(self._sides[0], self._origin)

    @cached_property
    def y(self) -> Tensor:
        """(m, d)."""
        return less_origin(self._sides[1], self._origin)

    def here(self, values: Tensor) -> Tensor:
        """In the plan's type."""
        return values.to(self.plan.dtype)

    def times(self, values: Tensor) -> Tensor:
        """P V (s, n, k) for V (s, m, k)."""
        return _apart(self.plan.times(_as_columns(values)), len(values))

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (s, m, k) for U (s, n, k)."""
        return _apart(self.plan.transposed_times(_as_columns(values)), len(values))

    @cached_property
    def r(self) -> Tensor:
        """P 1 (n,)."""
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
        return self.plan.times(self.y)

    @cached_property
    def transposed_images(self) -> Tensor:
        """P^T x (m, d)."""
        return self.plan.transposed_times(self.x)

    @cached_property
    def row_moments(self) -> Tensor | None:
        """sum_j P_ij y_j y_j^T (n, d, d), for few coordinates."""
        return _moments(self.plan.times, self.y)


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
        self._at = at = _Points(operator, (term.f, term.g), term.epsilon, inputs)
        quick, system = at.plan.quick, SchurSystem(at.plan, cg.damping)
        rounded = system if quick is at.plan else SchurSystem(quick, cg.damping)
        self._solver = Solver(system, rounded, cg)

    def along(self, a: Tensor, b: Tensor | None = None) -> Along:
        """Along A (s, n, d) of x and B (s, m, d) of y; without B, y stands still.

        The derivative of the gradient by y is asked for by a B, which may be 0.
        """
        a = self._at.here(a)
        return self._along_x(a) if b is None else self._along_both(a, self._at.here(b))

    def _along_x(self, a: Tensor) -> Along:
        at, factor, images = self._at, self._at.factor, self._at.images
        r, by_row = at.r, at.by_row
        shift, a = _less_mean(a, r)
        e = -by_row * _dot(a, images)
        of_a, of_e = _both(at.transposed_times, _beside(a, e))
        right = -_dot(of_a, at.y) - of_e
        # As large as the points, and not needed any more.
        del of_a
        solved = self._solve(right)
        w2 = at.here(solved.values.T)
        if at.row_moments is None:
            moved = _weighted(at.plan.times, at.y, [(a, at.y)])
        else:
            moved = torch.einsum("nkl,snl->snk", at.row_moments, a)
        ones = torch.ones_like(w2)
        of_y, of_w2 = _both(at.times, _beside(at.y, ones).mul_(w2[..., None]))
        t1 = factor * e - by_row * of_w2
        moved = moved.mul_(factor) + of_y + t1[..., None] * images
        by_x = factor * (r[:, None] * (a + shift) - moved / at.epsilon)
        # Means and what is left are orthogonal.
        curvature = factor * r.sum() * shift.square().sum((1, 2)) + _dot(a, by_x).sum(1)
        return _along(by_x, None, curvature, solved, at.epsilon)

    def _along_both(self, a: Tensor, b: Tensor) -> Along:
        at, x, y, factor = self._at, self._at.x, self._at.y, self._at.factor
        images, transposed_images = at.images, at.transposed_images
        r, c = at.r, at.c
        (mean_a, a), (mean_b, b) = _less_mean(a, r), _less_mean(b, c)
        shift, v = mean_a - mean_b, _dot(y, b)
        of_b, of_v = _both(at.times, _beside(b, v))
        e = at.by_row * (of_v - _dot(a, images) - _dot(x, of_b))
        of_a, of_e = _both(at.transposed_times, _beside(a, e))
        solved = self._solve(c * v - _dot(b, transposed_images) - _dot(of_a, y) - of_e)
        w2 = at.here(solved.values.T)
        t2, changes = w2 - factor * v, [(a, y), (x, b)]
        moved = _weighted(at.plan.times, y, changes)
        of_y, of_w2 = _both(at.times, _beside(t2[..., None] * y, w2))
        t1 = factor * e - at.by_row * of_w2
        moved = moved.mul_(factor) + of_y + t1[..., None] * images
        by_x = factor * (r[:, None] * (a + shift) - of_b - moved / at.epsilon)
        moved = _weighted(at.plan.transposed_times, x, changes).mul_(factor)
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
        self._at = at = _Points(operator, (term.f, term.f), term.epsilon, inputs)
        quick, system = at.plan.quick, SelfSystem(at.plan, cg.damping)
        rounded = system if quick is at.plan else SelfSystem(quick, cg.damping)
        self._solver = Solver(system, rounded, cg)

    def along(self, a: Tensor) -> Along:
        """Along A (s, n, d)."""
        at, x, factor, images = self._at, self._at.x, self._at.factor, self._at.images
        r = at.r
        _, a = _less_mean(at.here(a), r)
        u = _dot(x, a)
        of_a, of_u = _both(at.times, _beside(a, u))
        right = r * u - _dot(x, of_a) - _dot(a, images) + of_u
        solved = self._solver.solve((factor * right.double()).T)
        t = (at.here(solved.values.T) - factor * u)[..., None]
        moved = _weighted(at.plan.times, x, [(a, x), (x, a)]).mul_(factor)
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


def _weighted(times: Callable[..., Tensor], values: Tensor, changes: list[Factors]) -> Tensor:
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
    for pair in changes:
        last = first + pair[0].shape[-1]
        scale = _balance(*pair)
        left[..., first:last].copy_(pair[0]).mul_(scale)
        right[..., first:last].copy_(pair[1]).div_(scale)
        first = last
    return left, right


def _balance(left: Tensor, right: Tensor) -> Tensor:
    """By which to multiply one and divide the other for sides of one size.

    Pairs side by side are rounded on one scale.
    """
    sizes = [side.abs().max() for side in (left, right)]
    ratio = torch.where(sizes[0] * sizes[1] > 0, sizes[1] / sizes[0], 1)
    return (ratio.log2() / 2).round().exp2()


def _beside(values: Tensor, numbers: Tensor) -> Tensor:
    """V (m, k), or one for each direction, and q (s, m) as (s, m, k + 1)."""
    return torch.cat((values.expand(*numbers.shape, -1), numbers[..., None]), 2)


def _both(times: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
    """P V (s, n, k) and P q (s, n), for (V, q) side by side, in one pass."""
    found = times(values)
    return found[..., :-1], found[..., -1]


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


def _less_mean(directions: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """The mean (s, 1, d) of directions (s, n, d) over masses (n,), and what is left of them."""
    mean = torch.einsum("n,snd->sd", masses, directions)[:, None] / masses.sum()
    return mean, directions - mean


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """<one_i, other_i>, over the last dimension."""
    return (one * other).sum(-1)


def _as_columns(values: Tensor) -> Tensor:
    """(s, m, k) as the columns of one matrix (m, s k)."""
    return values.transpose(0, 1).flatten(1)


def _apart(values: Tensor, count: int) -> Tensor:
    """A matrix (n, s k) as (s, n, k)."""
    return values.reshape(len(values), count, -1).transpose(0, 1)
