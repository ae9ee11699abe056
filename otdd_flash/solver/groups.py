"""Groups of points that exchange almost no mass, and what is left open of their potentials.

The plan P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon) does not change if f rises and g falls by
a constant. Nor does it where only the rows and columns of a group g of points move by t_g, but for

    F_gh(t) = F_gh exp((t_g - t_h) / epsilon),    F_gh = sum of P over rows of g and columns of h,

which is all that ties the offsets t to the masses. A marginal error far above these flows does not
see them, so a converged solve leaves t where its iterations happened to end. Three steps follow,
where potentials are asked for, and in no solve that only wants a value:

1. `connected`: the parts of the graph of all entries of at least a share of their row's largest.
   Rows come in an even sample first; most plans are connected by it, and nothing else is done.
2. `balanced`: the dual is maximised over t alone, <t, a(g) - b(g)> - epsilon sum F(t), in the
   logarithms of the flows, whatever their size. Along one cut S that is one equation,

       exp(s) out - exp(-s) in = a(S) - b(S),

   solved in closed form for the cuts of the maximum spanning tree in turn (Osborne 1960, On
   pre-conditioning of matrices, where cuts are single groups). Exact masses then fix t although no
   product with P in floating point could see it.
3. `undetermined`: groups whose flows are below what rounding of the masses moves. The indicator w
   of a group S has w^T L w = cut(S) in the plan's system L, so that cut(S) over its mass bounds the
   smallest eigenvalue from above, and never reassures. A mass imbalance of d moves t by epsilon d /
   cut(S): with d the rounding of the masses, any t that keeps f_i + g_j <= C_ij between the groups
   is as good,

       t_g - t_h <= min over rows i of g, columns j of h of (C_ij - f_i - g_j).

   For epsilon to 0 these are the optimal potentials. Differences of t then end at shortest paths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree, shortest_path
from scipy.special import logsumexp
from torch import Tensor

from otdd_flash.errors import ConvergenceError, NotConvergedWarning, warn
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.matrix import CostSource
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.matrix.problem import MatrixProblem
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.term.result import TransportTerm

Array = npt.NDArray[np.float64]

# A link is an entry of at least this share of its row's largest; of the next share where that
# leaves more groups than can be contracted, but of none that rounding of the masses might outweigh.
# Of those that are contracted, the most strongly tied are joined.
LINKS, MOST_CONTRACTED, MOST_BALANCED = (0.05, 1e-5, 1e-11), 1024, 128

# Groups are one if links carry this share of the lighter one's mass. Offsets of what is tied by less
# are not fixed by a marginal error of 1e-3.
TIED = 0.05

# Rows of the first sample, and entries that are there at once.
FIRST_ROWS, ELEMENTS_CPU, ELEMENTS_GPU = 64, 1 << 21, 1 << 26

# Relative rounding of a sum of masses, which were divided by their own; offsets are open where it
# moves them by more than this share of epsilon.
MASS_ROUNDING, OPEN = 2.0**-51, 1e-3

# Passes over all cuts, the move in units of epsilon that ends them, and how many are enough alone.
SWEEPS, SETTLED, ALONE = 40, 1e-6, 2

# Entries of a plan whose optimum Newton's method finds, its most steps, the first one in units of
# epsilon that is worth it, and eigenvalues that float64 tells from 0.
MOST_POLISHED, NEWTON_STEPS, SMALL_STEP, LEAST_SEEN = 1 << 18, 60, 0.01, 1e-12

# What an exponent is raised to, and eigenvalues of the scaled system that count.
LOG_LEAST, LEAST_EIGENVALUE = -700.0, 1e-9

# Groups and rows that a message names.
NAMED_GROUPS, NAMED_CLASSES, NAMED_ROWS, NAME_LENGTH = 4, 6, 5, 40


class Entries(Protocol):
    """Costs (n, m), of some rows and columns at a time."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        ...

    @property
    def offsets(self) -> Tensor:
        """(n,) float64, C_ij = offsets_i - S_ij with scores S."""
        ...

    def logs(self, rows: slice, term: Tensor, epsilon: float) -> Tensor:
        """S / epsilon + term (k, m), of some rows (k,) and with a term (m,), float64."""
        ...

    def costs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """C (k, l) of some rows (k,) and columns (l,), int64."""
        ...


