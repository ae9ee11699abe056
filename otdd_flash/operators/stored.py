"""A cost whose scores are kept in memory: given as a matrix, or computed once from an operator."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from otdd_flash.operators.base import CostRange
from otdd_flash.operators.labelled_cost import equal_masses
from otdd_flash.operators.tiled import TiledOperator


class StoredOperator(TiledOperator):
    """Scores S (n, m) held in memory: n m elements, one read per pass."""

    def __init__(
        self,
        scores: Tensor,
        a: Tensor,
        b: Tensor,
        row_offset: Tensor,
        *,
        cost_range: CostRange,
        mean_cost: float,
        cost_error: float,
    ) -> None:
        super().__init__(
            a, b, row_offset, cost_range=cost_range, mean_cost=mean_cost, cost_error=cost_error
        )
        self.scores = scores

    @classmethod
    def from_cost(cls, cost: Tensor, a: Tensor, b: Tensor) -> StoredOperator:
        """Hold a given cost matrix C (n, m) with masses a (n,) and b (m,)."""
        support = cost[a > 0][:, b > 0]
        return cls(
            -cost,
            a,
            b,
            torch.zeros_like(cost[:, 0]),
            cost_range=CostRange(float(support.min()), float(support.max())),
            mean_cost=float(a @ cost.double() @ b),
            cost_error=0.0,
        )

    @classmethod
    def keep(cls, operator: TiledOperator) -> StoredOperator:
        """Compute another operator's scores once and keep them."""
        scores = torch.empty(operator.shape, dtype=operator.dtype, device=operator.device)
        for start, block in operator.score_blocks():
            scores[start : start + block.shape[0]] = block
        return cls(
            scores,
            operator.a,
            operator.b,
            operator.row_offset,
            cost_range=operator.cost_range,
            mean_cost=operator.mean_cost,
            cost_error=operator.cost_error,
        )

    @property
    def backend(self) -> str:
        """How the scores are held."""
        return "torch, scores kept"

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64: one product with the scores."""
        scores = torch.mv(self.scores, masses.to(self.dtype)).double()
        return self.row_offset.double() * masses.sum() - scores

    def expected_column_costs(self, masses: Tensor) -> Tensor:
        """sum_i C_ij p_i (m,) for masses p (n,), float64: one product with the scores."""
        scores = torch.mv(self.scores.T, masses.to(self.dtype)).double()
        return self.row_offset.double() @ masses - scores

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64."""
        return self.row_offset.double() - self.scores.diagonal().double()

    def sample(self, rows: Tensor, columns: Tensor) -> StoredOperator:
        """The cost between some rows (k,) and columns (l,), int64; on each side of equal masses."""
        scores, row_offset = self.scores[rows][:, columns], self.row_offset[rows]
        return StoredOperator(
            scores,
            equal_masses(rows),
            equal_masses(columns),
            row_offset,
            cost_range=self.cost_range,
            mean_cost=float(row_offset.double().mean() - scores.double().mean()),
            cost_error=self.cost_error,
        )

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the whole matrix as one block."""
        yield 0, self.scores
