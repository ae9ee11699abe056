"""A cost whose scores are kept in memory: given as a matrix, or computed once from an operator."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from otdd_flash.operators.base import CostRange
from otdd_flash.operators.labelled_cost import LabelledCost, equal_masses
from otdd_flash.operators.tiled import TiledOperator

# Rows of costs that are computed at once, of a symmetric cost only those right of the diagonal, and
# costs that are in float64 at once while they are read.
HEIGHT_CPU, HEIGHT_GPU, ROWS_ELEMENTS = 512, 2048, 1 << 17


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
        cost_error_share: float,
        cost_rounding: float,
    ) -> None:
        super().__init__(
            a,
            b,
            torch.zeros_like(scores[:, 0]),
            cost_range=cost_range,
            mean_cost=mean_cost,
            magnitudes=magnitudes,
            cost_error_share=cost_error_share,
            cost_rounding=cost_rounding,
        )
        self.scores = scores

    @classmethod
    def from_cost(cls, cost: Tensor, a: Tensor, b: Tensor) -> StoredOperator:
        """Hold a given cost matrix C (n, m) with masses a (n,) and b (m,)."""
        support = cost[a > 0][:, b > 0]
        largest = cost.abs().amax(1).double()
        return cls(
            -cost,
            a,
            b,
            cost_range=CostRange(float(support.min()), float(support.max())),
            mean_cost=float(a @ cost.double() @ b),
            magnitudes=(largest, torch.zeros_like(b)),
            cost_error_share=0.0,
            cost_rounding=0.0,
        )

    @classmethod
    def keep(cls, cost: LabelledCost, dtype: torch.dtype) -> StoredOperator:
        """Compute the costs of labelled points once, in float64, and keep them in a type."""
        n, m = cost.shape
        scores = torch.empty((n, m), dtype=dtype, device=cost.a.device)
        height = min(n, HEIGHT_GPU if scores.is_cuda else HEIGHT_CPU)
        buffer = torch.empty(height * m, dtype=torch.float64, device=cost.a.device)
        for first in range(0, n, height):
            rows = slice(first, min(first + height, n))
            start = first if cost.symmetric else 0
            block = buffer[: (rows.stop - first) * (m - start)].view(-1, m - start)
            cost.costs(rows, start, block)
            scores[rows, start:] = block.neg_()
            if cost.symmetric:
                scores[rows.stop :, rows] = block[:, rows.stop - first :].T
        return cls(
            scores,
            cost.a,
            cost.b,
            cost_range=cost.cost_range,
            mean_cost=cost.mean_cost,
            magnitudes=cost.magnitudes,
            cost_error_share=cost.cost_error_share,
            cost_rounding=0.0 if dtype == torch.float64 else torch.finfo(dtype).eps / 2,
        )

    @property
    def backend(self) -> str:
        """How the scores are held."""
        return "torch, scores kept"

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64: one read of the scores."""
        found = torch.empty_like(self.a)
        height = max(1, ROWS_ELEMENTS // self.shape[1])
        for first in range(0, self.shape[0], height):
            rows = slice(first, first + height)
            found[rows] = self.scores[rows].double() @ masses
        return -found

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64."""
        return -self.scores.diagonal().double()

    def sample(self, rows: Tensor, columns: Tensor) -> StoredOperator:
        """The cost between some rows (k,) and columns (l,), int64; on each side of equal masses."""
        scores = self.scores[rows][:, columns]
        x, y = self.magnitudes
        return StoredOperator(
            scores,
            equal_masses(rows),
            equal_masses(columns),
            cost_range=self.cost_range,
            mean_cost=-float(scores.double().mean()),
            magnitudes=(x[rows], y[columns]),
            cost_error_share=self.cost_error_share,
            cost_rounding=self.cost_rounding,
        )

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the whole matrix as one block."""
        yield 0, self.scores

    def negative_costs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield it likewise."""
        yield 0, self.scores
