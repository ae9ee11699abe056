"""Entropic transport for a given cost matrix: the entry point `matrix_transport`, and its solve.

`loss` and `plan` call `solve_matrix` as well, which adds to `solver.solving` what is particular to
forbidden pairs.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from otdd_flash.arguments import Positive, takes
from otdd_flash.checks import array, optional
from otdd_flash.cost.compute import Compute
from otdd_flash.eager import computes
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning, warn
from otdd_flash.solver.divergence import (
    Divergence,
    Potentials,
    Solved,
    checked_start,
    report_convergence,
)
from otdd_flash.solver.matrix.forbidden import short_rows, upper_bound
from otdd_flash.solver.matrix.result import MatrixTransport
from otdd_flash.solver.matrix_comparison import Costs, MatrixComparison, relative_to_mean
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.solving import solve
from otdd_flash.solver.term import SolverProgress, epsilon_given_as, refuse_both

# Most iterations for masses that admit no plan, and most rows that a message names.
INFEASIBLE_ITERATIONS, NAMED = 1, 5


@computes
@takes(a=optional(array("(n,)")), b=optional(array("(m,)")))
def matrix_transport(
    costs: Costs,
    a: Any = None,
    b: Any = None,
    *,
    epsilon: Positive | None = None,
    epsilon_relative: Positive | None = None,
    options: Schedule | None = None,
    compute: Compute | None = None,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
) -> MatrixTransport:
    """Compute OT_epsilon = min_P <C, P> + epsilon KL(P | a b^T) for a cost matrix C.

    Costs may have any sign and type: float16, bfloat16 and float32 are stored as they are and
    computed with in float32, float64 in double precision. Integers become float32 if all are at
    most 2^24 in size, else float64. The bounds hold for the matrix in that type. A solve that stops
    early returns the value reached so far, whose bounds hold, and warns.

    Args:
        costs: C (n, m), of any strides, or `otdd.CostBlocks`. +inf forbids a pair.
        a: (n,) non-negative masses that sum to 1; uniform by default. A mass of 0 has no influence.
        b: (m,) masses, likewise.
        epsilon: regularisation, in units of the cost.
        epsilon_relative: the same in units of the mean of the finite costs; one of both.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        compute: where and how passes run, or only the device; by default where the costs are.
        unbalanced: rho, or [rho_x, rho_y], in units of the cost: marginals then cost
            rho_x KL(P 1 | a) + rho_y KL(P^T 1 | b) in the place of being exact, as with None.
        unbalanced_relative: the same in units of the mean of the finite costs.
        start: a column potential to start from, {"xy": g}.
        progress: called as progress("xy", iteration, marginal error).

    Returns:
        Potentials, value and bounds, and products with the plan.

    Raises:
        InputError: both or none of the epsilons, or one that the precision cannot hold; costs that
            are NaN or -inf; a row or column with mass all of whose pairs are forbidden; masses that
            do not fit or do not sum to 1; a tolerance that the precision cannot reach.
        ConvergenceError: `options.require_convergence` is set and the solve stopped early.

    Warns:
        NotConvergedWarning: the solve stopped early, or no plan has these masses.
    """
    started = time.perf_counter()
    check_one_epsilon(epsilon, epsilon_relative)
    refuse_unbalanced(unbalanced, unbalanced_relative)
    options = options or Converged()
    comparison = MatrixComparison.prepare(costs, a, b, compute)
    constraints = resolve_constraints(
        unbalanced, unbalanced_relative, lambda: comparison.facts.mean
    )
    comparison = comparison.with_constraints(constraints)
    with torch.no_grad():
        divergence, short = solve_matrix(
            comparison, epsilon, epsilon_relative, options, start=start, progress=progress
        )
    if len(short):
        report_infeasible(short, options)
    else:
        report_convergence(divergence, options)
    seconds = time.perf_counter() - started
    return MatrixTransport(divergence.xy, seconds, short, comparison, options.require_convergence)


def check_one_epsilon(epsilon: float | None, relative: float | None) -> None:
    """Require exactly one of `epsilon` and `epsilon_relative`.

    Raises:
        InputError: neither is given, or both are.
    """
    refuse_both(epsilon, relative)
    if epsilon is None and relative is None:
        raise InputError("give epsilon or epsilon_relative, one of them; got none")


def solve_matrix(
    comparison: MatrixComparison,
    epsilon: float | None,
    relative: float | None,
    options: Schedule,
    *,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
    solved: Solved | None = None,
) -> tuple[Divergence, Tensor]:
    """Solve a comparison; return the divergence, and the rows (k,) of `short_rows`.

    Raises:
        InputError: as `matrix_transport`, or a goal that forbidden pairs do not allow.
    """
    if epsilon is None:
        assert relative is not None
        given, epsilon = (
            ("epsilon_relative", relative),
            relative_to_mean(relative, comparison.facts),
        )
    else:
        given = "epsilon", epsilon
    # Relaxed marginals admit any plan of the allowed pairs, whose primal value is at hand.
    forbidden = comparison.facts.forbidden and comparison.constraints.exact
    short = comparison.a.new_empty(0, dtype=torch.int64)
    torch_operator = comparison.torch_operator("xy")
    with epsilon_given_as(*given, epsilon):
        comparison = comparison.at(epsilon)
        start = checked_start(comparison, start)
        if forbidden:
            _check_goal(options)
            short = short_rows(torch_operator)
        if len(short) and isinstance(options, Converged):
            most = min(options.max_iterations, INFEASIBLE_ITERATIONS)
            options = replace(options, max_iterations=most)
        divergence = solve(comparison, options, start=start, progress=progress, solved=solved)
    if len(short):
        term = replace(divergence.xy, converged=False, stopped_by="infeasible")
        return replace(divergence, xy=term), short
    if forbidden:
        term = divergence.xy
        bounds = term.bounds[0], upper_bound(torch_operator, term)
        divergence = replace(divergence, xy=replace(term, bounds=bounds))
    return divergence, short


def _check_goal(options: Schedule) -> None:
    """Refuse a width of bounds, which the upper one has only after the solve.

    Raises:
        InputError: it is asked for.
    """
    if isinstance(options, Converged) and options.bound_width is not None:
        raise InputError(
            "solver.bound_width is no goal where pairs are forbidden, as bounds are known at the "
            "end alone; set solver.tolerance"
        )


def report_infeasible(short: Tensor, options: Schedule) -> None:
    """Warn, or raise if convergence is required, that no plan has the masses.

    Raises:
        ConvergenceError: convergence is required.
    """
    named = ", ".join(map(str, short[:NAMED].tolist())) + (", ..." if len(short) > NAMED else "")
    message = (
        f"no plan has these masses: {len(short)} rows ({named}) have more mass than the columns "
        "that costs below inf leave them; allow more pairs, or change a and b"
    )
    if options.require_convergence:
        raise ConvergenceError(message)
    warn(message, NotConvergedWarning)
