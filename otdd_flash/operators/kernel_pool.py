"""Small problems in Triton: their scores, the segments of the engine, and terms for certificates.

`KernelPool` is the pool of `score_pool` on a GPU: memory of fixed size, a `Room`, for the L points
of both sides of B problems, and for their scores. `solver.small.pooled_solve` drives it: it fills
the pool; then it calls `prepare`, iterates on the `segments` and certifies each `term`, in recorded
graphs that serve every batch that fits the room. A segment is one term of one problem, as the
engine iterates on it.

A pass reads scores alone, so labels and the dimension of the points do not matter to it. Rounding
errors of a pass are only estimated, as `one_problem` does; they decide how iterations proceed, and
certificates measure errors anew. `matrix_pool` has segments of its own for a given cost matrix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.cost.facts import SIDES
from otdd_flash.engine.few_problems import MEMORY
from otdd_flash.engine.problems import Evaluated, Start, Vectors
from otdd_flash.engine.quasi_newton_kernels import (
    KernelVectors,
    Pace,
    QuasiNewtonKernels,
    SegmentLayout,
    softness_of,
)
from otdd_flash.formulas.decision import Form
from otdd_flash.kernels.segments.step import Sums
from otdd_flash.kernels.stored import (
    signed_plan,
    stored_plan,
    stored_product,
    stored_programs,
    stored_scores,
    stored_step,
)
from otdd_flash.operators.base import Epsilon, Marginals, Passes
from otdd_flash.operators.score_pool import (
    PRODUCTS,
    Pool,
    PooledIterations,
    PooledSegments,
    Room,
    ScorePool,
)
from otdd_flash.operators.torch_operator import LEAST_EXPONENT, measured, present


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
        return ScoredSegments(self, tables, own=own)

    def term(self, name: str) -> PooledTerm:
        return PooledTerm(self, name)

    def signed_plan(
        self, cross: Tensor, own: Tensor | None, epsilon: Tensor, rows: slice
    ) -> Tensor:
        return signed_plan(self.scores, cross, own, self.masses, epsilon, rows, self.room.n)

    def _store(self, points: Tensor, squares: Tensor, rows: slice, columns: slice) -> None:
        # As many rows at once as `PRODUCTS` allows.
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


class PooledKernelSegments(PooledSegments):
    """Segments whose passes and vectors are in Triton.

    Args:
        pool: the problems.
        tables: of `tables_of` for all B problems of the room, on the device, where kernels read how
            many points a problem has.
        own: whether these are the self terms.
    """

    # `pooled_solve` records steps in its own graph and reads the device itself.
    pace: Pace = "ahead"
    softness: Tensor | None = None

    def __init__(self, pool: Pool, tables: Sequence[Tensor], *, own: bool) -> None:
        super().__init__(pool, own=own)
        room = pool.room
        self.device, self._tables = room.device, tables
        self._entries = room.problems * (room.points if own else room.m)
        self.masses = pool.masses.view(-1), pool.masses.view(-1)
        self.layouts = [SegmentLayout.of(table, self._entries) for table in tables]
        if not own:
            self.layouts[0] = self.layouts[0]._replace(entries=room.problems * room.n)

    @abstractmethod
    def softmin_rows(
        self, g: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        """Return T(g), or the sums that it is made of."""

    @abstractmethod
    def softmin_columns(
        self, f: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        """Return T'(f), or T(f) of self terms, or the sums that it is made of."""

    def iterations(self, form: Form) -> QuasiNewtonKernels:
        self._constraints = form.constraints
        self.softness = softness_of(form.constraints, len(self._tables[0]), self.device)
        nothing = torch.zeros(self._entries, dtype=torch.float32, device=self.device)
        vectors = KernelVectors(self, nothing, MEMORY)
        goal, start = self.placeholder
        return QuasiNewtonKernels(self, vectors, goal, form, start)

    def begin(
        self, iterations: PooledIterations, candidate: Tensor, settings: Tensor, start: Start
    ) -> None:
        if self.softness is not None:
            # Penalties may be other ones than those of the last batch.
            self.softness[:, 0] = self._constraints.rows.softness
            self.softness[:, 1] = self._constraints.columns.softness
        super().begin(iterations, candidate, settings, start)

    def evaluated(self, vectors: Vectors, epsilon: Tensor) -> Evaluated:
        assert vectors.rows is not None
        return Evaluated(vectors.rows, vectors.kept, vectors.updated)

    def keep(self, order: Tensor) -> None:
        """Continue with all problems: a pool never leaves out those that are done."""
        assert len(order) == len(self._tables[0])


class ScoredSegments(PooledKernelSegments):
    """Segments on the stored scores of a pool."""

    def __init__(self, pool: KernelPool, tables: Sequence[Tensor], *, own: bool) -> None:
        super().__init__(pool, tables, own=own)
        self._scores, room = pool, pool.room
        self._programs = [stored_programs(table) for table in tables]
        entries = room.problems * (room.points if own else max(room.n, room.m))
        highest = torch.zeros(entries, dtype=torch.float32, device=room.device)
        self._sums = Sums(highest, torch.ones_like(highest, dtype=torch.float64))

    def softmin_rows(self, g: Tensor, before: Tensor, epsilon: Tensor, active: Tensor) -> Sums:
        return self._half_step(0, epsilon, g, active)

    def softmin_columns(self, f: Tensor, before: Tensor, epsilon: Tensor, active: Tensor) -> Sums:
        return self._half_step(-1, epsilon, f, active)

    def _half_step(self, side: int, epsilon: Tensor, other: Tensor, active: Tensor) -> Sums:
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
        return self._sums


class PooledTerm:
    """A term of B problems, for certificates; valid until the pool is filled again.

    Potentials and all that is made of them have a leading dimension B.

    Args:
        pool: as `prepare` left it.
        term: "xy", "xx" or "yy".
    """

    passes = Passes(torch.float32, "triton, scores kept", in_triton=True, recorded=True)

    def __init__(self, pool: KernelPool, term: str) -> None:
        self._pool, (one, two) = pool, SIDES[term]
        rows, columns = pool.room.sides[one], pool.room.sides[two]
        self.a, self.b = pool.masses[:, rows], pool.masses[:, columns]
        self._scores = pool.block(one, two), pool.block(two, one)
        magnitudes = pool.own_magnitudes if one == two else pool.cross_magnitudes
        self._magnitudes = magnitudes[:, rows], magnitudes[:, columns]

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (B, n) and g (B, m), in float64 throughout."""
        scores, transposed = self._scores
        own_costs = self._own_costs if g is None else None
        f, g = present(self.a, f), present(self.b, f if g is None else g)
        level = torch.as_tensor(epsilon, dtype=torch.float64, device=f.device)
        rows = stored_plan(scores, f, g, self.b, level, LEAST_EXPONENT)
        columns = stored_plan(transposed, g, f, self.a, level, LEAST_EXPONENT)
        share, (x, y) = self._pool.error_share, self._magnitudes
        sums, errors = (self.a * rows, self.b * columns), (share * x, share * y)
        given = self._magnitudes, errors, self._pool.rounding
        return measured(sums, (f, g), *given, own_costs)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (B, n) for masses q (B, m), float64: one read of the scores."""
        return -stored_product(self._scores[0], masses)

    @cached_property
    def _own_costs(self) -> Tensor:
        """C_ii (B, n) for the cost of a cloud with itself, float64."""
        return -self._scores[0].diagonal(dim1=1, dim2=2).double()
