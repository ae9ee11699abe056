"""Forbidden pairs, of cost +inf: whether the masses admit a plan, and an upper bound of its cost.

`transport.solve_matrix` calls `short_rows` before the solve and `upper_bound` after it.

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

import torch
from torch import Tensor

from otdd_flash.derivatives.plan_system import MOST_HELD, CGOptions, PlanSystem
from otdd_flash.engine.conjugate_gradients import inverse
from otdd_flash.operators.base import SUM_UNITS, Operator, Products
from otdd_flash.operators.given_costs import GivenCosts, exact_blocks
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver.evidence import DOUBLE_UNIT, widen_bounds
from otdd_flash.solver.tensors import MASS_TOLERANCE
from otdd_flash.solver.term import TransportTerm

# An epsilon, over the range of the costs, so large that only the allowed pairs matter, not their
# costs.
ABOVE_COSTS = 2.0**10

# Numbers of updates after which rows are sorted and checked, and the marginal error below which a
# plan is taken to exist.
CHECKED_UPDATES, FEASIBLE_ERROR = (3, 10, 30, 100, 300), 1e-4

# Options of the linear system, and the unit roundoffs by which marginals of Q may be wrong.
EXACT, MOST_UNITS = CGOptions(tolerance=1e-13, max_iterations=500), 64


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
        t = b - products.columns * (1 + v) - products.transposed_times(u[:, None])[:, 0]
        right = t[:, None] - products.transposed_times(per_row * s[:, None])
        step = system.solve(right).values
        u = u + (per_row * (s[:, None] - products.times(step)))[:, 0]
        v = v + step[:, 0]
    s = a - products.rows * (1 + u) - products.times(v[:, None])[:, 0]
    t = b - products.columns * (1 + v) - products.transposed_times(u[:, None])[:, 0]
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

    def times(self, values: Tensor) -> Tensor:
        """Return P V (n, k) for V (m, k)."""
        return self._apply(values, transposed=False)

    def transposed_times(self, values: Tensor) -> Tensor:
        """Return P^T U (m, k) for U (n, k)."""
        return self._apply(values, transposed=True)

    def _apply(self, values: Tensor, *, transposed: bool) -> Tensor:
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
