"""Passes over all costs in float64: the least reduced costs of rows and columns, and their arcs.

For potentials f (n,) and g (m,) the reduced cost of a pair is C_ij - f_i - g_j. A pass, `price`,
computes it for all pairs, in blocks of rows, and keeps

    min_j (C_ij - g_j)        for every row: the c-transform of g, feasible with g by construction;
    the k least reduced costs of every row and of every column, of those below a given number, as
    arcs (i, j) with their costs, and the costs of pairs that are asked for.

It computes a block of costs at a time, and keeps none. Points and given matrices differ in their
blocks alone, `PointCosts` and `MatrixCosts`; several processes take a share of the rows each,
`SharedCosts`. `exact.solve` and `exact.slopes` make one of these and call `price`; `exact.bounds`
and `exact.program` read its `Arcs`. The costs of arcs must be the very numbers of the pass, because
`ExactCosts.errors` bounds the errors of these (`tests/exact/test_exact_bounds.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.cost.host_points import spans
from otdd_flash.cost.points import UNDERFLOW, LabelledCost
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError
from otdd_flash.operators.given_costs import CostSource, GivenCosts
from otdd_flash.operators.point_scores import CentredProducts, cost_tiles
from otdd_flash.operators.torch_operator import TorchOperator

if TYPE_CHECKING:
    # Of several processes alone.
    from otdd_flash.operators.sharing import ShardedOperator

# Entries of a block of costs. A block is read some five times and takes three buffers of its size.
BLOCK_ELEMENTS_CPU, BLOCK_ELEMENTS_GPU = 1 << 22, 1 << 27

# Arcs of a column that are collected before they are sorted, over those that are kept.
POOLED = 8

# Slices of a cloud that its principal axis is taken from, their rows, and steps of a power method.
AXIS_SLICES, SLICE_ROWS, AXIS_STEPS = 16, 64, 16

Vector = NDArray[np.float64]
Places = NDArray[np.int64]


class ExactCosts(ABC):
    """A cost C (n, m) between masses, in float64; +inf forbids a pair.

    Attributes:
        a: (n,) row masses, float64.
        b: (m,) column masses, float64.
        errors: (n,) and (m,) float64: the error of C_ij is at most errors[0]_i + errors[1]_j.
        lowest: no C_ij between points with mass is below it.
        highest: none that is finite is above it.
        mean: sum_ij a_i b_j C_ij over finite costs.
        forbidden: whether a cost is +inf.
    """

    a: Tensor
    b: Tensor
    errors: tuple[Tensor, Tensor]
    lowest: float
    highest: float
    mean: float
    forbidden: bool

    @property
    @abstractmethod
    def orders(self) -> tuple[Places, Places]:
        """Orders of rows (n,) and columns (m,) in which the corner rule's plan is a good one.

        That is along their common principal axis for points; other costs may have none.
        """

    @abstractmethod
    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of rows, in order, and C[rows] (h, m), in a buffer that is overwritten."""

    def price(
        self,
        f: Vector,
        g: Vector,
        count: int,
        *,
        below: float = np.inf,
        wanted: tuple[Places, Places] | None = None,
    ) -> Priced:
        """Pass over all costs, at potentials f (n,) and g (m,); rows in no block have inf.

        Args:
            f: in units of the cost; read where rows have mass.
            g: in units of the cost; read where columns have mass.
            count: arcs of every row, and of every column, that have the least reduced costs.
            below: only those whose reduced cost is less; infinite ones never count.
            wanted: rows, sorted, and columns of further arcs to return.
        """
        a, b, m = self.a, self.b, len(g)
        # Points without mass get arcs of infinite reduced cost.
        of_rows, of_columns = (
            torch.where(masses > 0, torch.from_numpy(values).to(masses.device), -torch.inf)
            for masses, values in ((a, f), (b, g))
        )
        least = torch.full_like(a, torch.inf)
        columns = _ColumnLeast(count, torch.full_like(b, below))
        massless, feasible = (b == 0).nonzero().squeeze(1), torch.full_like(b, torch.inf)
        found, asked, buffer = [], [], torch.empty(0)
        for rows, block in self.blocks():
            if len(buffer) < len(block):
                buffer = torch.empty_like(block)
            less = torch.sub(block, of_columns, out=buffer[: len(block)])
            torch.amin(less, 1, out=least[rows])
            if len(massless) > 0:
                known = least[rows].isfinite()
                above = (block[:, massless] - least[rows, None])[known]
                feasible[massless] = torch.cat((feasible[massless][None], above)).amin(0)
            if wanted is not None:
                part = slice(*np.searchsorted(wanted[0], (rows.start, rows.stop)))
                i, j = (torch.from_numpy(places[part]).to(a.device) for places in wanted)
                asked.append(_on_host(i, j, block[i - rows.start, j]))
            # Few rows have a reduced cost below a bound; no row without mass has.
            some = (least[rows] - of_rows[rows] < below).nonzero().squeeze(1)
            if len(some) == 0:
                continue
            if len(some) < len(block):
                less, block = less[some], block[some]
            places = some + rows.start
            less -= of_rows[places, None]
            values, nearest = torch.topk(less, min(count, m), 1, largest=False, sorted=False)
            i, k = (values < below).nonzero().unbind(1)
            j = nearest[i, k]
            found.append(_on_host(places[i], j, block[i, j]))
            columns.add(places, less, block)
        found.append(columns.arcs())
        arcs, wanted_arcs = Arcs.joined(m, *found), Arcs.joined(m, *asked)
        return Priced(least.cpu().numpy(), feasible.cpu().numpy(), arcs, wanted_arcs)


