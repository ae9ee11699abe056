"""The Sinkhorn divergence as a differentiable function of tensors, of one pair of clouds or many.

`otdd_flash` exports `sinkhorn_loss` and `sinkhorn_losses` for users; `potentials` uses
`plain_number`. `sinkhorn_loss` solves the divergence, takes first derivatives from
`gradient.DivergenceGradient` and, for squared Euclidean distances, second ones from
`hessian.SecondDerivatives`, and gives both to `autograd.KnownGradient`. For batches of clouds it
calls `sinkhorn_losses`, which in turn calls it for every pair that is not solved, or not proved,
side by side.

So a pair must have the same value and gradients on both ways (`tests/derivatives/test_losses.py`).
First derivatives must be computed in the forward pass, from the potentials of the solve, so that
memory does not grow with the number of iterations; second ones are solved for when asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from otdd_flash.arguments import Count, Ground, NotNegative, Positive, takes
from otdd_flash.checks import optional, tensor, tensors
from otdd_flash.cost.compute import Compute, ComputeOptions, uses_triton
from otdd_flash.cost.ground import GroundCost
from otdd_flash.derivatives.autograd import KnownGradient
from otdd_flash.derivatives.gradient import DivergenceGradient, Gradient, Input, Needs
from otdd_flash.derivatives.hessian import SecondDerivatives
from otdd_flash.eager import computes
from otdd_flash.errors import InputError, prefixed
from otdd_flash.formulas.marginals import Constraints
from otdd_flash.memory import budget_in_bytes
from otdd_flash.operators.score_pool import Room
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Potentials, checked_start, report_convergence
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules import Converged, Schedule
from otdd_flash.solver.small.pooled_solve import Batch
from otdd_flash.solver.small.route import solve_batch, suits
from otdd_flash.solver.solving import solve
from otdd_flash.solver.tensors import (
    MASS_TOLERANCE,
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
        b: (m,) or (B, m) masses of y, under the same rules.
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
        lambda_y: weight of W; a number or a 0-dim tensor.
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


Clouds = Tensor | Sequence[Tensor]

# Types of labels that are taken as they are.
INTEGERS = (torch.int16, torch.int32, torch.int64)


@computes
@takes(
    x=tensors("(n, d)"),
    y=tensors("(m, d)"),
    a=optional(tensors("(n,)")),
    b=optional(tensors("(m,)")),
    labels_x=optional(tensors("(n,)")),
    labels_y=optional(tensors("(m,)")),
    class_table=optional(tensor("(V_x + V_y, V_x + V_y)")),
)
def sinkhorn_losses(
    x: Clouds,
    y: Clouds,
    a: Clouds | None = None,
    b: Clouds | None = None,
    *,
    epsilon: Positive,
    labels_x: Clouds | None = None,
    labels_y: Clouds | None = None,
    class_table: Tensor | None = None,
    class_totals: tuple[Count, Count] | None = None,
    lambda_x: NotNegative | Tensor = 0.5,
    lambda_y: NotNegative | Tensor = 0.5,
    ground: Ground = "sqeuclidean",
    debias: bool = True,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    options: Schedule | None = None,
    compute: Compute | None = None,
) -> Tensor:
    """Return the `sinkhorn_loss` of B pairs of clouds, (B,), for autograd.

    Small pairs of which only points require a gradient are solved side by side, on a GPU with one
    launch a step for all of them; other pairs are solved one after the other. All values are
    converged and certified alike.

    Args:
        x: B clouds, tensors (n_k, d) or one tensor (B, n, d).
        y: B clouds, tensors (m_k, d) or one tensor (B, m, d).
        a: masses of the clouds x, B tensors (n_k,) or one (B, n); uniform by default.
        b: masses of the clouds y, B tensors (m_k,) or one (B, m); uniform by default.
        epsilon: regularisation of all pairs, in units of the cost.
        labels_x: class indices of x, B tensors (n_k,) or one (B, n).
        labels_y: class indices of y, B tensors (m_k,) or one (B, m).
        class_table: W (V_x + V_y, V_x + V_y), the same for all pairs, as in `sinkhorn_loss`.
        class_totals: (V_x, V_y), the numbers of classes; needed with labels unless the table has
            two equal sides.
        lambda_x: weight of ||x_i - y_j||^2, or of the cost that `ground` names.
        lambda_y: weight of W.
        ground: `sqeuclidean`, `cosine` or `inner`.
        debias: False leaves self terms out.
        unbalanced: the price of mass that is not matched, as in `sinkhorn_loss`.
        unbalanced_relative: the same as multiples of the mean cost of each pair.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        compute: as in `sinkhorn_loss`.

    Returns:
        (B,) tensor in units of the cost.

    Raises:
        InputError: as `sinkhorn_loss`, with the number of the pair; or x, y, masses or labels are
            of different numbers of clouds.
        ConvergenceError: `options.require_convergence` is set and a term stopped early.
    """
    count = len(x)
    sides: dict[str, Clouds | None] = {
        **{"y": y, "a": a, "b": b, "labels_x": labels_x, "labels_y": labels_y}
    }
    for name, clouds in (("x", x), ("y", y)):
        if isinstance(clouds, Tensor) and clouds.ndim == 2:
            raise InputError(
                f"{name} must be B clouds, got one of shape {tuple(clouds.shape)}; "
                f"give it as [{name}], or call otdd.sinkhorn_loss"
            )
        for k, cloud in enumerate(clouds):
            # `sinkhorn_loss` would take it for a batch of its own.
            if cloud.ndim == 3:
                raise InputError(
                    f"pair {k}: {name} must be a cloud (n, d), got shape {tuple(cloud.shape)}; "
                    f"{name} is one tensor (B, n, d) or B clouds"
                )
    for name, parts in sides.items():
        if parts is not None and len(parts) != count:
            raise InputError(f"x holds {count} clouds and {name} is for {len(parts)}")
    if class_table is not None and class_totals is None:
        class_totals = len(class_table) // 2, len(class_table) // 2

    # `unbind` gathers gradients at once; the gradient of each x[k] would be as large as x.
    each = {
        name: part.unbind() if isinstance(part, Tensor) else part
        for name, part in {"x": x, **sides}.items()
        if part is not None
    }

    def one(k: int) -> Tensor:
        parts: dict[str, Any] = {name: part[k] for name, part in each.items()}
        try:
            return sinkhorn_loss(
                **parts,
                epsilon=epsilon,
                class_table=class_table,
                class_totals=class_totals,
                lambda_x=lambda_x,
                lambda_y=lambda_y,
                ground=ground,
                debias=debias,
                unbalanced=unbalanced,
                unbalanced_relative=unbalanced_relative,
                options=options,
                compute=compute,
            )
        except InputError as error:
            raise prefixed(f"pair {k}", error) from error

    if count == 0:
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            return torch.zeros(0)
        # An empty tensor of their type and device, with a gradient like that of other batches.
        return x.flatten(1).sum(1) + y.flatten(1).sum(1)
    others = (a, b, class_table, lambda_x, lambda_y)
    options, labelled = options or Converged(), not (labels_x is None and labels_y is None)
    refuse_unbalanced(unbalanced, unbalanced_relative, options, debias=debias, ground=ground)
    # Mean costs are those of each pair.
    simple = unbalanced_relative is None
    constraints = resolve_constraints(unbalanced, None, lambda: 1.0)
    simple = simple and ground == "sqeuclidean" and not any(map(_asks_for_gradient, others))
    simple = simple and _fits(class_table, class_totals, labelled=labelled)
    simple = simple and _match(x, a, labels_x) and _match(y, b, labels_y)
    if not (simple and isinstance(options, Converged) and _small(x, y, epsilon, options, compute)):
        return torch.stack([one(k) for k in range(count)])
    clouds = _padded(x), _padded(y)
    batch = Batch(
        (clouds[0].detach(), clouds[1].detach()),
        (_masses(x, a), _masses(y, b)),
        (_labels(labels_x), _labels(labels_y)),
        class_totals or (1, 1),
        None if class_table is None else class_table.detach().to(clouds[0].device),
        (float(lambda_x), float(lambda_y)),
    )
    # Errors of another pair are no concern of these.
    chosen = _admitted(batch, zip(x, y, strict=True)).nonzero().flatten()
    found: dict[int, Tensor] = {}
    if len(chosen):
        if len(chosen) < count:
            there = chosen.to(clouds[0].device)
            batch, clouds = batch.part(there), (clouds[0][there], clouds[1][there])
        given = ComputeOptions.of(compute)
        losses, proved = _side_by_side(
            batch, clouds, epsilon, options, constraints, debias=debias, compute=given
        )
        if bool(proved.all()) and len(chosen) == count:
            return losses
        every = zip(chosen.tolist(), losses.unbind(), proved.tolist(), strict=True)
        found = {k: loss for k, loss, is_proved in every if is_proved}
    return torch.stack([found[k] if k in found else one(k) for k in range(count)])


def _side_by_side(
    batch: Batch,
    clouds: tuple[Tensor, Tensor],
    epsilon: float,
    options: Converged,
    constraints: Constraints,
    *,
    debias: bool,
    compute: ComputeOptions,
) -> tuple[Tensor, Tensor]:
    """Compute losses (B,) of all pairs, for autograd, and which (B,) are certified, on the host.

    Args:
        batch: the pairs, with masses as given.
        clouds: (B, n, d) and (B, m, d), which may require gradients.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        constraints: exact or relaxed marginals.
        debias: False leaves self terms out.
        compute: how passes run, and how much memory scores may take.
    """
    # Normalized as `LabeledSamples` does.
    of_x, of_y = (
        None if part is None else part / part.sum(1, keepdim=True) for part in batch.masses
    )
    batch = batch._replace(masses=(of_x, of_y))
    wanted = [k for k in (0, 1) if torch.is_grad_enabled() and clouds[k].requires_grad]
    with torch.no_grad():
        solved = solve_batch(
            batch,
            epsilon,
            options,
            debias=debias,
            wanted=wanted,
            in_triton=uses_triton(compute, clouds[0].device),
            constraints=constraints,
            budget=None
            if compute.memory_budget == "auto"
            else budget_in_bytes(compute.memory_budget, clouds[0].device),
        )
    losses = solved.values.to(clouds[0])
    if wanted:
        moved = (clouds[k] for k in wanted)
        losses = cast(Tensor, KnownGradient.apply(losses, solved.gradients, None, *moved))
    return losses, solved.proved


def _asks_for_gradient(given: Any) -> bool:
    tensors = given if isinstance(given, list | tuple) else [given]
    return any(isinstance(one, Tensor) and one.requires_grad for one in tensors)


def _fits(table: Tensor | None, totals: tuple[int, int] | None, *, labelled: bool) -> bool:
    """Return whether `sinkhorn_loss` accepts the class distances."""
    if table is None or totals is None:
        return not labelled
    shape = sum(totals), sum(totals)
    return labelled and table.shape == shape and bool(table.isfinite().all())


def _match(clouds: Clouds, masses: Clouds | None, labels: Clouds | None) -> bool:
    """Return whether masses and labels, if given, fit the clouds in shape, type and device."""
    for parts, whole in ((masses, False), (labels, True)):
        for cloud, part in zip(clouds, () if parts is None else parts, strict=False):
            right = part.dtype in INTEGERS if whole else part.is_floating_point()
            if not right or part.shape != cloud.shape[:1] or part.device != cloud.device:
                return False
    return True


def _small(
    x: Clouds,
    y: Clouds,
    epsilon: float,
    options: Converged,
    compute: Compute | None,
) -> bool:
    """Return whether all pairs are small enough to be solved side by side on stored scores."""
    if options.bound_width is not None or options.max_seconds is not None:
        return False
    if not torch.finfo(torch.float32).tiny <= epsilon <= torch.finfo(torch.float32).max / 4:
        return False
    first, chosen = x[0], ComputeOptions.of(compute)
    kind = first.device.type
    there = chosen.device in ("auto", str(first.device), kind)
    if kind == "cpu" and compute is not None and chosen.device == "auto":
        # `auto` is a GPU if there is one; without options it is the device of the clouds.
        there = not torch.cuda.is_available()
    same = all(
        cloud.ndim == 2
        and cloud.device == first.device
        and cloud.dtype == torch.float32
        and cloud.shape[1] == first.shape[1]
        and len(cloud)
        for cloud in (*x, *y)
    )
    if not (there and same and chosen.precision != "double"):
        return False
    try:
        in_triton = uses_triton(chosen, first.device)
    except InputError:
        # `sinkhorn_loss` raises it for the first pair, with the pair's number.
        return False
    n, m = (max(map(len, side)) for side in (x, y))
    room = Room(1, n, m, first.shape[1], 1, first.dtype, first.device, in_triton)
    return suits(room, chosen)


def _padded(clouds: Clouds) -> Tensor:
    """Pad clouds with zeros to one tensor (B, n, d)."""
    if isinstance(clouds, Tensor):
        return clouds
    return _spread(torch.cat(list(clouds)), list(map(len, clouds)))


def _spread(joined: Tensor, lengths: list[int]) -> Tensor:
    """Pad concatenated rows of clouds of these lengths with zeros to (B, longest, ...)."""
    count, longest = len(lengths), max(lengths)
    if min(lengths) == longest:
        return joined.reshape(count, longest, *joined.shape[1:])
    sizes = torch.tensor(lengths)
    # By how much the rows of each cloud are shifted against the concatenation.
    moves = torch.arange(count) * longest - (sizes.cumsum(0) - sizes)
    places = torch.arange(len(joined)) + moves.repeat_interleave(sizes)
    out = joined.new_zeros((count * longest, *joined.shape[1:]))
    spread = out.index_copy(0, places.to(joined.device), joined)
    return spread.reshape(count, longest, *joined.shape[1:])


def _masses(clouds: Clouds, given: Clouds | None) -> Tensor | None:
    """Pad masses with zeros to (B, n) float64; None if all are uniform over clouds of one size."""
    if isinstance(given, Tensor):
        return given.detach().double()
    lengths = list(map(len, clouds))
    if given is not None:
        return _spread(torch.cat(list(given)).detach().double(), lengths)
    if min(lengths) == max(lengths):
        return None
    sizes = torch.tensor(lengths)
    uniform = (1 / sizes.double()).repeat_interleave(sizes)
    return _spread(uniform.to(clouds[0].device), lengths)


def _labels(given: Clouds | None) -> Tensor | None:
    return None if given is None else _padded(given).detach().long()


def _admitted(batch: Batch, clouds: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return which pairs (B,) are valid and not of equal clouds, bool on the host."""
    x, y = batch.points
    fine = x.isfinite().all(2).all(1) & y.isfinite().all(2).all(1)
    for masses, labels, total in zip(batch.masses, batch.labels, batch.class_totals, strict=True):
        if masses is not None:
            fine &= (masses >= 0).all(1) & ((masses.sum(1) - 1).abs() <= MASS_TOLERANCE)
        if labels is not None:
            fine &= ((labels >= 0) & (labels < total)).all(1)
    # Equal clouds are at distance 0 exactly.
    least, as_many = min(batch.sizes), [len(one) == len(two) for one, two in clouds]
    differ = (x[:, :least] != y[:, :least]).any(2).any(1)
    return fine.cpu() & (differ.cpu() | ~torch.tensor(as_many))