class PointEntries:
    """Those of labelled points, on the device or streamed to it.

    Args:
        cost: two labelled clouds.
        dtype: of the entries.
    """

    def __init__(self, cost: LabelledCost, dtype: torch.dtype) -> None:
        self._cost, self._dtype, self.shape = cost, dtype, cost.shape
        squares_x, squares_y = cost.squares
        self.offsets = cost.lambda_x * squares_x
        y = cost.points[1]
        self._columns = self._centred(y) if isinstance(y, Tensor) else None
        self._bias = -cost.class_costs[:, cost.labels[1]] - cost.lambda_x * squares_y

    def _centred(self, points: Tensor) -> Tensor:
        return (points.double() - self._cost.centre).to(self._dtype)

    def logs(self, rows: slice, term: Tensor, epsilon: float) -> Tensor:
        """(2 lambda_x <x_i, y_j> - lambda_x ||y_j||^2 - lambda_y W[l_i, l_j]) / epsilon + term."""
        cost = self._cost
        x, y = self._centred(cost.points[0][rows]), self._columns
        if y is None:
            y = self._centred(cost.points[1][:])
        bias = torch.add(term, self._bias, alpha=1 / epsilon).to(self._dtype)
        found = bias.index_select(0, cost.labels[0][rows])
        return found.addmm_(x, y.T, alpha=2 * cost.lambda_x / epsilon)

    def costs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """C (k, l)."""
        cost = self._cost
        x = self._centred(cost.points[0][rows])
        y = (
            self._centred(cost.points[1][columns])
            if self._columns is None
            else self._columns[columns]
        )
        negative = self._bias[:, columns].to(self._dtype).index_select(0, cost.labels[0][rows])
        negative.addmm_(x, y.T, alpha=2 * cost.lambda_x)
        return torch.sub(self.offsets[rows, None].to(self._dtype), negative, out=negative)


class MatrixEntries:
    """Those of a given matrix, in the type of potentials."""

    def __init__(self, source: CostSource, dtype: torch.dtype) -> None:
        self._source, self._dtype, self.shape = source, dtype, source.shape
        self._every = torch.arange(source.shape[1], device=source.device)
        self.offsets = torch.zeros(source.shape[0], dtype=torch.float64, device=source.device)

    def logs(self, rows: slice, term: Tensor, epsilon: float) -> Tensor:
        """Term - C[rows] / epsilon."""
        chosen = torch.arange(self.shape[0], device=self._source.device)[rows]
        costs = self.costs(chosen, self._every)
        return torch.add(term.to(costs), costs, alpha=-1 / epsilon)

    def costs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """C (k, l)."""
        return self._source.between(rows, columns).to(self._dtype)


class _Plan(NamedTuple):
    """A plan of potentials in units of epsilon, (n,) and (m,), and its masses."""

    entries: Entries
    f: Tensor
    g: Tensor
    a: Tensor
    b: Tensor
    epsilon: float


