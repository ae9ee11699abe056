"""A given cost matrix as a pool of one problem without self terms, for `solver.small`.

The matrix is not copied: kernels read its address and its sizes from the device's memory. So the
CUDA graphs that were recorded for one matrix serve every other of its type that fits the room. Rows
are contiguous in memory: where columns of the given matrix are, its transpose is solved.
`solver.small.pooled_solve` makes a `MatrixPool`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.engine.problems import Evaluated, Vectors
from otdd_flash.kernels.matrix.facts import Place, matrix_row_facts
from otdd_flash.kernels.matrix.sums import matrix_sums
from otdd_flash.kernels.matrix.sweep import fill_absent, matrix_sweep, row_weights
from otdd_flash.kernels.segments.step import Sums
from otdd_flash.operators.base import Epsilon, Marginals, Passes
from otdd_flash.operators.kernel_pool import PooledKernelSegments
from otdd_flash.operators.score_pool import Pool, Room
from otdd_flash.operators.torch_operator import LEAST_EXPONENT, measured, present


class MatrixPool(Pool):
    """Masses of a given matrix C (n, m), what is known of its costs, and where it is.

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
        # What the last sweep has found of columns.
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
