"""The parts of a shared cost on every rank, and the operations on them.

Rank r owns rows R_r and columns C_r. Of the cost between two clouds it holds two parts,

    P_r = C[R_r, :],    Q_r = C[:, C_r],

each an operator of its own: f = softmin_rows(g) is computed by the P_r and gathered, g =
softmin_columns(f) by the Q_r. Column sums of a plan are sums over the P_r, added in float64 in the
order of the ranks.

For a self term every rank has some of the pairs (`self_share`), or P_r alone if points are
streamed. Results of pairs for rows of other ranks are sent to the owner of the rows, who merges
them in the order of the ranks. P_r serves products with the plan, sums of a plan of two potentials
and softmins over a sample of columns, and is built when one of these is first asked for. In a
`ring` it is built at once, and also computes softmins again that are out of reach of the pairs.

`Owned` divides a cloud, whose points are sorted by class first: so few classes are cut. Kernels pad
every class to whole blocks of rows, and a class that one rank has alone is padded once.

`ring` builds parts of which every rank holds a shard of the points. `flows.stepping` calls
`own_product`, for the gradient of a rank's own points.

The masses of a part's own side are divided by their sum w_r, so that they sum to 1; results that
are proportional to them are multiplied by w_r.

The operations run on all ranks together, by an order of `sharing` on rank 0; their first arguments
are the ranks and the number under which each holds its `Parts` (`own_product` takes these). They
must call the same collectives in the same order on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from otdd_flash.cost.points import DOUBLE_UNIT, LabelledCost, less_origin
from otdd_flash.distributed.exchange import added
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.engine.problems import LateReader
from otdd_flash.errors import LostRankError
from otdd_flash.fingerprint import remembered
from otdd_flash.operators.base import Applied, Epsilon, Marginals, Operator
from otdd_flash.operators.blocked import ROUNDINGS, BlockOperator
from otdd_flash.operators.self_share import NearShare, SelfShare, merged

if TYPE_CHECKING:
    # It imports this file.
    from otdd_flash.operators.ring import RingPart

Rows = slice | Tensor


class _Move(NamedTuple):
    """How this rank's points come to the ranks that own their places in the given order.

    Attributes:
        order: (k,) int64, this rank's rows by the rank that gets them.
        sent: how many rows each rank gets.
        coming: how many come from each rank.
        place: (share,) int64, where every row that comes belongs in the own share.
    """

    order: Tensor
    sent: list[int]
    coming: list[int]
    place: Tensor


@dataclass(frozen=True, eq=False)
class Owned:
    """How the points of one side are divided among ranks.

    Attributes:
        count: number of points.
        order: (count,) int64, the points sorted by class; None if they are sorted already.
        place: (count,) int64, the index of every point in that order.
    """

    count: int
    order: Tensor | None
    place: Tensor | None
    _labels: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)
    _moves: dict[tuple[int, int], _Move] = field(default_factory=dict, repr=False)

    @classmethod
    def by_class(cls, labels: Tensor) -> Owned:
        """Divide points in the order of their labels (count,); cached with the labels."""
        return remembered(labels, "owned", lambda: cls._in_order(labels))

    @classmethod
    def _in_order(cls, labels: Tensor) -> Owned:
        if bool((labels[1:] >= labels[:-1]).all()):
            return cls(len(labels), None, None)
        order = torch.argsort(labels, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return cls(len(labels), order, place)

    def of(self, ranks: Ranks, rank: int | None = None) -> Rows:
        """Return the points of a rank, this one by default."""
        share = ranks.share(self.count, rank)
        return share if self.order is None else self.order[share]

    def labels_of(self, ranks: Ranks, labels: Tensor) -> Tensor:
        """Cut the labels (count,) to this rank's points; one tensor for all calls."""
        place = ranks.rank, ranks.size
        if place not in self._labels:
            # Cloned: a view would keep all labels alive.
            self._labels[place] = labels[self.of(ranks)].clone()
        return self._labels[place]

    def gathered(self, ranks: Ranks, found: Tensor) -> Tensor:
        """Gather what all ranks computed for their points, in the points' own order."""
        every = ranks.gathered(found, self.count)
        return every if self.place is None else every[self.place]

    def in_given_order(self, ranks: Ranks, rows: Tensor) -> Tensor:
        """Send rows (k, ...) of this rank's points to the owners of `Ranks.share` in given order.

        Returns:
            (share, ...), the rows of the points at the places that this rank owns.
        """
        if self.order is None:
            return rows
        move = self._move(ranks)
        found = ranks.exchanged_rows(rows[move.order], move.sent, move.coming)
        return torch.empty_like(found).index_copy_(0, move.place, found)

    def _move(self, ranks: Ranks) -> _Move:
        here = ranks.rank, ranks.size
        if here not in self._moves:
            assert self.order is not None
            every = range(ranks.size)
            ends = [ranks.share(self.count, rank).stop for rank in every]
            # Points of every rank in the given order, which is that of their new owners.
            points = [self.order[ranks.share(self.count, rank)].sort() for rank in every]
            borders = self.order.new_tensor([0, *ends])
            counts = torch.stack(
                [torch.searchsorted(each.values, borders).diff() for each in points]
            ).tolist()
            first, end = [0, *ends][ranks.rank], ends[ranks.rank]
            coming = [each.values[(each.values >= first) & (each.values < end)] for each in points]
            self._moves[here] = _Move(
                points[ranks.rank].indices,
                counts[ranks.rank],
                [of_rank[ranks.rank] for of_rank in counts],
                torch.cat(coming) - first,
            )
        return self._moves[here]

    def exchanged(self, ranks: Ranks, partial: Tensor, nothing: float) -> Tensor:
        """Send every rank its points' rows of `partial` (count, ...); return those for own points.

        Returns:
            (size, share, ...), by the rank that computed them.
        """
        partial = partial if self.order is None else partial[self.order]
        width = -(-self.count // ranks.size)
        sent = partial.new_full((ranks.size, width, *partial.shape[1:]), nothing)
        for rank in range(ranks.size):
            share = partial[ranks.share(self.count, rank)]
            sent[rank, : len(share)] = share
        own = ranks.share(self.count)
        each = [1] * ranks.size
        return ranks.exchanged_rows(sent, each, each)[:, : own.stop - own.start]


# build(cost): builds the operator of a cost in one process.
Build = Callable[[LabelledCost], Operator]

EVERY, FIRST = slice(None), slice(0, 1)


class Part(NamedTuple):
    """The operator of some rows or columns, and their mass w_r."""

    operator: Operator | RingPart
    mass: float

    @property
    def refined(self) -> Part:
        """The part at full accuracy."""
        return self._replace(operator=self.operator.refined)


@dataclass
class Parts:
    """The parts of a cost that a rank holds; a part without rows or columns is None.

    Attributes:
        cost: the whole cost; without its points if these are in a ring.
        sides: how rows, and columns, are divided among ranks.
        first: an operator that runs as the parts do; None to take that of P_r or Q_r.
        rows: P_r.
        columns: Q_r; None for a self term.
        share: this rank's pairs of a self term, if these are divided.
        later: builds P_r when it is needed first; None if that is done or never needed.
    """

    cost: LabelledCost
    sides: tuple[Owned, Owned]
    first: Operator | RingPart | None
    rows: Part | None
    columns: Part | None
    share: SelfShare | None = None
    later: Callable[[], Part | None] | None = None

    @classmethod
    def replicated(
        cls,
        cost: LabelledCost,
        ranks: Ranks,
        build: Build,
        share: Callable[[LabelledCost, Ranks, Build], tuple[SelfShare, Operator]] | None,
    ) -> Parts:
        """Build the parts of a cost whose points every rank has, in memory or in files.

        Args:
            cost: the whole cost.
            ranks: the processes that share it.
            build: builds operators of parts.
            share: builds this rank's share of a self term, and an operator that runs like it; None
                if every rank has its rows against all columns instead.
        """
        sides = sides_of(cost)

        def part(rows: Rows, columns: Rows) -> Part | None:
            labels, masses, mass = [], [], 1.0
            for cloud, own, side in zip(cost.clouds, (rows, columns), sides, strict=True):
                if own is EVERY:
                    some, of = cloud.masses, cloud.labels
                else:
                    some, mass = cloud.share(own, (ranks.rank, ranks.size))
                    of = side.labels_of(ranks, cloud.labels)
                labels.append(of)
                masses.append(some)
            if 0 in map(len, masses):
                return None
            (x, y), (a, b) = labels, masses
            return Part(build(cost.part(rows, columns, labels=(x, y), masses=(a, b))), mass)

        rows, columns = (side.of(ranks) for side in sides)
        if cost.symmetric and share is not None:
            pairs, first = share(cost, ranks, build)
            return cls(cost, sides, first, None, None, pairs, lambda: part(rows, EVERY))
        theirs = None if cost.symmetric else part(EVERY, columns)
        own = part(rows, EVERY)
        alone = build(cost.part(FIRST, FIRST)) if own is theirs is None else None
        return cls(cost, sides, alone, own, theirs)

    @property
    def representative(self) -> Operator | RingPart:
        """An operator with the type, backend and precision of the parts of all ranks."""
        if self.first is not None:
            return self.first
        part = self.rows or self.columns
        assert part is not None
        return part.operator

    def by(self, ranks: Ranks, *, columns: bool) -> tuple[Part | None, Owned]:
        """Return the part by rows or by columns, and how those are divided."""
        if self.later is not None:
            make, self.later = self.later, None
            self.rows = ranks.together(make)
        return (self.columns if columns else self.rows), self.sides[columns]

    @property
    def refined(self) -> Parts:
        """The parts at full accuracy."""
        later = self.later
        return replace(
            self,
            first=self.first and self.first.refined,
            rows=self.rows and self.rows.refined,
            columns=self.columns and self.columns.refined,
            share=self.share and self.share.refined,
            later=later and (lambda: (rows := later()) and rows.refined),
        )


def sides_of(cost: LabelledCost) -> tuple[Owned, Owned]:
    """Return the division of the rows, and of the columns, of a cost among ranks."""
    x, y = cost.labels
    rows = Owned.by_class(x)
    return rows, rows if cost.symmetric else Owned.by_class(y)


def refine(ranks: Ranks, number: int, refined: int) -> None:
    """Hold the same parts at full accuracy under the number `refined`."""
    ranks.held[refined] = ranks.held[number].refined


def cost_error(ranks: Ranks, number: int) -> float:
    """Return `CostFacts.error` of the whole cost, by one exchange; it holds for refined parts too.

    The error of C_ij in P_r is at most A_i + B_j, where B may differ between ranks. A plan may give
    any share of a column's mass to any rank, so that the largest B_j counts.
    """
    parts: Parts = ranks.held[number]
    if parts.share is not None:
        total = parts.share.mean_error(ranks)
    else:
        if parts.rows is not None:
            operator, mass = cast(BlockOperator, parts.rows.operator), parts.rows.mass
            rows, of_columns = operator.accurate_errors
            rounding, of_rows = of_columns.new_tensor(operator.rounding), mass * (operator.a @ rows)
            own = torch.cat((of_columns, rounding[None], of_rows[None]))
        else:
            own = parts.cost.b.new_zeros(parts.cost.shape[1] + 2)
        every = ranks.all_gathered(own)
        largest = every.amax(0)
        most = parts.cost.b @ largest[:-2]
        # One tensor, so that the host waits once.
        found = torch.cat((most[None], largest[-2:-1], every[:, -1])).tolist()
        of_columns_and_rounding, of_all_rows = found[:2], found[2:]
        total = math.fsum((*of_all_rows, *of_columns_and_rounding))
    return total * (1 + (ranks.size + ROUNDINGS) * DOUBLE_UNIT)


def softmin(
    ranks: Ranks,
    number: int,
    columns: bool,
    potential: Tensor,
    epsilon: Epsilon,
    guess: Tensor | None,
) -> Tensor:
    """Compute the softmin of all rows (n,), or columns (m,), from the other side's potential."""
    parts: Parts = ranks.held[number]
    part, owned = parts.by(ranks, columns=columns)
    found = potential.new_empty(0, dtype=parts.representative.passes.dtype)
    if part is not None:
        near = None if guess is None else guess[owned.of(ranks)]
        softmin = part.operator.softmin_columns if columns else part.operator.softmin_rows
        found = softmin(potential, epsilon, near).to(found.dtype)
    return owned.gathered(ranks, found)


def softmin_over(ranks: Ranks, number: int, columns: Tensor, g: Tensor, epsilon: Epsilon) -> Tensor:
    """Compute the softmin of all rows (n,) over some columns (l,), int64, of potentials g (l,)."""
    parts: Parts = ranks.held[number]
    part, owned = parts.by(ranks, columns=False)
    found = g.new_empty(0, dtype=parts.representative.passes.dtype)
    if part is not None:
        found = part.operator.softmin_over(columns, g, epsilon).to(found.dtype)
    return owned.gathered(ranks, found)


def softmin_self(ranks: Ranks, number: int, f: Tensor, epsilon: Epsilon) -> Tensor:
    """Compute T(f) (n,) for the potential f of a self term, from the pairs of all ranks."""
    parts: Parts = ranks.held[number]
    share, owned = parts.share, parts.sides[0]
    assert share is not None
    own = owned.of(ranks)
    found = merged(owned.exchanged(ranks, share.softmin(f, epsilon), math.inf), epsilon)
    if isinstance(share, NearShare) and share.reach < math.inf:
        # Rows out of reach are computed again; a NaN is never within it.
        far = ~((found - f[own]).abs() <= share.reach * epsilon)
        # Whether there are any, the host has to know of a pass that all ranks do together alone.
        if share.repairs_alone or bool(ranks.all_gathered(far.sum()).any()):
            rows = torch.zeros_like(f, dtype=torch.bool)
            rows[own] = far
            found = torch.where(far, share.repaired(f, epsilon, rows)[own].to(found.dtype), found)
    return owned.gathered(ranks, found.to(parts.representative.passes.dtype))


def marginals(
    ranks: Ranks, number: int, f: Tensor, g: Tensor | None, epsilon: Epsilon, accurate: bool
) -> Marginals:
    """Compute the row and column sums of the plan of f (n,) and g (m,), or f, of the P_r."""
    potentials = (f,) if g is None else (f, g)
    return _of_same_potentials(ranks, _marginals, number, potentials, epsilon, accurate)


def marginals_self(
    ranks: Ranks, number: int, f: Tensor, epsilon: Epsilon, accurate: bool
) -> Marginals:
    """Compute the row and column sums of the symmetric plan of f (n,)."""
    return _of_same_potentials(ranks, _marginals_self, number, (f,), epsilon, accurate)


# An odd number of 64 bits, 2^64 over the golden ratio, as a signed one.
MIXING = 0x9E3779B97F4A7C15 - (1 << 64)

# Of the own part of a plan its errors, as `_largest` takes them; of all parts the sums with their
# errors, and `Marginals.own_costs`.
Errors = tuple[float, float, float]
Sums = tuple[Errors, tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]


def _of_same_potentials(
    ranks: Ranks,
    sums: Callable[..., Sums],
    number: int,
    potentials: tuple[Tensor, ...],
    epsilon: Epsilon,
    accurate: bool,
) -> Marginals:
    """Compute sums of a plan of which a certificate is made: all ranks have the same potentials.

    Where a rank has others, those of rank 0 are sent once more.

    Raises:
        LostRankError: on every rank, where potentials differ again.
    """
    for _ in range(2):
        reader = LateReader()
        check = torch.stack([checksum(each) for each in potentials])
        # On its way to the host while the sums are computed.
        told = reader.exchange(check)
        numbers, found, own_costs = sums(ranks, number, potentials, epsilon, accurate)
        told = told or reader.last()
        assert told is not None
        same, largest = _largest(ranks, numbers, [int(each) for each in told])
        if same:
            return Marginals(*found, *largest, own_costs)
        potentials = tuple(ranks.from_leader(each) for each in potentials)
    raise LostRankError(
        "processes of compute.group have other potentials than rank 0, which has sent them twice; "
        "a GPU, its memory or a link of this machine is at fault"
    )


def checksum(potential: Tensor) -> Tensor:
    """Return a number (), int64, that differs where the bits of a potential (n,) do.

    For certain where one entry differs; where several do, but for a chance of about 2^-64. The bits
    of every entry are multiplied by an odd number of its own and mixed, as high bits, the sign
    above all, would else cancel in the sum. Sums of integers depend on no order.
    """
    bits = potential.contiguous().view(
        torch.int64 if potential.dtype.itemsize == 8 else torch.int32
    )
    odd = torch.arange(1, 2 * len(bits), 2, device=bits.device)
    mixed = bits.to(torch.int64) * odd
    for shift in (32, 29):
        # Shifted without the sign, each step can be undone, so that no two entries become one.
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * MIXING
    return mixed.sum()


def _marginals(
    ranks: Ranks,
    number: int,
    potentials: tuple[Tensor, ...],
    epsilon: Epsilon,
    accurate: bool,
) -> Sums:
    parts: Parts = ranks.held[number]
    part, owned = parts.by(ranks, columns=False)
    f, g = potentials[0], potentials[-1]
    own_costs = parts.cost.own_costs() if len(potentials) == 1 else None
    numbers = (0.0, 0.0, 0.0)
    if part is None:
        of_rows = f.new_zeros((0, 2), dtype=torch.float64)
        of_columns = f.new_zeros((2, parts.cost.shape[1]), dtype=torch.float64)
    else:
        found = part.operator.marginals(f[owned.of(ranks)], g, epsilon, accurate=accurate)
        of_rows = torch.stack((part.mass * found.rows, found.row_errors), 1)
        of_columns = torch.stack((part.mass * found.columns, found.column_errors))
        numbers = found.cost_rounding, found.relative_error, found.underflow
    rows, row_errors = owned.gathered(ranks, of_rows).unbind(1)
    every = ranks.all_gathered(of_columns)
    columns = added(every[:, 0])
    return numbers, (rows, columns, row_errors, every[:, 1].amax(0)), own_costs


def _marginals_self(
    ranks: Ranks,
    number: int,
    potentials: tuple[Tensor, ...],
    epsilon: Epsilon,
    accurate: bool,
) -> Sums:
    (f,) = potentials
    parts: Parts = ranks.held[number]
    share, owned = parts.share, parts.sides[0]
    assert share is not None
    part = share.marginals(f, None, epsilon, accurate=accurate)
    every = owned.exchanged(ranks, torch.stack((part.rows, part.row_errors), 1), 0.0)
    found = torch.stack((added(every[..., 0]), every[..., 1].amax(0)), 1)
    sums, errors = owned.gathered(ranks, found).unbind(1)
    numbers = part.cost_rounding, part.relative_error, part.underflow
    return numbers, (sums, sums, errors, errors), part.own_costs


def _largest(ranks: Ranks, numbers: Errors, checks: list[int]) -> tuple[bool, Errors]:
    """Return whether all ranks have the same checks, and the largest errors of any.

    The rounding of sums over ranks is among these.
    """
    # Halves of int64, which float64 holds: they are one where the largest is the smallest.
    halves = [float(half) for each in checks for half in divmod(each, 1 << 32)]
    said = ranks.largest([*numbers, *halves, *(-half for half in halves)])
    (cost_rounding, relative_error, underflow), said = said[:3], said[3:]
    highest, lowest = said[: len(halves)], [-half for half in said[len(halves) :]]
    relative_error += (ranks.size + ROUNDINGS) * DOUBLE_UNIT
    return highest == lowest, (cost_rounding, relative_error, underflow)


def apply_plan(
    ranks: Ranks,
    number: int,
    transposed: bool,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    values: Tensor,
    left: Tensor | None,
    right: Tensor | None,
) -> Applied:
    """Compute a product with the plan, of all rows, or with its transpose, of all columns."""
    parts: Parts = ranks.held[number]
    own = own_product(ranks, parts, transposed, f, g, epsilon, values, left, right)
    owned = parts.sides[transposed]
    return Applied(*(owned.gathered(ranks, each) for each in own))


def own_product(
    ranks: Ranks,
    parts: Parts,
    transposed: bool,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    values: Tensor,
    left: Tensor | None,
    right: Tensor | None,
) -> Applied:
    """Compute this rank's rows of a product with the plan, or its columns of the transpose's."""
    part, owned = parts.by(ranks, columns=transposed)
    own, dtype = owned.of(ranks), parts.representative.passes.dtype
    rows: Rows = EVERY if transposed else own
    columns: Rows = own if transposed else EVERY
    if part is None:
        applied = values.new_zeros((0, values.shape[1]), dtype=dtype)
        masses = f.new_zeros(0, dtype=torch.float64)
    else:
        factors = None if left is None or right is None else (left[rows], right[columns])
        plan = part.operator.plan(f[rows], g[columns], epsilon)
        found = plan.applied(values, transposed=transposed, factors=factors)
        applied, masses = part.mass * found.values.to(dtype), part.mass * found.masses
    return Applied(applied, masses)


def apply_plan_to_points(
    ranks: Ranks,
    number: int,
    transposed: bool,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    origin: Tensor,
) -> Applied:
    """Compute a product with the other side's points less an origin (d,), which no one sends."""
    cost: LabelledCost = ranks.held[number].cost
    values = less_origin(cost.held[0 if transposed else 1], origin)
    return apply_plan(ranks, number, transposed, f, g, epsilon, values, None, None)


def expected_costs(ranks: Ranks, number: int, masses: Tensor) -> Tensor:
    """Compute sum_j C_ij q_j (n,) for masses q (m,), float64."""
    parts: Parts = ranks.held[number]
    part, owned = parts.by(ranks, columns=False)
    found = masses.new_zeros(0) if part is None else part.operator.expected_costs(masses)
    return owned.gathered(ranks, found)