class _Flows(NamedTuple):
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

    def joined(self, labels: npt.NDArray[np.int64]) -> _Flows:
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
        return _Flows(logs, gaps, masses, _above_rounding(excess, masses.sum(1)))

    def moved(self, t: Array) -> _Flows:
        """The flows after offsets (K,) in units of epsilon."""
        by = t[:, None] - t
        return self._replace(logs=self.logs + by, gaps=self.gaps - by)


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of points whose potentials the masses leave open against each other.

    Attributes:
        rows: (n,) int64, the group of each row; -1 without mass.
        columns: (m,) likewise.
        gaps: (K, K) float64, most by which the offset of a group may exceed that of another, in
            units of the cost: shortest paths between them, inf where nothing limits it.
        exchanged: log of the largest share of all mass that two of them exchange; -inf if none can.
        advised: an epsilon, about, from which on the masses determine all potentials.
    """

    rows: Tensor
    columns: Tensor
    gaps: Array
    exchanged: float
    advised: float

    def spread(self, direction: Array) -> tuple[float, float]:
        """Least and most of <direction, t> over the offsets t (K,); the direction sums to 0."""
        low, high = (_most(sign * direction, self.gaps) for sign in (-1, 1))
        return -low, high


def settled(
    entries: Entries, term: TransportTerm, a: Tensor, b: Tensor
) -> tuple[TransportTerm, Groups | None]:
    """A cross term with its groups' offsets balanced, and the groups whose offsets stay open.

    The same term where the plan is connected, None where all offsets are determined.

    Args:
        entries: the cost of the term.
        term: potentials f (n,) and g (m,), and epsilon.
        a: (n,) masses.
        b: (m,) masses.
    """
    f, g = (potential.double() / term.epsilon for potential in (term.f, term.g))
    plan = _Plan(entries, f, g, a, b, term.epsilon)
    if math.prod(entries.shape) <= MOST_POLISHED:
        plan = _polished(plan)
    linked = connected(plan)
    if linked is None:
        return _moved(term, plan, plan.f, plan.g), None
    f, g = plan.f, plan.g
    rows, columns, _ = linked
    flows = contracted(plan, linked)
    strongest = _joined_to(flows, MOST_BALANCED)
    flows = flows.joined(strongest)
    t = balanced(flows)
    t -= t[int(flows.masses.sum(1).argmax())]
    flows = flows.moved(t)
    alike = undetermined(flows)

    def of_points(labels: npt.NDArray[np.int64], of: Tensor) -> Tensor:
        table = torch.from_numpy(labels[strongest]).to(of.device)
        return torch.where(of >= 0, table[of], -1)

    if t.any():
        offsets = torch.from_numpy(np.append(t, 0.0)).to(f.device)
        place = np.arange(len(t))
        f = f + offsets[of_points(place, rows)]
        g = g - offsets[of_points(place, columns)]
    term = _moved(term, plan, f, g)
    if alike.max() == 0:
        return term, None
    flows = flows.joined(alike)
    most = float(_mean_logs(flows).max()) + math.log(2)
    # A gap of 0, or below it by what epsilon still spreads, would be no edge.
    gaps = shortest_path(np.maximum(flows.gaps, np.finfo(np.float64).tiny), method="FW")
    groups = Groups(
        of_points(alike, rows),
        of_points(alike, columns),
        term.epsilon * gaps,
        most,
        term.epsilon * most / math.log(MASS_ROUNDING / OPEN),
    )
    return term, groups


class _Linked(NamedTuple):
    """Groups of rows (n,) and columns (m,), -1 without mass, and max_j (f + g - C)_ij (n,).

    The last in units of epsilon, of the columns that get most.
    """

    rows: Tensor
    columns: Tensor
    peaks: Tensor


def settled_points(problem: Problem, term: TransportTerm) -> tuple[TransportTerm, Groups | None]:
    """The cross term of two clouds, as `settled`, on the device."""
    cost = problem.inputs("xy").labelled
    f, g = (potential.to(cost.a.device) for potential in (term.f, term.g))
    entries = PointEntries(cost, problem.request.compute.dtype)
    return settled(entries, replace(term, f=f, g=g), cost.a, cost.b)


def settled_matrix(
    problem: MatrixProblem, term: TransportTerm
) -> tuple[TransportTerm, Groups | None]:
    """The term of a cost matrix, as `settled`."""
    entries = MatrixEntries(problem.source, problem.dtype)
    return settled(entries, term, problem.a, problem.b)


def _moved(term: TransportTerm, plan: _Plan, f: Tensor, g: Tensor) -> TransportTerm:
    """The term with other potentials in units of epsilon; those that stay, to the last bit."""
    stay_f, stay_g = (
        (old.double() / term.epsilon == new) for old, new in ((term.f, f), (term.g, g))
    )
    if bool((stay_f | (plan.a == 0)).all() & (stay_g | (plan.b == 0)).all()):
        return term
    stay_f, stay_g = stay_f & (plan.a > 0), stay_g & (plan.b > 0)
    f, g = _with_softmins(plan._replace(f=f, g=g))
    return replace(
        term,
        f=torch.where(stay_f, term.f, (term.epsilon * f).to(term.f)),
        g=torch.where(stay_g, term.g, (term.epsilon * g).to(term.g)),
    )


def _polished(plan: _Plan) -> _Plan:
    """The plan of the optimum, but for offsets that float64 cannot see in products with P.

    Newton's method on the semi-dual in f, with g the softmin of f, where its first step is not
    small. It finds what groups cannot: several thin ties, and points that are lighter than the
    marginal error.
    """
    device = plan.f.device
    rows, columns = ((mass > 0).nonzero().squeeze(1) for mass in (plan.a, plan.b))
    costs = plan.entries.costs(rows, columns).double().cpu().numpy() / plan.epsilon
    a, b = plan.a[rows].cpu().numpy(), plan.b[columns].cpu().numpy()
    logs = np.log(a)[:, None] + np.log(b) - costs
    f, g = plan.f[rows].cpu().numpy(), plan.g[columns].cpu().numpy()
    for step in range(NEWTON_STEPS):
        before, g = g, np.log(b) - logsumexp(logs + f[:, None], axis=0)
        shares = np.exp(logs + f[:, None] + g)
        sums = shares.sum(1)
        per_row = 1 / np.sqrt(sums)
        system = np.diag(sums) - (shares / b) @ shares.T
        values, vectors = np.linalg.eigh(per_row[:, None] * system * per_row)
        kept = values > LEAST_SEEN
        pulled = vectors.T @ (per_row * (a - sums))
        move = per_row * (vectors[:, kept] @ (pulled[kept] / values[kept]))
        largest = float(np.abs(move).max())
        if step == 0 and max(largest, np.abs(g - before).max()) <= SMALL_STEP:
            return plan
        f += move / max(1.0, largest)
        if largest <= SETTLED:
            whole_f, whole_g = plan.f.clone(), plan.g.clone()
            whole_f[rows] = torch.from_numpy(f).to(device)
            whole_g[columns] = torch.from_numpy(g).to(device)
            return plan._replace(f=whole_f, g=whole_g)
    return plan


def connected(plan: _Plan) -> _Linked | None:
    """The groups that no link connects; None where all are one."""
    for share in LINKS:
        found = _linked(plan, -math.log(share))
        if found is None or int(found.columns.max()) < MOST_CONTRACTED:
            return found
    assert found is not None
    # What no link is to hide holds these apart. The last ones count as one, and are still reported.
    rows, columns = (part.clamp_max(MOST_CONTRACTED - 1) for part in found[:2])
    return _Linked(rows, columns, found.peaks)


def _linked(plan: _Plan, threshold: float) -> _Linked | None:
    """The same by entries of at least exp(-threshold) of their row's largest."""
    (n, m), device = plan.entries.shape, plan.g.device
    present = plan.b > 0
    # Groups of columns so far; m stands for columns without mass.
    groups = torch.where(present, torch.arange(m, device=device), m)
    best = torch.zeros(n, dtype=torch.int64, device=device)
    peaks, with_mass = torch.zeros_like(plan.f), plan.a > 0
    term = torch.where(present, plan.g + plan.b.log(), -torch.inf)
    for rows in _even_parts(n, m, device):
        # A row's own potential moves all of its entries alike.
        logs = plan.entries.logs(rows, term, plan.epsilon)
        most, best[rows] = logs.max(1)
        peaks[rows] = most.double()
        linked = logs >= (most - threshold)[:, None]
        # Rows that are not all within the largest group so far may join others.
        beside = groups != groups[present].mode().values
        chosen = (linked & beside).any(1) & with_mass[rows]
        if bool(chosen.any()):
            row, column = linked[chosen].nonzero(as_tuple=True)
            shares = (logs[chosen] - most[chosen, None])[row, column].exp().double()
            # The rows read stand for all.
            weights = plan.a[rows][chosen][row] * shares / plan.a[rows].sum()
            ties = (groups[best[rows]][chosen][row], groups[column], weights)
            masses = torch.zeros(m + 1, dtype=torch.float64, device=device)
            masses.index_add_(0, groups, plan.b)
            joined = _well_tied(masses.cpu().numpy(), *(part.cpu().numpy() for part in ties))
            groups = torch.where(present, torch.from_numpy(joined).to(device)[groups], m)
        if bool((groups[present] == groups[present][0]).all()):
            return None
    of_rows = torch.where(with_mass, groups[best], m)
    # A column that is little to each of its rows belongs to the row from which it has most.
    lonely = (present & ~torch.isin(groups, of_rows)).nonzero().squeeze(1)
    if len(lonely):
        groups[lonely] = of_rows[_most_from(plan, lonely)]
    names, labels = torch.unique(torch.cat((of_rows, groups)), return_inverse=True)
    if not bool(with_mass.all() & present.all()):
        # The largest name, m.
        labels[labels == len(names) - 1] = -1
    return _Linked(
        labels[:n],
        labels[n:],
        peaks + plan.f - plan.b.log()[best] - plan.entries.offsets / plan.epsilon,
    )


