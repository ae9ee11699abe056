"""Which points of a plan links of enough mass connect, and how much mass groups of them exchange.

`groups` calls this module for potentials whose offsets between groups may be undetermined:

- `polished` takes a small plan to its optimum by Newton steps, if it is not near it.
- `connected` finds the groups: the points that links of enough of their mass connect. A link is an
  entry of the plan of at least a share of its row's largest. An even sample of the rows is read
  first; it shows most plans to be one group, and nothing else is done.
- `contracted` sums the flows between groups, for `group_flows`.

Costs must be read in blocks of rows and columns (`Entries`), so that no plan is stored but a small
one, in `polished`. If a change joins groups that it should not join, their offsets stay
undetermined and nothing reports it (`tests/derivatives/test_groups.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from otdd_flash.cost.points import LabelledCost
from otdd_flash.derivatives.group_flows import (
    MASS_ROUNDING,
    SETTLED,
    TIED,
    Array,
    Flows,
    above_rounding,
    well_tied,
)
from otdd_flash.operators.given_costs import CostSource

# A link is an entry of at least this share of its row's largest, or of the next share if that
# leaves more than MOST_CONTRACTED groups; the last is still above the rounding of the masses.
LINKS, MOST_CONTRACTED = (0.05, 1e-5, 1e-11), 1024

# Rows of the first sample, entries in memory at once, and those that a GPU reads without a sample:
# of 1,000 x 1,000 points, half as many operations.
FIRST_ROWS, ELEMENTS_CPU, ELEMENTS_GPU, FEW_GPU = 64, 1 << 21, 1 << 25, 1 << 20

# Links that are held at once, 24 bytes each.
LINKS_CPU, LINKS_GPU = 1 << 21, 1 << 23

# Rounds in which a group may take in all others. Two are enough where one link in fifty is strong,
# and eight where a column has few links among a hundred thousand.
SPREAD_ROUNDS = 8

# The share that joins nodes for good before all rows were read. With TIED a row between two groups
# would join them, a column at a time.
MOSTLY_TIED = 0.5

# The most entries of a plan for Newton's method, the most steps, the first step in units of epsilon
# from which it pays, the least eigenvalue that float64 distinguishes from 0, and the least pivot of
# a factorization whose eigenvalues are all far above that.
MOST_POLISHED, NEWTON_STEPS, SMALL_STEP, LEAST_SEEN, CLEAR_PIVOT = 1 << 18, 60, 0.01, 1e-12, 1e-3


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


class ScaledPlan(NamedTuple):
    """A plan: its cost, potentials f (n,) and g (m,) in units of epsilon, and masses.

    The relative rounding of a sum of masses is that of float64, unless these were rounded to less.
    """

    entries: Entries
    f: Tensor
    g: Tensor
    a: Tensor
    b: Tensor
    epsilon: float
    rounding: float = MASS_ROUNDING


class Linked(NamedTuple):
    """Groups of rows (n,) and columns (m,), -1 without mass, and peaks (n,).

    A peak is (f_i + g_j - C_ij) / epsilon at the column j to which row i sends most.
    """

    rows: Tensor
    columns: Tensor
    peaks: Tensor


def polished(plan: ScaledPlan) -> ScaledPlan:
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


def connected(plan: ScaledPlan) -> Linked | None:
    """Find the groups that links of enough mass connect; None if all points are one group."""
    m = plan.entries.shape[1]
    # Groups of columns so far; m is that of columns without mass.
    groups = torch.where(plan.b > 0, torch.arange(m, device=plan.b.device), m)
    for share in LINKS:
        strong = _linked(plan, -math.log(share), groups)
        if strong is None:
            return None
        groups = strong[0]
        found = _of_all_points(plan, *strong)
        if int(found.columns.max()) < MOST_CONTRACTED:
            return found
    # Even the weakest links leave too many groups. The last ones count as one, and are reported.
    rows, columns = (part.clamp_max(MOST_CONTRACTED - 1) for part in found[:2])
    return Linked(rows, columns, found.peaks)


def _linked(
    plan: ScaledPlan, threshold: float, groups: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Connect groups by entries of at least exp(-threshold) times their row's largest.

    Whether links make one group is asked of the device after 1, 2, 4, ... parts of the rows, which
    are a sample of all. Groups are looked for on the host, once all rows were read or when there
    are too many links to hold.

    Args:
        plan: the plan whose points are connected.
        threshold: of links, in units of epsilon.
        groups: (m,) of columns, as stronger links connect them; m without mass.

    Returns:
        groups (m,); the column to which each row sends most (n,); and the logarithm of that entry
        without the row's potential (n,). None if all points are one group.
    """
    (n, m), device = plan.entries.shape, plan.g.device
    present, with_mass = plan.b > 0, plan.a > 0
    best, peaks = torch.zeros(n, dtype=torch.int64, device=device), torch.zeros_like(plan.f)
    term = torch.where(present, plan.g + plan.b.log(), -torch.inf)
    read = torch.zeros_like(with_mass)
    parts, gathered, merged = _even_parts(n, m, device), _Links(device), False
    largest = groups[present].mode().values
    for number, (rows, of_sample) in enumerate(parts, 1):
        # The row's potential scales all of its entries alike, and is left out.
        logs = plan.entries.logs(rows, term, plan.epsilon)
        most, best[rows] = logs.max(1)
        read[rows] = True
        peaks[rows] = most.double()
        links = _links_of(logs, most, best[rows], plan.a[rows], threshold, groups, largest)
        gathered.add(*links, plan.a[rows].sum())
        last = number == len(parts)
        if not (last or gathered.too_many or number & (number - 1) == 0):
            continue
        ends, others, weights = gathered.between(groups)
        masses = torch.zeros(m + 1, dtype=torch.float64, device=device)
        masses.index_add_(0, groups, plan.b)
        nodes = masses
        if last and not merged:
            # A column that no row links to joins the group of a row, below.
            alone = torch.ones_like(masses).index_fill_(0, others, 0)
            alone.index_fill_(0, groups[best[with_mass]], 0)
            nodes = torch.where(alone > 0, 0, masses)
        inside = spread(nodes, ends, others, weights)
        if bool((inside | (nodes == 0)).all()):
            return None
        if last or gathered.too_many:
            ties = (part.cpu().numpy() for part in (masses, ends, others, weights))
            joined = torch.from_numpy(well_tied(*ties)).to(device)
            groups, merged = torch.where(present, joined[groups], m), True
            largest = groups[present].mode().values
            if bool((groups[present] == largest).all()):
                return None
        elif bool(inside[groups[best[read & with_mass]]].all()):
            # All rows so far may be of one group. If links of theirs, of no more mass than they
            # have, are most of it, no other rows part it, and it counts as one from now on: of a
            # plan in which light columns alone are outside, nearly all links are within it.
            inside = spread(masses, ends, others, weights * gathered.mass, MOSTLY_TIED)
            if bool(inside[groups[best[read & with_mass]]].all()):
                largest = inside.to(torch.int8).argmax()
                groups = torch.where(inside[groups], largest, groups)
        if of_sample or gathered.too_many:
            gathered = _Links(device)
    return groups, best, peaks


