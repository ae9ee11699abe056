"""Passes over all costs in float64: least reduced costs of rows and columns, and the arcs there.

For potentials f (n,) and g (m,) the reduced cost of a pair is C_ij - f_i - g_j. `price` computes
it for all pairs, in blocks of rows, and keeps

    min_j (C_ij - g_j)        for every row: the c-transform of g, feasible with g by construction;
    the k least reduced costs of every row and of every column, as arcs (i, j) with their costs.

Nothing has n x m entries but a block. Points and given matrices differ by `PointCosts` and
`MatrixCosts` alone. `solve` calls these. A change must keep that the costs of arcs are the very
numbers of the pass, whose errors `ExactCosts.errors` bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.cost.points import LabelledCost
from otdd_flash.operators.given_costs import CostSource, GivenCosts
from otdd_flash.operators.point_scores import CentredProducts, cost_tiles
from otdd_flash.operators.torch_operator import TorchOperator

# Entries of a block of costs. A block is read some five times and takes three buffers of its size.
BLOCK_ELEMENTS_CPU, BLOCK_ELEMENTS_GPU = 1 << 22, 1 << 27

Vector = NDArray[np.float64]
Places = NDArray[np.int64]


class ExactCosts(Protocol):
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

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of rows, in order, and C[rows] (h, m), in a buffer that is overwritten."""
        ...


class PointCosts:
    """The cost between two labelled clouds; see `ExactCosts`. Points may be streamed.

    Args:
        cost: of the points as the ground cost transforms them.
        error: of the cost, by that of these points.
    """

    def __init__(self, cost: LabelledCost, error: float) -> None:
        self._cost, self._products = cost, CentredProducts(cost)
        of_rows, of_columns = self._products.errors
        self.a, self.b, self.errors = cost.a, cost.b, (of_rows + error, of_columns)
        self.lowest, self.highest = cost.cost_range
        self.mean, self.forbidden = cost.mean_cost, False

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        n, m = self._cost.shape
        height = block_height(n, m, self.a.device)
        buffer = self.a.new_empty((height, m))
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            block = buffer[: rows.stop - start]
            for part, columns, negative in cost_tiles(self._cost, self._products, rows):
                torch.neg(negative, out=block[part.start - start : part.stop - start, columns])
            yield rows, block


class MatrixCosts:
    """A given cost, in memory or computed by a user's function; see `ExactCosts`."""

    def __init__(self, operator: TorchOperator[GivenCosts]) -> None:
        self._costs: CostSource = operator.source.costs
        self.a, self.b, self.errors = operator.a, operator.b, operator.source.cost_errors
        facts = operator.source.facts
        self.lowest, self.highest, self.mean = facts.lowest, facts.highest, facts.mean
        self.forbidden = facts.forbidden

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        n, m = self._costs.shape
        asked = self._costs.block_entries
        height = block_height(n, m, self.a.device) if asked is None else max(1, min(n, asked // m))
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            yield rows, self._costs.rows(rows).double()


def block_height(n: int, m: int, device: torch.device) -> int:
    """Return the rows of a block of costs."""
    return max(1, min(n, (BLOCK_ELEMENTS_GPU if device.type != "cpu" else BLOCK_ELEMENTS_CPU) // m))


class Arcs(NamedTuple):
    """Pairs (i, j) with their costs, on the host, without duplicates and sorted by row.

    Attributes:
        rows: (k,) i.
        columns: (k,) j.
        costs: (k,) C_ij, finite.
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
    """What one pass finds for potentials f and g.

    Attributes:
        row_least: (n,) min_j (C_ij - g_j) over columns with mass.
        arcs: those of the least reduced costs.
        wanted: those asked for, of any cost; none if none were.
    """

    row_least: Vector
    arcs: Arcs
    wanted: Arcs


def price(
    costs: ExactCosts,
    f: Vector,
    g: Vector,
    count: int,
    *,
    below: float = np.inf,
    wanted: tuple[Places, Places] | None = None,
) -> Priced:
    """Pass over all costs, at potentials f (n,) and g (m,).

    Args:
        costs: C.
        f: in units of the cost; read where rows have mass.
        g: likewise of columns.
        count: arcs of every row, and of every column, that have the least reduced costs.
        below: only those whose reduced cost is less.
        wanted: rows, sorted, and columns of further arcs to return.
    """
    a, b, n, m = costs.a, costs.b, len(f), len(g)
    # Points without mass get arcs of infinite reduced cost.
    of_rows, of_columns = (
        torch.where(masses > 0, torch.from_numpy(values).to(masses.device), -torch.inf)
        for masses, values in ((a, f), (b, g))
    )
    least, columns = torch.empty_like(a), _ColumnLeast(min(count, n))
    found, asked = [], []
    for rows, block in costs.blocks():
        less = block - of_columns
        least[rows] = less.amin(1)
        less -= of_rows[rows, None]
        if wanted is not None:
            part = slice(*np.searchsorted(wanted[0], (rows.start, rows.stop)))
            i, j = (torch.from_numpy(places[part]).to(a.device) for places in wanted)
            asked.append(_on_host(i, j, block[i - rows.start, j]))
        values, places = torch.topk(less, min(count, m), 1, largest=False, sorted=False)
        i, k = ((values < below) & (values < torch.inf)).nonzero().unbind(1)
        j = places[i, k]
        found.append(_on_host(i + rows.start, j, block[i, j]))
        columns.add(rows.start, less, block)
    k, j = ((columns.values < below) & (columns.values < torch.inf)).nonzero().unbind(1)
    found.append(_on_host(columns.rows[k, j], j, columns.costs[k, j]))
    return Priced(least.cpu().numpy(), Arcs.joined(m, *found), Arcs.joined(m, *asked))


def _on_host(rows: Tensor, columns: Tensor, costs: Tensor) -> Arcs:
    return Arcs(*(side.cpu().numpy() for side in (rows, columns, costs)))


class _ColumnLeast:
    """The k least reduced costs of every column so far, their rows and costs, (k, m) each."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values = self.rows = self.costs = torch.empty(0)

    def add(self, start: int, less: Tensor, block: Tensor) -> None:
        """Add a block of reduced costs (h, m) and of costs, whose first row is `start`."""
        count = min(self.count, len(less))
        values, places = torch.topk(less, count, 0, largest=False, sorted=False)
        rows, costs = places + start, block.gather(0, places)
        if len(self.values):
            values, rows, costs = (
                torch.cat(pair)
                for pair in ((self.values, values), (self.rows, rows), (self.costs, costs))
            )
        if len(values) > self.count:
            values, order = torch.topk(values, self.count, 0, largest=False, sorted=False)
            rows, costs = rows.gather(0, order), costs.gather(0, order)
        self.values, self.rows, self.costs = values, rows, costs
