"""Entropic transport for a given cost matrix: the entry point `matrix_transport`, and its solve.

`otdd_flash` exports `matrix_transport`, and `shift.pooled` calls it. `solver.matrix.gradients`
calls `solve_matrix`, which resolves epsilon, calls `solver.solving.solve`, and adds what forbidden
pairs, of cost +inf, need: before the solve whether the masses admit a plan (`short_rows`), and
after it an `upper_bound`.

A change must keep the upper bound valid, rounding included, and never call masses infeasible that
have a plan (`tests/matrix/test_forbidden.py`).

There is no plan if some rows have more mass than all columns that they may use (Hall's condition,
for masses). Sinkhorn updates then increase the potentials of these rows without end, so that
sorting rows by their increase puts such a set first.

If there is a plan, one with exactly the marginals a and b is obtained from the plan P of two
potentials by a Newton step,

    Q_ij = P_ij (1 + u_i + v_j),    [diag(r) P; P^T diag(c)] [u; v] = [a - r; b - c],

with the sums r, c of P. As log(1 + t) <= t it costs at most

    <a, f> + <b, g> + epsilon (<a, u> + <b, v>),

if no 1 + u_i + v_j is negative. It uses only the pairs of P, and its error is of second order.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from otdd_flash.arguments import NotNegative, takes
from otdd_flash.checks import array, optional
from otdd_flash.cost.compute import Compute
from otdd_flash.derivatives.plan_system import MOST_HELD, CGOptions, PlanSystem
from otdd_flash.eager import computes
from otdd_flash.engine.conjugate_gradients import inverse
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning, warn
from otdd_flash.operators.base import SUM_UNITS, Operator, Products
from otdd_flash.operators.given_costs import GivenCosts, exact_blocks
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver.divergence import (
    Divergence,
    Potentials,
    Solved,
    checked_start,
    report_convergence,
)
from otdd_flash.solver.evidence import DOUBLE_UNIT, widen_bounds
from otdd_flash.solver.matrix.result import MatrixTransport
from otdd_flash.solver.matrix_comparison import Costs, MatrixComparison
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced
from otdd_flash.solver.schedules import Converged, Exact, Schedule, refuse_start, schedule_of
from otdd_flash.solver.solving import solve
from otdd_flash.solver.tensors import MASS_TOLERANCE
from otdd_flash.solver.term import (
    SolverProgress,
    TransportTerm,
    epsilon_given_as,
    refuse_both,
    resolve_epsilon,
)

# Most iterations for masses that admit no plan, and most rows that a message names.
INFEASIBLE_ITERATIONS, NAMED = 1, 5

# An epsilon, over the range of the costs, so large that only the allowed pairs matter, not their
# costs.
ABOVE_COSTS = 2.0**10

# Numbers of updates after which rows are sorted and checked, and the marginal error below which a
# plan is taken to exist.
CHECKED_UPDATES, FEASIBLE_ERROR = (3, 10, 30, 100, 300), 1e-4

# Options of the linear system, and the unit roundoffs by which marginals of Q may be wrong.
EXACT, MOST_UNITS = CGOptions(tolerance=1e-13, max_iterations=500), 64


@computes
@takes(a=optional(array("(n,)")), b=optional(array("(m,)")))
def matrix_transport(
    costs: Costs,
    a: Any = None,
    b: Any = None,
    *,
    epsilon: NotNegative | None = None,
    epsilon_relative: NotNegative | None = None,
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
    early warns and returns the value reached so far, with valid bounds.

    Args:
        costs: C (n, m), of any strides, or `otdd.CostBlocks`. +inf forbids a pair.
        a: (n,) non-negative masses that sum to 1; uniform by default. A mass of 0 has no influence.
        b: (m,) masses of columns, under the same rules.
        epsilon: regularisation, in units of the cost; 0 is exact transport, of `otdd.Exact()`.
        epsilon_relative: epsilon as a multiple of the mean finite cost; give one of the two.
        options: how to solve and when to stop, `otdd.Converged()` by default.
        compute: `otdd.ComputeOptions`, or only a device; by default where the costs are.
        unbalanced: rho, or [rho_x, rho_y], the price of mass that is not matched, in units of the
            cost: marginals are not exact, but cost rho_x KL(P 1 | a) + rho_y KL(P^T 1 | b). None is
            exact.
        unbalanced_relative: the same as multiples of the mean finite cost.
        start: a column potential to start from, {"xy": g}.
        progress: called as progress("xy", iteration, marginal error).

    Returns:
        Potentials, value and bounds, and products with the plan.

    Raises:
        InputError: both epsilons or none are given, or one that the precision cannot hold; costs
            that are NaN or -inf; a row or column with mass all of whose pairs are forbidden; masses
            that do not fit or do not sum to 1; a tolerance that the precision cannot reach.
        ConvergenceError: `options.require_convergence` is set and the solve stopped early.

    Warns:
        NotConvergedWarning: the solve stopped early, or no plan has these masses.
    """
    started = time.perf_counter()
    options, epsilon, epsilon_relative = schedule_of(options, epsilon, epsilon_relative)
    check_one_epsilon(epsilon, epsilon_relative)
    refuse_unbalanced(unbalanced, unbalanced_relative, options)
    refuse_start(options, start)
    comparison = MatrixComparison.prepare(costs, a, b, compute)
    if isinstance(options, Exact):
        from otdd_flash.solver.exact.solve import solve_exact

        if comparison.facts.forbidden:
            short = short_rows(comparison.torch_operator("xy"))
            if len(short):
                raise InputError(_infeasible(short))
        divergence = solve_exact(comparison, options, progress=progress)
        report_convergence(divergence, options)
        short = comparison.a.new_empty(0, dtype=torch.int64)
        seconds = time.perf_counter() - started
        return MatrixTransport(divergence.xy, seconds, short, comparison)
    comparison = comparison.with_penalties(unbalanced, unbalanced_relative)
    with torch.no_grad():
        divergence, short = solve_matrix(
            comparison, epsilon, epsilon_relative, options, start=start, progress=progress
        )
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
        ConvergenceError: as `matrix_transport`.

    Warns:
        NotConvergedWarning: as `matrix_transport`.
    """
    name, given, epsilon = resolve_epsilon(epsilon, relative, lambda: comparison.facts.mean)
    # Relaxed marginals admit any plan of the allowed pairs, whose primal value is at hand.
    forbidden = comparison.facts.forbidden and comparison.constraints.exact
    short = comparison.a.new_empty(0, dtype=torch.int64)
    torch_operator = comparison.torch_operator("xy")
    with epsilon_given_as(name, given, epsilon):
        comparison = comparison.at(epsilon)
        start = checked_start(comparison, start)
        if forbidden:
            if isinstance(options, Converged) and options.bound_width is not None:
                raise InputError(
                    "solver.bound_width is no goal where pairs are forbidden, as bounds are known "
                    "at the end alone; set solver.tolerance"
                )
            short = short_rows(torch_operator)
        if len(short) and isinstance(options, Converged):
            most = min(options.max_iterations, INFEASIBLE_ITERATIONS)
            options = replace(options, max_iterations=most)
        divergence = solve(comparison, options, start=start, progress=progress, solved=solved)
    if len(short):
        if options.require_convergence:
            raise ConvergenceError(_infeasible(short))
        warn(_infeasible(short), NotConvergedWarning)
        term = replace(divergence.xy, converged=False, stopped_by="infeasible")
        return replace(divergence, xy=term), short
    if forbidden:
        term = divergence.xy
        bounds = term.bounds[0], upper_bound(torch_operator, term)
        divergence = replace(divergence, xy=replace(term, bounds=bounds))
    report_convergence(divergence, options)
    return divergence, short


def _infeasible(short: Tensor) -> str:
    named = ", ".join(map(str, short[:NAMED].tolist())) + (", ..." if len(short) > NAMED else "")
    return (
        f"no plan has these masses: {len(short)} rows ({named}) have more mass than the columns "
        "that costs below inf leave them; allow more pairs, or change a and b"
    )


def short_rows(operator: TorchOperator[GivenCosts]) -> Tensor:
    """Return rows (k,) int64 with more mass than the columns they may use; k = 0 if none."""
    a, b, facts = operator.a, operator.b, operator.costs
    epsilon = ABOVE_COSTS * (facts.spread or 1.0)
    g = torch.zeros_like(b, dtype=operator.passes.dtype)
    f = operator.softmin_rows(g, epsilon)
    for update in range(CHECKED_UPDATES[-1]):
        g = operator.softmin_columns(f, epsilon)
        updated = operator.softmin_rows(g, epsilon)
        rise = torch.where(a > 0, (updated - f).double(), -math.inf)
        f = updated
        missing = a * (1 - torch.exp(-rise / epsilon)).clamp_min(0)
        if float(missing.sum()) < FEASIBLE_ERROR:
            break
        if update + 1 in CHECKED_UPDATES:
            found = _short_prefix(operator, rise.argsort(descending=True))
            if len(found):
                return found
    return a.new_empty(0, dtype=torch.int64)


def _short_prefix(operator: TorchOperator[GivenCosts], order: Tensor) -> Tensor:
    """Return the first rows of an order (n,) that exceed their columns' mass most, or none."""
    a, b = operator.a, operator.b
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    # The first row of the order that may use a column.
    first = torch.full_like(b, len(order), dtype=torch.int64)
    for rows, costs in exact_blocks(operator.source.costs):
        ranks = torch.where(costs < math.inf, rank[rows, None], len(order))
        first = torch.minimum(first, ranks.amin(0))
    reached = torch.zeros(len(order) + 1, dtype=b.dtype, device=b.device).index_add_(0, first, b)
    short = a[order].cumsum(0) - reached[:-1].cumsum(0)
    most, place = short.max(0)
    if not float(most) > MASS_TOLERANCE:
        return order[:0]
    return order[: int(place) + 1].sort().values


