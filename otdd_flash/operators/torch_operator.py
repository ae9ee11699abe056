"""Softmins, plan sums and plan products in PyTorch, one cache-sized tile of scores at a time.

`point_scores`, `given_costs` and `score_pool` make a `TorchOperator`. Its `Source` provides blocks
of the scores S (n, m) with C_ij = row_offset_i - S_ij; this file reduces them. In base-2
logarithms, with u_j = log2(b_j) + g_j log2(e) / epsilon, one half-step is

    f_i = row_offset_i - epsilon ln(2) LSE2_j[u_j + S_ij log2(e) / epsilon].

Each tile is scaled, shifted, exponentiated and summed while it sits in the processor's cache, in a
scratch buffer made once per pass, so that a pass reads S once and allocates nothing of its size.
`exp2` is used because PyTorch's float32 `exp` on x86 takes ten times longer on arguments that
underflow, and at small epsilon most arguments do.

`build` and `solver.matrix_comparison` hand the operator to solvers; `matrix_kernel` calls it for
all that its kernels do not do. Certificates read `marginals`, in float64 throughout, whose errors
`measured` bounds, also for `kernel_pool`, `matrix_kernel` and `torch_pool`. So every term of
`measured` must stay an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import threshold

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.host_points import spans
from otdd_flash.cost.points import DOUBLE_UNIT, Masses
from otdd_flash.memory import holds
from otdd_flash.operators.base import (
    Applied,
    Epsilon,
    EvaluatedPlan,
    Factors,
    Marginals,
    Passes,
    Plan,
    StoredPlan,
)

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

# In place of log2(0): finite, so that the difference of two of them is 0 and not NaN.
LOG2_ZERO = -1e30

# Least logarithm of a sum, for sums without terms: a potential of that size still leaves points of
# mass 0, with LOG2_ZERO, without weight.
LOG2_NOTHING = -1e29

# The potential of a point without mass, far below any other.
ABSENT = -1e250

# Least exponent of float64; smaller ones are raised to it, as exp is slow for them.
LEAST_EXPONENT = -700.0

# Entries of the plan up to this are taken to be 0 if pairs may be forbidden.
NOTHING = 2 * math.exp(LEAST_EXPONENT)

# The error of an exponent in unit roundoffs of float64, over the sizes of its terms.
EVALUATION = 8

# The least float32 above 0.
LEAST_FLOAT32 = 2.0**-149

# Elements of a tile: two of them fit a 2 MiB second-level cache; a GPU wants few, large launches.
TILE_ELEMENTS_CPU = 1 << 17
TILE_ELEMENTS_GPU = 1 << 26


Pair = tuple[Tensor, Tensor]

# Rows, values of them (rows, m), and a buffer of the same shape.
Tile = tuple[slice, Tensor, Tensor]


class Source(Protocol):
    """Scores S (n, m) in blocks, with C_ij = row_offset_i - S_ij, and facts of these costs."""

    @property
    def backend(self) -> str:
        """How the scores are held, for reports."""
        ...

    @property
    def holds_plans(self) -> bool:
        """Whether a plan for many products may take a matrix in memory."""
        ...

    @property
    def row_offset(self) -> Tensor:
        """(n,), in the type of the scores."""
        ...

    @property
    def facts(self) -> CostFacts:
        """Facts of the costs between the masses; the operator sets `error`."""
        ...

    @property
    def magnitudes(self) -> Pair:
        """(n,) and (m,) float64; |C_ij| is at most row_i + column_j if both have mass."""
        ...

    @property
    def cost_errors(self) -> Pair:
        """(n,) and (m,) float64: before storing, the error of C_ij is at most row_i + column_j."""
        ...

    @property
    def cost_rounding(self) -> float:
        """Relative rounding error of a stored cost."""
        ...

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, S[first row : first row + rows]) over all rows, in order."""
        ...

    def negative_costs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, -C[first row : first row + rows]), accurate to `cost_rounding`."""
        ...

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64."""
        ...

    def diagonal(self) -> Tensor:
        """Return C_ii (n,) for the cost of a cloud with itself, float64."""
        ...

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> Self:
        """Return scores between some rows and columns, int64, with facts for other masses."""
        ...

    def over(self, columns: Tensor) -> Self:
        """Return scores between all rows and some columns, int64, with facts of the whole."""
        ...


S = TypeVar("S", bound=Source, covariant=True)


