"""Optimal potentials, and the barycentric map of their plan, as functions for autograd.

Both solve a cross term, and their backward passes one linear system of its plan; see `adjoint` for
the density e, its sums q and p, and the weight M of each cost.

**Potentials.** For cotangents f' (n,) and g' (m,), at points with mass,

    alpha r o h + P k = f',    P^T h + beta c o k = g'

and M = P o (h 1^T + 1 k^T) is dL/dC. The potential of a point without mass is the update by the
others', whose derivative is the conditional plan over alpha: its cotangent passes through that to
costs, to the other side's potentials and to masses, with f'_i / (alpha q_i) in place of a_i h_i.
With h and k that include the masses,

    dL/da = -epsilon e k,    dL/db = -epsilon e^T h.

Potentials are normalized: f + t and g - t with t = <b, g>, or where a marginal is relaxed with the
translation t at which both sides owe the same mass. So the slopes of t times sum f' - sum g' are
added to f', g', dL/da and dL/db. The cotangents then have equal sums, without which the system has
no solution where marginals are exact, and nearly none where rho is large.

**Maps.** The image of x_i is the mean of V under its conditional plan,

    T_i = sum_j e_ij b_j V_j / q_i.

For a cotangent T' (n, k) of T, the cotangent of the plan is G = A B^T / a with

    A = [T' / q, -(T' . T) / q] (n, k + 1),    B = [V, 1] (m, k + 1),

and P o G has row sums 0 and column sums b o (B . e^T A), where . multiplies rows. With

    alpha r o u + P v = 0,    P^T u + beta c o v = b o (B . e^T A)

the derivatives are dL/dV = b o e^T (T' / q), dL/da = u, dL/db = v and dL/dC = -M / epsilon,

    M = e o (A B^T) b - P o (u 1^T + 1 v^T).

V and T are relative to an origin near them, as A B^T cancels any common part. At points without
mass u = -e (b o v) / (alpha q) and v = (B . e^T A - e^T (a o u)) / (beta p). With relaxed marginals
dL/da = alpha q o u and dL/db = beta p o v.

`otdd_flash` exports `sinkhorn_potentials` and `transport_map`; users alone call them. The
potentials must be balanced by `groups.settle`, and images by `settle_images`, before they are
returned or differentiated. `tests/derivatives/test_solved_gradients.py` compares the gradients with
unrolled autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from otdd_flash.arguments import TENSORS_OF_A_PAIR, Count, NotNegative, Positive, takes
from otdd_flash.checks import optional, shown, tensor
from otdd_flash.cost.compute import Compute
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.points import less_origin
from otdd_flash.derivatives.adjoint import (
    CostWeights,
    Density,
    check_sums,
    cost_gradient,
    potentials_everywhere,
)
from otdd_flash.derivatives.autograd import Inputs, Solved
from otdd_flash.derivatives.centred import mean_near
from otdd_flash.derivatives.groups import settle, settle_images
from otdd_flash.derivatives.loss import plain_number
from otdd_flash.derivatives.plan_system import DEFAULTS, CGOptions, dense_plan, largest
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.operators.base import Factors, Plan
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import Potentials, checked_start, report_convergence
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules import Converged, Schedule
from otdd_flash.solver.solving import solve
from otdd_flash.solver.tensors import compared_tensors, type_of
from otdd_flash.solver.term import TransportTerm


@computes
@takes(TENSORS_OF_A_PAIR)
def sinkhorn_potentials(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    epsilon: Positive,
    labels_x: Tensor | None = None,
    labels_y: Tensor | None = None,
    class_table: Tensor | None = None,
    class_totals: tuple[Count, Count] | None = None,
    lambda_x: NotNegative | Tensor = 0.5,
    lambda_y: NotNegative | Tensor = 0.5,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    start: Potentials | None = None,
    options: Schedule | None = None,
    cg: CGOptions = DEFAULTS,
    compute: Compute | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute optimal potentials f (n,), g (m,) of OT_epsilon(x, y) with <b, g> = 0, for autograd.

    With `unbalanced` potentials are unique, and <b, g> need not be 0.

    Differentiable once by x, y, a, b, class_table, lambda_x and lambda_y. The backward pass solves
    one linear system (see `CGOptions`), from the potentials alone: memory is that of the inputs,
    however many iterations the solve took. The gradient is the implicit one of the optimum at the
    plan's own marginals, not that of the iterations. By masses it is the one along the simplex, up
    to a constant. An incoming gradient that is not finite gives NaN.

    Between groups of points that exchange almost no mass, potentials are balanced to far below the
    marginal error, by the logarithms of the exchanged masses. Where the exchanged masses are below
    the rounding of the masses, a common offset of each group is undetermined, and a warning says
    so.

    Args:
        x: (n, d) points. Arguments are as in `sinkhorn_loss`.
        y: (m, d) points.
        a: (n,) masses, uniform by default. The potential of a point without mass is the update by
            the other side: the softmin, or with `unbalanced` what the price makes of it.
        b: (m,) masses of y, uniform by default.
        epsilon: regularisation, in units of the cost.
        labels_x: (n,) class indices.
        labels_y: (m,) class indices.
        class_table: W (V_x + V_y, V_x + V_y), of which the block [x, y] is read.
        class_totals: (V_x, V_y), the numbers of classes.
        lambda_x: weight of ||x_i - y_j||^2.
        lambda_y: weight of W.
        unbalanced: the price of mass that is not matched, rho or [rho_x, rho_y], as in
            `sinkhorn_loss`.
        unbalanced_relative: the same as multiples of the mean cost, which counts as a constant.
        start: potentials by term to start from, {"xy": g}.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        cg: options of the linear system of the backward pass.
        compute: as in `sinkhorn_loss`.

    Returns:
        f and g in units of the cost, float64, on the points' device.

    Raises:
        InputError: as `sinkhorn_loss`; in the backward pass an input that was changed in place, an
            epsilon that is far below the rounding of costs of points without mass, or a price so
            far below the costs of a point that it moves no mass; a second derivative.
        ConvergenceError: `options.require_convergence` is set and the solve stopped early, or
            leaves potentials undetermined, or, in the backward pass, the linear system was not
            solved.

    Warns:
        NotConvergedWarning: the same, without `require_convergence`.
    """
    given: dict[str, Any] = {"x": x, "y": y, "a": a, "b": b}
    options = options or Converged()
    given |= {"classes": class_table, "lambda_x": lambda_x, "lambda_y": lambda_y}
    labels = labels_x, labels_y
    penalties = unbalanced, unbalanced_relative
    solved = _solved(given, labels, epsilon, class_totals, penalties, start, options, compute)
    comparison, inputs, term = solved
    required = options.require_convergence
    with torch.no_grad():
        with comparison.within_memory():
            term = settle(comparison, term, "potentials", required=required)
            potentials = potentials_everywhere(comparison, term)
        f, g = (potential.double() for potential in potentials)
        source, target = comparison.transformed
        f, g = comparison.constraints.normalized(source.masses, f, target.masses, g)
        results = f.to(x.device), g.to(x.device)
    if not inputs.tensors:
        return results
    needs = frozenset(inputs.tensors)
    backward = PotentialGradient(comparison, potentials, needs, options, cg)
    found = Solved.apply("sinkhorn_potentials", backward, inputs, results, *inputs.tensors.values())
    return cast(tuple[Tensor, Tensor], found)