def _links_of(
    logs: Tensor,
    most: Tensor,
    best: Tensor,
    masses: Tensor,
    threshold: float,
    groups: Tensor,
    largest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the links of some rows: columns (l,), columns (l,) and the mass that each carries.

    Links with the largest group, which may have most of the points, are summed: those of a column
    over all of the group's rows, and those of a row over all of the group's columns. One column of
    the group stands for all of them.

    Args:
        logs: (k, m) of entries, without potentials of rows.
        most: (k,), their largest.
        best: (k,), its column.
        masses: (k,) of the rows.
        threshold: of links, in units of epsilon.
        groups: (m,) of columns; m without mass.
        largest: () the group of most columns.
    """
    inside = groups == largest
    linked = logs >= (most - threshold)[:, None]
    # A row within the largest group, whose links are as well, says nothing.
    outward = (linked & ~inside).any(1) & (masses > 0) & most.isfinite()
    rows = outward.nonzero().squeeze(1)
    heaviest = masses.max()
    if len(rows) < len(masses):
        logs, linked, most, best, masses = (
            each[rows] for each in (logs, linked, most, best, masses)
        )
    shares = logs.sub_(most[:, None]).exp_().mul_(linked)
    of_largest = inside[best]
    # In the type of the entries, in which masses may be too small.
    to_columns = heaviest * ((masses * of_largest / heaviest).to(shares) @ shares)
    from_rows = masses * (shares @ inside.to(shares))
    row, column = (linked & ~inside & ~of_largest[:, None]).nonzero(as_tuple=True)
    across = groups[best[row]] != groups[column]
    row, column = row[across], column[across]
    member = inside.to(torch.int8).argmax()
    columns = (~inside & (to_columns > 0)).nonzero().squeeze(1)
    others = (~of_largest & (from_rows > 0)).nonzero().squeeze(1)
    return (
        torch.cat((best[row], member.expand_as(columns), best[others])),
        torch.cat((column, columns, member.expand_as(others))),
        torch.cat((masses[row] * shares[row, column], to_columns[columns], from_rows[others])),
    )


def _of_all_points(plan: ScaledPlan, groups: Tensor, best: Tensor, peaks: Tensor) -> Linked:
    """Number the groups of rows and columns from what `_linked` returns."""
    (n, m), present, with_mass = plan.entries.shape, plan.b > 0, plan.a > 0
    of_rows, groups = torch.where(with_mass, groups[best], m), groups.clone()
    # A column that no row links to joins the group of the row from which it gets most.
    lonely = (present & ~torch.isin(groups, of_rows)).nonzero().squeeze(1)
    if len(lonely):
        groups[lonely] = of_rows[_most_from(plan, lonely)]
    names, labels = torch.unique(torch.cat((of_rows, groups)), return_inverse=True)
    if not bool(with_mass.all() & present.all()):
        # The largest label, m, is that of no mass.
        labels[labels == len(names) - 1] = -1
    return Linked(
        labels[:n],
        labels[n:],
        peaks + plan.f - plan.b.log()[best] - plan.entries.offsets / plan.epsilon,
    )


class _Links:
    """Links between columns: from the one to which a row sends most to others that it sends to.

    Attributes:
        mass: of the rows that were added.
    """

    def __init__(self, device: torch.device) -> None:
        self._most = LINKS_CPU if device.type == "cpu" else LINKS_GPU
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.mass = torch.zeros((), dtype=torch.float64, device=device)
        self._count = 0

    @property
    def too_many(self) -> bool:
        """Whether more would take too much memory."""
        return self._count > self._most

    def add(self, ends: Tensor, others: Tensor, weights: Tensor, mass: Tensor) -> None:
        """Add the links of rows of some mass: (l,) columns, columns and masses."""
        self._parts.append((ends, others, weights))
        self.mass += mass
        self._count += len(ends)

    def between(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return groups, groups and the mass of each link if all rows were like those so far."""
        ends, others, weights = (torch.cat(each) for each in zip(*self._parts, strict=True))
        return groups[ends], groups[others], weights / self.mass


def spread(
    masses: Tensor, ends: Tensor, others: Tensor, weights: Tensor, tied: float = TIED
) -> Tensor:
    """Let a group that starts at one node take in others for a few rounds.

    A node joins as in `group_flows.well_tied`: links that carry enough of the lighter mass tie it
    to the group. Nodes that it does not take in may still belong to it.

    Args:
        masses: (count,) of the nodes; those of mass 0 belong to no group.
        ends: (l,) int64, one node of each link.
        others: (l,) int64, its other node.
        weights: (l,) mass that each link carries.
        tied: the least share of the lighter mass that ties a node to the group.

    Returns:
        (count,) bool, which nodes it took in.
    """
    none = torch.zeros_like(masses)
    group = none.clone()
    # The node with the most links, of those with mass: there may be no links.
    group[torch.where(masses > 0, none.index_add(0, ends, weights), -1).argmax()] = 1
    for _ in range(SPREAD_ROUNDS):
        ties = none.index_add(0, others, weights * group[ends])
        ties.index_add_(0, ends, weights * group[others])
        ties -= tied * torch.minimum(masses, group @ masses)
        before, group = group, torch.maximum(group, (ties >= 0).to(group))
        if torch.equal(before, group):
            break
    return (group > 0) & (masses > 0)


def _even_parts(n: int, m: int, device: torch.device) -> list[tuple[slice, bool]]:
    """Cut the rows into parts, each spread evenly over all, and say which is a sample.

    A small sample comes first, whose rows are those of other parts, too; but where all rows are few
    for a GPU, to which a sample takes as long.
    """
    on_cpu = device.type == "cpu"
    budget = ELEMENTS_CPU if on_cpu else ELEMENTS_GPU
    count, first = -(-n // max(1, budget // m)), -(-n // FIRST_ROWS)
    sampled = first > count and (on_cpu or n * m > FEW_GPU)
    sample = [(slice(0, n, first), True)] if sampled else []
    return sample + [(slice(start, n, count), False) for start in range(count)]


def _most_from(plan: ScaledPlan, columns: Tensor) -> Tensor:
    """Return for some columns (l,) the row from which each gets most of its mass."""
    weights = plan.f + plan.a.log()
    highest = torch.full_like(columns, -torch.inf, dtype=torch.float64)
    found = torch.zeros_like(columns)
    for rows in blocks_of_rows(torch.arange(len(weights), device=columns.device), len(columns)):
        logs = weights[rows, None] - plan.entries.costs(rows, columns) / plan.epsilon
        top, place = logs.max(0)
        found = torch.where(top > highest, rows[place], found)
        highest = torch.maximum(top, highest)
    return found


def blocks_of_rows(rows: Tensor, width: int) -> Sequence[Tensor]:
    """Cut rows into parts whose entries fit in memory at once."""
    budget = ELEMENTS_CPU if rows.device.type == "cpu" else ELEMENTS_GPU
    return torch.split(rows, max(1, budget // (4 * max(1, width)))) if len(rows) else []


def contracted(plan: ScaledPlan, linked: Linked) -> Flows:
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
        for part in blocks_of_rows(high, len(wide)):
            top, sums = by_group(plan, part, wide, columns[wide], count)
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
    excess = above_rounding(masses[:, 0] - masses[:, 1], masses.sum(1), plan.rounding)
    return Flows(logs, gaps, masses, excess, plan.rounding)


def by_group(
    plan: ScaledPlan, rows: Tensor, columns: Tensor, groups: Tensor, count: int
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


def with_softmins(plan: ScaledPlan) -> tuple[Tensor, Tensor]:
    """Replace potentials of points without mass by softmins of the others, in units of epsilon."""
    potentials = [plan.f.clone(), plan.g.clone()]
    sides = (plan.a, plan.b)
    for side in (0, 1):
        absent = (sides[side] == 0).nonzero().squeeze(1)
        other = (sides[1 - side] > 0).nonzero().squeeze(1)
        of_other = (plan.g, plan.f)[side][other] + sides[1 - side][other].log()
        for part in blocks_of_rows(absent, len(other)):
            chosen = (part, other) if side == 0 else (other, part)
            costs = plan.entries.costs(*chosen) / plan.epsilon
            logs = of_other - (costs if side == 0 else costs.T)
            potentials[side][part] = -logs.logsumexp(1)
    return potentials[0], potentials[1]