def upper_bound(operator: TorchOperator[GivenCosts], term: TransportTerm) -> float:
    """Return an upper bound of OT_epsilon from the Newton step, or inf if that fails.

    It holds for masses that are a and b up to rounding.
    """
    a, b, epsilon = operator.a, operator.b, term.epsilon
    f = torch.where(a > 0, term.f.double(), 0)
    g = torch.where(b > 0, term.g.double(), 0)
    products: Products = operator.plan(f, g, epsilon, MOST_HELD).prepared
    if products.precision > SUM_UNITS * DOUBLE_UNIT:
        products = ExactProducts(operator, f, g, epsilon)
    sums = operator.marginals(f, g, epsilon)
    per_row = inverse(products.rows)[:, None]
    u, v = torch.zeros_like(a), torch.zeros_like(b)
    system = PlanSystem(products, EXACT, products)
    # Two steps: the second removes the rounding error of the first.
    for _ in range(2):
        s = a - products.rows * (1 + u) - products.times(v[:, None])[:, 0]
        t = b - products.columns * (1 + v) - products.times(u[:, None], transposed=True)[:, 0]
        right = t[:, None] - products.times(per_row * s[:, None], transposed=True)
        step = system.solve(right).values
        u = u + (per_row * (s[:, None] - products.times(step)))[:, 0]
        v = v + step[:, 0]
    s = a - products.rows * (1 + u) - products.times(v[:, None])[:, 0]
    t = b - products.columns * (1 + v) - products.times(u[:, None], transposed=True)[:, 0]
    units = MOST_UNITS + len(a) + len(b)
    exact = float(s.abs().sum() + t.abs().sum()) <= units * 2 * DOUBLE_UNIT
    if not exact or not _least_change(operator, u, v) > -1:
        return math.inf
    value = float(a @ (f + epsilon * u) + b @ (g + epsilon * v))
    size = float(a @ (f.abs() + epsilon * u.abs()) + b @ (g.abs() + epsilon * v.abs()))
    mean_error = float(a @ sums.row_errors + b @ sums.column_errors)
    return widen_bounds(operator.costs, sums, (value, value), mean_error, size, epsilon)[1]