def _solved(
    given: dict[str, Any],
    labels: tuple[Tensor | None, Tensor | None],
    epsilon: float,
    class_totals: tuple[int, int] | None,
    penalties: tuple[Unbalanced | None, Unbalanced | None],
    start: Potentials | None,
    options: Schedule,
    compute: Compute | None,
) -> tuple[Comparison, Inputs, TransportTerm]:
    """Compare the tensors that are given by key, and solve for their cross term."""
    refuse_unbalanced(*penalties, options)
    lambda_x, lambda_y = (plain_number(name, given[name]) for name in ("lambda_x", "lambda_y"))
    comparison = compared_tensors(
        (given["x"], given["a"], labels[0]),
        (given["y"], given["b"], labels[1]),
        epsilon,
        given["classes"],
        class_totals,
        GroundCost(lambda_x, lambda_y),
        compute,
        debias=False,
    )
    constraints = resolve_constraints(*penalties, comparison.mean_cost)
    comparison = replace(comparison, constraints=constraints)
    inputs = Inputs(given, *labels)
    with torch.no_grad():
        divergence = solve(comparison, options, start=checked_start(comparison, start))
    report_convergence(divergence, options)
    return comparison, inputs, divergence.xy


class _ImplicitGradient(ABC):
    """The backward pass of a function of potentials, from these alone.

    Args:
        comparison: the clouds and costs.
        potentials: f (n,) and g (m,), of points without mass as well.
        needs: inputs to differentiate by.
        options: whether a missed tolerance is an error.
        cg: the tolerance of the linear system.
    """

    def __init__(
        self,
        comparison: Comparison,
        potentials: tuple[Tensor, Tensor],
        needs: frozenset[str],
        options: Schedule,
        cg: CGOptions,
    ) -> None:
        self._comparison, self._potentials, self._needs = comparison, potentials, needs
        self._options, self._cg = options, cg

    def __call__(self, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return gradients by key, for cotangents of the results."""
        given = [cotangent.to(self._comparison.device) for cotangent in cotangents]
        unit = largest(*given)
        with self._comparison.within_memory():
            found = self._gradient(*(cotangent / unit for cotangent in given))
        return {key: gradient.mul_(unit) for key, gradient in found.items()}

    @abstractmethod
    def _gradient(self, *cotangents: Tensor) -> dict[str, Tensor]:
        """Return gradients by key, for cotangents of the size of 1."""


class PotentialGradient(_ImplicitGradient):
    """The backward pass of `sinkhorn_potentials`."""

    def _gradient(self, *cotangents: Tensor) -> dict[str, Tensor]:
        of_f, of_g = cotangents
        comparison, epsilon = self._comparison, self._comparison.epsilon
        density = Density.of(comparison, *self._potentials)
        a, b = density.a, density.b
        density.check_moving()
        f, g = self._potentials
        of_rows, of_columns = comparison.constraints.translation_slopes(a, f, b, g)
        surplus = of_f.sum() - of_g.sum()
        if of_rows is not None:
            of_f = of_f + of_rows[0] * surplus
        if of_columns is not None:
            of_g = of_g + of_columns[0] * surplus
        s, t = of_f, of_g
        if not density.whole:
            # Potentials of points without mass are updates: their cotangents pass to the others'.
            alpha, beta = density.diagonal
            h = torch.where(a > 0, 0, of_f / (alpha * density.q))
            k = torch.where(b > 0, 0, of_g / (beta * density.p))
            s = torch.where(a > 0, of_f, 0) - a * density.times(k[:, None])[:, 0]
            t = torch.where(b > 0, of_g, 0) - b * density.times(h[:, None], transposed=True)[:, 0]
        w1, w2 = density.solve(s, t, self._cg, self._options)
        if density.whole:
            h, k = a * w1, b * w2
        else:
            h, k = h + a * w1, k + b * w2
        gradient = cost_gradient(comparison, CostWeights(density, h, k), self._needs)
        if "a" in self._needs:
            gradient["a"] = -epsilon * density.times(k[:, None])[:, 0]
            if of_rows is not None:
                gradient["a"] += of_rows[1].double() * surplus
        if "b" in self._needs:
            gradient["b"] = -epsilon * density.times(h[:, None], transposed=True)[:, 0]
            if of_columns is not None:
                gradient["b"] += of_columns[1].double() * surplus
        return gradient


@computes
@takes(TENSORS_OF_A_PAIR, values=optional(tensor("(m, k)")))
def transport_map(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    values: Tensor | None = None,
    epsilon: Positive,
    labels_x: Tensor | None = None,
    labels_y: Tensor | None = None,
    class_table: Tensor | None = None,
    class_totals: tuple[Count, Count] | None = None,
    lambda_x: NotNegative | Tensor = 0.5,
    lambda_y: NotNegative | Tensor = 0.5,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    start: Potentials | None = None,
    options: Schedule | None = None,
    cg: CGOptions = DEFAULTS,
    compute: Compute | None = None,
) -> Tensor:
    """Compute the barycentric map T = diag(1 / r) P V of OT_epsilon(x, y), for autograd.

    Differentiable once by x, y, values, a, b, class_table, lambda_x and lambda_y. The backward pass
    solves one linear system (see `CGOptions`), from the potentials alone: memory is that of the
    inputs, however many iterations the solve took, and a plan of more than 256 MiB is never stored.
    The gradient is the implicit one of the optimum at the plan's own marginals, not that of the
    iterations. By masses it is the one along the simplex, up to a constant.

    Args:
        x: (n, d) points. Arguments are as in `sinkhorn_loss`.
        y: (m, d) points.
        a: (n,) masses, uniform by default. Points without mass are mapped too, by the conditional
            plan that their potential defines.
        b: (m,) masses of y, uniform by default.
        values: V (m, k), of the type and on the device of y; y by default.
        epsilon: regularisation, in units of the cost.
        labels_x: (n,) class indices.
        labels_y: (m,) class indices.
        class_table: W (V_x + V_y, V_x + V_y), of which the block [x, y] is read.
        class_totals: (V_x, V_y), the numbers of classes.
        lambda_x: weight of ||x_i - y_j||^2.
        lambda_y: weight of W.
        unbalanced: the price of mass that is not matched, rho or [rho_x, rho_y], as in
            `sinkhorn_loss`.
        unbalanced_relative: the same as multiples of the mean cost, which counts as a constant.
        start: potentials by term to start from, {"xy": g}.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        cg: options of the linear system of the backward pass.
        compute: as in `sinkhorn_loss`.

    Returns:
        T (n, k) on the points' device, float64 if a cloud is and float32 otherwise.

    Raises:
        InputError: as `sinkhorn_loss`; values of another length, type or device than y, or not
            finite; an epsilon that is far below the rounding of costs of points of little or no
            mass; in the backward pass an input that was changed in place, or a price so far below
            the costs of a point that it moves no mass; a second derivative.
        ConvergenceError: `options.require_convergence` is set and the solve stopped early, or
            leaves gradients by masses or images of points without mass undetermined, or, in the
            backward pass, the linear system was not solved.

    Warns:
        NotConvergedWarning: the same, without `require_convergence`.
    """
    images = None if values is None else _checked(values, y)
    given: dict[str, Any] = {"x": x, "y": y, "a": a, "b": b, "values": values}
    options = options or Converged()
    given |= {"classes": class_table, "lambda_x": lambda_x, "lambda_y": lambda_y}
    labels = labels_x, labels_y
    penalties = unbalanced, unbalanced_relative
    solved = _solved(given, labels, epsilon, class_totals, penalties, start, options, compute)
    comparison, inputs, term = solved
    required = options.require_convergence
    with torch.no_grad():
        with comparison.within_memory():
            term = settle_images(comparison, term, required=required)
            if inputs.tensors.keys() & {"a", "b"}:
                term = settle(comparison, term, "gradients by masses", required=required)
            potentials = potentials_everywhere(comparison, term)
            needs = frozenset(inputs.tensors)
            gradient = MapGradient(images, comparison, potentials, needs, options, cg)
            result = gradient.mapped()
        result = result.to(x.device, type_of(comparison))
    if not inputs.tensors:
        return result
    found = Solved.apply("transport_map", gradient, inputs, (result,), *inputs.tensors.values())
    mapped: Tensor = found[0]
    return mapped


def _checked(values: Tensor, y: Tensor) -> Tensor:
    """Return V (m, k), detached.

    Raises:
        InputError: it does not fit y, or is not finite.
    """
    if values.ndim != 2 or len(values) != len(y) or values.shape[1] == 0:
        raise InputError(f"values must be a tensor ({len(y)}, k), got {shown(values)}")
    if values.dtype != y.dtype or values.device != y.device:
        raise InputError(
            f"values must be {y.dtype} on {y.device} as y, got {values.dtype} on {values.device}"
        )
    if not bool(values.isfinite().all()):
        raise InputError("values holds NaN or infinite entries")
    return values.detach()


class MapGradient(_ImplicitGradient):
    """The map, and its backward pass.

    Args:
        images: V (m, k), None for y.
        others: as above.
    """

    def __init__(
        self,
        images: Tensor | None,
        comparison: Comparison,
        potentials: tuple[Tensor, Tensor],
        needs: frozenset[str],
        options: Schedule,
        cg: CGOptions,
    ) -> None:
        super().__init__(comparison, potentials, needs, options, cg)
        self._images = images

    def mapped(self) -> Tensor:
        """Return T (n, k), float64."""
        values, origin = self._centred()
        # A conditional plan does not depend on the mass of its row: any serves where it is 0.
        given = self._comparison.unweighted(0)
        # Nor on how far its potential is above the softmin, maybe so far that nothing moves.
        f, g = self._potentials
        at = given.constraints.rows.softmin_of(f, given.epsilon), g
        plan: Plan | None = dense_plan(given, "xy", *at)
        if plan is None:
            operator = given.operator("xy", keep_scores=False).refined
            plan = operator.plan(*at, given.epsilon)
        found = plan.times(torch.cat((values, torch.ones_like(values[:, :1])), 1))
        check_sums(found[:, -1], self._comparison.epsilon)
        return found[:, :-1] / found[:, -1:] + origin

    def _gradient(self, *cotangents: Tensor) -> dict[str, Tensor]:
        (cotangent,) = cotangents
        comparison = self._comparison
        density = Density.of(comparison, *self._potentials)
        density.check_moving()
        a, b, per_q = density.a, density.b, 1 / density.q[:, None]
        left, right = self._factors(density, per_q, cotangent)
        pulled = density.times(left, transposed=True)
        sums = (right * pulled).sum(1)
        by_values = None
        if self._images is not None or "y" in self._needs:
            by_values = b[:, None] * pulled[:, :-1]
        # Free tensors that are not needed any more, here and below: these are the largest.
        del pulled
        w1, w2 = density.solve(None, b * sums, self._cg, self._options)
        factors = left.div_(-comparison.epsilon), right
        weights = CostWeights(
            density, a * w1 / comparison.epsilon, b * w2 / comparison.epsilon, factors
        )
        gradient = cost_gradient(comparison, weights, self._needs)
        if self._needs & {"a", "b"}:
            constraints, (alpha, beta) = comparison.constraints, density.diagonal
            u = -per_q[:, 0] * density.times((b * w2)[:, None])[:, 0] / alpha
            gradient["a"] = constraints.rows.mass_slope(u, density.q, comparison.epsilon)
            if "b" in self._needs:
                of_u = density.times((a * u)[:, None], transposed=True)[:, 0]
                v = torch.where(b > 0, w2, (sums - of_u) / (beta * density.p))
                gradient["b"] = constraints.columns.mass_slope(v, density.p, comparison.epsilon)
        if by_values is not None:
            if self._images is None:
                gradient["y"] += by_values
            else:
                gradient["values"] = by_values
        return gradient

    def _factors(self, density: Density, per_q: Tensor, cotangent: Tensor) -> Factors:
        """Return A (n, k + 1) and B (m, k + 1) of the module docstring."""
        values, _ = self._centred()
        right = torch.cat((values, torch.ones_like(values[:, :1])), 1)
        means = density.times(values, weights=(density.b,)).mul_(per_q)
        cotangent = cotangent.to(means)
        dots = (cotangent * means).sum(1, keepdim=True)
        return torch.cat((cotangent, -dots), 1).mul_(per_q), right

    def _centred(self) -> tuple[Tensor, Tensor]:
        """Return V relative to an origin near it, and the origin (k,), float64."""
        target = self._comparison.transformed[1]
        values = target.features if self._images is None else self._images.to(target.masses.device)
        origin = mean_near(values, target.masses)
        return less_origin(values, origin), origin
