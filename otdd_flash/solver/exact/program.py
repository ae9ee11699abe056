"""The transport problem on few arcs: masses as integers, a tree that has a plan, the simplex.

Masses become integers of equal sums, so that the simplex adds and subtracts them without rounding.
Costs are given to it reduced by potentials near the optimal ones. That leaves the problem as it is
and matters for time and accuracy: the first pivots take the least cost of every column, which so is
the arc of the entropic plan (with plain costs the same problem takes ten times as long), and the
cost of artificial arcs, hence the rounding of potentials, is a multiple of the largest reduced cost
instead of the largest cost.

The simplex is the network simplex of POT for sparse costs (Bonneel et al. 2011, Displacement
interpolation using Lagrangian mass transport), after LEMON's. `solve` calls this.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otdd_flash.solver.exact.pricing import Arcs, Places, Vector

# Integers up to this are exact in float64; masses sum to about half of it.
TOTAL = 2.0**52

# More pivots than any problem in memory takes.
MOST_PIVOTS = 10**12

# The largest reduced cost has so many bits.
COST_BITS = 20

# POT's code for an optimal plan. With any other code there is no plan.
OPTIMAL = 1


def integer_masses(a: Vector, b: Vector) -> tuple[Vector, Vector]:
    """Return integers, float64, near multiples of masses a (n,) and b (m,), of equal sums.

    Equal masses on both sides are represented exactly. Others are off by at most half of an integer
    in about 2^52, and the largest mass of a side by what its sum lacks then.
    """
    if (a == a[0]).all() and (b == b[0]).all():
        common = math.gcd(len(a), len(b))
        return np.full(len(a), len(b) // common, float), np.full(len(b), len(a) // common, float)
    sides = [np.rint(side / math.fsum(side) * TOTAL) for side in (a, b)]
    for side in sides:
        side[side.argmax()] += TOTAL - math.fsum(side)
    return sides[0], sides[1]


def corner_tree(supply: Vector, demand: Vector) -> tuple[Places, Places, Vector]:
    """Return a plan between integer masses of equal sums by the north-west corner rule.

    Returns:
        Rows, sorted, columns and masses (k,) of at most n + m - 1 arcs.
    """
    ends = np.union1d(supply.cumsum(), demand.cumsum())
    ends = ends[ends > 0]
    rows = np.searchsorted(supply.cumsum(), ends)
    columns = np.searchsorted(demand.cumsum(), ends)
    return rows, columns, np.diff(ends, prepend=0.0)


class Vertex(NamedTuple):
    """An optimal plan on some arcs, with optimal potentials.

    Attributes:
        which: (k,) bool, arcs with mass.
        masses: of these, integers.
        f: (n,) row potentials, in units of the cost.
        g: (m,) column potentials, likewise.
    """

    which: NDArray[np.bool_]
    masses: Vector
    f: Vector
    g: Vector


def solve_program(
    supply: Vector, demand: Vector, arcs: Arcs, f: Vector, g: Vector
) -> Vertex | None:
    """Solve the transport problem on some arcs; None if there is no plan or no proof of one.

    Args:
        supply: (n,) integers.
        demand: (m,) integers of the same sum.
        arcs: a cost of +inf is taken only where nothing else has a plan.
        f: (n,) potentials to reduce costs by.
        g: (m,) likewise.
    """
    # They take seconds to import.
    import ot
    from scipy.sparse import coo_matrix

    n, m = len(supply), len(demand)
    allowed = (supply[arcs.rows] > 0) & (demand[arcs.columns] > 0)
    used = arcs.some(allowed)
    reduced = used.reduced(f, g)
    forbidden = ~np.isfinite(reduced)
    # A power of two, so that the 1 that the simplex adds to the largest cost is nothing.
    most = np.abs(reduced[~forbidden]).max(initial=0.0)
    unit = 2.0 ** (math.frexp(most)[1] - COST_BITS) if most > 0 else 1.0
    reduced /= unit
    # No cycle of allowed arcs pays as much as one forbidden arc.
    reduced[forbidden] = (n + m) * 2.0**COST_BITS
    reduced = coo_matrix((reduced, (used.rows, used.columns)), shape=(n, m))
    with warnings.catch_warnings():
        # Its warnings are the codes that are read below.
        warnings.simplefilter("ignore")
        plan, log = ot.emd(
            supply, demand, reduced, MOST_PIVOTS, log=True, center_dual=False, check_marginals=False
        )
    if log["result_code"] != OPTIMAL:
        return None
    keys = arcs.rows * m + arcs.columns
    places = np.searchsorted(keys, plan.row.astype(np.int64) * m + plan.col)
    masses = np.zeros(len(keys))
    masses[places] = plan.data
    which = masses > 0
    u, v = f + unit * log["u"], g + unit * log["v"]
    # The simplex leaves out masses that are 0 as integers. Others of their points' arcs decide.
    u = np.where(supply > 0, u, _least(n, arcs.rows, arcs.costs - v[arcs.columns], u))
    v = np.where(demand > 0, v, _least(m, arcs.columns, arcs.costs - u[arcs.rows], v))
    return Vertex(which, masses[which], u, v)


def _least(count: int, places: Places, values: Vector, otherwise: Vector) -> Vector:
    """Return the least value of each of `count` places; the `otherwise` (count,) of one without."""
    least = np.full(count, np.inf)
    np.minimum.at(least, places, values)
    return np.where(np.isfinite(least), least, otherwise)
