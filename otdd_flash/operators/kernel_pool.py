"""Small problems in Triton: their scores, the segments of the engine, and terms for certificates.

A pass reads scores or costs, so labels and the dimension of the points do not matter to it. What it
may get wrong is about what `one_segment` says of a single problem: certificates measure it again.
`matrix_pool` has segments of its own for a cost matrix that is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import Form
from otdd_flash.engine.levels import Levels
from otdd_flash.engine.quasi_newton_kernels import QuasiNewtonKernels
from otdd_flash.engine.rule import Goal, Start
from otdd_flash.engine.segments import PassErrors
from otdd_flash.kernels.segments.step import Sums
from otdd_flash.kernels.stored.plan import signed_plan, stored_plan, stored_product
from otdd_flash.kernels.stored.scores import stored_scores
from otdd_flash.kernels.stored.step import stored_programs, stored_step
from otdd_flash.operators.base import CostFacts, Epsilon, Marginals
from otdd_flash.operators.few_vectors import MEMORY
from otdd_flash.operators.kernel_vectors import KernelVectors, SegmentLayout
from otdd_flash.operators.score_pool import (
    PRODUCTS,
    SIDES,
    UNIT,
    Pool,
    PooledCosts,
    PooledSegments,
    Room,
    ScorePool,
)
from otdd_flash.operators.tiled import LEAST_EXPONENT, measured, present

# The host does not know more while everything is launched.
UNKNOWN = CostFacts(torch.float32, 0.0, 0.0, 0.0, 0.0)


class KernelPool(ScorePool):
    """Stored scores of B problems that Triton kernels make and read.

    Attributes:
        scores: (B, L, L) float32.
    """

    def __init__(self, room: Room) -> None:
        super().__init__(room)
        self.scores = self.zeros(room.points, room.points, dtype=torch.float32)

    def block(self, rows: int, columns: int) -> Tensor:
        sides = self.room.sides
        return self.scores[:, sides[rows], sides[columns]]

    def segments(self, tables: Sequence[Tensor], *, own: bool) -> ScoredSegments:
        return ScoredSegments(self, tables, symmetric=own)

    def rule(self, segments: PooledSegments, form: Form) -> QuasiNewtonKernels:
        return kernel_rule(segments, form)

    def term(self, name: str) -> PooledTerm:
        return PooledTerm(self, name)

    def signed_plan(
        self, cross: Tensor, own: Tensor | None, epsilon: Tensor, rows: slice
    ) -> Tensor:
        return signed_plan(self.scores, cross, own, self.masses, epsilon, rows, self.room.n)

    def _store(self, points: Tensor, squares: Tensor, rows: slice, columns: slice) -> None:
        # As many rows at once as fit.
        symmetric, labels = rows is columns, self.labels
        width = columns.stop - columns.start
        height = max(1, PRODUCTS // (self.room.problems * width))
        for first in range(rows.start, rows.stop, height):
            part = slice(first, min(first + height, rows.stop))
            others = slice(first if symmetric else columns.start, columns.stop)
            stored_scores(
                torch.bmm(points[:, part], points[:, others].mT),
                (squares[:, part], squares[:, others]),
                (labels[:, part], labels[:, others]),
                self.class_costs,
                self.lambda_x,
                (self.scores[:, part, others], self.scores[:, others, part]),
                symmetric=symmetric,
            )


def kernel_rule(segments: PooledSegments, form: Form) -> QuasiNewtonKernels:
    """The iterations of the vectors of a pool in kernels."""
    vectors = cast(PooledVectors, segments)
    ones = torch.ones(len(segments.mean_cost), dtype=torch.float64)
    nowhere = Start(Levels.descending(ones), torch.zeros_like(ones))
    return QuasiNewtonKernels(vectors, Goal(1.0, 1.0, 1.0, 0), form, nowhere)


class PooledVectors(ABC):
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
        for part in self.vectors.columns:
            part.zero_()
        self.vectors.columns.candidate.copy_(candidate)
        self.vectors.columns.kept.copy_(candidate)

    def updated(self, epsilon: Tensor) -> Tensor:
        return self.vectors.columns.kept + self.vectors.columns.residual

    def move_by(self, numbers: Tensor, active: Tensor) -> None:
        self.vectors.move(numbers, active)

    @property
    def rows(self) -> Tensor:
        return self.vectors.rows

    @property
    def kept(self) -> Tensor:
        return self.vectors.columns.kept

    @property
    def facts(self) -> PooledCosts:
        known = self._pool.own if self._symmetric else self._pool.cross
        return PooledCosts(*(number.reshape(-1) for number in known))

    @property
    def mean_cost(self) -> Tensor:
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


class ScoredSegments(PooledVectors):
    """Those of a pool whose scores are stored."""

    def __init__(self, pool: KernelPool, tables: Sequence[Tensor], *, symmetric: bool) -> None:
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


class PooledTerm:
    """A term of B problems; it reads the pool, and is gone with what stands there.

    Potentials and all that is made of them have a leading dimension B.

    Args:
        pool: as `prepare` left it.
        term: "xy", "xx" or "yy".
    """

    dtype, costs = torch.float32, UNKNOWN

    def __init__(self, pool: KernelPool, term: str) -> None:
        self._pool, (one, two) = pool, SIDES[term]
        rows, columns = pool.room.sides[one], pool.room.sides[two]
        self.a, self.b = pool.masses[:, rows], pool.masses[:, columns]
        self._scores = pool.block(one, two), pool.block(two, one)
        magnitudes = pool.own_magnitudes if one == two else pool.cross_magnitudes
        self._magnitudes = magnitudes[:, rows], magnitudes[:, columns]

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (B, n) and g (B, m), in float64 throughout."""
        scores, transposed = self._scores
        f, g = present(self.a, f), present(self.b, g)
        level = torch.as_tensor(epsilon, dtype=torch.float64, device=f.device)
        rows = stored_plan(scores, f, g, self.b, level, LEAST_EXPONENT)
        columns = stored_plan(transposed, g, f, self.a, level, LEAST_EXPONENT)
        share, (x, y) = self._pool.error_share, self._magnitudes
        sums, errors = (self.a * rows, self.b * columns), (share * x, share * y)
        return measured(sums, (f, g), self._magnitudes, errors, self._pool.rounding)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (B, n) for masses q (B, m), float64: one read of the scores."""
        return -stored_product(self._scores[0], masses)

    def own_costs(self) -> Tensor:
        """C_ii (B, n) for the cost of a cloud with itself, float64; computed once."""
        return self._own_costs

    @cached_property
    def _own_costs(self) -> Tensor:
        return -self._scores[0].diagonal(dim1=1, dim2=2).double()
