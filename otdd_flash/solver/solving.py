"""The solve of two datasets or of a given matrix by the route that fits; `sinkhorn` entry points.

Distances, losses, derivatives, flows, mixtures, rankings, studies and given matrices all call
`solve` with a `Comparison` or a `MatrixComparison` at an epsilon, and get a `Divergence`. The terms
of small problems are solved all at once (`solver.small`), sides of equal content and class
distances are one term, and other problems solve their terms in turn (`solver.divergence`); epsilon
0 goes to `solver.exact`. All routes at a positive epsilon must end with the same certificates, so
that the choice decides how long a solve takes and its last digits, never whether its bounds hold
(`tests/solver/test_bounds.py`).

`otdd_flash` exports `sinkhorn` and `sinkhorn_divergence`; users alone call them.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from otdd_flash.arguments import NotNegative, takes
from otdd_flash.checks import array, optional
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import (
    Compared,
    Divergence,
    GradientCallbacks,
    Potentials,
    Solved,
    SolvedTerms,
    checked_start,
    report_convergence,
    solve_divergence,
    solve_identical,
)
from otdd_flash.solver.geomloss import GeomlossSchedule
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules import Converged, Exact, Schedule, refuse_start, schedule_of
from otdd_flash.solver.small.route import is_small, solve_small
from otdd_flash.solver.term import SolverProgress, TransportTerm


def solve(
    comparison: Compared,
    options: Schedule,
    *,
    start: Potentials | None = None,
    known: SolvedTerms | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
    gradient_callbacks: GradientCallbacks | None = None,
) -> Divergence:
    """Solve the divergence of a comparison, or without debiasing the cross term alone.

    Datasets of equal content and class distances (`Comparison.identical`) are one cloud: a single
    self term. Matrices are never taken as equal.

    Args:
        comparison: two datasets with class distances, or a matrix with its masses; with epsilon.
        options: how to solve and when to stop.
        start: potentials to start from at this epsilon, by term.
        known: self terms that are solved already, though small problems solve them again; the
            caller guarantees that they are of these clouds at this cost.
        progress: called in every iteration.
        solved: called after each term, as solved(name, operator, term).
        gradient_callbacks: called instead, if the solve computes the gradients by points itself.

    Exact distances have no use for `start`, `known`, `solved` and `gradient_callbacks`.

    Raises:
        InputError: the block of W of a self term is not symmetric, an allocation fails, or rounding
            alone exceeds the tolerance at this epsilon and precision.
    """
    if isinstance(comparison, Comparison):
        refuse_below_zero(comparison)
    if isinstance(options, Exact):
        from otdd_flash.solver.exact.solve import solve_exact

        with comparison.within_memory():
            return solve_exact(comparison, options, progress=progress)
    if isinstance(options, GeomlossSchedule) and options.diameter is None:
        options = replace(options, diameter=comparison.diameter)
    found: Divergence | None = None
    with comparison.within_memory():
        if len(comparison.terms) > 1 and comparison.identical:
            found = solve_identical(
                comparison, options, start=start, progress=progress, solved=solved
            )
        elif isinstance(options, Converged) and is_small(comparison, options):
            found = solve_small(
                comparison,
                options,
                start=start,
                progress=progress,
                solved=solved,
                gradient_callbacks=gradient_callbacks,
            )
        if found is None:
            found = solve_divergence(
                comparison, options, start=start, known=known, progress=progress, solved=solved
            )
        return found.widened(comparison.cost_error)


def refuse_below_zero(comparison: Comparison) -> None:
    """Raise an `InputError` for relaxed marginals where costs may be below 0."""
    if not comparison.constraints.exact and comparison.below_zero:
        raise InputError(
            "unbalanced needs costs of which 0 is the least, and class distances of several labels "
            "are below 0 here; take labels=means, labels.diagonal=true or a tree"
        )


@computes
@takes(class_table=optional(array("(V_x + V_y, V_x + V_y)")))
def sinkhorn(
    source: Samples,
    target: Samples,
    *,
    epsilon: NotNegative,
    class_table: Tensor | None = None,
    cost: GroundCost | None = None,
    options: Schedule | None = None,
    compute: Compute | None = None,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    progress: SolverProgress | None = None,
) -> TransportTerm:
    """Compute OT_epsilon(source, target) = min_P <C, P> + epsilon KL(P | a b^T).

    With `unbalanced`, marginals need not be a and b, at a price: OT_epsilon is then

        min_P <C, P> + epsilon KL(P | a b^T) + rho_x KL(P 1 | a) + rho_y KL(P^T 1 | b).

    A solve that stops early warns and returns the value reached so far, with valid bounds.
    Potentials are those of the last iteration. The marginal error does not determine offsets
    between groups of points that exchange almost no mass; `sinkhorn_potentials` corrects or reports
    them.

    Args:
        source: n points: `LabeledSamples`, (features, labels), features alone, or any dataset of
            vectors that `otdd.embed` takes.
        target: m points, in any of these forms.
        epsilon: regularisation, in units of the cost; 0 is exact transport, of `otdd.Exact()`.
        class_table: W (V_x + V_y, V_x + V_y), squared distances between all classes; None is 0.
            Only the block [x, y] is read.
        cost: the ground cost and its weights, by default half the squared distances between
            features and between classes.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        compute: `otdd.ComputeOptions`, or only a device.
        unbalanced: rho, or [rho_x, rho_y], the price of mass that is not matched, in units of the
            cost; None is exact.
        unbalanced_relative: the same as multiples of the mean cost.
        progress: called as progress("xy", iteration, marginal error).

    Returns:
        Potentials, value and bounds.

    Raises:
        InputError: a feature that is not finite, a bad epsilon, clouds on two devices or of
            different dimension, a table of another size, a tolerance that the precision cannot
            reach, a backend that cannot run on the device, or too little memory.
        ConvergenceError: `options.require_convergence` is set and the solve stopped early.

    Warns:
        NotConvergedWarning: the solve stopped early.
    """
    options, *_ = schedule_of(options, epsilon, None)
    x, y = as_samples(source, "source"), as_samples(target, "target")
    compute = ComputeOptions.of(compute)
    ground = "sqeuclidean" if cost is None else cost.ground
    refuse_unbalanced(unbalanced, unbalanced_relative, options, ground=ground)
    comparison = Comparison.between(x, y, epsilon, class_table, cost, compute, debias=False)
    mean = comparison.mean_cost
    constraints = resolve_constraints(unbalanced, unbalanced_relative, mean)
    comparison = replace(comparison, constraints=constraints)
    divergence = solve(comparison, options, progress=progress)
    report_convergence(divergence, options)
    return _with_one_side(divergence, comparison)


def _with_one_side(divergence: Divergence, comparison: Comparison) -> TransportTerm:
    """Return the cross term with the separable terms of the ground cost added back."""
    term, ground = divergence.xy, comparison.ground
    p, q = (ground.one_side(side.features) for side in comparison.given)
    if p is None or q is None:
        return term
    low, high = term.bounds
    value, error = divergence.offset
    return replace(
        term,
        f=term.f.double() + p.to(term.f.device),
        g=term.g.double() + q.to(term.g.device),
        value=term.value + value,
        bounds=(low + value - error, high + value + error),
    )


@computes
@takes(class_table=optional(array("(V_x + V_y, V_x + V_y)")))
def sinkhorn_divergence(
    source: Samples,
    target: Samples,
    *,
    epsilon: NotNegative,
    class_table: Tensor | None = None,
    cost: GroundCost | None = None,
    options: Schedule | None = None,
    compute: Compute | None = None,
    debias: bool = True,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
) -> Divergence:
    """Compute S_epsilon = OT_epsilon(x, y) - OT_epsilon(x, x) / 2 - OT_epsilon(y, y) / 2.

    Arguments and errors as for `sinkhorn`; without `debias`, the cross term alone. The blocks [x,
    x] and [y, y] of `class_table` are read as well and must be symmetric but for rounding. `start`
    holds potentials by term to start from, {"xy": g, "xx": f, "yy": g}. Sides of equal content
    whose blocks of `class_table` are equal count as one cloud: a single self term is solved, the
    value is 0 and the bounds are [0, 0].

    With `unbalanced` (Sejourne et al. 2019, Sinkhorn divergences for unbalanced optimal transport)
    all three terms are relaxed, by one rho for both sides. A further term, epsilon / 2 times the
    squared difference of both masses, is 0 as masses sum to 1.

    Raises:
        InputError: as for `sinkhorn`, two different penalties with `debias`, a block [x, x] or
            [y, y] is not symmetric, or `start` holds potentials of other clouds or NaN.
        ConvergenceError: `options.require_convergence` is set and a term stopped early.

    Warns:
        NotConvergedWarning: a term stopped early.
    """
    options, *_ = schedule_of(options, epsilon, None)
    x, y = as_samples(source, "source"), as_samples(target, "target")
    refuse_start(options, start)
    compute = ComputeOptions.of(compute)
    ground = "sqeuclidean" if cost is None else cost.ground
    refuse_unbalanced(unbalanced, unbalanced_relative, options, debias=debias, ground=ground)
    comparison = Comparison.between(x, y, epsilon, class_table, cost, compute, debias=debias)
    mean = comparison.mean_cost
    constraints = resolve_constraints(unbalanced, unbalanced_relative, mean)
    comparison = replace(comparison, constraints=constraints)
    start = checked_start(comparison, start)
    divergence = solve(comparison, options, start=start, progress=progress)
    report_convergence(divergence, options)
    return divergence