class PointCosts(ExactCosts):
    """The cost between two labelled clouds; see `ExactCosts`. Points may be streamed.

    Args:
        cost: of the points as the ground cost transforms them.
        error: of the cost, by that of these points.
        rows: those that a pass is over; None for all.
    """

    def __init__(self, cost: LabelledCost, error: float, rows: slice | None = None) -> None:
        self._rows = slice(0, cost.shape[0]) if rows is None else rows
        self._cost, self._products = cost, CentredProducts(cost)
        of_rows, of_columns = map(torch.add, self._products.errors, cost.lost_errors)
        self.a, self.b, self.errors = cost.a, cost.b, (of_rows + error, of_columns)
        self.lowest, self.highest = cost.cost_range
        self.mean, self.forbidden = cost.mean_cost, False

    @property
    def orders(self) -> tuple[Places, Places]:
        """Rows and columns along the principal axis that both clouds have about their means."""
        n, m = self._cost.shape
        sides = ((self._products.left, n), (self._products.right, m))
        joint = torch.cat([_centred_sample(*side) for side in sides])
        axis = joint[joint.square().sum(1).argmax()]
        for _ in range(AXIS_STEPS):
            axis = joint.T @ (joint @ axis)
            axis = axis / torch.linalg.vector_norm(axis).clamp_min(UNDERFLOW)
        x, y = (_order_along(axis, *side) for side in sides)
        return x, y

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        first, last, m = self._rows.start, self._rows.stop, self._cost.shape[1]
        height = block_height(last - first, m, self.a.device)
        buffer = self.a.new_empty((height, m))
        for rows in spans(first, last, height):
            start = rows.start
            block = buffer[: rows.stop - start]
            for part, columns, negative in cost_tiles(self._cost, self._products, rows):
                torch.neg(negative, out=block[part.start - start : part.stop - start, columns])
            yield rows, block


