"""Bounds of OT_0 from potentials and from a plan, with the rounding of costs and sums.

The problem is that of the masses a / sum a and b / sum b as real numbers, and of costs C of which
the computed ones are off by at most A_i + B_j (`ExactCosts.errors`). u is the unit roundoff of
float64; sums of products are rounded once (`math.fsum`), after each product was.

Lower bound. For any g let f_i = min_j (C'_ij - g_j) for the computed costs C'. As t - u |t| grows
with t, C_ij - A_i - B_j >= f_i + g_j - u |f_i| for all pairs with mass, so that

    OT_0 >= <a, f - A - u |f|> + <b, g - B>.                                                  (1)

Both sums also differ from those for the masses r and c of a plan, by <r - a, f - s> + <c - b, g -
t> for any s and t, here the medians of f and of g. (1) is lowered by as much, so that it is below
the cost of that plan.

Upper bound. A plan P of mass 1 has row sums r and column sums c. Lower every row that has too much,
then every column: that removes at most rho / 2, with rho = ||r - a||_1 + ||c - b||_1. As much is
missing now, and any plan of the missing mass completes it. So

    OT_0 <= <C, P> + (max C - min C) rho / 2,                                                 (2)

with the range of C over pairs with mass. A few costs far above the others make (2) wide. A hub (p,
q), an arc of mass rho or more, gives another bound: a row that lacks mass takes it from q; one that
has too much leaves an arc (i, j) of its own, and p serves j instead; columns in the same way; (p,
q) gives the mass that p and q had to take. As deficits and excesses of a side are equal,

    OT_0 <= <C, P> + sum_i |r - a|_i max(C_iq - C_pq, max_j (C_pj - C_ij), 0)
                   + sum_j |c - b|_j max(C_pj - C_pq, max_i (C_iq - C_ij), 0),                (3)

with inner maxima over the arcs of the plan, and (p, j). The lesser of (2) and (3) is taken. The
plan is divided by its mass, which is 1 but for rounding. Its sums are sums of integers, without
error; where the integers are the masses, r = a and c = b. With forbidden pairs the upper bound
holds for the masses r and c, as the rest may have no pair to use.

`exact.solve` calls these after every pass and program, and makes the bounds of an `ExactTerm` from
them; `exact.slopes` calls `negligible`. Every bound must hold after any round, rounding of costs
and sums included (`tests/exact/test_exact_bounds.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from otdd_flash.cost.points import DOUBLE_UNIT, UNDERFLOW
from otdd_flash.solver.exact.pricing import Arcs, ExactCosts, Places, Vector

# Hubs of (3) that are tried.
HUBS = 4


class Bound(NamedTuple):
    """One end of the interval that holds OT_0.

    Attributes:
        value: of the dual, or the cost of the plan, as computed.
        rounding: by how much the end is beyond it.
        marginal_cost: the part of `rounding` that the marginals of a plan cost, of the upper end.
    """

    value: float
    rounding: float
    marginal_cost: float = 0.0


class Marginals(NamedTuple):
    """How far the marginals of a plan are from the masses.

    Attributes:
        rows: (n,) bounds of |r - a|.
        columns: (m,) bounds of |c - b|.
    """

    rows: Vector
    columns: Vector

    @property
    def error(self) -> float:
        """The larger L1 error."""
        return max(math.fsum(self.rows), math.fsum(self.columns))


def marginals_of(a: Vector, b: Vector, plan: Arcs, masses: Vector) -> Marginals:
    """Compare the marginals of a plan, of integer masses (k,) on arcs, with a (n,) and b (m,)."""
    total, found = math.fsum(masses), []
    for wanted, places in ((a, plan.rows), (b, plan.columns)):
        # Integers add without error.
        sums = np.bincount(places, masses, len(wanted)) / total
        apart = np.abs(sums - wanted / math.fsum(wanted))
        # Two quotients, a sum and a difference.
        found.append(apart + 4 * DOUBLE_UNIT * (sums + apart))
    return Marginals(found[0], found[1])


def mean_errors(costs: ExactCosts) -> float:
    """Return <a, A> + <b, B>, the mean error of costs under any plan."""
    return float(costs.a @ costs.errors[0] + costs.b @ costs.errors[1])


def negligible(costs: ExactCosts, f: Vector, g: Vector) -> float:
    """Return the size below which a reduced cost at f (n,) and g (m,) is 0 but for rounding."""
    # Costs far above the others have none.
    largest = sum(
        float(np.abs(potential[masses.cpu().numpy() > 0]).max())
        for potential, masses in ((f, costs.a), (g, costs.b))
    )
    return 4 * DOUBLE_UNIT * min(largest, max(abs(costs.lowest), abs(costs.highest)))


def common_rounding(count: int, scale: float, error: float) -> float:
    """Return the most by which rounding leaves (1) and (2) apart if no cost is above the others.

    For costs within +-K the potentials of either side span 2 K at most: f_i - f_k <= max C - min C.
    Integer masses of a sum near 2^52 leave rho <= (2 count + 12) u: half an integer a point, as
    much again that equal sums take, and quotients. So (2) pays rho K and (1) 2 rho K; products and
    sums are off by 8 u times sizes of K and of 5 K, for g within +-2 K and f within +-3 K, and the
    costs by their error at either end. Forbidden pairs leave rho <= (6 count + 12) u, with what
    `solve_program` may leave out, which (1) pays alone, with the mean size of potentials as K.

    Args:
        count: n + m.
        scale: K: the largest of a common cost, the value and the mean size of potentials.
        error: the mean error of costs.
    """
    # The errors of either end are themselves rounded up.
    return (6 * count + 84) * DOUBLE_UNIT * scale + 2 * error * (1 + 2e-6)


def lower_bound(
    a: Vector, b: Vector, f: Vector, g: Vector, error: float, marginals: Marginals
) -> Bound:
    """Return (1) for f (n,) as `price` found it for g (m,), and for the masses of a plan.

    Args:
        a: (n,) masses.
        b: (m,) masses.
        f: row potentials; read where rows have mass.
        g: column potentials; read where columns have mass.
        error: `mean_errors`.
        marginals: of a plan.
    """
    value = size = apart = 0.0
    for masses, potential, off in ((a, f, marginals.rows), (b, g, marginals.columns)):
        # Potentials of points without mass may be infinite.
        present = masses > 0
        known, total = potential[present], math.fsum(masses)
        terms = masses[present] * known
        value += math.fsum(terms) / total
        size += math.fsum(np.abs(terms)) / total
        apart += math.fsum(off[present] * np.abs(known - np.median(known)))
    # u |f| of (1); products, sums, quotients; the error is itself rounded.
    rounding = 8 * DOUBLE_UNIT * size + (error + apart) * (1 + 1e-6)
    return Bound(value, rounding + 2 * UNDERFLOW * (len(a) + len(b)))


def centred_size(a: Vector, b: Vector, f: Vector, g: Vector) -> float:
    """Return <a, |f - s|> + <b, |g - t|> for the medians s of f and t of g."""
    return math.fsum(
        float(masses[masses > 0] @ np.abs(known - np.median(known)))
        for masses, known in ((a, f[a > 0]), (b, g[b > 0]))
    )


def upper_bound(
    plan: Arcs,
    masses: Vector,
    marginals: Marginals,
    spread: float,
    errors: tuple[Vector, Vector],
    hubs: Arcs | None = None,
) -> Bound:
    """Return the lesser of (2) and (3) for a plan with masses (k,) on arcs.

    Args:
        plan: arcs of pairs with mass.
        masses: of the arcs.
        marginals: of the plan; 0 if its masses are exact, or pairs forbidden.
        spread: max C - min C over pairs with mass.
        errors: A (n,) and B (m,).
        hubs: `hub_arcs` of the plan with their costs; (2) alone if None.
    """
    total = math.fsum(masses)
    shares = masses / total
    terms = shares * plan.costs
    value, size = math.fsum(terms), math.fsum(np.abs(terms))
    rho = math.fsum(marginals.rows) + math.fsum(marginals.columns)
    paid = spread * rho / 2
    if hubs is not None and rho > 0:
        # The costs of (3) are computed ones.
        of_costs = 4 * rho * float(errors[0].max() + errors[1].max())
        for hub in largest(plan, masses):
            if shares[hub] > rho:
                paid = min(paid, of_costs + _through_hub(plan, hub, marginals, hubs))
    error = math.fsum(shares * (errors[0][plan.rows] + errors[1][plan.columns]))
    rounding = 8 * DOUBLE_UNIT * size + (paid + error) * (1 + 1e-6)
    return Bound(value, rounding + 2 * UNDERFLOW * len(masses), paid)


def largest(plan: Arcs, masses: Vector) -> Places:
    """Return the places of the arcs of most mass, at most `HUBS`."""
    places: Places = np.argsort(-masses, kind="stable")[:HUBS]
    return places


def hub_arcs(plan: Arcs, masses: Vector, n: int, m: int) -> tuple[Places, Places]:
    """Return rows, sorted, and columns of all pairs in the row or the column of a hub."""
    hubs = largest(plan, masses)
    rows, columns = np.unique(plan.rows[hubs]), np.unique(plan.columns[hubs])
    keys = np.unique(
        np.concatenate(
            (
                (rows[:, None] * m + np.arange(m)).ravel(),
                (np.arange(n)[:, None] * m + columns).ravel(),
            )
        )
    )
    return keys // m, keys % m


def _through_hub(plan: Arcs, hub: int, marginals: Marginals, hubs: Arcs) -> float:
    """Return what (3) adds to the cost of the plan."""
    p, q, n, m = plan.rows[hub], plan.columns[hub], len(marginals.rows), len(marginals.columns)
    to_q, from_p, centre = np.zeros(n), np.zeros(m), plan.costs[hub]
    for costs, into, some in (
        (to_q, hubs.rows, hubs.columns == q),
        (from_p, hubs.columns, hubs.rows == p),
    ):
        costs[into[some]] = hubs.costs[some]
    rows, columns = np.maximum(to_q - centre, 0), np.maximum(from_p - centre, 0)
    np.maximum.at(rows, plan.rows, from_p[plan.columns] - plan.costs)
    np.maximum.at(columns, plan.columns, to_q[plan.rows] - plan.costs)
    columns = np.maximum(columns, centre - from_p)
    return math.fsum(marginals.rows * rows) + math.fsum(marginals.columns * columns)
