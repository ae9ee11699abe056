"""What groups of points exchange: the offsets that balance it, and those that stay open.

Offsets t of K groups move potentials of rows by t_g and of columns by -t_g, and the flows between
the groups to F_gh exp((t_g - t_h) / epsilon). Everything here is of K groups, in numpy on the host,
with flows as logarithms and offsets in units of epsilon; `solver.groups` makes groups of points.

- `balanced` maximises the dual <t, a(g) - b(g)> - sum F(t) over t. Along one cut S that is

      exp(s) out - exp(-s) in = a(S) - b(S),

  solved in closed form for the cuts of the maximum spanning tree in turn (Osborne 1960, On
  pre-conditioning of matrices, where cuts are single groups). Exact masses then fix t although no
  product with P in floating point could see it.
- `undetermined`: groups whose flows are below what rounding of the masses moves. The indicator w of
  a group S has w^T L w = cut(S) in the plan's system L, so that cut(S) over its mass bounds the
  smallest eigenvalue from above, and never reassures. A mass imbalance of d moves t by epsilon d /
  cut(S), with d the rounding of the masses.
- `most_along`: the range of what stays open. Any t is as good as another that keeps

      t_g - t_h <= gaps_gh = min over rows i of g, columns j of h of (C_ij - f_i - g_j).

  For epsilon to 0 these are the optimal potentials. Differences of t end at shortest paths.
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

# Groups are one if links carry this share of the lighter one's mass. Offsets of what is tied by
# less are not fixed by a marginal error of 1e-3.
TIED = 0.05

# Relative rounding of a sum of masses, which were divided by their own; offsets are open where it
# moves them by more than this share of epsilon.
MASS_ROUNDING, OPEN = 2.0**-51, 1e-3

# Passes over all cuts, the move in units of epsilon that ends them, and how many are enough alone.
SWEEPS, SETTLED, ALONE = 40, 1e-6, 2

# What an exponent is raised to, and eigenvalues of the scaled system that count.
LOG_LEAST, LEAST_EIGENVALUE = -700.0, 1e-9


class Flows(NamedTuple):
    """What K groups exchange, on the host.

    Attributes:
        logs: (K, K), log F_gh; -inf on the diagonal, and where no pair is allowed.
        gaps: (K, K), least (C_ij - f_i - g_j) / epsilon of rows of g and columns of h, with f_i
            lowered so that it is 0 at the row's link.
        masses: (K, 2), of rows and of columns.
        excess: (K,), masses of rows less those of columns; 0 where rounding may have made it.
    """

    logs: Array
    gaps: Array
    masses: Array
    excess: Array

    def joined(self, labels: Labels) -> Flows:
        """The flows of unions of groups (K,)."""
        count = int(labels.max()) + 1
        logs, gaps = np.full((count, count), -np.inf), np.full((count, count), np.inf)
        pairs = labels[:, None] * np.ones_like(labels), labels * np.ones_like(labels)[:, None]
        np.logaddexp.at(logs, pairs, self.logs)
        np.minimum.at(gaps, pairs, self.gaps)
        np.fill_diagonal(logs, -np.inf)
        masses, excess = np.zeros((count, 2)), np.zeros(count)
        np.add.at(masses, labels, self.masses)
        np.add.at(excess, labels, self.excess)
        return Flows(logs, gaps, masses, above_rounding(excess, masses.sum(1)))

    def moved(self, t: Array) -> Flows:
        """The flows after offsets (K,) in units of epsilon."""
        by = t[:, None] - t
        return self._replace(logs=self.logs + by, gaps=self.gaps - by)


def well_tied(masses: Array, ends: Labels, others: Labels, weights: Array) -> Labels:
    """Join nodes (count,), each with the heavier one that it has most in common with, if enough.

    A light point between two heavy groups joins one of them; it does not make them one.
    """
    labels = np.arange(len(masses))
    while True:
        mass = np.bincount(labels, masses)
        shape = len(mass), len(mass)
        both = coo_array((weights, (labels[ends], labels[others])), shape=shape).tocsr()
        ties = (both + both.T).tocoo()
        order = np.argsort(ties.data, kind="stable")
        lighter, heavier, shared = ties.row[order], ties.col[order], ties.data[order]
        place = np.empty(len(mass), dtype=np.int64)
        place[np.argsort(mass, kind="stable")] = np.arange(len(mass))
        enough = (place[lighter] < place[heavier]) & (shared >= TIED * mass[lighter])
        chosen = np.arange(len(mass))
        # The last, which is the strongest, stays.
        chosen[lighter[enough]] = heavier[enough]
        if not enough.any():
            return labels
        labels = _components(len(mass), np.arange(len(mass)), chosen)[labels]


def _components(count: int, ends: Labels, others: Labels) -> Labels:
    """Connected components (count,) of a graph of these edges."""
    graph = coo_array((np.ones(len(ends), dtype=np.int8), (ends, others)), shape=(count, count))
    labels: Labels = connected_components(graph, directed=False)[1]
    return labels.astype(np.int64)


def above_rounding(excess: Array, masses: Array) -> Array:
    """Differences of sums of masses, 0 where they are no more than their rounding."""
    return np.where(np.abs(excess) <= MASS_ROUNDING * masses, 0.0, excess)


def mean_logs(flows: Flows) -> Array:
    """Return log sqrt(F_gh F_hg) (K, K), what both exchange at balance; -inf if one is closed."""
    return (flows.logs + flows.logs.T) / 2


def _tree(strength: Array) -> tuple[Array, Labels, Labels]:
    """The edges of the maximum spanning forest of strengths (K, K), the strongest first."""
    finite = np.isfinite(strength)
    most = strength[finite].max() if finite.any() else 0.0
    # Weights of a minimum spanning tree; those of 0 would be no edges.
    weights = np.where(finite, 1 + most - strength, 0.0)
    edges = minimum_spanning_tree(weights).tocoo()
    order = np.argsort(edges.data, kind="stable")
    return edges.data[order], edges.row[order].astype(np.int64), edges.col[order].astype(np.int64)


def joined_to(flows: Flows, most: int) -> Labels:
    """Labels (K,) of at most so many unions of groups, those joined that exchange most."""
    count = len(flows.logs)
    _, ends, others = _tree(mean_logs(flows))
    kept = max(0, count - most)
    return _components(count, ends[:kept], others[:kept])


def balanced(flows: Flows) -> Array:
    """Offsets t (K,) in units of epsilon at which every group gives what it gets, but its excess.

    Groups to which no allowed pair leads both ways stay where they are.
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
    """One step (K,) for what many groups have in common, which single cuts find slowly.

    Directions that rounding hides among larger flows are left to the cuts.
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
    """The root s of exp(s + out) - exp(into - s) = excess."""
    if not math.isfinite(out + into):
        # One way alone, which the excess has to take, if there is one in its direction.
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
    """Labels (K,) of unions of groups whose offsets are open; all 0 where none is."""
    labels = np.arange(len(flows.logs))
    while True:
        found = flows.joined(labels)
        # A cut moves by epsilon times the rounding of its masses over what it lets through.
        held = found.masses.sum(1)
        least = np.log(np.minimum(held[:, None], held)) + math.log(MASS_ROUNDING / OPEN)
        tied = np.logaddexp(found.logs, found.logs.T) >= least
        # What goes one way alone is to be 0 where no excess takes it, and the offset is infinite.
        needed = (found.excess != 0)[:, None] & (found.excess != 0)
        tied &= np.isfinite(mean_logs(found)) | needed
        joined = _components(len(found.logs), *np.nonzero(tied))
        if len(np.unique(joined)) == len(found.logs):
            return labels
        labels = joined[labels]


def most_along(direction: Array, gaps: Array) -> float:
    """The most of <direction, t> where t_g - t_h <= gaps_gh, shortest paths (K, K).

    It is the least cost at which what is above 0 in the direction reaches what is below.
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
