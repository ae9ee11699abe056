"""Small problems in Triton: their scores, the segments of the engine, and terms for certificates.

`KernelPool` is the pool of `score_pool` on a GPU: memory of fixed size, a `Room`, for the L points
of both sides of B problems, and for their scores. `solver.small.pooled_solve` fills the pool. Then
it calls `prepare`, iterates on the `segments` and certifies each `term`, in recorded graphs that
serve every batch that fits the room. So nothing here may wait for the device or read from the host
what depends on a batch. A segment is one term of one problem, as the engine iterates on it.

A pass reads scores alone, so labels and the dimension of the points do not matter to it. Rounding
errors of a pass are only estimated, as in `one_problem`, and decide how iterations proceed.
Certificates measure errors anew: `marginals` are in float64, with errors that must be upper bounds.

`MatrixPool` is for a given cost matrix, one problem without self terms; `solver.small.pooled_solve`
makes it, too. The matrix is not copied: kernels read its address and its sizes from the device's
memory. So the CUDA graphs that were recorded for one matrix serve every other of its type that fits
the room. Kernels need contiguous rows; of a matrix with contiguous columns `solver.small.route`
solves the transpose.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.cost.facts import SIDES
from otdd_flash.cost.host_points import spans
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
from otdd_flash.kernels.matrix.facts import Place, matrix_row_facts
from otdd_flash.kernels.matrix.sums import matrix_sums
from otdd_flash.kernels.matrix.sweep import fill_absent, matrix_sweep, row_weights
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
        for part in spans(rows.start, rows.stop, height):
            others = slice(part.start if symmetric else columns.start, columns.stop)
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


class MatrixPool(Pool):
    """Masses of a given matrix C (n, m), the facts of its costs, and its place.

    Inputs, to be filled first: `masses` and `cross_magnitudes`, 0 where there is no point,
    `of_costs`, the mean, the lowest and the highest cost, and the numbers of `place`.

    Args:
        room: for N >= n and M >= m points.
        numbers: (4,) int64 on the device, of a `Place`.

    Attributes:
        place: where the matrix is.
        log_masses: (N,) and (M,) float64, natural logarithms.
        weights: (N,) float32, of `row_weights`.
    """

    def __init__(self, room: Room, numbers: Tensor) -> None:
        super().__init__(room)
        self.place = Place(numbers, room.dtype, room.aligned)
        logs = self.zeros(room.points)[0]
        self.log_masses = logs[: room.n], logs[room.n :]
        self.weights = torch.zeros(room.n, dtype=torch.float32, device=room.device)

    def prepare(self, *, own: bool) -> None:
        """Compute logarithms and weights of the masses, and take `cross` from `of_costs`."""
        assert not own
        for logs, side in zip(self.log_masses, self.sides, strict=True):
            torch.log(side, out=logs)
        self.weights.copy_(row_weights(self.sides[0]))
        for known, number in zip(self.cross, self.of_costs, strict=True):
            known.copy_(number)

    def segments(self, tables: Sequence[Tensor], *, own: bool) -> PooledMatrix:
        assert not own
        return PooledMatrix(self, tables)

    def term(self, name: str) -> MatrixTerm:
        assert name == "xy"
        return MatrixTerm(self)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """Masses (N,) and (M,)."""
        return self.masses[0, : self.room.n], self.masses[0, self.room.n :]


class PooledMatrix(PooledKernelSegments):
    """The matrix as the only segment of the engine; an evaluation is one read of it.

    Args:
        pool: that holds it.
        tables: of `tables_of`, for rows and for columns.
    """

    def __init__(self, pool: MatrixPool, tables: Sequence[Tensor]) -> None:
        super().__init__(pool, tables, own=False)
        self._matrix = pool
        # The results of the last sweep for columns.
        self._swept: Sums | Tensor = pool.weights

    def softmin_rows(self, g: Tensor, before: Tensor, epsilon: Tensor, active: Tensor) -> Tensor:
        """Return T(g), by a sweep that finds what T'(T(g)) is made of as well."""
        pool = self._matrix
        swept = matrix_sweep(pool.place, pool.log_masses, pool.weights, g, epsilon, active)
        self._swept = swept.columns
        return swept.f

    def softmin_columns(
        self, f: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        return self._swept

    def evaluated(self, vectors: Vectors, epsilon: Tensor) -> Evaluated:
        """Return the potentials of the last evaluation, in columns without mass too."""
        found = super().evaluated(vectors, epsilon)
        pool = self._matrix
        fill_absent(pool.place, pool.log_masses, found.f, epsilon, found.updated)
        return found


class MatrixTerm:
    """The cross term of the matrix, as certificates need it; tensors have a leading dimension 1.

    Args:
        pool: after `prepare`.
    """

    passes = Passes(torch.float32, "triton, costs given", in_triton=True, recorded=True)

    def __init__(self, pool: MatrixPool) -> None:
        self._pool, room = pool, pool.room
        self.a, self.b = (pool.masses[:, side] for side in room.sides)
        x, y = (pool.cross_magnitudes[:, side] for side in room.sides)
        self._magnitudes = x, y

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (1, N) and g (1, M), in float64 throughout."""
        f, g = present(self.a, f), present(self.b, f if g is None else g)
        level = torch.as_tensor(epsilon, dtype=torch.float64, device=f.device)
        given = (f[0], g[0]), (self.a[0], self.b[0])
        rows, columns = matrix_sums(self._pool.place, *given, level, LEAST_EXPONENT)
        sums = self._where_mass(self.a, rows), self._where_mass(self.b, columns)
        exact = torch.zeros_like(self.a), torch.zeros_like(self.b)
        return measured(sums, (f, g), self._magnitudes, exact, 0.0)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (1, N) for masses q (1, M), float64: one read."""
        facts = matrix_row_facts(self._pool.place, self.a.shape[1], masses[0])
        return torch.where(self.a > 0, facts.products, 0)

    @staticmethod
    def _where_mass(masses: Tensor, sums: Tensor) -> Tensor:
        """Masses (1, N) times sums, which are unspecified where there is no point."""
        return torch.where(masses > 0, masses * sums, 0)
