"""A cost matrix in memory whose passes run in Triton kernels on a GPU.

A half-step, the sums of a plan and the facts of the matrix read it once each, along its contiguous
axis. If rows are contiguous and have at most `MOST_COLUMNS` entries, one read serves both
half-steps of an iteration of a cross term with exact marginals. Products with the plan run in
PyTorch.

`solver.matrix_comparison` calls `kernel_facts` and builds the operator. `one_problem` makes its
problem for the engine. If the operator `fits_sweeps`, `solver.small.route` takes address and layout
of the matrix from it and solves in recorded CUDA graphs (`kernel_pool.MatrixPool`). `marginals`
must stay in float64, with the error bounds of `torch_operator.measured`, because certificates read
them. `kernel_facts` must leave forbidden pairs and invalid entries to `given_costs.matrix_facts`,
which refuses the latter by name.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts, CostRange
from otdd_flash.cost.points import Masses
from otdd_flash.engine.problems import Evaluated, Vectors
from otdd_flash.formulas.decision import Form
from otdd_flash.kernels.launch import on_device
from otdd_flash.kernels.matrix.facts import Place, is_aligned, matrix_row_facts, numbers_of
from otdd_flash.kernels.matrix.half_step import line_parts, matrix_half_step, matrix_sums_of_lines
from otdd_flash.kernels.matrix.sums import matrix_sums
from otdd_flash.kernels.matrix.sweep import (
    MOST_COLUMNS,
    Swept,
    fill_absent,
    matrix_sweep,
    row_weights,
)
from otdd_flash.kernels.segments.step import Sums
from otdd_flash.operators.base import Epsilon, Marginals, Passes
from otdd_flash.operators.given_costs import (
    GivenCosts,
    HeldCosts,
    MatrixFacts,
    exact_blocks,
    matrix_facts,
)
from otdd_flash.operators.one_kernel_problem import OneKernelProblem
from otdd_flash.operators.torch_operator import (
    LEAST_EXPONENT,
    TiledPlan,
    TorchOperator,
    measured,
    present,
)
from otdd_flash.operators.triton_plans import single

# Bytes of a matrix up to which a pass is about as short as its launch, so that steps are recorded.
FEW_BYTES = 1 << 28


class MatrixKernelOperator:
    """A given cost C (n, m) on a GPU.

    Args:
        tiles: the operator of the same matrix in PyTorch, with scores in float32. A matrix without
            a contiguous axis is copied.

    Attributes:
        lines: C, or its transpose, with contiguous rows.
        transposed: whether `lines` is the transpose.
        passes: how passes run.
    """

    def __init__(self, tiles: TorchOperator[GivenCosts]) -> None:
        source = tiles.source.costs
        assert isinstance(source, HeldCosts)
        self._tiles, self.a, self.b = tiles, tiles.a.contiguous(), tiles.b.contiguous()
        self.lines, self.transposed = row_contiguous(source.matrix)
        few = self.lines.numel() * self.lines.itemsize <= FEW_BYTES
        self.passes = Passes(
            tiles.dtype, "triton, costs given", in_triton=True, recorded=self.a.is_cuda and few
        )

    @property
    def costs(self) -> CostFacts:
        return self._tiles.costs

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        return self._half_step(self._log_masses[1], g, epsilon, columns=self.transposed)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        return self._half_step(self._log_masses[0], f, epsilon, columns=not self.transposed)

    def softmin_self(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute T(f) (n,) for the potential of a self term."""
        return self.softmin_rows(f, epsilon)

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Compute row and column sums of the plan of f (n,) and g (m,), in float64 throughout."""
        tiles, level = self._tiles, on_device(epsilon, self.a.device)
        source, own_costs = tiles.source, tiles.source.diagonal() if g is None else None
        f, g = present(self.a, f), present(self.b, f if g is None else g)
        if self.transposed:
            given = (g, f), (self.b, self.a)
            columns, rows = matrix_sums(self.place, *given, level, LEAST_EXPONENT)
        else:
            given = (f, g), (self.a, self.b)
            rows, columns = matrix_sums(self.place, *given, level, LEAST_EXPONENT)
        sums = self.a * rows, self.b * columns
        return measured(sums, (f, g), source.magnitudes, source.cost_errors, 0.0, own_costs)

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> TiledPlan:
        """Build the plan of f (n,) and g (m,), whose products run in PyTorch."""
        return self._tiles.plan(f, g, epsilon, most)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64, over allowed pairs."""
        if self.transposed:
            return self._tiles.expected_costs(masses)
        # A copy: Triton compiles a kernel again for a vector whose address is not aligned.
        return matrix_row_facts(self.place, len(self.a), masses.clone()).products

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> MatrixKernelOperator:
        """Return the cost between some rows and columns, with other masses."""
        return MatrixKernelOperator(self._tiles.sample(rows, columns, masses))

    def softmin_over(self, columns: Tensor, g: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute the softmin of rows over some columns, in PyTorch, which copies no matrix."""
        return self._tiles.softmin_over(columns, g, epsilon)

    @property
    def refined(self) -> MatrixKernelOperator:
        """The operator itself: nothing was rounded for passes alone."""
        return self

    @cached_property
    def _log_masses(self) -> tuple[Tensor, Tensor]:
        return self.a.log(), self.b.log()

    @property
    def fits_sweeps(self) -> bool:
        """Whether registers hold a line of the matrix, as sweeps ask."""
        return self.lines.shape[1] <= MOST_COLUMNS

    @property
    def place_numbers(self) -> tuple[int, int, int, int]:
        """The numbers of `place`, on the host."""
        return numbers_of(self.lines)

    @property
    def aligned(self) -> bool:
        """Whether `lines` are aligned as `Place` says."""
        return is_aligned(self.lines)

    @property
    def sweeps(self) -> bool:
        """Whether one read of the matrix serves both half-steps.

        T'(f) needs f, and f_i needs the whole row i: rows have to be contiguous, and short enough
        for registers to hold one until f_i is computed.
        """
        return not self.transposed and self.fits_sweeps

    def sweep(self, g: Tensor, epsilon: Tensor, active: Tensor) -> Swept:
        """Compute T(g) and partial sums of T'(T(g)) in one read, if the operator `sweeps`.

        Args:
            g: (m,) float32.
            epsilon: (1,) float64 on the device.
            active: (1,) bool; the kernel does nothing if it is False.
        """
        return matrix_sweep(self.place, self._log_masses, self._weights, g, epsilon, active)

    def fill_absent(self, f: Tensor, epsilon: float, updated: Tensor) -> None:
        """Compute T'(f) for columns without mass, which sweeps leave out.

        Args:
            f: (n,) float32.
            epsilon: in units of the cost.
            updated: (m,) float32, T'(f) for the other columns; completed in place.
        """
        level = on_device(epsilon, f.device)
        fill_absent(self.place, self._log_masses, f, level, updated)

    @cached_property
    def place(self) -> Place:
        """The address and strides of `lines`, for kernels."""
        return Place.of(self.lines)

    @cached_property
    def _weights(self) -> Tensor:
        return row_weights(self.a)

    def sums_of_lines(self, potential: Tensor, epsilon: Tensor, *, columns: bool) -> Sums:
        """Compute the partial sums of the softmin of rows, or of columns."""
        log_masses = self._log_masses[0 if columns else 1]
        along = columns != self.transposed
        return matrix_sums_of_lines(self.lines, log_masses, potential, epsilon, columns=along)

    @property
    def ranges(self) -> tuple[int, int]:
        """The numbers of partial sums of a row and of a column."""
        shape = self.lines.shape[0], self.lines.shape[1]
        rows, columns = (
            line_parts(shape, columns=along != self.transposed)[0] for along in (False, True)
        )
        return rows, columns

    def _half_step(
        self, log_masses: Tensor, potential: Tensor, epsilon: Epsilon, *, columns: bool
    ) -> Tensor:
        level = on_device(epsilon, potential.device)
        return matrix_half_step(self.lines, log_masses, single(potential), level, columns=columns)


class OneMatrix(OneKernelProblem):
    """A matrix as the only problem of the engine, which merges the partial sums of its passes.

    An evaluation reads the matrix once in a self term, or if the operator `sweeps` and marginals
    are exact; else twice.
    """

    operator: MatrixKernelOperator

    def __init__(self, operator: MatrixKernelOperator, form: Form) -> None:
        # The column sums of a sweep, until `softmin_columns` takes them.
        self._swept: Swept | None = None
        super().__init__(operator, form)

    @property
    def ranges(self) -> tuple[int, int]:
        """The numbers of partial sums of a row and of a column."""
        return (1, 1) if self._sweeps else self.operator.ranges

    @property
    def _sweeps(self) -> bool:
        # A sweep sums columns by potentials of rows that are softmins.
        return self.operator.sweeps and not self.symmetric and self.constraints.exact

    def softmin_rows(
        self, g: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        if not self._sweeps:
            return self.operator.sums_of_lines(g, epsilon[0], columns=False)
        self._swept = self.operator.sweep(g, epsilon, active)
        return self._swept.f

    def softmin_columns(
        self, f: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        if self._swept is not None:
            found, self._swept = self._swept.columns, None
            return found
        return self.operator.sums_of_lines(f, epsilon[0], columns=not self.symmetric)

    def evaluated(self, vectors: Vectors, epsilon: float) -> Evaluated:
        """Return the potentials of the last evaluation, also for columns without mass."""
        found = super().evaluated(vectors, epsilon)
        if self._sweeps:
            self.operator.fill_absent(found.f, epsilon, found.updated)
        return found


def row_contiguous(matrix: Tensor) -> tuple[Tensor, bool]:
    """Return a matrix, or its transpose, with contiguous rows, and whether it is the transpose."""
    n, m = matrix.shape
    if m == 1 or matrix.stride(1) == 1:
        return matrix, False
    if n == 1 or matrix.stride(0) == 1:
        return matrix.T, True
    return matrix.contiguous(), False


def kernel_facts(source: HeldCosts, a: Tensor, b: Tensor) -> MatrixFacts:
    """Compute `matrix_facts` by one launch; in PyTorch if a pair is forbidden or invalid.

    Raises:
        InputError: as for `matrix_facts`.
    """
    costs, transposed = row_contiguous(source.matrix)
    masses = (b, a) if transposed else (a, b)
    found = matrix_row_facts(Place.of(costs), len(costs), masses[1].contiguous())
    rows = masses[0] > 0
    numbers = torch.stack(
        (
            torch.where(rows, found.lowest, torch.inf).amin().double(),
            torch.where(rows, found.highest, -torch.inf).amax().double(),
            masses[0] @ found.products,
            found.extreme.amax().double(),
            found.flags.amax().double(),
        )
    )
    lowest, highest, mean, extreme, flags = numbers.tolist()
    if flags:
        return matrix_facts(exact_blocks(source), a, b)
    largest = torch.maximum(found.lowest.abs(), found.highest.abs()).double()
    none = torch.zeros_like(masses[1])
    magnitudes = (none, largest) if transposed else (largest, none)
    return MatrixFacts(CostRange(lowest, highest), mean, magnitudes, extreme, None)