def _well_tied(
    masses: Array, ends: npt.NDArray[np.int64], others: npt.NDArray[np.int64], weights: Array
) -> npt.NDArray[np.int64]:
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


def _even_parts(n: int, m: int, device: torch.device) -> Iterator[slice]:
    """Every row in some part, each of which is spread evenly; a small part of them comes first."""
    budget = ELEMENTS_CPU if device.type == "cpu" else ELEMENTS_GPU
    count = -(-n // max(1, budget // m))
    first = -(-n // FIRST_ROWS)
    if first > count:
        yield slice(0, n, first)
    yield from (slice(start, n, count) for start in range(count))


def _components(
    count: int, ends: npt.NDArray[np.int64], others: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Connected components (count,) of a graph of these edges."""
    graph = coo_array((np.ones(len(ends), dtype=np.int8), (ends, others)), shape=(count, count))
    labels: npt.NDArray[np.int64] = connected_components(graph, directed=False)[1]
    return labels.astype(np.int64)


def _most_from(plan: _Plan, columns: Tensor) -> Tensor:
    """The row (l,) from which each of some columns has most."""
    weights = plan.f + plan.a.log()
    highest = torch.full_like(columns, -torch.inf, dtype=torch.float64)
    found = torch.zeros_like(columns)
    for rows in _blocks(torch.arange(len(weights), device=columns.device), len(columns)):
        logs = weights[rows, None] - plan.entries.costs(rows, columns) / plan.epsilon
        top, place = logs.max(0)
        found = torch.where(top > highest, rows[place], found)
        highest = torch.maximum(top, highest)
    return found


def _blocks(rows: Tensor, width: int) -> Sequence[Tensor]:
    """Rows in parts of which the entries are there at once."""
    budget = ELEMENTS_CPU if rows.device.type == "cpu" else ELEMENTS_GPU
    return torch.split(rows, max(1, budget // (4 * max(1, width)))) if len(rows) else []


def contracted(plan: _Plan, linked: _Linked) -> _Flows:
    """What the groups exchange, in float64.

    Of the largest group only the pairs with others are read.
    """
    rows, columns, peaks = linked
    count = 1 + int(columns.max())
    sizes = torch.bincount(rows[rows >= 0], minlength=count)
    sizes *= torch.bincount(columns[columns >= 0], minlength=count)
    largest = int(sizes.argmax())
    logs, gaps = np.full((count, count), -np.inf), np.full((count, count), np.inf)
    of_largest = (rows == largest).nonzero().squeeze(1), (columns == largest).nonzero().squeeze(1)
    others = tuple(
        ((part >= 0) & (part != largest)).nonzero().squeeze(1) for part in (rows, columns)
    )
    every = (columns >= 0).nonzero().squeeze(1)
    for high, wide in ((others[0], every), (of_largest[0], others[1])):
        for part in _blocks(high, len(wide)):
            top, sums = _by_group(plan, part, wide, columns[wide], count)
            mine = rows[part].cpu().numpy()
            np.logaddexp.at(logs, mine, sums)
            # On links f_i + g_j is above C_ij by an entropy that vanishes with epsilon.
            np.minimum.at(gaps, mine, peaks[part].cpu().numpy()[:, None] - top)
    np.fill_diagonal(logs, -np.inf)
    masses = np.zeros((count, 2))
    for side, (part, mass) in enumerate(((rows, plan.a), (columns, plan.b))):
        held, where = mass.cpu().numpy(), part.cpu().numpy()
        for group in range(count):
            masses[group, side] = math.fsum(held[where == group].tolist())
    excess = _above_rounding(masses[:, 0] - masses[:, 1], masses.sum(1))
    return _Flows(logs, gaps, masses, excess)


def _by_group(
    plan: _Plan, rows: Tensor, columns: Tensor, groups: Tensor, count: int
) -> tuple[Array, Array]:
    """Of rows (k,), largest f + g - C and log of the sum of P over the columns of each group.

    Both (k, K), in units of epsilon.
    """
    costs = plan.entries.costs(rows, columns)
    # What is left of large potentials and costs, in their type.
    logs = (plan.f[rows, None] + plan.g[columns]).sub_(costs, alpha=1 / plan.epsilon).to(costs)
    top = logs.new_full((len(rows), count), -torch.inf)
    top.scatter_reduce_(1, groups.expand_as(logs), logs, "amax")
    base = torch.where(top.isfinite(), top, 0)
    shares = logs.sub_(base[:, groups]).exp_().mul_(plan.b[columns].to(logs))
    sums = torch.zeros_like(top).index_add_(1, groups, shares)
    sums = sums.log_().add_(base).double().add_(plan.a[rows].log()[:, None])
    return top.double().cpu().numpy(), sums.cpu().numpy()


def _above_rounding(excess: Array, masses: Array) -> Array:
    """Differences of sums of masses, 0 where they are no more than their rounding."""
    return np.where(np.abs(excess) <= MASS_ROUNDING * masses, 0.0, excess)


def _mean_logs(flows: _Flows) -> Array:
    """Log sqrt(F_gh F_hg) (K, K), what both exchange at balance; -inf where one way is closed."""
    return (flows.logs + flows.logs.T) / 2


def _tree(strength: Array) -> tuple[Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The edges of the maximum spanning forest of strengths (K, K), the strongest first."""
    finite = np.isfinite(strength)
    most = strength[finite].max() if finite.any() else 0.0
    # Weights of a minimum spanning tree; those of 0 would be no edges.
    weights = np.where(finite, 1 + most - strength, 0.0)
    edges = minimum_spanning_tree(weights).tocoo()
    order = np.argsort(edges.data, kind="stable")
    return edges.data[order], edges.row[order].astype(np.int64), edges.col[order].astype(np.int64)


def _joined_to(flows: _Flows, most: int) -> npt.NDArray[np.int64]:
    """Labels (K,) of at most so many unions of groups, those joined that exchange most."""
    count = len(flows.logs)
    _, ends, others = _tree(_mean_logs(flows))
    kept = max(0, count - most)
    return _components(count, ends[:kept], others[:kept])


def balanced(flows: _Flows) -> Array:
    """Offsets t (K,) in units of epsilon at which every group gives what it gets, but its excess.

    Groups to which no allowed pair leads both ways stay where they are.
    """
    count = len(flows.logs)
    _, ends, others = _tree(_mean_logs(flows))
    sides, cuts = np.eye(count, dtype=bool), []
    for one, other in zip(ends, others, strict=True):
        smaller = min(sides[one], sides[other], key=np.sum)
        cuts.append(smaller.copy())
        sides[sides[one] | sides[other]] |= sides[one] | sides[other]
    logs, t = flows.logs.copy(), np.zeros(count)
    excesses = _above_rounding(
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


def undetermined(flows: _Flows) -> npt.NDArray[np.int64]:
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
        tied &= np.isfinite(_mean_logs(found)) | needed
        joined = _components(len(found.logs), *np.nonzero(tied))
        if len(np.unique(joined)) == len(found.logs):
            return labels
        labels = joined[labels]


def _with_softmins(plan: _Plan) -> tuple[Tensor, Tensor]:
    """Potentials in units of epsilon, those of points without mass as softmins of the others."""
    potentials = [plan.f.clone(), plan.g.clone()]
    sides = (plan.a, plan.b)
    for side in (0, 1):
        absent = (sides[side] == 0).nonzero().squeeze(1)
        other = (sides[1 - side] > 0).nonzero().squeeze(1)
        of_other = (plan.g, plan.f)[side][other] + sides[1 - side][other].log()
        for part in _blocks(absent, len(other)):
            chosen = (part, other) if side == 0 else (other, part)
            costs = plan.entries.costs(*chosen) / plan.epsilon
            logs = of_other - (costs if side == 0 else costs.T)
            potentials[side][part] = -logs.logsumexp(1)
    return potentials[0], potentials[1]


def _most(direction: Array, gaps: Array) -> float:
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


def report_groups(
    groups: Groups | None,
    what: str,
    rows: LabeledSamples | None = None,
    *,
    required: bool,
) -> None:
    """Warn, or raise if convergence is required, that offsets between groups are open.

    Args:
        groups: those of `settled`; None is nothing to report.
        what: the numbers that depend on the offsets, in the plural.
        rows: n samples with their classes, if there are any.
        required: whether to raise.

    Raises:
        ConvergenceError: as said.
    """
    if groups is None:
        return
    if math.isfinite(groups.exchanged):
        power, factor = divmod(groups.exchanged / math.log(10), 1)
        exchange = f"at most {10**factor:.1f}e{power:.0f} of the mass, less than its rounding"
        way_out = f"raise epsilon to about {groups.advised:.2g}"
    else:
        exchange, way_out = "no mass, as no allowed pair leads there and back", "allow more pairs"
    message = (
        f"{what} are not determined: {_named(groups, rows)} exchange {exchange}, so their "
        f"potentials are fixed only together{_range_of(groups)}. Compare {what} within a group, or "
        f"{way_out}"
    )
    if required:
        raise ConvergenceError(message)
    warn(message, NotConvergedWarning)


def _named(groups: Groups, samples: LabeledSamples | None) -> str:
    """The groups by classes and rows, the largest last."""
    rows = groups.rows.cpu()
    sizes = torch.bincount(rows[rows >= 0], minlength=len(groups.gaps))
    order = sizes.argsort(descending=True, stable=True).tolist()
    shown, rest = order[1 : 1 + NAMED_GROUPS], order[1 + NAMED_GROUPS :]
    parts = []
    for group in shown:
        chosen = (rows == group).nonzero().squeeze(1)
        counted = f"{len(chosen)} row{'' if len(chosen) == 1 else 's'}"
        if samples is None or samples.labels is None:
            first = ", ".join(map(str, chosen[:NAMED_ROWS].tolist()))
            parts.append(f"{counted} ({first}{', ...' if len(chosen) > NAMED_ROWS else ''})")
            continue
        here = torch.unique(samples.labels.cpu()[chosen]).tolist()
        classes = [samples.class_names[c] for c in here]
        listed = ", ".join(f"{name[:NAME_LENGTH]!r}" for name in classes[:NAMED_CLASSES])
        more = ", ..." if len(classes) > NAMED_CLASSES else ""
        parts.append(f"{counted} of class {listed}{more}")
    if rest:
        parts.append(f"{len(rest)} further groups")
    others = int(sizes[order[0]])
    return f"{', '.join(parts)} and the other {others} row{'' if others == 1 else 's'}"


def _range_of(groups: Groups) -> str:
    """By how much the group that is named first may move against the largest."""
    rows = groups.rows[groups.rows >= 0]
    largest, first = torch.bincount(rows, minlength=len(groups.gaps)).argsort(
        descending=True, stable=True
    )[:2]
    up, down = groups.gaps[first, largest], groups.gaps[largest, first]
    return (
        f"; as epsilon falls, the first may move by anything in [{-down:.4g}, {up:.4g}] against "
        "the last"
    )
