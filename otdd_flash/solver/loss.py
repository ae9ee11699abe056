"""The Sinkhorn divergence as a differentiable function of tensors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from otdd_flash import arguments
from otdd_flash.checks import takes
from otdd_flash.errors import InputError, prefixed
from otdd_flash.operators.build import Compute, ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import report_convergence
from otdd_flash.solver.gradient import DivergenceGradient, Gradient, Input, Needs
from otdd_flash.solver.known_gradient import KnownGradient
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term_solves import Potentials

# How far from 1 given masses may sum: float32 rounding of many of them, and nothing worse.
MASS_TOLERANCE = 1e-6


@takes(arguments.SINKHORN_LOSS)
def sinkhorn_loss(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    epsilon: float,
    labels_x: Tensor | None = None,
    labels_y: Tensor | None = None,
    class_table: Tensor | None = None,
    class_totals: tuple[int, int] | None = None,
    lambda_x: float | Tensor = 0.5,
    lambda_y: float | Tensor = 0.5,
    ground: str = "sqeuclidean",
    debias: bool = True,
    start: Potentials | None = None,
    options: Schedule | None = None,
    compute: Compute | None = None,
) -> Tensor:
    """S_epsilon = OT_epsilon(x, y) - OT_epsilon(x, x) / 2 - OT_epsilon(y, y) / 2, for autograd.

    Differentiable, once, in x, y, a, b, class_table, lambda_x and lambda_y. The forward pass solves
    to `options.tolerance` and computes what the inputs that require a gradient need; the backward
    pass only scales it. Memory is that of the solve, whatever the number of iterations. Where the
    gradient itself is differentiated, autograd ends in an `InputError`.

    The gradient is exact for the dual value at the potentials that the solver returned, converged
    or not (Danskin; Feydy et al. 2019, Interpolating between optimal transport and MMD using
    Sinkhorn divergences; Ye et al. 2026, arXiv:2602.03067, for plans with marginals other than a
    and b). The gradient by masses is the one along the simplex, with <a, gradient> = 0: masses that
    do not come from a softmax have to be projected after a step.

    Args:
        x: (n, d) points of any real type and strides; half types are computed in float32.
        y: (m, d) points on the same device.
        a: (n,) non-negative masses that sum to 1; uniform by default.
        b: (m,) masses, likewise.
        epsilon: regularisation, in units of the cost.
        labels_x: (n,) class indices in [0, V_x); None is one class.
        labels_y: (m,) class indices in [0, V_y), which are not those of `labels_x`.
        class_table: W (V_x + V_y, V_x + V_y), squared distances between all classes, which labels
            need and which needs labels. The blocks [x, y], [x, x] and [y, y] are read, the block
            [y, x] is not and gets the gradient 0. The last two must be symmetric but for rounding,
            and so are their gradients; they are not read without `debias`.
        class_totals: (V_x, V_y), needed where the last class of a side has no point.
        lambda_x: weight of ||x_i - y_j||^2, or of what `ground` says, a number or a 0-dim tensor.
        lambda_y: weight of W, likewise.
        ground: `sqeuclidean`, `cosine` or `inner`, as in `GroundCost`.
        debias: False leaves both self terms out.
        start: potentials by term to start from, {"xy": g, "xx": f, "yy": g}.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        compute: where and how passes run, or only the device; by default on the device of the
            points, in double precision if a cloud is float64.

    Returns:
        0-dim tensor in units of the cost, float64 if a cloud is and float32 otherwise.

    Raises:
        InputError: points that are not finite, clouds on two devices or of two dimensions, masses
            that do not sum to 1, labels or a table that do not fit, a block [x, x] or [y, y] of it
            that is not symmetric, a bad epsilon or weight, or a tolerance that the precision cannot
            reach.
        ConvergenceError: `options.require_convergence` is set and a term stopped early.
    """
    _check_one_device(x, y)
    _check_classes(labels_x, labels_y, class_table)
    weights = GroundCost(_number("lambda_x", lambda_x), _number("lambda_y", lambda_y), ground)
    totals = _class_totals(labels_x, labels_y, class_table, class_totals)
    source = _samples(("x", "a"), x, labels_x, totals[0], a)
    target = _samples(("y", "b"), y, labels_y, totals[1], b)
    dtype = torch.promote_types(source.features.dtype, target.features.dtype)
    if compute is None:
        precision = "double" if dtype == torch.float64 else "fast"
        compute = ComputeOptions(device=str(x.device), precision=precision)
    compute = ComputeOptions.of(compute)
    options = options or Converged()
    table = None if class_table is None else class_table.detach()
    inputs: dict[Input, Any] = {
        **{"x": x, "y": y, "a": a, "b": b},
        **{"classes": class_table, "lambda_x": lambda_x, "lambda_y": lambda_y},
    }
    needs = _needs(inputs)
    with torch.no_grad():
        problem = Problem.between(source, target, epsilon, table, weights, compute, debias=debias)
        gradient = DivergenceGradient(problem, needs, debias=debias)
        divergence = problem.solve(
            options,
            debias=debias,
            start=start,
            solved=gradient if needs else None,
            pulled=gradient.pulled if needs else None,
        )
    report_convergence(divergence, options)
    value = torch.tensor(divergence.value, dtype=dtype, device=x.device)
    if not needs:
        return value
    _along_simplex(gradient.total, source, target)
    parts = tuple(gradient.total.values())
    wanted = (inputs[key] for key in gradient.total)
    return cast(Tensor, KnownGradient.apply(value, parts, *wanted))


def _needs(inputs: dict[Input, Any]) -> Needs:
    """Which inputs autograd will ask for."""
    if not torch.is_grad_enabled():
        return frozenset()
    return frozenset(
        key for key, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad
    )


def _along_simplex(gradient: Gradient, source: LabeledSamples, target: LabeledSamples) -> None:
    """Fix the constant that mass gradients leave open: <a, gradient> = <b, gradient> = 0."""
    sides: dict[Input, LabeledSamples] = {"a": source, "b": target}
    for key in gradient.keys() & sides.keys():
        gradient[key] -= sides[key].masses.to(gradient[key].device) @ gradient[key]


def _check_one_device(x: Tensor, y: Tensor) -> None:
    if x.device != y.device:
        raise InputError(
            f"x is on {x.device} and y on {y.device}; move both to one device with .to()"
        )


def _check_classes(labels_x: Tensor | None, labels_y: Tensor | None, table: Tensor | None) -> None:
    """Refuse labels without distances between them, and distances without labels to look up."""
    labelled = labels_x is not None or labels_y is not None
    if labelled and table is None:
        raise InputError(
            "labels need class_table, the squared distances between their classes, such as "
            "otdd.class_distances([x, y]).between(0, 1).full; without them leave the labels out"
        )
    if table is not None and not labelled:
        raise InputError(
            "class_table needs labels_x and labels_y, which tell the class of every point; without "
            "classes leave the table out"
        )


def _samples(
    called: tuple[str, str],
    points: Tensor,
    labels: Tensor | None,
    classes: int,
    masses: Tensor | None,
) -> LabeledSamples:
    """One side; `called` names the arguments of its points and of its masses."""
    names = tuple(map(str, range(classes)))
    weights = None if masses is None else masses.detach()
    points = points.detach().contiguous()
    try:
        samples = LabeledSamples(points, labels, names, weights, name=called[0])
    except InputError as error:
        raise prefixed(called[0], error) from error
    if weights is not None:
        total = float(weights.double().sum())
        if abs(total - 1) > MASS_TOLERANCE:
            raise InputError(f"{called[1]} must sum to 1, got {total:.8g}; divide it by its sum")
    return samples


def _class_totals(
    labels_x: Tensor | None,
    labels_y: Tensor | None,
    table: Tensor | None,
    given: tuple[int, int] | None,
) -> tuple[int, int]:
    """(V_x, V_y): as given, or as the labels tell if that fits the table."""
    if given is not None:
        return given
    seen_x, seen_y = (
        1 if labels is None or not len(labels) else int(labels.max()) + 1
        for labels in (labels_x, labels_y)
    )
    # Labels can only tell too few classes, so what fits the table is right.
    if table is not None and table.shape != (seen_x + seen_y, seen_x + seen_y):
        raise InputError(
            f"class_table has shape {tuple(table.shape)}, but the labels tell of {seen_x} + "
            f"{seen_y} classes; if the last class of a side has no point here, pass "
            "class_totals=(V_x, V_y)"
        )
    return seen_x, seen_y


def _number(name: str, value: float | Tensor) -> float:
    if not isinstance(value, Tensor):
        return float(value)
    if value.ndim != 0:
        raise InputError(
            f"{name} must be a number or a 0-dim tensor, got shape {tuple(value.shape)}"
        )
    return float(value.detach())
