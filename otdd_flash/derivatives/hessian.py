"""Hessian-vector products of the Sinkhorn divergence by the points; no Hessian is stored.

`sinkhorn_hessian` is the entry point, which users alone call. `loss` makes `SecondDerivatives`, the
products for autograd's second pass. Both sum the terms' second derivatives (`curvature`) by
`DivergenceCurvature`. A change must keep products symmetric, and refuse inputs that were changed in
place since the solve (`check_unchanged`; `tests/derivatives/test_changed_inputs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.arguments import TENSORS_OF_A_PAIR, Count, NotNegative, Positive, takes
from otdd_flash.checks import shown
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.derivatives.curvature import Along, CrossCurvature, SelfCurvature, in_parts
from otdd_flash.derivatives.gradient import POINTS, DivergenceGradient, Input
from otdd_flash.derivatives.plan_system import DEFAULTS, CGOptions, largest, report_unsolved
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.fingerprint import Mark
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import all_finite
from otdd_flash.solver.divergence import Divergence, Potentials, checked_start, report_convergence
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules import Converged, Schedule
from otdd_flash.solver.solving import solve
from otdd_flash.solver.tensors import compared_tensors
from otdd_flash.solver.term import TransportTerm

# Directions whose largest entry is in [1 / USUAL, USUAL] are not rescaled, which saves a copy.
USUAL = 1e6

# The tolerance of linear systems where a cloud is float64; others have that of `CGOptions`.
TIGHT = 1e-10

# Names of arguments where they differ from keys.
NAMES: dict[Input, str] = {"classes": "class_table"}


@computes
@takes(TENSORS_OF_A_PAIR)
def sinkhorn_hessian(
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
    lambda_x: NotNegative = 0.5,
    lambda_y: NotNegative = 0.5,
    debias: bool = True,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    start: Potentials | None = None,
    options: Schedule | None = None,
    cg: CGOptions = DEFAULTS,
    compute: Compute | None = None,
) -> SinkhornHessian:
    """Compute the Sinkhorn divergence with its first and second derivatives by the points x.

    Linear systems of few points are factorized by the first product and reused by the next; those
    of more points are solved by conjugate gradients (see `CGOptions`).

    Args:
        x: (n, d) points. Arguments are as in `sinkhorn_loss`, except that lambdas must be numbers.
        y: (m, d) points, held fixed.
        a: (n,) masses, uniform by default.
        b: (m,) masses of y, uniform by default.
        epsilon: regularisation, in units of the cost.
        labels_x: (n,) class indices.
        labels_y: (m,) class indices.
        class_table: W (V_x + V_y, V_x + V_y).
        class_totals: (V_x, V_y), the numbers of classes.
        lambda_x: weight of ||x_i - y_j||^2.
        lambda_y: weight of W.
        debias: False leaves both self terms out.
        unbalanced: the price of mass that is not matched, as in `sinkhorn_loss`.
        unbalanced_relative: the same as multiples of the mean cost, which counts as a constant.
        start: potentials by term to start from.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        cg: options of the linear systems of a product.
        compute: as in `sinkhorn_loss`.

    Raises:
        InputError: as `sinkhorn_loss`.
        ConvergenceError: `options.require_convergence` is set and a term stopped early.

    Warns:
        NotConvergedWarning: a term stopped early.
    """
    options = options or Converged()
    refuse_unbalanced(unbalanced, unbalanced_relative, options, debias=debias)
    comparison = compared_tensors(
        (x, a, labels_x),
        (y, b, labels_y),
        epsilon,
        class_table,
        class_totals,
        GroundCost(lambda_x, lambda_y),
        compute,
        debias=debias,
    )
    constraints = resolve_constraints(unbalanced, unbalanced_relative, comparison.mean_cost)
    comparison = replace(comparison, constraints=constraints)
    gradient = DivergenceGradient(comparison, frozenset({"x"}))
    start = checked_start(comparison, start)
    with torch.no_grad():
        divergence = solve(
            comparison,
            options,
            start=start,
            solved=gradient,
            gradient_callbacks=gradient.callbacks,
        )
    report_convergence(divergence, options)
    by_x = gradient.total["x"].to(x.device)
    # In a type of integers the gradient would be truncated.
    by_x = by_x.to(x.dtype) if x.is_floating_point() else by_x
    return SinkhornHessian(comparison, divergence, by_x, options, cg)


@dataclass(frozen=True, eq=False)
class HessianProduct:
    """Products T v of a Hessian with s directions v.

    Attributes:
        values: T v, in the shape and type of the directions and on their device.
        curvature: <v, T v> (s,), float64. Without debiasing it is, up to rounding, a lower bound of
            the exact number, however early conjugate gradients stopped. With debiasing it is an
            estimate.
        iterations: (s,) int64, of conjugate gradients, summed over terms; 0 for factorized systems.
        residual: (s,) relative residual of the linear system, the largest over terms; 0 where the
            right-hand side is only rounding error.
        converged: whether residuals are within the tolerance, (s,) bool.
    """

    values: Tensor
    curvature: Tensor
    iterations: Tensor
    residual: Tensor
    converged: Tensor


class SinkhornHessian:
    """A divergence with its gradient and Hessian T by the points x.

    T is the derivative of the gradient at fixed marginals r and c of the plan; with relaxed
    marginals r exp(f / rho_x) and c exp(g / rho_y), which are a and b at the optimum, are fixed
    instead. It is the Hessian of the converged problem up to the marginal error, and always
    symmetric. y is fixed, also where it equals x. The first product computes and keeps what later
    ones need, plans included if memory suffices.

    Attributes:
        divergence: the solved terms.
        gradient: (n, d) gradient by x, on the device and in the type of x; for integers in float32,
            or float64 where they need it.
    """

    def __init__(
        self,
        comparison: Comparison,
        divergence: Divergence,
        gradient: Tensor,
        options: Schedule,
        cg: CGOptions,
    ) -> None:
        self.divergence, self.gradient = divergence, gradient
        self._comparison, self._options, self._mark = comparison, options, comparison.mark
        self._curvature = DivergenceCurvature(comparison, divergence, cg)

    @property
    def value(self) -> float:
        """The divergence, in units of the cost."""
        return self.divergence.value

    @computes
    def product(self, v: Tensor) -> HessianProduct:
        """Return T v for a direction v (n, d), or for each of v (s, n, d), which share passes.

        Raises:
            InputError: v is no dense tensor of such a shape, of another type or device than the
                gradient, or not finite; an input was changed in place since; or memory is short.
            ConvergenceError: `options.require_convergence` is set and a linear system was not
                solved to the tolerance.

        Warns:
            NotConvergedWarning: a linear system was not solved to the tolerance.
        """
        comparison, directions = self._comparison, self._checked(v)
        check_unchanged(comparison, self._mark)
        with torch.no_grad():
            directions = directions.to(comparison.device)
            with comparison.within_memory():
                found = self._curvature.along(directions, None)
        way_out = f"raise cg.tolerance or cg.max_iterations{or_in_double(comparison.compute)}"
        required = self._options.require_convergence
        report_unsolved(found.residual, found.converged, way_out, required=required)
        values = found.x.to(v)
        facts = found.curvature, found.iterations, found.residual, found.converged
        return HessianProduct(
            values if v.ndim == 3 else values[0], *(fact.to(v.device) for fact in facts)
        )

    def _checked(self, v: Tensor) -> Tensor:
        like = self.gradient
        n, d = like.shape
        accepted = f"v must be a tensor ({n}, {d}), or (s, {n}, {d}) of s >= 1 directions"
        if not isinstance(v, Tensor) or v.ndim not in (2, 3) or v.shape[-2:] != like.shape:
            raise InputError(f"{accepted}, got {shown(v)}")
        if len(v) == 0:
            raise InputError(f"{accepted}, got none")
        if v.layout != torch.strided:
            raise InputError(f"v must be dense, got {v.layout}; give it as .to_dense()")
        if v.dtype != like.dtype or v.device != like.device:
            raise InputError(
                f"v must be {like.dtype} on {like.device} as the gradient, got {v.dtype} on "
                f"{v.device}"
            )
        if not all_finite(v):
            raise InputError("v holds NaN or infinite values")
        return v.detach().reshape(-1, n, d)


class DivergenceCurvature:
    """Second derivatives of a solved divergence, T = T_xy - T_xx / 2 - T_yy / 2.

    Args:
        comparison: the clouds and costs.
        divergence: its terms.
        cg: the tolerance of the linear systems.
    """

    def __init__(self, comparison: Comparison, divergence: Divergence, cg: CGOptions) -> None:
        self._comparison, self._cg = comparison, cg
        self._terms: dict[str, TransportTerm] = divergence.terms

    def along(self, a: Tensor, b: Tensor | None) -> Along:
        """Apply T to directions A (s, n, d) of x and B (s, m, d) of y; without B, y is fixed."""
        sides = [side for side in (a, b) if side is not None]
        unit = largest(*sides, dim=(1, 2))[:, None, None]
        sizes = unit[:, 0, 0].tolist()
        usual = not any(size < 1 / USUAL or size > USUAL for size in sizes)
        if not usual:
            a, b = a / unit, None if b is None else b / unit
        found = in_parts(
            lambda part: self._along(a[part], None if b is None else b[part]),
            len(a),
            sum(side[0].numel() for side in sides),
        )
        if usual:
            return found
        by_y = None if found.y is None else found.y * unit
        curvature = found.curvature * unit[:, 0, 0] * unit[:, 0, 0]
        return found._replace(x=found.x * unit, y=by_y, curvature=curvature)

    def _along(self, a: Tensor, b: Tensor | None) -> Along:
        found = self._cross.along(a, b)
        if "xx" in self._terms:
            found = _with(found, self._own_x.less_half(a, found.x))
        if b is not None and found.y is not None and "yy" in self._terms:
            found = _with(found, self._own_y.less_half(b, found.y))
        return found

    @cached_property
    def _cross(self) -> CrossCurvature:
        return CrossCurvature(self._comparison, self._terms["xy"], self._cg)

    @cached_property
    def _own_x(self) -> SelfCurvature:
        return SelfCurvature(self._comparison, "xx", self._terms["xx"], self._cg)

    @cached_property
    def _own_y(self) -> SelfCurvature:
        return SelfCurvature(self._comparison, "yy", self._terms["yy"], self._cg)


def _with(found: Along, own: Along) -> Along:
    """Combine derivatives, less half of a self term's already, with the facts of that term."""
    return Along(
        found.x,
        found.y,
        torch.sub(found.curvature, own.curvature, alpha=0.5),
        found.iterations + own.iterations,
        torch.maximum(found.residual, own.residual),
        found.converged & own.converged,
    )


