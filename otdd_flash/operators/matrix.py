"""A cost that is given: a matrix held in its own type, or a function that is asked for blocks.

Nothing of the size of the matrix is made. Every pass reads it once, in blocks of rows that are
turned into scores of the type of the potentials while they are in a cache. An entry of +inf forbids
a pair: its score is -inf and its entry of the plan 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import threshold

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.matrix import MatrixFacts, matrix_facts
from otdd_flash.cost.memory import holds
from otdd_flash.cost.points import equal_masses
from otdd_flash.operators.base import Execution
from otdd_flash.operators.plan import KeptPlan
from otdd_flash.operators.tiled import (
    LEAST_EXPONENT,
    TILE_ELEMENTS_CPU,
    TiledOperator,
)

# An entry of the plan that stands for any below it.
NOTHING = 2 * math.exp(LEAST_EXPONENT)

# Costs that are in float64 at once while they are read; on a GPU also scores, as others fill it.
EXACT_ELEMENTS_CPU, EXACT_ELEMENTS_GPU = 1 << 16, 1 << 22


class CostSource(Protocol):
    """Where the entries of C (n, m) come from."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def asked(self) -> int | None:
        """How many entries to ask for at once; None where they are held."""
        ...

    def rows(self, rows: slice) -> Tensor:
        """C[rows], not to be written."""
        ...

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """C (k, l) of some rows (k,) and columns (l,), int64."""
        ...


class HeldCosts:
    """A matrix in memory, of any strides."""

    asked = None

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.shape: tuple[int, int] = (matrix.shape[0], matrix.shape[1])
        self.dtype, self.device = matrix.dtype, matrix.device

    def rows(self, rows: slice) -> Tensor:
        """Return C[rows] as a view."""
        return self.matrix[rows]

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Copy C (k, l) of some rows (k,) and columns (l,)."""
        return self.matrix[rows[:, None], columns]


class MatrixOperator(TiledOperator):
    """A given cost C (n, m).

    Args:
        given: C as a matrix of a floating type, or as a source.
        a: (n,) row masses, float64.
        b: (m,) column masses, float64.
        dtype: of scores and potentials: float32, or float64; by default as costs of this type take.
        facts: what is known of C already.
        errors: (n,) float64; C_ij is off by at most errors_i.
    """

    def __init__(
        self,
        given: Tensor | CostSource,
        a: Tensor,
        b: Tensor,
        *,
        dtype: torch.dtype | None = None,
        facts: MatrixFacts | None = None,
        errors: Tensor | None = None,
    ) -> None:
        source = HeldCosts(given) if isinstance(given, Tensor) else given
        self.source: CostSource = source
        dtype = dtype or torch.promote_types(source.dtype, torch.float32)
        self.facts = facts or matrix_facts(exact_blocks(source), a, b)
        of_rows = torch.zeros_like(a) if errors is None else errors
        super().__init__(
            a,
            b,
            torch.zeros(source.shape[0], dtype=dtype, device=source.device),
            cost_range=self.facts.range,
            mean_cost=self.facts.mean,
            magnitudes=self.facts.magnitudes,
            cost_errors=(of_rows, torch.zeros_like(b)),
            cost_rounding=0.0,
        )

    @property
    def costs(self) -> CostFacts:
        return super().costs._replace(forbidden=self.facts.forbidden)

    @property
    def backend(self) -> str:
        return "torch, costs given" if self.source.asked is None else "torch, costs asked for"

    @property
    def execution(self) -> Execution:
        """Passes run as in the base class; nothing is learnt of a sample if pairs are forbidden."""
        execution = super().execution._replace(prepared_plan=self._prepared_plan)
        return execution._replace(sampled=None) if self.facts.forbidden else execution

    def _prepared_plan(
        self, f: Tensor, g: Tensor, epsilon: float, most: int | None
    ) -> KeptPlan | None:
        n, m = self.source.shape
        if not holds(8 * n * m, most, self.device):
            return None
        return KeptPlan(self.plan_entries(f, g, epsilon))

    def exact_tiles(self, f: Tensor, g: Tensor, epsilon: float) -> Iterator[tuple[slice, Tensor]]:
        """Yield the tiles of the base class, exactly 0 at forbidden pairs."""
        for rows, plan in super().exact_tiles(f, g, epsilon):
            if self.facts.forbidden:
                threshold(plan, NOTHING, 0.0, inplace=True)
            yield rows, plan

    def scaled_plan(
        self, f: Tensor, g: Tensor, epsilon: float, dtype: torch.dtype, factor: Tensor | float = 1.0
    ) -> Tensor:
        """Return factor P (n, m), rounded once; 0 at forbidden pairs and at masses of 0.

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

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64, over allowed pairs: one read."""
        found = torch.empty_like(self.a)
        for rows, block in exact_blocks(self.source):
            costs = block.double()
            if self.facts.forbidden:
                costs = costs.where(costs < torch.inf, 0)
            found[rows] = costs @ masses
        return found

    def own_costs(self) -> Tensor:
        found = [block[:, rows].diagonal().double() for rows, block in exact_blocks(self.source)]
        return torch.cat(found)

    def sample(self, rows: Tensor, columns: Tensor) -> MatrixOperator:
        masses = equal_masses(rows), equal_masses(columns)
        return MatrixOperator(self.source.between(rows, columns), *masses, dtype=self.dtype)

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield -C in blocks of rows, in a buffer that the next block overwrites."""
        elements = TILE_ELEMENTS_CPU if self.device.type == "cpu" else EXACT_ELEMENTS_GPU
        return self._negative(elements, self.dtype)

    def negative_costs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield -C in blocks of rows, float64, in a buffer that is overwritten."""
        return self._negative(_exact_elements(self.device), torch.float64)

    def _negative(self, elements: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        zero = torch.zeros(self.source.shape[1], dtype=dtype, device=self.device)
        buffer = zero[:0]
        for rows, block in _blocks(self.source, elements):
            if len(block) > len(buffer):
                buffer = zero.new_empty(block.shape)
            # In one operation for any two types.
            yield rows.start, torch.sub(zero, block, out=buffer[: len(block)])


def exact_blocks(source: CostSource) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and C[rows], few enough to be in float64 at once."""
    return _blocks(source, _exact_elements(source.device))


def _exact_elements(device: torch.device) -> int:
    return EXACT_ELEMENTS_CPU if device.type == "cpu" else EXACT_ELEMENTS_GPU


def _blocks(source: CostSource, elements: int) -> Iterator[tuple[slice, Tensor]]:
    n, m = source.shape
    height = max(1, min(n, (source.asked or elements) // m))
    for start in range(0, n, height):
        rows = slice(start, min(start + height, n))
        yield rows, source.rows(rows)
