"""A cost whose scores are computed once and kept in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostRange
from otdd_flash.cost.memory import holds
from otdd_flash.cost.points import LabelledCost, equal_masses
from otdd_flash.operators.base import Execution
from otdd_flash.operators.cost_tiles import CentredProducts, cost_tiles
from otdd_flash.operators.plan import KeptPlan
from otdd_flash.operators.tiled import TiledOperator
from otdd_flash.operators.whole_points import whole_products

# Costs that are in float64 at once while they are read.
ROWS_ELEMENTS = 1 << 17


class StoredOperator(TiledOperator):
    """Scores S (n, m) held in memory: n m elements, one read per pass."""

    def __init__(
        self,
        scores: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        cost_range: CostRange,
        mean_cost: float,
        magnitudes: tuple[Tensor, Tensor],
        cost_errors: tuple[Tensor, Tensor],
        cost_rounding: float,
    ) -> None:
        super().__init__(
            a,
            b,
            torch.zeros_like(scores[:, 0]),
            cost_range=cost_range,
            mean_cost=mean_cost,
            magnitudes=magnitudes,
            cost_errors=cost_errors,
            cost_rounding=cost_rounding,
        )
        self.scores = scores

    @classmethod
    def keep(cls, cost: LabelledCost, dtype: torch.dtype) -> StoredOperator:
        """Compute the costs of labelled points once, in float64, and keep them in a type."""
        scores = torch.empty(cost.shape, dtype=dtype, device=cost.a.device)
        # Costs that are rounded to float32 may come from points that are: the errors are alike.
        whole = whole_products(cost) if dtype == torch.float32 else None
        products = whole or CentredProducts(cost)
        every = slice(0, len(scores))
        for rows, columns, negative in cost_tiles(cost, products, every, upper=cost.symmetric):
            scores[rows, columns] = negative
            if cost.symmetric and columns.start >= rows.stop:
                scores[columns, rows] = scores[rows, columns].T
        return cls(
            scores,
            cost.a,
            cost.b,
            cost_range=cost.cost_range,
            mean_cost=cost.mean_cost,
            magnitudes=cost.magnitudes,
            cost_errors=products.errors,
            cost_rounding=0.0 if dtype == torch.float64 else torch.finfo(dtype).eps / 2,
        )

    @property
    def backend(self) -> str:
        return "torch, scores kept"

    @property
    def execution(self) -> Execution:
        """Passes run as in the base class; a prepared plan takes n m float64 numbers."""
        return super().execution._replace(prepared_plan=self._prepared_plan)

    def _prepared_plan(
        self, f: Tensor, g: Tensor, epsilon: float, most: int | None
    ) -> KeptPlan | None:
        if not holds(8 * self.scores.numel(), most, self.device):
            return None
        return KeptPlan(self.plan_entries(f, g, epsilon))

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64: one read of the scores."""
        found = torch.empty_like(self.a)
        height = max(1, ROWS_ELEMENTS // self.shape[1])
        for first in range(0, self.shape[0], height):
            rows = slice(first, first + height)
            found[rows] = self.scores[rows].double() @ masses
        return -found

    def own_costs(self) -> Tensor:
        return -self.scores.diagonal().double()

    def sample(self, rows: Tensor, columns: Tensor) -> StoredOperator:
        scores = self.scores[rows][:, columns]
        (x, y), (of_x, of_y) = self.magnitudes, self.cost_errors
        return StoredOperator(
            scores,
            equal_masses(rows),
            equal_masses(columns),
            cost_range=self._cost_range,
            mean_cost=-float(scores.double().mean()),
            magnitudes=(x[rows], y[columns]),
            cost_errors=(of_x[rows], of_y[columns]),
            cost_rounding=self.cost_rounding,
        )

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the whole matrix as one block."""
        yield 0, self.scores

    def negative_costs(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.scores
