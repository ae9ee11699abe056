"""A given cost: a matrix held in its own type, or a function that is called for blocks.

Nothing of the size of the matrix is allocated. Every pass reads it once, in blocks of rows that are
converted to scores in the type of the potentials while they are in a cache. An entry of +inf
forbids a pair: its score is -inf and its entry of the plan is 0.

`solver.matrix_comparison` and `solver.matrix.plan` build operators by `matrix_operator`. On a GPU
`matrix_kernel` runs the passes in Triton and uses such an operator for the rest. What needs the
costs themselves reads them in float64 by `exact_blocks` (`solver.matrix.result`,
`solver.matrix.transport`, `derivatives.groups`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.matrix import MatrixFacts, matrix_facts
from otdd_flash.cost.points import Cut, Masses
from otdd_flash.operators.torch_operator import TILE_ELEMENTS_CPU, TorchOperator

# Costs that are converted to float64 at once; on a GPU the size of a block of scores as well.
EXACT_ELEMENTS_CPU, EXACT_ELEMENTS_GPU = 1 << 16, 1 << 22


class CostSource(Protocol):
    """Access to the entries of a cost C (n, m), by rows."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def block_entries(self) -> int | None:
        """Entries per call of a user's function; None if the matrix is in memory."""
        ...

    def rows(self, rows: slice) -> Tensor:
        """Return C[rows]; do not write to it."""
        ...

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return C (k, l) of some rows (k,) and columns (l,), int64."""
        ...


class HeldCosts:
    """A matrix in memory, of any strides."""

    block_entries = None

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.shape: tuple[int, int] = (matrix.shape[0], matrix.shape[1])
        self.dtype, self.device = matrix.dtype, matrix.device

    def rows(self, rows: slice) -> Tensor:
        """Return C[rows], a view."""
        return self.matrix[rows]

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Copy C (k, l) of some rows (k,) and columns (l,)."""
        return self.matrix[rows[:, None], columns]


class CutCosts:
    """Some rows and columns of another source, which are read from it in every pass."""

    def __init__(self, source: CostSource, rows: Cut, columns: Cut) -> None:
        (n, m), device = source.shape, source.device
        self._source, self._every = source, isinstance(rows, slice) and rows == slice(None)
        self._rows, self._columns = (
            torch.arange(count, device=device)[side] for count, side in ((n, rows), (m, columns))
        )
        self.shape = len(self._rows), len(self._columns)
        self.dtype, self.device = source.dtype, device

    @property
    def block_entries(self) -> int | None:
        """Entries that make as many rows per call as those of the whole source."""
        entries, m = self._source.block_entries, self._source.shape[1]
        return None if entries is None else max(1, entries // m) * self.shape[1]

    @property
    def whole(self) -> Tensor:
        """The matrix of these rows and columns, in memory."""
        return self._source.between(self._rows, self._columns)

    def rows(self, rows: slice) -> Tensor:
        """Copy some of the rows."""
        if self._every:
            return self._source.rows(rows)[:, self._columns]
        return self._source.between(self._rows[rows], self._columns)

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Copy C (k, l) of some of these rows (k,) and columns (l,)."""
        return self._source.between(self._rows[rows], self._columns[columns])


class GivenCosts:
    """Scores of a given cost C (n, m); see `torch_operator.Source`.

    Args:
        costs: C.
        known: facts of C between the masses.
        dtype: of scores and potentials, float32 or float64.
        errors: (n,) float64; the error of C_ij is at most errors_i.
    """

    holds_plans, cost_rounding = True, 0.0

    def __init__(
        self, costs: CostSource, known: MatrixFacts, dtype: torch.dtype, errors: Tensor
    ) -> None:
        (n, m), device = costs.shape, costs.device
        self.costs, self._known = costs, known
        self.row_offset = torch.zeros(n, dtype=dtype, device=device)
        self.facts = CostFacts(dtype, known.mean, *known.range, 0.0, known.forbidden)
        self.magnitudes = known.magnitudes
        self.cost_errors = errors, errors.new_zeros(m)

    @property
    def backend(self) -> str:
        return (
            "torch, costs given" if self.costs.block_entries is None else "torch, costs asked for"
        )

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64, over allowed pairs: one read."""
        found = masses.new_empty(self.costs.shape[0])
        for rows, block in exact_blocks(self.costs):
            costs = block.double()
            if self.facts.forbidden:
                costs = costs.where(costs < torch.inf, 0)
            found[rows] = costs @ masses
        return found

    def diagonal(self) -> Tensor:
        found = [block[:, rows].diagonal().double() for rows, block in exact_blocks(self.costs)]
        return torch.cat(found)

    def some(self, rows: Cut, columns: Cut, masses: Masses | None) -> GivenCosts:
        cut, dtype = CutCosts(self.costs, rows, columns), self.row_offset.dtype
        if masses is not None:
            held = HeldCosts(cut.whole)
            known, exact = matrix_facts(exact_blocks(held), *masses), torch.zeros_like(masses[0])
            return GivenCosts(held, known, dtype, exact)
        x, y = self.magnitudes
        known = self._known._replace(magnitudes=(x[rows], y[columns]))
        return GivenCosts(cut, known, dtype, self.cost_errors[0][rows])

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield -C in blocks of rows, in a buffer that the next block overwrites."""
        elements = TILE_ELEMENTS_CPU if self.costs.device.type == "cpu" else EXACT_ELEMENTS_GPU
        return self._negative(elements, self.row_offset.dtype)

    def negative_costs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield -C in blocks of rows, float64, in a buffer that is overwritten."""
        return self._negative(_exact_elements(self.costs.device), torch.float64)

    def _negative(self, elements: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        zero = torch.zeros(self.costs.shape[1], dtype=dtype, device=self.costs.device)
        buffer = zero[:0]
        for rows, block in _blocks(self.costs, elements):
            if len(block) > len(buffer):
                buffer = zero.new_empty(block.shape)
            # Negation and conversion in one operation, for any two types.
            yield rows.start, torch.sub(zero, block, out=buffer[: len(block)])


def matrix_operator(
    given: Tensor | CostSource,
    a: Tensor,
    b: Tensor,
    *,
    dtype: torch.dtype | None = None,
    facts: MatrixFacts | None = None,
    errors: Tensor | None = None,
) -> TorchOperator[GivenCosts]:
    """Build the operator of a given cost C (n, m), with passes in PyTorch.

    Args:
        given: C as a matrix of a floating type, or as a source.
        a: (n,) masses, float64.
        b: (m,) masses, float64.
        dtype: of scores and potentials: float32 or float64; by default float64 for float64 costs.
        facts: of C, if they were computed before.
        errors: (n,) float64; the error of C_ij is at most errors_i. By default 0.
    """
    costs = HeldCosts(given) if isinstance(given, Tensor) else given
    known = facts or matrix_facts(exact_blocks(costs), a, b)
    errors = torch.zeros_like(a) if errors is None else errors
    dtype = dtype or torch.promote_types(costs.dtype, torch.float32)
    return TorchOperator(GivenCosts(costs, known, dtype, errors), a, b)


def exact_blocks(source: CostSource) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of rows and C[rows], small enough to be converted to float64 at once."""
    return _blocks(source, _exact_elements(source.device))


def _exact_elements(device: torch.device) -> int:
    return EXACT_ELEMENTS_CPU if device.type == "cpu" else EXACT_ELEMENTS_GPU


def _blocks(source: CostSource, elements: int) -> Iterator[tuple[slice, Tensor]]:
    n, m = source.shape
    height = max(1, min(n, (source.block_entries or elements) // m))
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        yield rows, source.rows(rows)