class MatrixCosts(ExactCosts):
    """A given cost, in memory or computed by a user's function; see `ExactCosts`."""

    def __init__(self, operator: TorchOperator[GivenCosts]) -> None:
        self._costs: CostSource = operator.source.costs
        self.a, self.b, self.errors = operator.a, operator.b, operator.source.cost_errors
        facts = operator.source.facts
        self.lowest, self.highest, self.mean = facts.lowest, facts.highest, facts.mean
        self.forbidden = facts.forbidden

    @property
    def orders(self) -> tuple[Places, Places]:
        n, m = self._costs.shape
        return np.arange(n), np.arange(m)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        n, m = self._costs.shape
        asked = self._costs.block_entries
        height = block_height(n, m, self.a.device) if asked is None else max(1, min(n, asked // m))
        for rows in spans(0, n, height):
            yield rows, self._costs.rows(rows).double()


def _centred_sample(points: Callable[[slice], Tensor], count: int) -> Tensor:
    """Return evenly spaced slices of a cloud of `count` points, less their mean."""
    starts = np.linspace(0, max(count - SLICE_ROWS, 0), AXIS_SLICES).astype(int).tolist()
    slices = [slice(start, start + SLICE_ROWS) for start in dict.fromkeys(starts)]
    sample = torch.cat([points(some) for some in slices])
    return sample - sample.mean(0)


def _order_along(axis: Tensor, points: Callable[[slice], Tensor], count: int) -> Places:
    """Return the order of `count` points along an axis (d,)."""
    height = block_height(count, len(axis), axis.device)
    along = torch.cat([points(some) @ axis for some in spans(0, count, height)])
    order: Places = along.argsort().cpu().numpy()
    return order


def block_height(n: int, m: int, device: torch.device) -> int:
    """Return the rows of a block of costs."""
    return max(1, min(n, (BLOCK_ELEMENTS_GPU if device.type != "cpu" else BLOCK_ELEMENTS_CPU) // m))


class Arcs(NamedTuple):
    """Pairs (i, j) with their costs, on the host: each once, sorted by row, then by column.

    Attributes:
        rows: (k,) i.
        columns: (k,) j.
        costs: (k,) C_ij; +inf for a forbidden pair.
    """

    rows: Places
    columns: Places
    costs: Vector

    @classmethod
    def joined(cls, m: int, *parts: Arcs) -> Arcs:
        """Join arcs to m columns; several that are one have one cost."""
        if not parts:
            return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        keys = np.concatenate([part.rows * m + part.columns for part in parts])
        keys, first = np.unique(keys, return_index=True)
        costs = np.concatenate([part.costs for part in parts])[first]
        return cls(keys // m, keys % m, costs)

    def some(self, which: NDArray[np.bool_]) -> Arcs:
        """Return some of the arcs."""
        return Arcs(self.rows[which], self.columns[which], self.costs[which])

    def reduced(self, f: Vector, g: Vector) -> Vector:
        """Return C_ij - f_i - g_j (k,)."""
        reduced: Vector = self.costs - f[self.rows] - g[self.columns]
        return reduced


class Priced(NamedTuple):
    """The results of one pass for potentials f and g.

    Attributes:
        row_least: (n,) min_j (C_ij - g_j) over columns with mass.
        massless: (m,) min_i (C_ij - row_least_i), the g of columns without mass; inf of others.
        arcs: those of the least reduced costs.
        wanted: those asked for, of any cost; none if none were.
    """

    row_least: Vector
    massless: Vector
    arcs: Arcs
    wanted: Arcs


def _on_host(rows: Tensor, columns: Tensor, costs: Tensor) -> Arcs:
    return Arcs(*(side.cpu().numpy() for side in (rows, columns, costs)))


class SharedCosts(PointCosts):
    """The cost between two labelled clouds that ranks share; see `ExactCosts`.

    Args:
        operator: of rank 0, which keeps the cost on all ranks as long as it exists.
        error: of the cost, by that of the points.

    Raises:
        InputError: each rank has a part of the points.
    """

    def __init__(self, operator: ShardedOperator, error: float) -> None:
        cost = operator.cost
        if operator.ranks.held[operator.number].cost is not cost:
            raise InputError(
                "epsilon=0 needs all points on every process of compute.group, which do not fit "
                "here; raise memory_budget, or set a positive epsilon"
            )
        super().__init__(cost, error)
        self._operator, self._error = operator, error

    def price(
        self,
        f: Vector,
        g: Vector,
        count: int,
        *,
        below: float = np.inf,
        wanted: tuple[Places, Places] | None = None,
    ) -> Priced:
        """Pass over all costs, of which every rank takes a share of the rows."""
        ranks, number = self._operator.ranks, self._operator.number
        found = ranks.order(_price_share, number, self._error, f, g, count, below, wanted)
        least, massless = (
            np.minimum.reduce(each)
            for each in zip(*((some.row_least, some.massless) for some in found), strict=True)
        )
        arcs, asked = (
            Arcs.joined(len(g), *parts)
            for parts in zip(*((each.arcs, each.wanted) for each in found), strict=True)
        )
        return Priced(least, massless, arcs, asked)


def _price_share(
    ranks: Ranks,
    number: int,
    error: float,
    f: Vector,
    g: Vector,
    count: int,
    below: float,
    wanted: tuple[Places, Places] | None,
) -> list[Priced]:
    """Pass over this rank's share of the rows, and gather what all ranks find."""
    cost: LabelledCost = ranks.held[number].cost
    some = PointCosts(cost, error, ranks.share(len(f)))
    own = ranks.together(lambda: some.price(f, g, count, below=below, wanted=wanted))
    return ranks.all_gathered_objects(own)


class _ColumnLeast:
    """The arcs of the k least reduced costs of every column so far.

    Of the first block the k least are taken at once, and of later ones all below the k-th of these:
    they are few, and sorted now and then.

    Args:
        count: k.
        bounds: (m,) for every column, only reduced costs below are kept.
    """

    def __init__(self, count: int, bounds: Tensor) -> None:
        self.count, self.bounds = count, bounds
        self._parts: list[tuple[Tensor, ...]] = []

    def add(self, places: Tensor, less: Tensor, block: Tensor) -> None:
        """Add reduced costs (h, m) and costs (h, m) of some rows (h,)."""
        first = not self._parts and bool(self.bounds.isinf().all())
        if first and len(less) > self.count:
            _, i = torch.topk(less, self.count, 0, largest=False, sorted=False)
            j = torch.arange(less.shape[1], device=less.device).expand_as(i)
            finite = less[i, j] < torch.inf
            i, j = i[finite], j[finite]
        else:
            i, j = (less < self.bounds).nonzero().unbind(1)
        self._parts.append((less[i, j], j, places[i], block[i, j]))
        if first or sum(len(part[0]) for part in self._parts) > POOLED * self.count * len(
            self.bounds
        ):
            self._parts = [self._least()]

    def arcs(self) -> Arcs:
        """Return the arcs, on the host."""
        if not self._parts:
            return Arcs.joined(1)
        _, columns, rows, costs = self._least()
        return _on_host(rows, columns, costs)

    def _least(self) -> tuple[Tensor, ...]:
        """Return the k least values of every column, with columns, rows and costs; set bounds."""
        pool = [torch.cat(parts) for parts in zip(*self._parts, strict=True)]
        # By columns, and by value within each.
        order = pool[0].argsort()
        order = order[pool[1][order].argsort(stable=True)]
        values, columns, rows, costs = (each[order] for each in pool)
        every = torch.arange(len(self.bounds), device=order.device)
        rank = torch.arange(len(order), device=order.device)
        rank -= torch.searchsorted(columns, every)[columns]
        last, kept = rank == self.count - 1, rank < self.count
        self.bounds[columns[last]] = values[last]
        return values[kept], columns[kept], rows[kept], costs[kept]
