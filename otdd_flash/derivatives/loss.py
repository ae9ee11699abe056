"""The Sinkhorn divergence as a differentiable function of tensors.

`otdd_flash` exports `sinkhorn_loss` for users; `derivatives.losses` calls it for pairs that are not
solved side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from otdd_flash.arguments import Count, Ground, NotNegative, Positive, takes
from otdd_flash.checks import optional, tensor
from otdd_flash.cost.compute import Compute
from otdd_flash.cost.ground import GroundCost
from otdd_flash.derivatives.autograd import KnownGradient
from otdd_flash.derivatives.gradient import DivergenceGradient, Gradient, Input, Needs
from otdd_flash.derivatives.hessian import SecondDerivatives
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Potentials, checked_start, report_convergence
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules import Converged, Schedule
from otdd_flash.solver.solving import solve
from otdd_flash.solver.tensors import (
    check_batch,
    class_totals_of,
    compared_tensors,
    type_of,
)


@computes
@takes(
    x=tensor("(n, d) or (B, n, d)"),
    y=tensor("(m, d) or (B, m, d)"),
    a=optional(tensor("(n,) or (B, n)")),
    b=optional(tensor("(m,) or (B, m)")),
    labels_x=optional(tensor("(n,) or (B, n)")),
    labels_y=optional(tensor("(m,) or (B, m)")),
    class_table=optional(tensor("(V_x + V_y, V_x + V_y)")),
)
def sinkhorn_loss(
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
    ground: Ground = "sqeuclidean",
    debias: bool = True,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    start: Potentials | None = None,
    options: Schedule | None = None,
    compute: Compute | None = None,
) -> Tensor:
    """Compute S_epsilon = OT(x, y) - OT(x, x) / 2 - OT(y, y) / 2 at epsilon, for autograd.

    For clouds (n, d) and (m, d) it is one number, for B pairs (B, n, d) and (B, m, d) a tensor
    (B,); `sinkhorn_losses` also takes clouds of different sizes.

    Differentiable in x, y, a, b, class_table, lambda_x and lambda_y. Twice differentiable in x and
    y (`create_graph=True`) if none of the others requires a gradient. The forward pass solves to
    `options.tolerance` and computes the gradients of the inputs that require one; the backward pass
    only scales them. Memory is that of the solve, whatever the number of iterations. A second
    backward pass solves the linear systems of `sinkhorn_hessian`, to 1e-5, or 1e-10 for points in
    float64, from the potentials alone, and needs all points on the device.

    The gradient is exact for the dual value at the potentials that the solver returned, converged
    or not (Danskin; Feydy et al. 2019, Interpolating between optimal transport and MMD using
    Sinkhorn divergences; Ye et al. 2026, arXiv:2602.03067, for plans with marginals other than a
    and b). The gradient by masses is the one along the simplex, with <a, gradient> = 0: masses that
    do not come from a softmax have to be projected after a step. Between groups of points that
    exchange almost no mass, it is computed from potentials that balance these flows; a warning says
    so where the rounding of the masses is larger than the flows.

    Args:
        x: (n, d) or (B, n, d) points of any real type and strides; half types are computed in
            float32.
        y: (m, d) or (B, m, d) points on the same device.
        a: (n,) or (B, n) non-negative masses that sum to 1; uniform by default.
        b: (m,) or (B, m) masses, likewise.
        epsilon: regularisation of all pairs, in units of the cost.
        labels_x: (n,) or (B, n) class indices in [0, V_x); None is one class.
        labels_y: (m,) or (B, m) class indices in [0, V_y), numbered apart from `labels_x`.
        class_table: W (V_x + V_y, V_x + V_y), squared distances between all classes; given with
            labels, and only with them. The block [y, x] is not read and gets the gradient 0. The
            blocks [x, x] and [y, y] must be symmetric but for rounding, and so are their gradients;
            without `debias` they are not read.
        class_totals: (V_x, V_y), the numbers of classes; needed where the last class of a side has
            no point.
        lambda_x: weight of ||x_i - y_j||^2, or of the cost that `ground` names; a number or a 0-dim
            tensor.
        lambda_y: weight of W, likewise.
        ground: `sqeuclidean`, `cosine` or `inner`, as in `GroundCost`.
        debias: False leaves both self terms out.
        unbalanced: rho, the price of mass that is not matched, in units of the cost; without
            `debias` also [rho_x, rho_y]. Marginals are then not exact, but cost rho_x KL(P 1 | a) +
            rho_y KL(P^T 1 | b).
        unbalanced_relative: the same as multiples of the mean cost, which counts as a constant.
        start: potentials by term to start from, {"xy": g, "xx": f, "yy": g}, of one pair.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        compute: `otdd.ComputeOptions`, or only a device; by default on the device of the
            points, in double precision if a cloud is float64.

    Returns:
        0-dim tensor, or (B,), in units of the cost, float64 if a cloud is and float32 otherwise.

    Raises:
        InputError: points that are not finite, clouds on two devices or of two dimensions, masses
            that do not sum to 1, labels or a table that do not fit, a block [x, x] or [y, y] of it
            that is not symmetric, a bad epsilon or weight, or a tolerance that the precision cannot
            reach.
        ConvergenceError: `options.require_convergence` is set and a term stopped early, or leaves
            gradients by masses undetermined.

    Warns:
        NotConvergedWarning: the same, without `require_convergence`.
    """
    if x.ndim == 3 and y.ndim == 3:
        if start is not None:
            raise InputError(
                "start holds potentials of one pair, and x is a batch (B, n, d); leave it out"
            )
        check_batch((x, a, labels_x), (y, b, labels_y))
        # It calls this for single pairs.
        from otdd_flash.derivatives.losses import sinkhorn_losses

        return sinkhorn_losses(
            x,
            y,
            a,
            b,
            epsilon=epsilon,
            labels_x=labels_x,
            labels_y=labels_y,
            class_table=class_table,
            class_totals=class_totals_of(labels_x, labels_y, class_table, class_totals),
            lambda_x=lambda_x,
            lambda_y=lambda_y,
            ground=ground,
            debias=debias,
            unbalanced=unbalanced,
            unbalanced_relative=unbalanced_relative,
            options=options,
            compute=compute,
        )
    options = options or Converged()
    refuse_unbalanced(unbalanced, unbalanced_relative, options, debias=debias, ground=ground)
    comparison = compared_tensors(
        (x, a, labels_x),
        (y, b, labels_y),
        epsilon,
        class_table,
        class_totals,
        GroundCost(plain_number("lambda_x", lambda_x), plain_number("lambda_y", lambda_y), ground),
        compute,
        debias=debias,
        resident=False,
    )
    mean = comparison.mean_cost
    constraints = resolve_constraints(unbalanced, unbalanced_relative, mean)
    comparison = replace(comparison, constraints=constraints)
    inputs: dict[Input, Any] = {
        **{"x": x, "y": y, "a": a, "b": b},
        **{"classes": class_table, "lambda_x": lambda_x, "lambda_y": lambda_y},
    }
    needs = _needs(inputs)
    with torch.no_grad():
        gradient = DivergenceGradient(comparison, needs)
        divergence = solve(
            comparison,
            options,
            start=checked_start(comparison, start),
            solved=gradient if needs else None,
            gradient_callbacks=gradient.callbacks if needs else None,
        )
    report_convergence(divergence, options)
    gradient.report("gradients by masses", required=options.require_convergence)
    value = torch.tensor(divergence.value, dtype=type_of(comparison), device=x.device)
    if not needs:
        return value
    _along_simplex(gradient.total, *comparison.given)
    parts = tuple(gradient.total.values())
    wanted = [inputs[key] for key in gradient.total]
    second = None
    if ground == "sqeuclidean":
        second = SecondDerivatives(tuple(gradient.total), comparison, divergence, options)
    return cast(Tensor, KnownGradient.apply(value, parts, second, *wanted))


def _needs(inputs: dict[Input, Any]) -> Needs:
    """Return the keys of the inputs whose gradients autograd needs."""
    if not torch.is_grad_enabled():
        return frozenset()
    return frozenset(
        key for key, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad
    )


def _along_simplex(gradient: Gradient, source: LabeledSamples, target: LabeledSamples) -> None:
    """Fix the free constant of mass gradients: <a, gradient> = <b, gradient> = 0."""
    sides: dict[Input, LabeledSamples] = {"a": source, "b": target}
    for key in gradient.keys() & sides.keys():
        gradient[key] -= sides[key].masses.to(gradient[key].device) @ gradient[key]


def plain_number(name: str, value: float | Tensor) -> float:
    """Return a weight as a float, detached.

    Raises:
        InputError: a tensor of any dimension.
    """
    if not isinstance(value, Tensor):
        return float(value)
    if value.ndim != 0:
        raise InputError(
            f"{name} must be a number or a 0-dim tensor, got shape {tuple(value.shape)}"
        )
    return float(value.detach())
