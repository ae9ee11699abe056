"""The transport problem on few arcs: integer masses, a tree that has a plan, the network simplex.

Masses become integers of equal sums, so that the simplex adds and subtracts them without rounding.
Costs are given to it reduced by potentials near the optimal ones. This changes no solution, but
saves time and rounding. The first pivots take the least cost of every column, which then is that of
an arc of the entropic plan; with plain costs the same problem takes ten times as long. And the cost
of artificial arcs, hence the rounding of potentials, is a multiple of the largest reduced cost
instead of the largest cost.

The simplex is the network simplex of POT for sparse costs (Bonneel et al. 2011, Displacement
interpolation using Lagrangian mass transport), after LEMON's.

`exact.solve` and `exact.slopes` call `solve_program` on the arcs so far, and add those of
`corner_tree` so that there is a plan; `exact.solve` calls `fewest_forbidden` for forbidden pairs.
Masses must stay integers of equal sums below 2^53, exact in float64: the bounds of `exact.bounds`
take the sums of a plan as free of error.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otdd_flash.cost.points import UNDERFLOW
from otdd_flash.solver.exact.pricing import Arcs, Places, Vector

# Integers up to this are exact in float64; masses sum to about half of it.
TOTAL = 2.0**52

# More pivots than any problem in memory takes.
MOST_PIVOTS = 10**12

# Reduced costs are scaled so that the largest is in [2^19, 2^20): POT adds 1 to the largest for its
# artificial arcs, which is then 1e-6 of it.
COST_BITS = 20

# Costs over (n + m) 2^COST_BITS, which no cycle of allowed arcs reaches. A unit left out uses two
# slack arcs, dearer together than any such cycle and cheaper than a forbidden arc.
SLACK_COST, FORBIDDEN_COST = 1.0, 4.0

# POT's codes for an optimal plan, and for none on these arcs, which also ends programs whose small
# costs are lost to rounding beside others. With any other code the simplex failed.
OPTIMAL, NO_PLAN = 1, 0


class ProgramError(RuntimeError):
    """POT's network simplex ended without an optimal plan.

    Args:
        code: of POT: `NO_PLAN`, 2 if a cycle of arcs costs less than nothing, 3 after
            `MOST_PIVOTS`.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"the network simplex of POT ended without an optimal plan, with code {self.code}"


class IntegerMasses(NamedTuple):
    """Integers, float64, in proportion to masses, of equal sums below 2^53.

    Attributes:
        supply: (n,) of rows.
        demand: (m,) of columns.
        exact: whether these are the masses over their sums as real numbers.
    """

    supply: Vector
    demand: Vector
    exact: bool


