"""The cross terms, or the self terms, of a pool of problems, as segments of the engine.

A pass reads scores or costs, so labels and the dimension of the points do not matter to it. What it
may get wrong is about what `one_segment` says of a single problem: certificates measure it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.engine.segments import PassErrors
from otdd_flash.kernels.adder import UNIT
from otdd_flash.kernels.segments.step import Sums
from otdd_flash.kernels.stored.step import stored_programs, stored_step
from otdd_flash.operators.kernel_vectors import KernelVectors, SegmentLayout
from otdd_flash.operators.one_segment import MEMORY
from otdd_flash.operators.score_pool import Pool, PooledCosts, Room, ScorePool


class PooledSegments(ABC):
    """B cross terms, or 2 B self terms, those of x and y of each problem in turn.

    Args:
        pool: the problems.
        tables: of `tables_of` for all that there is room for, on the device; kernels read there how
            many points there are.
        symmetric: whether these are the self terms.

    Attributes:
        vectors: potentials and what else there is of each column.
    """

    dtype = sum_dtype = torch.float32
    memory = MEMORY

    def __init__(self, pool: Pool, tables: Sequence[Tensor], *, symmetric: bool) -> None:
        self._pool, self._symmetric, room = pool, symmetric, pool.room
        self.device, self._tables = room.device, tables
        columns = room.problems * (room.points if symmetric else room.m)
        candidate = torch.zeros(columns, dtype=torch.float32, device=room.device)
        masses = pool.masses.view(-1)
        layouts = [SegmentLayout.of(table, columns) for table in self._tables]
        if not symmetric:
            layouts[0] = layouts[0]._replace(entries=room.problems * room.n)
        self.vectors = KernelVectors((masses, masses), layouts, candidate, self.memory)

    @abstractmethod
    def numbers(self, epsilon: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of an evaluation."""

    def restart(self, candidate: Tensor) -> None:
        """Begin again with other potentials of columns (entries,)."""
        for part in self.vectors.columns:
            part.zero_()
        self.vectors.columns.candidate.copy_(candidate)
        self.vectors.columns.kept.copy_(candidate)

    def updated(self, epsilon: Tensor) -> Tensor:
        """T'(T(g)) (entries,) of the potentials that were kept last, or T(g) of self terms.

        Args:
            epsilon: () float64, of the last evaluation.
        """
        return self.vectors.columns.kept + self.vectors.columns.residual

    def move_by(self, numbers: Tensor, active: Tensor) -> None:
        self.vectors.move(numbers, active)

    @property
    def facts(self) -> PooledCosts:
        """Facts of the costs, (S,) each."""
        known = self._pool.own if self._symmetric else self._pool.cross
        return PooledCosts(*(number.reshape(-1) for number in known))

    @property
    def mean_cost(self) -> Tensor:
        """The mean cost, above the lowest one where that is negative (S,)."""
        return self.facts.above_lowest

    @property
    def cost_spread(self) -> Tensor:
        """R >= max C - min C (S,)."""
        return self.facts.spread

    @property
    def offset(self) -> Tensor:
        """0: no term of one side is left out of the costs (S,)."""
        return torch.zeros_like(self.facts.mean)

    @property
    def errors(self) -> PassErrors:
        """Estimates of what rounding does to a pass in float32."""
        mean, lowest = self.facts.mean, self.facts.lowest.clamp_max(0)
        none, unit = torch.zeros_like(mean), UNIT + torch.zeros_like(mean)
        costs, reach = unit * (mean - 2 * lowest) / 2, unit * (mean - 2 * lowest)
        return PassErrors(costs, costs, none, unit / 2, none, none, unit, reach, none)


class ScoredSegments(PooledSegments):
    """Those of a pool whose scores are stored."""

    def __init__(self, pool: ScorePool, tables: Sequence[Tensor], *, symmetric: bool) -> None:
        super().__init__(pool, tables, symmetric=symmetric)
        self._scores, room = pool, pool.room
        self._programs = [stored_programs(table) for table in tables]
        entries = room.problems * (room.points if symmetric else max(room.n, room.m))
        highest = torch.zeros(entries, dtype=torch.float32, device=room.device)
        self._sums = Sums(highest, torch.ones_like(highest, dtype=torch.float64))

    def numbers(self, epsilon: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        vectors = self.vectors
        if not self._symmetric:
            self._half_step(0, epsilon, vectors.columns.candidate, active)
            vectors.take(self._sums, epsilon, active)
        self._half_step(-1, epsilon, vectors.rows, active)
        return vectors.evaluate(self._sums, epsilon, active)

    def _half_step(self, side: int, epsilon: Tensor, other: Tensor, active: Tensor) -> None:
        stored_step(
            self._scores.scores,
            self._scores.log2_masses,
            self._programs[side],
            self._tables[side],
            active,
            epsilon,
            other,
            self._sums,
        )


def tables_of(room: Room, n: int, m: int, *, symmetric: bool) -> list[Tensor]:
    """Where kernels find segments of so many points, (S, 8) int64 as `segmented_step` says.

    Rows first, and then with columns as rows; a single table of self terms.
    """
    first = torch.arange(room.problems) * room.points
    one, (start_x, start_y) = torch.ones_like(first), (first, first + room.n)
    if symmetric:
        sides = ((start_x, n * one), (start_y, m * one))
        # Rows, columns and their sums all lie where the points do.
        own = [(start, size, start, start, size, start, start, one) for start, size in sides]
        return [torch.stack([torch.stack(columns, 1) for columns in own], 1).flatten(0, 1)]
    index = torch.arange(room.problems)
    of_x, of_y = (start_x, n * one, index * room.n), (start_y, m * one, index * room.m)
    return [
        torch.stack((*rows, *columns, rows[2], one), 1)
        for rows, columns in ((of_x, of_y), (of_y, of_x))
    ]