class TorchOperator(Generic[S]):
    """A cost with masses whose passes read blocks of scores, in PyTorch.

    Args:
        source: the scores.
        a: (n,) row masses, float64.
        b: (m,) column masses, float64.
    """

    # Points are not packed.
    packing = None

    def __init__(self, source: S, a: Tensor, b: Tensor) -> None:
        self.source, self.a, self.b = source, a, b

    @cached_property
    def log2_a(self) -> Tensor:
        """log2 of the row masses (n,), as `dtype`; finite."""
        return _log2_masses(self.a, self.dtype)

    @cached_property
    def log2_b(self) -> Tensor:
        """log2 of the column masses (m,), as `dtype`; finite."""
        return _log2_masses(self.b, self.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self.a.shape[0], self.b.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The type of scores and potentials."""
        return self.source.row_offset.dtype

    @property
    def device(self) -> torch.device:
        return self.source.row_offset.device

    @property
    def passes(self) -> Passes:
        """How passes run: in PyTorch, on what the source reads."""
        return Passes(self.dtype, self.source.backend)

    @cached_property
    def costs(self) -> CostFacts:
        of_rows, of_columns = self.accurate_errors
        error = self.rounding + float(self.a @ of_rows + self.b @ of_columns)
        return self.source.facts._replace(error=error)

    @property
    def rounding(self) -> float:
        """The mean rounding error of stored costs."""
        return self.source.cost_rounding * self.source.facts.magnitude

    @property
    def accurate_errors(self) -> Pair:
        """(n,) and (m,): error bounds of costs in `marginals`, without `cost_rounding`."""
        of_rows, of_columns = (
            errors + EVALUATION * DOUBLE_UNIT * magnitudes
            for errors, magnitudes in zip(
                self.source.cost_errors, self.source.magnitudes, strict=True
            )
        )
        return of_rows, of_columns

    @property
    def refined(self) -> TorchOperator[S]:
        """The operator itself: nothing was rounded for passes alone."""
        return self

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> TorchOperator[S]:
        """Return the cost between some rows and columns, with other masses."""
        return TorchOperator(self.source.sample(rows, columns, masses), *masses)

    def softmin_over(self, columns: Tensor, g: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute the softmin of rows over some columns (l,), int64, with potentials g (l,)."""
        part = TorchOperator(self.source.over(columns), self.a, self.b[columns])
        return part.softmin_rows(g, epsilon)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64."""
        return self.source.expected_costs(masses)

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Compute row and column sums of the plan of f (n,) and g (m,), in float64 throughout."""
        own_costs = self.source.diagonal() if g is None else None
        g = f if g is None else g
        rows, columns = torch.empty_like(self.a), torch.zeros_like(self.b)
        for part, plan in self.exact_tiles(f, g, float(epsilon)):
            rows[part] = plan @ self.b
            columns += self.a[part] @ plan
        sums = self.a * rows, self.b * columns
        potentials, source = (present(self.a, f), present(self.b, g)), self.source
        given = source.magnitudes, source.cost_errors, source.cost_rounding
        return measured(sums, potentials, *given, own_costs)

    def exact_tiles(self, f: Tensor, g: Tensor, epsilon: float) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of rows and their exp((f_i + g_j - C_ij) / epsilon), in a reused buffer.

        Entries are float64; those of points without mass are near 0, those of forbidden pairs 0.
        """
        f, g = present(self.a, f), present(self.b, g)
        # f_i + g_j as a matrix product: one read and one write of a tile.
        left = torch.stack((f / epsilon, torch.ones_like(f)), 1)
        right = torch.stack((torch.ones_like(g), g / epsilon))
        for rows, negative, tile in self._cut(self.source.negative_costs(), torch.float64, 2):
            tile.copy_(negative).addmm_(left[rows], right, beta=1 / epsilon)
            # exp is slow below LEAST_EXPONENT.
            tile.clamp_min_(LEAST_EXPONENT).exp_()
            if self.source.facts.forbidden:
                threshold(tile, NOTHING, 0.0, inplace=True)
            yield rows, tile

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        epsilon = float(epsilon)
        scale = LOG2_E / epsilon
        column_term = self._column_term(g, scale)
        logs = torch.empty_like(self.source.row_offset)
        for rows, scores, scratch in self.tiles():
            torch.add(column_term, scores, alpha=scale, out=scratch)
            logs[rows] = _log2_sums(scratch)
        return self.source.row_offset - (epsilon * LN_2) * logs.clamp_min_(LOG2_NOTHING)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        epsilon = float(epsilon)
        scale = LOG2_E / epsilon
        row_term, columns = self._row_term(f, scale), _ColumnSums(self.log2_b)
        for rows, scores, scratch in self.tiles():
            torch.add(row_term[rows], scores, alpha=scale, out=scratch)
            columns.add(scratch)
        return (-epsilon * LN_2) * columns.logs

    def softmin_self(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute T(f) (n,) for the potential of a self term."""
        return self.softmin_rows(f, epsilon)

    def softmin_part(
        self, potential: Tensor, epsilon: Epsilon, near: Tensor | None, *, columns: bool
    ) -> Tensor:
        """Compute the softmin of rows, or of columns; `near` is not used."""
        return (self.softmin_columns if columns else self.softmin_rows)(potential, epsilon)

    def softmin_pair(self, f: Tensor, g: Tensor | None, epsilon: Epsilon) -> tuple[Tensor, Tensor]:
        """Compute the softmins of rows and of columns in one pass; both are one without g."""
        if g is None:
            found = self.softmin_rows(f, epsilon)
            return found, found
        epsilon = float(epsilon)
        scale = LOG2_E / epsilon
        row_term, column_term = self._row_term(f, scale), self._column_term(g, scale)
        logs = torch.empty_like(self.source.row_offset)
        columns = _ColumnSums(self.log2_b)
        for rows, scores, scratch in self.tiles():
            torch.add(column_term, scores, alpha=scale, out=scratch)
            logs[rows] = _log2_sums(scratch)
            torch.add(row_term[rows], scores, alpha=scale, out=scratch)
            columns.add(scratch)
        of_rows = self.source.row_offset - (epsilon * LN_2) * logs.clamp_min_(LOG2_NOTHING)
        return of_rows, (-epsilon * LN_2) * columns.logs

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> TiledPlan:
        """Build the plan of f (n,) and g (m,); see `Operator.plan`."""
        return TiledPlan(self, f, g, epsilon, most)

    def plan_entries(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        dtype: torch.dtype = torch.float64,
        factor: Tensor | float = 1.0,
    ) -> Tensor:
        """Return factor P (n, m), in float64 throughout and rounded once.

        It is 0 at forbidden pairs and at masses of 0.

        Args:
            f: (n,) potential.
            g: (m,) potential.
            epsilon: regularisation, in units of the cost.
            dtype: of the result.
            factor: a number, or a tensor () float64.
        """
        entries = torch.empty(self.shape, dtype=dtype, device=self.device)
        left = self.a * factor
        for rows, plan in self.exact_tiles(f, g, epsilon):
            entries[rows] = plan.mul_(left[rows, None]).mul_(self.b)
        return entries

    def plan_tiles(self, f: Tensor, g: Tensor, epsilon: float) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of rows and their entries of P, in the scores' type, in a reused buffer."""
        scale = LOG2_E / epsilon
        row_term, column_term = self._row_term(f, scale), self._column_term(g, scale)
        for rows, scores, scratch in self.tiles():
            torch.add(column_term, scores, alpha=scale, out=scratch)
            yield rows, scratch.add_(row_term[rows]).exp2_()

    def _row_term(self, f: Tensor, scale: float) -> Tensor:
        return (self.log2_a + (f.to(self.dtype) - self.source.row_offset) * scale).unsqueeze(1)

    def _column_term(self, g: Tensor, scale: float) -> Tensor:
        return self.log2_b + g.to(self.dtype) * scale

    def tiles(self) -> Iterator[Tile]:
        """Yield cache-sized tiles: rows, their scores, not to be written to, and a buffer."""
        return self._cut(self.source.score_blocks(), self.dtype)

    def _cut(
        self, blocks: Iterator[tuple[int, Tensor]], dtype: torch.dtype, share: int = 1
    ) -> Iterator[Tile]:
        """Cut blocks of rows into tiles, of 1 / `share` of the usual size, each with a buffer."""
        n, m = self.shape
        budget = TILE_ELEMENTS_CPU if self.device.type == "cpu" else TILE_ELEMENTS_GPU
        height = max(1, min(n, budget // share // m))
        scratch = torch.empty((0, m), dtype=dtype, device=self.device)
        for start, block in blocks:
            scratch = _at_least(scratch, min(height, len(block)))
            for part in spans(0, len(block), height):
                rows = slice(start + part.start, start + part.stop)
                yield rows, block[part], scratch[: part.stop - part.start]


class TiledPlan(EvaluatedPlan):
    """A plan computed from tiles of scores; `prepared` may hold it as a matrix."""

    operator: TorchOperator[Source]

    @property
    def prepared(self) -> Plan:
        operator = self.operator
        needed = 8 * math.prod(operator.shape)
        if operator.source.holds_plans and holds(needed, self._most, operator.device):
            return StoredPlan(operator.plan_entries(*self._at))
        return self

    def applied(
        self, values: Tensor, *, transposed: bool = False, factors: Factors | None = None
    ) -> Applied:
        values = values.to(self.dtype)
        sums = torch.zeros_like(self.masses[transposed])
        out = values.new_zeros((len(sums), values.shape[1]))
        for rows, plan in self.operator.plan_tiles(*self._at):
            if transposed:
                sums += plan.sum(0)
            else:
                sums[rows] = plan.sum(1).double()
            if factors is not None:
                left, right = (factor.to(self.dtype) for factor in factors)
                plan.mul_(left[rows] @ right.T)
            if transposed:
                out.addmm_(plan.T, values[rows])
            else:
                torch.mm(plan, values, out=out[rows])
        return Applied(out, sums)


def present(masses: Tensor, potential: Tensor) -> Tensor:
    """Return a potential in float64, with `ABSENT` for points without mass."""
    return torch.where(masses > 0, potential.double(), ABSENT)


def measured(
    sums: tuple[Tensor, Tensor],
    potentials: tuple[Tensor, Tensor],
    magnitudes: tuple[Tensor, Tensor],
    cost_errors: tuple[Tensor, Tensor],
    cost_rounding: float,
    own_costs: Tensor | None = None,
) -> Marginals:
    """Build `Marginals` of sums computed in float64, with their error bounds, see `Source`."""
    # Rounding to float32 among subnormal numbers has an absolute error.
    stored = LEAST_FLOAT32 / 4 if cost_rounding else 0.0
    # An exponent takes three operations on numbers of these sizes.
    of_rows, of_columns = (
        errors + stored + EVALUATION * DOUBLE_UNIT * (magnitude + potential.abs())
        for errors, magnitude, potential in zip(cost_errors, magnitudes, potentials, strict=True)
    )
    terms = sum(part.shape[-1] for part in sums)
    return Marginals(
        *sums,
        of_rows,
        of_columns,
        cost_rounding=cost_rounding,
        relative_error=(terms + EVALUATION) * DOUBLE_UNIT,
        underflow=math.exp(LEAST_EXPONENT),
        own_costs=own_costs,
    )


def _at_least(buffer: Tensor, rows: int) -> Tensor:
    """Return a buffer with at least `rows` rows: this one, or a larger one."""
    return buffer if len(buffer) >= rows else buffer.new_empty((rows, buffer.shape[1]))


def _log2_sums(exponents: Tensor) -> Tensor:
    """Compute log2 sum_j 2^e_ij (rows,) of a tile, which is overwritten."""
    highest = exponents.amax(1, keepdim=True).clamp_min_(LOG2_NOTHING)
    return highest.squeeze(1) + exponents.sub_(highest).exp2_().sum(1).log2_()


class _ColumnSums:
    """An accumulator of log2 sum_i 2^e_ij (m,) over tiles of rows.

    Args:
        like: (m,), of the type of the exponents.
    """

    def __init__(self, like: Tensor) -> None:
        self._highest, self._sums = torch.full_like(like, -math.inf), torch.zeros_like(like)

    def add(self, exponents: Tensor) -> None:
        """Add a tile (rows, m), which is overwritten."""
        raised = torch.maximum(self._highest, exponents.amax(0)).clamp_min_(LOG2_NOTHING)
        self._sums.mul_(self._highest.sub_(raised).exp2_())
        self._sums.add_(exponents.sub_(raised).exp2_().sum(0))
        self._highest = raised

    @property
    def logs(self) -> Tensor:
        """The logarithms (m,) of the sums so far."""
        return (self._highest + self._sums.log2()).clamp_min_(LOG2_NOTHING)


def _log2_masses(masses: Tensor, dtype: torch.dtype) -> Tensor:
    return masses.log2().clamp_min(LOG2_ZERO).to(dtype)
