"""Groups of points that exchange almost no mass, and the undetermined offsets of their potentials.

The plan P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon) does not change if a constant is added to
f and subtracted from g. If an offset t_g is added and subtracted in a group g of points alone, only
the flows between groups change,

    F_gh(t) = F_gh exp((t_g - t_h) / epsilon),    F_gh = sum of P over rows of g and columns of h,

and only they tie the offsets t to the masses. Where they are far below the marginal error, a
converged solve leaves t wherever its iterations ended. In the linear system of the plan
(`plan_system`) they are its small singular values. Plans, values and bounds do not depend on t, nor
do Hessians, derivatives of plans and maps by points and costs, or the map of points with mass: for
these t is a null vector that their right-hand sides do not have. Potentials, contributions and
gradients by masses do, and the images of points without mass that lie between groups. When these
are asked for, and not in a solve for a value alone,

1. `_polished` takes a small plan to its optimum by Newton steps, if it is not near it.
2. `connected` finds the groups: the points that links of enough of their mass connect. A link is an
   entry of the plan of at least a share of its row's largest. An even sample of the rows is read
   first; it shows most plans to be one group, and nothing else is done.
3. `contracted` sums the flows between groups, and `derivatives.group_flows` balances them and says
   which offsets remain undetermined.

In plans that are not small, slow modes within a group stay as the solve left them. A self term has
one potential, and so offsets only between groups that send all of their mass to each other.

`settle` does this for results and for functions of potentials, `settle_images` for maps; gradients
by masses (`gradient`, `solver.matrix.loss`) are `settled` during the solve, and reported after it.
What depends on offsets must call one of them: nothing else says that they are undetermined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from otdd_flash.cost.facts import SIDES
from otdd_flash.cost.points import LabelledCost
from otdd_flash.derivatives.group_flows import (
    MASS_ROUNDING,
    OPEN,
    SETTLED,
    TIED,
    Array,
    Flows,
    Labels,
    above_rounding,
    balanced,
    joined_to,
    mean_logs,
    most_along,
    undetermined,
    well_tied,
)
from otdd_flash.errors import ConvergenceError, NotConvergedWarning, warn
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.given_costs import CostSource, HeldCosts, exact_blocks
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.matrix_comparison import MatrixComparison
from otdd_flash.solver.term import TransportTerm

# Two clouds of points, or a given matrix.
Compared = Comparison | MatrixComparison

# A link is an entry of at least this share of its row's largest, or of the next share if that
# leaves more than MOST_CONTRACTED groups; the last is still above the rounding of the masses. Of
# more than MOST_BALANCED groups, those with the largest flows are joined.
LINKS, MOST_CONTRACTED, MOST_BALANCED = (0.05, 1e-5, 1e-11), 1024, 128

# Rows of the first sample, and entries in memory at once.
FIRST_ROWS, ELEMENTS_CPU, ELEMENTS_GPU = 64, 1 << 21, 1 << 25

# Rounds in which a group may take in all others. Two are enough where one link in fifty is strong.
SPREAD_ROUNDS = 6

# The most entries of a plan for Newton's method, the most steps, the first step in units of epsilon
# from which it pays, the least eigenvalue that float64 distinguishes from 0, and the least pivot of
# a factorization whose eigenvalues are all far above that.
MOST_POLISHED, NEWTON_STEPS, SMALL_STEP, LEAST_SEEN, CLEAR_PIVOT = 1 << 18, 60, 0.01, 1e-12, 1e-3

# Groups and rows that a message names.
NAMED_GROUPS, NAMED_CLASSES, NAMED_ROWS, NAME_LENGTH = 4, 6, 5, 40


class Entries(Protocol):
    """A cost (n, m), read in blocks of rows and columns."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        ...

    @property
    def offsets(self) -> Tensor:
        """(n,) float64, C_ij = offsets_i - S_ij with scores S."""
        ...

    def logs(self, rows: slice, term: Tensor, epsilon: float) -> Tensor:
        """Return S / epsilon + term (k, m) of some rows, for a term (m,), float64."""
        ...

    def costs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return C (k, l) of some rows (k,) and columns (l,), int64."""
        ...


class PointEntries:
    """The cost of labelled points, on the device or streamed to it, in blocks.

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
        """Return S / epsilon + term, S = 2 lambda_x <x, y> - lambda_x ||y||^2 - lambda_y W."""
        cost = self._cost
        x, y = self._centred(cost.points[0][rows]), self._columns
        if y is None:
            y = self._centred(cost.points[1][:])
        bias = torch.add(term, self._bias, alpha=1 / epsilon).to(self._dtype)
        found = bias.index_select(0, cost.labels[0][rows])
        return found.addmm_(x, y.T, alpha=2 * cost.lambda_x / epsilon)

    def costs(self, rows: Tensor, columns: Tensor) -> Tensor:
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
    """A given cost matrix in blocks, in the type of potentials."""

    def __init__(self, source: CostSource, dtype: torch.dtype) -> None:
        self._source, self._dtype, self.shape = source, dtype, source.shape
        self._every = torch.arange(source.shape[1], device=source.device)
        self.offsets = torch.zeros(source.shape[0], dtype=torch.float64, device=source.device)

    def logs(self, rows: slice, term: Tensor, epsilon: float) -> Tensor:
        """Return term - C[rows] / epsilon (k, m): the scores are S = -C."""
        chosen = torch.arange(self.shape[0], device=self._source.device)[rows]
        costs = self.costs(chosen, self._every)
        return torch.add(term.to(costs), costs, alpha=-1 / epsilon)

    def costs(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self._source.between(rows, columns).to(self._dtype)


def _entries(comparison: Compared, name: str) -> tuple[Entries, Tensor, Tensor]:
    """Return the costs of the term of this name, and the masses a (n,) and b (m,)."""
    if isinstance(comparison, Comparison):
        cost = comparison.cost(name)
        return PointEntries(cost, comparison.compute.dtype), cost.a, cost.b
    masses = comparison.a, comparison.b
    if name == "xy":
        return MatrixEntries(comparison.source, comparison.dtype), *masses
    assert comparison.self_costs is not None
    side = SIDES[name][0]
    source = HeldCosts(comparison.self_costs[side].matrix)
    return MatrixEntries(source, comparison.dtype), masses[side], masses[side]


class _Plan(NamedTuple):
    """A plan: its cost, potentials f (n,) and g (m,) in units of epsilon, and masses."""

    entries: Entries
    f: Tensor
    g: Tensor
    a: Tensor
    b: Tensor
    epsilon: float


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of points whose offsets the masses do not determine.

    Attributes:
        rows: (n,) int64, the group of each row; -1 without mass.
        columns: (m,) likewise.
        gaps: (K, K) float64, upper bounds of t_g - t_h for the offsets t, in units of the cost:
            lengths of shortest paths, inf where nothing bounds it.
        exchanged: log of the largest flow between two of them; -inf if none is possible.
        advised: roughly the epsilon from which the masses determine all potentials.
        own: whether they are of a self term, where rows of one group are columns of another.
    """

    rows: Tensor
    columns: Tensor
    gaps: Array
    exchanged: float
    advised: float
    own: bool = False

    def spread(self, direction: Array) -> tuple[float, float]:
        """Return the range of <direction, t> over all offsets t (K,); the direction sums to 0."""
        low, high = (most_along(sign * direction, self.gaps) for sign in (-1, 1))
        return -low, high


def settled(
    comparison: Compared, term: TransportTerm, name: str = "xy"
) -> tuple[TransportTerm, Groups | None]:
    """Balance the offsets between groups of a term; return groups with undetermined offsets.

    Return the term itself if the plan is connected, and None if all offsets are determined. A term
    that has not converged is returned as it is, and is reported elsewhere: its plan is far from the
    optimum and shows no groups, and its marginal error is that of these potentials.

    Args:
        comparison: the costs and masses.
        term: potentials f (n,) and g (m,), and epsilon.
        name: of the term. A self term has one potential, so that an offset of rows is minus that of
            the same points as columns: only groups that send their mass to each other have one.
    """
    if not term.converged or (name != "xy" and not _may_leave_itself(comparison, name)):
        return term, None
    entries, a, b = _entries(comparison, name)
    term = replace(term, f=term.f.to(a.device), g=term.g.to(a.device))
    found, groups = _settled(entries, term, a, b)
    if name == "xy":
        return found, groups
    mean = (found.f + found.g) / 2
    if groups is not None and not torch.equal(groups.rows, groups.columns):
        return replace(found, f=mean, g=mean), replace(groups, own=True)
    return replace(found, f=mean, g=mean), None


def _may_leave_itself(comparison: Compared, name: str) -> bool:
    """Return whether in a self term two points may cost more by themselves than as a pair.

    C_ii + C_jj > 2 C_ij never holds for points alone, or with distances between classes that are 0
    from a class to itself: all points then keep mass, and their potentials have no offsets.
    """
    if isinstance(comparison, Comparison):
        blocks = iter([(slice(None), comparison.block(name))])
        own = comparison.block(name).diagonal()
    else:
        assert comparison.self_costs is not None
        matrix = comparison.self_costs[SIDES[name][0]].matrix
        blocks, own = exact_blocks(HeldCosts(matrix)), matrix.diagonal().double()
    return any(bool((own[rows, None] + own > 2 * costs.double()).any()) for rows, costs in blocks)


def _settled(
    entries: Entries, term: TransportTerm, a: Tensor, b: Tensor
) -> tuple[TransportTerm, Groups | None]:
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
    strongest = joined_to(flows, MOST_BALANCED)
    flows = flows.joined(strongest)
    t = balanced(flows)
    t -= t[int(flows.masses.sum(1).argmax())]
    flows = flows.moved(t)
    alike = undetermined(flows)

    def of_points(labels: Labels, of: Tensor) -> Tensor:
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
    most = float(mean_logs(flows).max()) + math.log(2)
    # scipy takes a gap of 0 for no edge; the entropic spread may even make it negative.
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
    """Groups of rows (n,) and columns (m,), -1 without mass, and peaks (n,).

    A peak is (f_i + g_j - C_ij) / epsilon at the column j to which row i sends most.
    """

    rows: Tensor
    columns: Tensor
    peaks: Tensor


def _moved(term: TransportTerm, plan: _Plan, f: Tensor, g: Tensor) -> TransportTerm:
    """Replace the term's potentials by f, g in units of epsilon; equal ones keep their bits."""
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
    """Take a plan to its optimum, up to offsets that float64 cannot resolve.

    This is Newton's method on the semi-dual in f, with g the softmin of f; a plan whose first step
    is small is returned as it is. It resolves what groups cannot: several weak links between the
    same groups, and points lighter than the marginal error.
    """
    rows, columns = ((mass > 0).nonzero().squeeze(1) for mass in (plan.a, plan.b))
    costs = plan.entries.costs(rows, columns).double().cpu() / plan.epsilon
    a, b = plan.a[rows].cpu(), plan.b[columns].cpu()
    logs = costs.neg_().add_(a.log()[:, None]).add_(b.log())
    f, g = plan.f[rows].cpu(), plan.g[columns].cpu()
    for step in range(NEWTON_STEPS):
        shares = logs + f[:, None]
        highest = shares.amax(0)
        shares.sub_(highest).exp_()
        totals = shares.sum(0)
        before, g = g, b.log() - highest - totals.log()
        shares.mul_(b / totals)
        sums = shares.sum(1)
        if not bool(((sums > 0) & sums.isfinite()).all()):
            # No plan has these masses, or the solve stopped far from the optimum.
            return plan
        per_row = sums.rsqrt()
        shares.mul_(per_row[:, None])
        system = torch.eye(len(sums), dtype=sums.dtype, device=sums.device).addmm_(
            shares / b, shares.T, alpha=-1
        )
        move = per_row * _without_constants(system, sums, per_row * (a - sums))
        largest = float(move.abs().max())
        if step == 0 and max(largest, float((g - before).abs().max())) <= SMALL_STEP:
            return plan
        f += move / max(1.0, largest)
        if largest <= SETTLED:
            whole_f, whole_g = plan.f.clone(), plan.g.clone()
            whole_f[rows], whole_g[columns] = f.to(whole_f), g.to(whole_g)
            return plan._replace(f=whole_f, g=whole_g)
    return plan


def _without_constants(system: Tensor, sums: Tensor, right: Tensor) -> Tensor:
    """Solve a system (n, n) scaled by row sums (n,), with constants and what is unseen left out.

    Where all of its other eigenvalues are clear of 0, a Cholesky factorization does, which takes a
    tenth of the time of a decomposition.
    """
    constant = (sums / sums.sum()).sqrt_()
    factor, failed = torch.linalg.cholesky_ex(torch.addr(system, constant, constant))
    if int(failed) == 0 and float(factor.diagonal().amin()) > CLEAR_PIVOT:
        return torch.cholesky_solve(right[:, None], factor)[:, 0]
    values, vectors = torch.linalg.eigh(system)
    kept = values > LEAST_SEEN
    found: Tensor = vectors[:, kept] @ ((vectors.T @ right)[kept] / values[kept])
    return found


def connected(plan: _Plan) -> _Linked | None:
    """Find the groups that links of enough mass connect; None if all points are one group."""
    for share in LINKS:
        found = _linked(plan, -math.log(share))
        if found is None or int(found.columns.max()) < MOST_CONTRACTED:
            return found
    assert found is not None
    # Even the weakest links leave too many groups. The last ones count as one, and are reported.
    rows, columns = (part.clamp_max(MOST_CONTRACTED - 1) for part in found[:2])
    return _Linked(rows, columns, found.peaks)


def _linked(plan: _Plan, threshold: float) -> _Linked | None:
    """Connect points by entries of at least exp(-threshold) times their row's largest."""
    (n, m), device = plan.entries.shape, plan.g.device
    present = plan.b > 0
    # Groups of columns so far; m is that of columns without mass.
    groups = torch.where(present, torch.arange(m, device=device), m)
    best = torch.zeros(n, dtype=torch.int64, device=device)
    peaks, with_mass = torch.zeros_like(plan.f), plan.a > 0
    term = torch.where(present, plan.g + plan.b.log(), -torch.inf)
    for rows in _even_parts(n, m, device):
        # The row's potential scales all of its entries alike, and is left out.
        logs = plan.entries.logs(rows, term, plan.epsilon)
        most, best[rows] = logs.max(1)
        peaks[rows] = most.double()
        linked = logs >= (most - threshold)[:, None]
        if spreads(
            torch.where(linked, logs - most[:, None], -torch.inf).exp_(),
            best[rows],
            plan.a[rows] / plan.a[rows].sum(),
            plan.b,
        ):
            return None
        # Rows that are not all within the largest group so far may join others.
        beside = groups != groups[present].mode().values
        chosen = (linked & beside).any(1) & with_mass[rows]
        if bool(chosen.any()):
            row, column = linked[chosen].nonzero(as_tuple=True)
            shares = (logs[chosen] - most[chosen, None])[row, column].exp().double()
            # The rows read so far are a sample of all.
            weights = plan.a[rows][chosen][row] * shares / plan.a[rows].sum()
            ties = (groups[best[rows]][chosen][row], groups[column], weights)
            masses = torch.zeros(m + 1, dtype=torch.float64, device=device)
            masses.index_add_(0, groups, plan.b)
            joined = well_tied(masses.cpu().numpy(), *(part.cpu().numpy() for part in ties))
            groups = torch.where(present, torch.from_numpy(joined).to(device)[groups], m)
        if bool((groups[present] == groups[present][0]).all()):
            return None
    of_rows = torch.where(with_mass, groups[best], m)
    # A column that no row links to joins the group of the row from which it gets most.
    lonely = (present & ~torch.isin(groups, of_rows)).nonzero().squeeze(1)
    if len(lonely):
        groups[lonely] = of_rows[_most_from(plan, lonely)]
    names, labels = torch.unique(torch.cat((of_rows, groups)), return_inverse=True)
    if not bool(with_mass.all() & present.all()):
        # The largest label, m, is that of no mass.
        labels[labels == len(names) - 1] = -1
    return _Linked(
        labels[:n],
        labels[n:],
        peaks + plan.f - plan.b.log()[best] - plan.entries.offsets / plan.epsilon,
    )


def spreads(shares: Tensor, best: Tensor, a: Tensor, b: Tensor) -> bool:
    """Return whether a group that starts at one column takes in all columns within a few rounds.

    A column joins as in `group_flows.well_tied`: links that carry `TIED` of the lighter mass tie it
    to the group. False says nothing. All rounds run on the device, which is asked once.

    Args:
        shares: (k, m) links of some rows, over their row's largest; 0 for none.
        best: (k,) int64, the column of that largest.
        a: (k,) masses of the rows, which sum to 1.
        b: (m,) masses of the columns; those of mass 0 belong to no group.
    """
    weights, masses = a.to(shares), b.to(shares)
    group = torch.zeros_like(masses)
    group[torch.zeros_like(masses).index_add_(0, best, weights).argmax()] = 1
    for _ in range(SPREAD_ROUNDS):
        inside = group[best]
        ties = (weights * inside) @ shares
        ties.index_add_(0, best, weights * (1 - inside) * (shares @ group))
        ties -= TIED * torch.minimum(masses, group @ masses)
        group = torch.maximum(group, (ties >= 0).to(group))
    return bool(((group > 0) | (b == 0)).all())


def _even_parts(n: int, m: int, device: torch.device) -> Iterator[slice]:
    """Yield parts of the rows, each spread evenly over all; a small sample comes first."""
    budget = ELEMENTS_CPU if device.type == "cpu" else ELEMENTS_GPU
    count = -(-n // max(1, budget // m))
    first = -(-n // FIRST_ROWS)
    if first > count:
        yield slice(0, n, first)
    yield from (slice(start, n, count) for start in range(count))


def _most_from(plan: _Plan, columns: Tensor) -> Tensor:
    """Return for some columns (l,) the row from which each gets most of its mass."""
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
    """Cut rows into parts whose entries fit in memory at once."""
    budget = ELEMENTS_CPU if rows.device.type == "cpu" else ELEMENTS_GPU
    return torch.split(rows, max(1, budget // (4 * max(1, width)))) if len(rows) else []


def contracted(plan: _Plan, linked: _Linked) -> Flows:
    """Compute the flows between groups, in float64.

    Pairs within the largest group are not read.
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
    # Ordered by group, so that each group is a stretch of rows for `reduceat`.
    high_others = others[0][rows[others[0]].argsort(stable=True)]
    for high, wide in ((high_others, every), (of_largest[0], others[1])):
        for part in _blocks(high, len(wide)):
            top, sums = _by_group(plan, part, wide, columns[wide], count)
            mine, starts = np.unique(rows[part].cpu().numpy(), return_index=True)
            logs[mine] = np.logaddexp(logs[mine], np.logaddexp.reduceat(sums, starts))
            # At a link f_i + g_j exceeds C_ij by an entropic term that vanishes with epsilon.
            above = peaks[part].cpu().numpy()[:, None] - top
            gaps[mine] = np.minimum(gaps[mine], np.minimum.reduceat(above, starts))
    np.fill_diagonal(logs, -np.inf)
    masses = np.zeros((count, 2))
    for side, (part, mass) in enumerate(((rows, plan.a), (columns, plan.b))):
        held, where = mass.cpu().numpy(), part.cpu().numpy()
        for group in range(count):
            masses[group, side] = math.fsum(held[where == group].tolist())
    excess = above_rounding(masses[:, 0] - masses[:, 1], masses.sum(1))
    return Flows(logs, gaps, masses, excess)


def _by_group(
    plan: _Plan, rows: Tensor, columns: Tensor, groups: Tensor, count: int
) -> tuple[Array, Array]:
    """Return the largest f + g - C and log sum P of rows (k,) over the columns of each group.

    Both (k, K), in units of epsilon.
    """
    costs = plan.entries.costs(rows, columns)
    # Potentials and costs cancel in float64 before the result is rounded to their type.
    logs = (plan.f[rows, None] + plan.g[columns]).sub_(costs, alpha=1 / plan.epsilon).to(costs)
    top = logs.new_full((len(rows), count), -torch.inf)
    top.scatter_reduce_(1, groups.expand_as(logs), logs, "amax")
    base = torch.where(top.isfinite(), top, 0)
    shares = logs.sub_(base[:, groups]).exp_().mul_(plan.b[columns].to(logs))
    sums = torch.zeros_like(top).index_add_(1, groups, shares)
    sums = sums.log_().add_(base).double().add_(plan.a[rows].log()[:, None])
    return top.double().cpu().numpy(), sums.cpu().numpy()


def _with_softmins(plan: _Plan) -> tuple[Tensor, Tensor]:
    """Replace potentials of points without mass by softmins of the others, in units of epsilon."""
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


def settle(
    comparison: Compared, term: TransportTerm, what: str, *, required: bool
) -> TransportTerm:
    """Balance the offsets between groups of a cross term, and report those that stay undetermined.

    Args:
        comparison: the costs and masses.
        term: potentials f (n,) and g (m,), and epsilon.
        what: the name of the numbers that depend on the offsets, in the plural.
        required: whether to raise.

    Raises:
        ConvergenceError: `required`, and offsets are undetermined.
    """
    term, groups = settled(comparison, term)
    rows = comparison.given[0] if isinstance(comparison, Comparison) else None
    report_groups(groups, what, rows, required=required)
    return term


def settle_images(comparison: Comparison, term: TransportTerm, *, required: bool) -> TransportTerm:
    """Balance the offsets of a cross term for the conditional plans of all rows.

    Those of rows with mass do not depend on offsets. Warn, or raise if `required`, where one of a
    row without mass does.

    Args:
        comparison: two clouds.
        term: potentials f (n,) and g (m,), and epsilon.
        required: whether to raise.

    Raises:
        ConvergenceError: `required`, and an image is undetermined.
    """
    absent = (comparison.sides("xy")[0].masses == 0).nonzero().squeeze(1)
    if not len(absent):
        return term
    term, groups = settled(comparison, term)
    if groups is None:
        return term
    entries, a, b = _entries(comparison, "xy")
    f, g = (potential.double() / term.epsilon for potential in (term.f, term.g))
    plan, gaps = _Plan(entries, f, g, a, b, term.epsilon), groups.gaps / term.epsilon
    every = (groups.columns >= 0).nonzero().squeeze(1)
    for part in _blocks(absent, len(every)):
        top, _ = _by_group(plan, part, every, groups.columns[every], len(gaps))
        nearest = top.argmax(1)
        # Offsets raise the others against the nearest group by their gaps, at the most.
        others = top - top.max(1, keepdims=True) + gaps[nearest]
        np.put_along_axis(others, nearest[:, None], -np.inf, 1)
        if others.max() > math.log(MASS_ROUNDING):
            what, rows = "images of points without mass", comparison.given[0]
            report_groups(groups, what, rows, required=required)
            break
    return term


def report_groups(
    groups: Groups | None,
    what: str,
    rows: LabeledSamples | None = None,
    *,
    required: bool,
) -> None:
    """Warn, or raise if convergence is required, that offsets between groups are undetermined.

    Args:
        groups: from `settled`; None: nothing to report.
        what: the name of the numbers that depend on the offsets, in the plural.
        rows: n samples with their classes, if there are any.
        required: whether to raise.

    Raises:
        ConvergenceError: `required`, and offsets are undetermined.
    """
    if groups is None:
        return
    if math.isfinite(groups.exchanged):
        power, factor = divmod(groups.exchanged / math.log(10), 1)
        exchange = f"at most {10**factor:.1f}e{power:.0f} of the mass, less than its rounding"
        way_out = f"raise epsilon to about {groups.advised:.2g}"
    else:
        exchange, way_out = "no mass, as no allowed pair leads there and back", "allow more pairs"
    verb = "keep within each" if groups.own else "exchange"
    message = (
        f"{what} are not determined: {_named(groups, rows)} {verb} {exchange}, so their "
        f"potentials are fixed only together{_range_of(groups)}. Compare {what} within a group, or "
        f"{way_out}"
    )
    if required:
        raise ConvergenceError(message)
    warn(message, NotConvergedWarning)


def _named(groups: Groups, samples: LabeledSamples | None) -> str:
    """Name the groups by classes and rows, the largest last."""
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
    """Return the range of the offset between the group named first and the largest, as text."""
    rows = groups.rows[groups.rows >= 0]
    largest, first = torch.bincount(rows, minlength=len(groups.gaps)).argsort(
        descending=True, stable=True
    )[:2]
    up, down = groups.gaps[first, largest], groups.gaps[largest, first]
    return (
        f"; as epsilon falls, the first may move by anything in [{-down:.4g}, {up:.4g}] against "
        "the last"
    )
