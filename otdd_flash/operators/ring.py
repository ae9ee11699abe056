"""A part of a cost whose own points are here, while those of the other side come round a ring.

Rank r holds rows R_r of one cloud, or columns C_r, and a shard of the other. It computes with one
shard of the other side after the other, each a cost like any other:

    f_i = -epsilon log sum_s w_s exp(-f_i^s / epsilon)

with the softmin f^s over shard s, whose masses are divided by their sum w_s. Whatever the order in
which shards come by, their sums are added in the order of the ranks. Labels, masses and norms of
all points are on every rank; they are little beside the points.

All ranks call every operation together, also those that own no points.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.base import (
    Applied,
    CostFacts,
    Epsilon,
    Execution,
    Marginals,
    Operator,
    refined,
)
from otdd_flash.operators.labelled_cost import DOUBLE_UNIT, LabelledCost
from otdd_flash.operators.owned import Owned, Rows
from otdd_flash.operators.parts import Build, Part, Parts, errors_of, normalised, sides_of
from otdd_flash.operators.self_share import merged

# Roundings of a mass that is divided by its shard's and multiplied again.
ROUNDINGS = 8


class Shard(NamedTuple):
    """The points (k, d) of this rank, and how those of all are divided."""

    points: Tensor
    owned: Owned

    def circulated(self, ranks: Ranks) -> Iterator[tuple[int, Rows, Tensor]]:
        """Every rank's: its number, which points they are, and where they are."""
        count = self.owned.count
        padded = self.points.new_zeros((-(-count // ranks.size), self.points.shape[1]))
        padded[: len(self.points)] = self.points
        for rank, points in ranks.circulated(padded):
            share = ranks.share(count, rank)
            yield rank, self.owned.of(ranks, rank), points[: share.stop - share.start]


class RingPart:
    """P_r, or Q_r, of points that no rank holds all of.

    Args:
        ranks: that hold the shards.
        cost: the whole, without its points.
        shards: of rows and of columns.
        columns: whether the own side are columns: Q_r.
        build: makes the operator of a pair of shards.
        high: whether operators are to be refined.

    Attributes:
        mass: of the own points, whose masses are divided by it.
        a: (.,) masses of the rows, likewise b of the columns.
        dtype: of what is found; parts of no points know no other.
    """

    dtype = torch.float64

    def __init__(
        self,
        ranks: Ranks,
        cost: LabelledCost,
        shards: tuple[Shard, Shard],
        *,
        columns: bool,
        build: Build,
        high: bool = False,
    ) -> None:
        self._ranks, self._cost, self._shards, self._build = ranks, cost, shards, build
        self._columns, self._high = columns, high
        self._own, self._other = shards[::-1] if columns else shards
        self._rows = self._own.owned.of(ranks)
        own = (cost.b if columns else cost.a)[self._rows]
        masses, self.mass = normalised(own)
        self.a, self.b = (cost.a, masses) if columns else (masses, cost.b)

    def _tiles(self) -> Iterator[tuple[int, Rows, Operator, float]]:
        """Of every shard of the other side: its rank, points, operator and mass."""
        for rank, there, points in self._other.circulated(self._ranks):
            if not len(points) or not len(self._own.points):
                continue
            own = self._own.points
            if self._columns:
                part = self._cost.part(there, self._rows, (points, own))
            else:
                part = self._cost.part(self._rows, there, (own, points))
            part.a, of_rows = normalised(part.a)
            part.b, of_columns = normalised(part.b)
            operator = self._build(part)
            if self._high:
                operator = refined(operator)
            yield rank, there, operator, of_rows if self._columns else of_columns

    @property
    def execution(self) -> Execution:
        """What ends a solve; all else is asked of another operator."""
        return Execution("points in a ring", _nothing, None, None if self._high else self._refined)

    def _refined(self) -> RingPart:
        return RingPart(
            self._ranks,
            self._cost,
            self._shards,
            columns=self._columns,
            build=self._build,
            high=True,
        )

    @cached_property
    def costs(self) -> CostFacts:
        """What is known of the costs; asks for all shards of the other side."""
        (rows, columns), rounding = self._errors
        error = rounding + float(self.a @ rows + self.b @ columns)
        return CostFacts(self.dtype, self._cost.mean_cost, *self._cost.cost_range, error)

    @property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): what costs of accurate `marginals` are off by, but for their rounding."""
        return self._errors[0]

    @cached_property
    def _errors(self) -> tuple[tuple[Tensor, Tensor], float]:
        rows, columns = torch.zeros_like(self.a), torch.zeros_like(self.b)
        rounding = 0.0
        for _, there, operator, _ in self._tiles():
            (of_rows, of_columns), rounded = errors_of(operator)
            own, other = (of_columns, of_rows) if self._columns else (of_rows, of_columns)
            mine, theirs = (columns, rows) if self._columns else (rows, columns)
            torch.maximum(mine, own, out=mine)
            theirs[there] = other
            rounding = max(rounding, rounded)
        return (rows, columns), rounding

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Of P_r: f (k,), float64."""
        return self._softmin(g, epsilon, guess)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Of Q_r: g (k,), float64."""
        return self._softmin(f, epsilon, guess)

    def own_costs(self) -> Tensor:
        """Never asked for."""
        raise AssertionError("the whole cost knows them")

    def _softmin(self, potential: Tensor, epsilon: Epsilon, guess: Tensor | None) -> Tensor:
        """The softmin (k,) of the own points of the other side's potential, float64."""
        found: dict[int, Tensor] = {}
        for rank, there, operator, mass in self._tiles():
            softmin = operator.softmin_columns if self._columns else operator.softmin_rows
            part = softmin(potential[there], epsilon, guess).double()
            found[rank] = part - epsilon * torch.tensor(mass, dtype=torch.float64).log()
        if not found:
            return potential.new_empty(0, dtype=torch.float64)
        return merged(torch.stack([found[rank] for rank in sorted(found)]), epsilon)

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Of P_r: sums of the own rows, of f (k,), and their part of all columns, of g (m,)."""
        own = len(self._own.points)
        rows, row_errors = (f.new_zeros(own, dtype=torch.float64) for _ in range(2))
        columns, column_errors = torch.zeros_like(self._cost.b), torch.zeros_like(self._cost.b)
        parts: dict[int, Tensor] = {}
        numbers = torch.zeros(3, dtype=torch.float64)
        for rank, there, operator, mass in self._tiles():
            found = operator.marginals(f, g[there], epsilon, accurate=accurate)
            parts[rank] = mass * found.rows
            columns[there], column_errors[there] = mass * found.columns, found.column_errors
            row_errors = torch.maximum(row_errors, found.row_errors)
            mine = (found.cost_rounding, found.relative_error, found.lost)
            numbers = torch.maximum(numbers, torch.tensor(mine, dtype=torch.float64))
        for rank in sorted(parts):
            rows += parts[rank]
        cost_rounding, relative_error, lost = numbers.tolist()
        relative_error += (self._ranks.size + ROUNDINGS) * DOUBLE_UNIT
        return Marginals(
            rows, columns, row_errors, column_errors, cost_rounding, relative_error, lost
        )

    def apply_plan(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        values: Tensor,
        *,
        transposed: bool = False,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> Applied:
        """Products (k, .) and masses (k,) of the own points; all of the other side is given."""
        parts: dict[int, Applied] = {}
        own = len(self._own.points)
        for rank, there, operator, mass in self._tiles():
            potentials = (f[there], g) if transposed else (f, g[there])
            near = None
            if factors is not None:
                left, right = factors
                near = (left[there], right) if transposed else (left, right[there])
            found = operator.apply_plan(
                *potentials, epsilon, values[there], transposed=transposed, factors=near
            )
            parts[rank] = Applied(mass * found.values, mass * found.masses)
        masses = f.new_zeros(own, dtype=torch.float64)
        out = values.new_zeros((own, values.shape[1]))
        for rank in sorted(parts):
            out = out + parts[rank].values
            masses += parts[rank].masses
        return Applied(out, masses)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Of P_r: sum_j C_ij q_j (k,) for masses q (m,), float64."""
        parts = {
            rank: operator.expected_costs(masses[there])
            for rank, there, operator, _ in self._tiles()
        }
        total = masses.new_zeros(len(self._own.points))
        for rank in sorted(parts):
            total += parts[rank]
        return total


def ring_parts(
    ranks: Ranks,
    cost: LabelledCost,
    points: tuple[Tensor, Tensor],
    first: tuple[Tensor, Tensor],
    build: Build,
) -> Parts:
    """What this rank holds of a cost whose points go round.

    Args:
        ranks: that share it.
        cost: the whole, without its points.
        points: of this rank, rows and columns of the cost.
        first: the first row and column, (1, d).
        build: makes operators of pairs of shards.
    """
    sides = sides_of(cost)
    shards = Shard(points[0], sides[0]), Shard(points[1], sides[1])
    rows = RingPart(ranks, cost, shards, columns=False, build=build)
    columns = None if cost.symmetric else RingPart(ranks, cost, shards, columns=True, build=build)
    beginning = build(cost.part(slice(0, 1), slice(0, 1), first))
    return Parts(
        cost,
        sides,
        beginning,
        Part(rows, rows.mass),
        None if columns is None else Part(columns, columns.mass),
    )


def _nothing(*args: object, **kwargs: object) -> None:
    raise AssertionError("a part has no solve of its own")
