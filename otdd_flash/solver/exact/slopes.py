"""How OT_0 changes with the masses of a class: two slopes, as there may be many optimal potentials.

As the masses a grow in a direction d, whose entries sum to 0, OT_0 changes at the rate

    max <d, f>    to the one side,    min <d, f>    to the other,

over all optimal f. Optimal potentials differ by an offset t_k of each group k of points that the
plan connects: f_i + t_k for its rows, g_j - t_k for its columns. With the reduced costs r of one
optimal pair they are feasible where t_k - t_l <= r_ij for i in k and j in l, so that

    max <d, f> = <d, f> + max sum_k d_k t_k,    d_k the sum of d in k,

is the dual of a flow with supplies d_k along arcs of length r_ij: shortest paths in the residual
graph. `exact.program` solves it as a transport problem in which each node k is both a row and a
column, with an arc of length 0 between them, and with enough mass for whatever k passes on. Passes
find the arcs, as for the plan itself.

Equal sums of masses may differ by one integer once they are rounded, and the plan then moves that
integer from group to group. So entries of the plan as small as rounding (`mass_rounding`) must not
connect groups (`tests/exact/test_exact_slopes.py`).

`otdd_flash.contributions` calls `slopes_of` for the `ExactTerm` of a distance at epsilon 0, which
must be proven optimal, and hands the slopes to `DistanceResult.contributions`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.errors import InputError, NotConvergedWarning, warn
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.exact.bounds import negligible
from otdd_flash.solver.exact.pricing import Arcs, ExactCosts, Places, PointCosts, Vector
from otdd_flash.solver.exact.program import (
    NO_PLAN,
    ProgramError,
    corner_tree,
    integer_masses,
    solve_program,
)
from otdd_flash.solver.term import ExactTerm

# Arcs of a row and of a column that a pass finds, and most passes of one slope.
ARCS, MOST_PASSES = 10, 30

# Advice where a plan is not proven, by the reason why its solve ended.
NEEDED = {
    "rounding": "rounding leaves no more of it: lower costs that are far above the others",
    "infeasible": "there is none: change a and b, or allow more pairs",
    "max_seconds": "solve with solver.bound_width=0, and raise solver.max_seconds",
}


class ExactSlopes(NamedTuple):
    """The contributions of the rows and the classes of the source to OT_0.

    Attributes:
        row_costs: (n,) the mean cost of a row under the plan, in units of the cost; NaN without
            mass.
        slopes: (2, V) least and greatest slope of every direction; NaN if it was not found.
    """

    row_costs: Tensor
    slopes: Tensor


def slopes_of(comparison: Comparison, term: ExactTerm, directions: Tensor) -> ExactSlopes:
    """Compute the costs of rows, and the slopes in some directions of the masses.

    Args:
        comparison: of the distance.
        term: its cross term.
        directions: (n, V) float64, NaN for a direction that does not exist.

    Raises:
        InputError: the term is not proven optimal.
    """
    if term.stopped_by != "optimal":
        raise InputError(
            "contributions at epsilon 0 are of an optimal plan, and this one is not proven to be; "
            + NEEDED.get(term.stopped_by, "solve with solver.bound_width=0")
        )
    costs = PointCosts(comparison.cost("xy"), comparison.cost_error)
    term = term.moved(torch.device("cpu"))
    f, g = term.f.numpy(), term.g.numpy()
    plan = term.rows.numpy(), term.columns.numpy()
    groups = _Groups(costs, f, g, plan, term.masses.numpy())
    paid = torch.from_numpy(groups.plan.costs) * term.masses
    masses = term.applied(torch.ones(len(g), 1)).masses
    row_costs = torch.zeros_like(masses).index_add_(0, term.rows, paid) / masses
    ends = [
        [groups.greatest_slope(sign * d) * sign for d in directions.T.numpy()] for sign in (-1, 1)
    ]
    slopes = torch.tensor(ends, dtype=torch.float64)
    missing = int((slopes.isnan() & ~directions.isnan().any(0)).any(0).sum())
    if missing:
        warn(
            f"slopes of {missing} of {slopes.shape[1]} classes at epsilon 0 were not proven after "
            f"{MOST_PASSES} passes over the costs and are NaN; a small positive epsilon has slopes "
            "near them",
            NotConvergedWarning,
        )
    return ExactSlopes(row_costs, slopes)


def mass_rounding(count: int) -> float:
    """Return the mass, of 1, that the plan of `count` points has or leaves out by rounding."""
    return 2 * DOUBLE_UNIT * count


class _Groups:
    """The groups of points that a plan connects, and the arcs between them.

    Args:
        costs: C.
        f: (n,) optimal potentials of rows.
        g: (m,) optimal potentials of columns.
        plan: rows, sorted, and columns (k,) of an optimal plan.
        masses: (k,) its masses, of sum 1.
    """

    def __init__(
        self,
        costs: ExactCosts,
        f: Vector,
        g: Vector,
        plan: tuple[Places, Places],
        masses: Vector,
    ) -> None:
        # SciPy's graphs take time to import.
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        self.costs, self.f, self.g = costs, f, g
        n, m = len(f), len(g)
        ends = plan[0], plan[1] + n
        # Of entries that are rounding a point keeps the largest: it is grouped, and connects none.
        kept = masses > mass_rounding(n + m)
        order = np.argsort(-masses, kind="stable")
        for side in ends:
            kept[order[np.unique(side[order], return_index=True)[1]]] = True
        links = coo_matrix((np.ones(len(order))[kept], [e[kept] for e in ends]), (n + m, n + m))
        _, label = connected_components(links, directed=False)
        # Points without mass are in no group.
        used, places = np.unique(label[plan[0]], return_inverse=True)
        of_label = np.full(n + m, -1)
        of_label[used] = np.arange(len(used))
        self.count = len(used)
        self.rows, self.columns = np.split(of_label[label], [n])
        # A row and a column of each group.
        self._representatives = tuple(np.empty(self.count, np.int64) for _ in range(2))
        for points, side in zip(self._representatives, plan, strict=True):
            points[places] = side
        priced = costs.price(f, g, ARCS, wanted=plan)
        self.plan, self._arcs = priced.wanted, priced.arcs

    def greatest_slope(self, direction: Vector) -> float:
        """Return max <d, f> over optimal f, for a direction d (n,); NaN if d is, or if unknown."""
        if np.isnan(direction).any():
            return float("nan")
        known = self.rows >= 0
        supply = np.bincount(self.rows[known], direction[known], self.count)
        base = float(direction[known] @ self.f[known])
        # More than a node may pass on: its own arc keeps some, so that it has one potential.
        room = 2 * np.maximum(supply, 0).sum()
        if self.count == 1 or not room > 0:
            return base
        sides = np.maximum(supply, 0) + room, np.maximum(-supply, 0) + room
        integers = integer_masses(*sides)
        units = integers.supply, integers.demand
        arcs = self._with_tree(corner_tree(*units)[:2])
        for _ in range(MOST_PASSES):
            gaps = self._gaps(arcs)
            nothing = np.zeros(self.count)
            try:
                vertex = solve_program(*units, gaps, nothing, nothing)
            except ProgramError as error:
                if error.code != NO_PLAN:
                    raise
                # There is one, but lengths that are lost to rounding beside others hid it.
                break
            t = vertex.f
            f = self.f + np.where(known, t[self.rows], 0)
            g = self.g - np.where(self.columns >= 0, t[self.columns], 0)
            # The lengths of a path add their rounding.
            below = -8 * negligible(self.costs, f, g)
            more = self.costs.price(f, g, ARCS, below=below).arcs
            joined = Arcs.joined(len(g), arcs, more)
            if len(joined.rows) == len(arcs.rows):
                return base + float(supply @ t)
            arcs = joined
        return float("nan")

    def _with_tree(self, tree: tuple[Places, Places]) -> Arcs:
        """Return the arcs with those of a tree between groups, by a row and a column of each."""
        rows, columns = (
            points[side] for points, side in zip(self._representatives, tree, strict=True)
        )
        order = np.argsort(rows, kind="stable")
        wanted = rows[order], columns[order]
        found = self.costs.price(self.f, self.g, 1, below=-np.inf, wanted=wanted).wanted
        return Arcs.joined(len(self.g), self._arcs, found)

    def _gaps(self, arcs: Arcs) -> Arcs:
        """Return the shortest arcs between groups, and one of length 0 within each."""
        rows, columns = self.rows[arcs.rows], self.columns[arcs.columns]
        both: NDArray[np.bool_] = (rows >= 0) & (columns >= 0) & (rows != columns)
        keys, lengths = (rows * self.count + columns)[both], arcs.reduced(self.f, self.g)[both]
        order = np.lexsort((lengths, keys))
        keys, first = np.unique(keys[order], return_index=True)
        shortest = np.maximum(lengths[order][first], 0)
        own = np.arange(self.count)
        between = Arcs(keys // self.count, keys % self.count, shortest)
        return Arcs.joined(self.count, between, Arcs(own, own, np.zeros(self.count)))
