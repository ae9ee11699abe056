"""Mass flows between groups of points: offsets that balance them, and undetermined offsets.

Offsets t of K groups change the potentials of rows by t_g and of columns by -t_g, and the flows
between groups to F_gh exp((t_g - t_h) / epsilon). All is in numpy on the host, with offsets in
units of epsilon, but for `most_along`, which takes any unit of offsets and gaps alike. Flows must
stay logarithms, because they may underflow. `plan_links` finds the groups, by `well_tied`, and
their `Flows`, and `groups` calls the functions below (`tests/derivatives/test_groups.py`).
`plan_links`, `groups` and `batched.plans` use thresholds of this file (TIED, OPEN, ...), so a
change of these changes which groups they find or report, too.

- `balanced` maximises the dual <t, a(g) - b(g)> - sum F(t) over t. For a common offset s of the
  groups S on one side of a cut, with the flows out and in across it, the optimum solves

      exp(s) out - exp(-s) in = a(S) - b(S),

  in closed form, for the cuts of the maximum spanning tree in turn (Osborne 1960, On
  pre-conditioning of matrices, where cuts are single groups). Exact masses determine t in this way
  even where flows are below the rounding of products with P.
- `undetermined` finds groups whose flows are too small against the rounding of the masses. The
  indicator w of a group S has w^T L w = cut(S) in the plan's linear system L. So cut(S) over the
  mass of S is an upper bound of the smallest eigenvalue: it can show that t is undetermined, never
  that it is determined. An error d of the masses changes t by epsilon d / cut(S).
- `most_along` computes the range of undetermined offsets. All t are equivalent that keep

      t_g - t_h <= gaps_gh = min over rows i of g, columns j of h of (C_ij - f_i - g_j).

  As epsilon goes to 0 these give the optimal potentials. The largest difference of two offsets is a
  shortest path.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

# Two groups are joined if links between them carry this share of the lighter one's mass. With less,
# a marginal error of 1e-3 does not determine the offset between them.
TIED = 0.05

# Relative rounding of a sum of float64 masses, which were divided by their sum; an offset is
# undetermined if the rounding of masses changes it by more than OPEN times epsilon.
MASS_ROUNDING, OPEN = 2.0**-51, 1e-3

# Most sweeps over all cuts, the step in units of epsilon that ends them, and sweeps before the
# first Newton step.
SWEEPS, SETTLED, ALONE = 40, 1e-6, 2

# Least logarithm of a flow in a Newton step, and least eigenvalue of its scaled system.
LOG_LEAST, LEAST_EIGENVALUE = -700.0, 1e-9


class Flows(NamedTuple):
    """The flows between K groups, on the host.

    Attributes:
        logs: (K, K), log F_gh; -inf on the diagonal, and where all pairs are forbidden.
        gaps: (K, K), least (C_ij - f_i - g_j) / epsilon over rows of g and columns of h, with f_i
            shifted so that it is 0 at the row's largest entry.
        masses: (K, 2), of rows and of columns.
        excess: (K,), mass of rows minus mass of columns; 0 if it may be only rounding.
        rounding: relative rounding of a sum of masses.
    """

    logs: Array
    gaps: Array
    masses: Array
    excess: Array
    rounding: float

    def joined(self, labels: Labels) -> Flows:
        """Return the flows between unions of groups, given by labels (K,)."""
        count = int(labels.max()) + 1
        logs, gaps = np.full((count, count), -np.inf), np.full((count, count), np.inf)
        pairs = labels[:, None] * np.ones_like(labels), labels * np.ones_like(labels)[:, None]
        np.logaddexp.at(logs, pairs, self.logs)
        np.minimum.at(gaps, pairs, self.gaps)
        np.fill_diagonal(logs, -np.inf)
        masses, excess = np.zeros((count, 2)), np.zeros(count)
        np.add.at(masses, labels, self.masses)
        np.add.at(excess, labels, self.excess)
        excess = above_rounding(excess, masses.sum(1), self.rounding)
        return Flows(logs, gaps, masses, excess, self.rounding)

    def moved(self, t: Array) -> Flows:
        """Return the flows after offsets t (K,) in units of epsilon."""
        by = t[:, None] - t
        return self._replace(logs=self.logs + by, gaps=self.gaps - by)


def well_tied(masses: Array, ends: Labels, others: Labels, weights: Array) -> Labels:
    """Join each node to the heavier one with the largest shared weight, if that is at least TIED.

    A light point between two heavy groups joins one of them; it does not join the two.

    Args:
        masses: (count,) of the nodes.
        ends: one node of each link.
        others: its other node.
        weights: mass that each link carries.

    Returns:
        Labels (count,) of the groups.
    """
    labels = np.arange(len(masses))
    while True:
        mass = np.bincount(labels, masses)
        shape = len(mass), len(mass)
        both = coo_array((weights, (ends, others)), shape=shape).tocsr()
        ties = (both + both.T).tocoo()
        place = np.empty(len(mass), dtype=np.int64)
        place[np.argsort(mass, kind="stable")] = np.arange(len(mass))
        enough = (place[ties.row] < place[ties.col]) & (ties.data >= TIED * mass[ties.row])
        if not enough.any():
            return labels
        lighter, heavier = ties.row[enough], ties.col[enough]
        order = np.argsort(ties.data[enough], kind="stable")
        chosen = np.arange(len(mass))
        # Of repeated assignments the last counts, which is the strongest link.
        chosen[lighter[order]] = heavier[order]
        joined = _components(len(mass), np.arange(len(mass)), chosen)
        labels = joined[labels]
        # Links between groups, once each, in place of those between their nodes.
        ends, others = joined[ties.row], joined[ties.col]
        between = (ties.row < ties.col) & (ends != others)
        ends, others, weights = ends[between], others[between], ties.data[between]


def _components(count: int, ends: Labels, others: Labels) -> Labels:
    """Label (count,) the connected components of a graph of these edges."""
    graph = coo_array((np.ones(len(ends), dtype=np.int8), (ends, others)), shape=(count, count))
    labels: Labels = connected_components(graph, directed=False)[1]
    return labels.astype(np.int64)


def above_rounding(excess: Array, masses: Array, rounding: float) -> Array:
    """Replace differences of sums of masses that are only rounding by 0."""
    return np.where(np.abs(excess) <= rounding * masses, 0.0, excess)


def mean_logs(flows: Flows) -> Array:
    """Return log sqrt(F_gh F_hg) (K, K), the flow at balance; -inf if one of both is 0."""
    return (flows.logs + flows.logs.T) / 2


def _tree(strength: Array) -> tuple[Array, Labels, Labels]:
    """Return the edges of the maximum spanning forest of strengths (K, K), the strongest first."""
    finite = np.isfinite(strength)
    most = strength[finite].max() if finite.any() else 0.0
    # Weights of a minimum spanning tree; those of 0 would be no edges.
    weights = np.where(finite, 1 + most - strength, 0.0)
    edges = minimum_spanning_tree(weights).tocoo()
    order = np.argsort(edges.data, kind="stable")
    return edges.data[order], edges.row[order].astype(np.int64), edges.col[order].astype(np.int64)


def joined_to(flows: Flows, most: int) -> Labels:
    """Label (K,) at most so many unions of groups: those with the largest flows are joined."""
    count = len(flows.logs)
    _, ends, others = _tree(mean_logs(flows))
    kept = max(0, count - most)
    return _components(count, ends[:kept], others[:kept])


def balanced(flows: Flows) -> Array:
    """Return offsets t (K,) in units of epsilon that balance the flows of every group.

    Its outflow minus its inflow is its excess. Groups without flow in both directions are not
    moved, unless by an excess.
    """
    count = len(flows.logs)
    _, ends, others = _tree(mean_logs(flows))
    sides, cuts = np.eye(count, dtype=bool), []
    for one, other in zip(ends, others, strict=True):
        smaller = min(sides[one], sides[other], key=np.sum)
        cuts.append(smaller.copy())
        sides[sides[one] | sides[other]] |= sides[one] | sides[other]
    logs, t = flows.logs.copy(), np.zeros(count)
    excesses = above_rounding(
        np.array([flows.excess[cut].sum() for cut in cuts]),
        np.array([flows.masses[cut].sum() for cut in cuts]),
        flows.rounding,
    ).tolist()
    sets = [(cut.nonzero()[0], (~cut).nonzero()[0]) for cut in cuts]
    for sweep in range(SWEEPS):
        largest = 0.0
        for (cut, rest), excess in zip(sets, excesses, strict=True):
            out, into = _log_sum(logs[cut].T[rest]), _log_sum(logs[:, cut][rest])
            step = _step(out, into, excess)
            t[cut] += step
            logs[cut] += step
            logs[:, cut] -= step
            largest = max(largest, abs(step))
        if largest <= SETTLED:
            break
        if sweep >= ALONE:
            moves = _newton(logs, flows.excess)
            t += moves
            logs += moves[:, None] - moves
    return t


def _newton(logs: Array, excess: Array) -> Array:
    """Return a Newton step (K,), for modes of many groups on which single cuts converge slowly.

    Modes below the rounding of larger flows are left to the cuts.
    """
    shares = np.exp(np.maximum(logs, LOG_LEAST))
    out, into = shares.sum(1), shares.sum(0)
    per_group = 1 / np.sqrt(out + into)
    system = np.diag(out + into) - shares - shares.T
    values, vectors = np.linalg.eigh(per_group[:, None] * system * per_group)
    kept = values > LEAST_EIGENVALUE
    pulled = vectors.T @ (per_group * (excess - out + into))
    step: Array = per_group * (vectors[:, kept] @ (pulled[kept] / values[kept]))
    return np.clip(step, -1, 1)


def _step(out: float, into: float, excess: float) -> float:
    """Return the root s of exp(s + out) - exp(into - s) = excess."""
    if not math.isfinite(out + into):
        # Flow is possible one way only: the excess takes it, if it has that direction.
        open_way = out if excess > 0 else into
        fits = excess != 0 and math.isfinite(open_way)
        return math.copysign(math.log(abs(excess)) - open_way, excess) if fits else 0.0
    middle, half = (into - out) / 2, (into + out) / 2
    if excess == 0:
        return middle
    # s - middle = asinh(excess / (2 exp(half))), whose argument may overflow.
    size = math.log(abs(excess) / 2) - half
    rise = math.asinh(math.exp(size)) if size < 300 else size + math.log(2)
    return middle + math.copysign(rise, excess)


def _log_sum(logs: Array) -> float:
    most = float(logs.max())
    return most + math.log(np.exp(logs - most).sum()) if math.isfinite(most) else most


def undetermined(flows: Flows) -> Labels:
    """Label (K,) unions of groups with undetermined offsets; all 0 if all are determined."""
    labels = np.arange(len(flows.logs))
    while True:
        found = flows.joined(labels)
        # The offset of a cut changes by epsilon times the rounding of its masses over its flow.
        held = found.masses.sum(1)
        least = np.log(np.minimum(held[:, None], held)) + math.log(found.rounding / OPEN)
        tied = np.logaddexp(found.logs, found.logs.T) >= least
        # A flow one way alone must be 0 without an excess, which an infinite offset achieves.
        needed = (found.excess != 0)[:, None] & (found.excess != 0)
        tied &= np.isfinite(mean_logs(found)) | needed
        joined = _components(len(found.logs), *np.nonzero(tied))
        if len(np.unique(joined)) == len(found.logs):
            return labels
        labels = joined[labels]


def most_along(direction: Array, gaps: Array) -> float:
    """Return the maximum of <direction, t> over t_g - t_h <= gaps_gh, shortest paths (K, K).

    By duality it is the optimal transport cost from the positive part of the direction to the
    negative one, with the gaps as costs.
    """
    scale = np.abs(direction).max()
    if not scale > 0:
        return 0.0
    high = (direction > MASS_ROUNDING * scale).nonzero()[0]
    low = (direction < -MASS_ROUNDING * scale).nonzero()[0]
    costs, supply, demand = gaps[np.ix_(high, low)], direction[high], -direction[low]
    if len(high) == 1:
        return float(costs[0] @ demand)
    if len(low) == 1:
        return float(costs[:, 0] @ supply)
    finite = np.isfinite(costs).ravel()
    sources, ends = np.divmod(np.arange(costs.size), len(low))
    rows = np.concatenate((sources, len(high) + ends))
    places = np.tile(np.arange(costs.size), 2)
    sums = coo_array((np.ones(len(rows)), (rows, places)), shape=(len(high) + len(low), costs.size))
    # One of the equations follows from the others, but for rounding.
    sums, right = sums.tocsr()[:-1], np.concatenate((supply, demand))[:-1]
    found = linprog(
        costs.ravel()[finite], A_eq=sums[:, finite], b_eq=right, bounds=(0, None), method="highs"
    )
    return float(found.fun) if found.status == 0 else math.inf
