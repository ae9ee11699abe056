"""Bounds of OT_0 from potentials and from a plan, with the rounding of costs and sums.

The problem is that of the masses a / sum a and b / sum b as real numbers, and of costs C of which
the computed ones are off by at most A_i + B_j (`ExactCosts.errors`). u is the unit roundoff of
float64; sums of products are rounded once (`math.fsum`), after each product was.

Lower bound. For any g let f_i = min_j (C'_ij - g_j) for the computed costs C'. As x (1 - u) grows
with x, C_ij - A_i - B_j >= f_i + g_j - u |f_i| for all pairs with mass, so that

    OT_0 >= <a, f - A - u |f|> + <b, g - B>.                                                  (1)

Upper bound. A plan P of mass 1 has row sums r and column sums c. Lower every row that has too much,
then every column: that removes at most rho / 2, with rho = ||r - a||_1 + ||c - b||_1. As much is
missing now, and any plan of what is missing completes it. So

    OT_0 <= <C, P> + (max C - min C) rho / 2,                                                 (2)

with range of C over pairs with mass. The plan is divided by its mass, which is 1 but for rounding.
With forbidden pairs (2) holds for the masses r and c, as the rest may have no pair to use.

`solve` calls these.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.solver.exact.pricing import Arcs, ExactCosts, Vector


class Bound(NamedTuple):
    """One end of the interval that holds OT_0.

    Attributes:
        value: of the dual, or the cost of the plan, as computed.
        rounding: by how much the end is beyond it.
    """

    value: float
    rounding: float


def mean_errors(costs: ExactCosts) -> float:
    """Return <a, A> + <b, B>, the mean error of costs under any plan."""
    return float(costs.a @ costs.errors[0] + costs.b @ costs.errors[1])


def lower_bound(a: Vector, b: Vector, f: Vector, g: Vector, error: float) -> Bound:
    """Return (1) for f (n,) as `price` found it for g (m,).

    Args:
        a: (n,) masses.
        b: (m,) masses.
        f: row potentials; read where rows have mass.
        g: column potentials, likewise.
        error: `mean_errors`.
    """
    value = size = 0.0
    for masses, potential in ((a, f), (b, g)):
        present = masses > 0
        terms, total = masses[present] * potential[present], math.fsum(masses)
        value += math.fsum(terms) / total
        size += math.fsum(np.abs(terms)) / total
    # u |f| of (1); products, sums, quotients; the error is itself rounded.
    return Bound(value, 8 * DOUBLE_UNIT * size + error * (1 + 1e-6))


def upper_bound(
    a: Vector, b: Vector, plan: Arcs, masses: Vector, spread: float, errors: tuple[Vector, Vector]
) -> tuple[Bound, float]:
    """Return (2) for a plan with masses (k,) on arcs, and the larger L1 error of its marginals.

    Args:
        a: (n,) masses.
        b: (m,) masses.
        plan: arcs of pairs with mass.
        masses: of the arcs.
        spread: max C - min C over pairs with mass; 0 if pairs are forbidden.
        errors: A (n,) and B (m,).
    """
    total = math.fsum(masses)
    terms = masses * plan.costs
    value, size = math.fsum(terms) / total, math.fsum(np.abs(terms)) / total
    residuals = []
    for wanted, places in ((a, plan.rows), (b, plan.columns)):
        sums = np.bincount(places, masses, len(wanted)) / total
        count = np.bincount(places, minlength=len(wanted))
        apart = np.abs(sums - wanted / math.fsum(wanted))
        # The sum of k masses, and three quotients.
        slack = (count + 4) * DOUBLE_UNIT * (sums + apart)
        residuals.append(math.fsum(apart + slack))
    error = math.fsum(masses * (errors[0][plan.rows] + errors[1][plan.columns])) / total
    rounding = 8 * DOUBLE_UNIT * size + (spread * sum(residuals) / 2 + error) * (1 + 1e-6)
    return Bound(value, rounding), max(residuals)