def integer_masses(a: Vector, b: Vector) -> IntegerMasses:
    """Return integers near multiples of masses a (n,) and b (m,).

    Where the masses of each side are all equal, or 0, they are represented exactly. Others are off
    by at most half of an integer in about 2^52, equal ones by as much, and the largest mass of one
    side by what its sum lacks then: masses that are permuted lack nothing.
    """
    sizes = [np.unique(side[side > 0]) for side in (a, b)]
    if all(len(each) == 1 for each in sizes):
        n, m = np.count_nonzero(a), np.count_nonzero(b)
        common = math.gcd(n, m)
        return IntegerMasses(
            np.where(a > 0, float(m // common), 0), np.where(b > 0, float(n // common), 0), True
        )
    supply, demand = (np.rint(side / math.fsum(side) * TOTAL) for side in (a, b))
    lacking = math.fsum(demand) - math.fsum(supply)
    more = supply if lacking > 0 else demand
    more[more.argmax()] += abs(lacking)
    return IntegerMasses(supply, demand, False)


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
        g: (m,) column potentials, in units of the cost.
    """

    which: NDArray[np.bool_]
    masses: Vector
    f: Vector
    g: Vector


def solve_program(
    supply: Vector, demand: Vector, arcs: Arcs, f: Vector, g: Vector, *, slack: bool = False
) -> Vertex:
    """Solve the transport problem on some arcs.

    Args:
        supply: (n,) integers.
        demand: (m,) integers of the same sum.
        arcs: sorted by row, then by column; a cost of +inf is taken only where nothing else has a
            plan.
        f: (n,) row potentials to reduce costs by.
        g: (m,) column potentials to reduce costs by.
        slack: whether up to n + m units may be left out where no plan has them, as masses that
            forbidden pairs allow may be an integer apart once they are rounded.

    Raises:
        ProgramError: there is no plan on these arcs, or the simplex failed.
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
    unit = max(2.0 ** (math.frexp(most)[1] - COST_BITS), UNDERFLOW) if most > 0 else 1.0
    reduced /= unit
    # More than any cycle of allowed arcs pays.
    large = (n + m) * 2.0**COST_BITS
    reduced[forbidden] = FORBIDDEN_COST * large
    rows, columns, shape, units = used.rows, used.columns, (n, m), (supply, demand)
    if slack:
        # A row n and a column m of n + m units each, which are for one another but for the slack.
        i, j = supply.nonzero()[0], demand.nonzero()[0]
        rows = np.concatenate((rows, i, np.full(len(j) + 1, n)))
        columns = np.concatenate((columns, np.full(len(i), m), j, [m]))
        costs = np.full(len(i) + len(j), SLACK_COST * large)
        reduced, shape = np.concatenate((reduced, costs, [0.0])), (n + 1, m + 1)
        units = np.append(supply, n + m), np.append(demand, n + m)
    reduced = coo_matrix((reduced, (rows, columns)), shape=shape)
    with warnings.catch_warnings():
        # Its warnings are the codes that are read below.
        warnings.simplefilter("ignore")
        plan, log = ot.emd(
            *units, reduced, MOST_PIVOTS, log=True, center_dual=False, check_marginals=False
        )
    if log["result_code"] != OPTIMAL:
        raise ProgramError(log["result_code"])
    keys = arcs.rows * m + arcs.columns
    own = (plan.row < n) & (plan.col < m)
    places = np.searchsorted(keys, plan.row[own].astype(np.int64) * m + plan.col[own])
    masses = np.zeros(len(keys))
    masses[places] = plan.data[own]
    which = masses > 0
    u, v = f + unit * log["u"][:n], g + unit * log["v"][:m]
    # The simplex leaves out masses that are 0 as integers. Others of their points' arcs decide.
    u = np.where(supply > 0, u, _least(n, arcs.rows, arcs.costs - v[arcs.columns], u))
    v = np.where(demand > 0, v, _least(m, arcs.columns, arcs.costs - u[arcs.rows], v))
    # Large offsets would cost sums of potentials digits.
    offset = np.median(v[demand > 0])
    return Vertex(which, masses[which], u + offset, v - offset)


def fewest_forbidden(supply: Vector, demand: Vector, arcs: Arcs) -> Vertex:
    """Move as few units as possible over arcs of a cost of +inf, at potentials without a unit.

    This is phase 1 of the simplex method: an allowed arc costs 0, each unit left out 2 and a
    forbidden arc 4, so that potentials are integers but for rounding. A pair beyond `arcs` could
    help only if f_i + g_j is 1 or more.

    Args:
        supply: (n,) integers.
        demand: (m,) integers of the same sum.
        arcs: some that have a plan; finite costs are not read.
    """
    n, m = len(supply), len(demand)
    free = arcs._replace(costs=np.where(np.isfinite(arcs.costs), 0.0, np.inf))
    vertex = solve_program(supply, demand, free, np.zeros(n), np.zeros(m), slack=True)
    large = SLACK_COST * (n + m) * 2.0**COST_BITS
    return vertex._replace(f=vertex.f / large, g=vertex.g / large)


def _least(count: int, places: Places, values: Vector, otherwise: Vector) -> Vector:
    """Return the least value of each of `count` places; the `otherwise` (count,) of one without."""
    least = np.full(count, np.inf)
    np.minimum.at(least, places, values)
    return np.where(np.isfinite(least), least, otherwise)