def _least_change(operator: TorchOperator[GivenCosts], u: Tensor, v: Tensor) -> float:
    """Return the least u_i + v_j over allowed pairs with mass, or a lower bound above -1."""
    rows, columns = (
        torch.where(masses > 0, values, math.inf)
        for masses, values in ((operator.a, u), (operator.b, v))
    )
    least = float(rows.min() + columns.min())
    if least > -1:
        return least
    return min(
        float(torch.where(costs < math.inf, rows[part, None] + columns, math.inf).min())
        for part, costs in exact_blocks(operator.source.costs)
    )


class ExactProducts:
    """Float64 products with the plan of f (n,) and g (m,), for operators whose own are less exact.

    Values are shifted to be positive, so that epsilon times their logarithm can be added to a
    potential: the marginals of that plan are the products. Each product evaluates the plan anew.
    """

    half_products = None

    def __init__(self, operator: Operator, f: Tensor, g: Tensor, epsilon: float) -> None:
        self._operator, self._at, self._epsilon = operator, (f, g), epsilon
        sums = operator.marginals(f, g, epsilon)
        self.rows, self.columns, self.precision = sums.rows, sums.columns, sums.relative_error

    def times(self, values: Tensor, *, transposed: bool = False) -> Tensor:
        """Return P V (n, k) for V (m, k), or if `transposed` P^T U (m, k) for U (n, k)."""
        (f, g), sums = self._at, self.columns if transposed else self.rows
        found = torch.zeros(len(sums), values.shape[1], dtype=sums.dtype, device=sums.device)
        for place, column in enumerate(values.unbind(1)):
            shift = 2 * column.abs().max()
            if float(shift) > 0:
                raised = self._epsilon * (column + shift).log()
                at = (f + raised, g) if transposed else (f, g + raised)
                applied = self._operator.marginals(*at, self._epsilon)
                found[:, place] = (applied.columns if transposed else applied.rows) - shift * sums
        return found