class SecondDerivatives:
    """The Hessian of a loss for autograd's second pass, from the points and potentials alone.

    Args:
        keys: the inputs that require a gradient.
        comparison: the clouds and costs.
        divergence: its terms.
        options: whether a missed tolerance is an error.
    """

    def __init__(
        self,
        keys: tuple[Input, ...],
        comparison: Comparison,
        divergence: Divergence,
        options: Schedule,
    ) -> None:
        self._keys, self._comparison, self._divergence = keys, comparison, divergence
        self._options, self._mark = options, comparison.mark

    def __call__(self, along: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the changes of the gradients by the points along directions of the points.

        Raises:
            InputError: an input other than points requires a gradient, points are streamed, or an
                input has been changed in place since.
            ConvergenceError: convergence is required and a linear system was not solved.
        """
        others = [key for key in self._keys if key not in POINTS]
        if others:
            names = ", ".join(NAMES.get(key, key) for key in others)
            raise InputError(
                "the loss is differentiable twice by x and y alone, and its gradient was to be "
                f"differentiated where {names} require one too; detach {names}"
            )
        if self._comparison.streaming is not None:
            raise InputError(
                "second derivatives need all points on the device, which does not hold them; take "
                "fewer points, or raise memory_budget"
            )
        check_unchanged(self._comparison, self._mark)
        directions = dict(zip(self._keys, along, strict=True))
        x, y = (side.features for side in self._comparison.given)

        def of(key: Input, points: Tensor) -> Tensor:
            one = directions.get(key)
            still = torch.zeros_like(points, dtype=torch.float64)
            return (still if one is None else one.to(still))[None]

        a, b = of("x", x), of("y", y) if "y" in self._keys else None
        tight = torch.float64 in (x.dtype, y.dtype)
        cg = CGOptions(tolerance=TIGHT) if tight else DEFAULTS
        curvature = DivergenceCurvature(self._comparison, self._divergence, cg)
        with self._comparison.within_memory():
            found = curvature.along(a, b)
        way_out = "otdd.sinkhorn_hessian takes a larger cg.tolerance"
        way_out += or_in_double(self._comparison.compute)
        required = self._options.require_convergence
        report_unsolved(found.residual, found.converged, way_out, required=required)
        changes = {"x": found.x} if found.y is None else {"x": found.x, "y": found.y}
        return [changes[key][0] for key in self._keys]


def check_unchanged(comparison: Comparison, mark: Mark) -> None:
    """Refuse derivatives at points that are not those that were solved for.

    Args:
        comparison: the clouds and costs.
        mark: its mark of then.

    Raises:
        InputError: something was changed in place since.
    """
    if comparison.mark != mark:
        raise InputError(
            "an input was changed in place after the loss was computed, and its second "
            "derivative needs it as it was; clone it before"
        )


def or_in_double(compute: ComputeOptions) -> str:
    """Return the advice to set double precision, which ends a message; empty where it is set."""
    return "" if compute.precision == "double" else ", or set precision=double"
