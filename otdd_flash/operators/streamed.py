"""A cost of points and labels whose scores are computed again in every pass, never stored.

    C_ij = lambda_x ||x_i||^2 - S_ij
    S_ij = 2 lambda_x x_i . y_j + bias[l_i, j]
    bias[c, j] = -lambda_x ||y_j||^2 - lambda_y W[c, l_j]

The bias table (V_x, m) holds all that depends on a row only through its class; a block of scores is
that table gathered by class, plus one matrix product on top of it. Memory is O((n + m) d + V_x m)
and one block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from otdd_flash.cost.points import LabelledCost, squared_norms
from otdd_flash.operators.base import Execution
from otdd_flash.operators.cost_tiles import CentredProducts, cost_tiles
from otdd_flash.operators.tiled import TiledOperator

# Elements of one block of scores: large enough for the matrix product to run at full speed.
BLOCK_ELEMENTS_CPU = 1 << 23
BLOCK_ELEMENTS_GPU = 1 << 27


class StreamedOperator(TiledOperator):
    """Scores of labelled points, recomputed block by block.

    Args:
        cost: two labelled clouds.
        dtype: float32 or float64, the type of scores and potentials.
    """

    def __init__(self, cost: LabelledCost, dtype: torch.dtype) -> None:
        x, y = cost.centred(dtype)
        products = CentredProducts(cost)
        # Of the rounded points, so that scores are those of clouds nearby.
        squares_x, squares_y = (cost.lambda_x * squared_norms(points) for points in (x, y))
        super().__init__(
            cost.a,
            cost.b,
            squares_x.to(dtype),
            cost_range=cost.cost_range,
            mean_cost=cost.mean_cost,
            magnitudes=cost.magnitudes,
            cost_errors=products.errors,
            cost_rounding=0.0,
        )
        self._cost, self._products = cost, products
        self._points, self._labels, self._lambda_x = (x, y), cost.labels[0], cost.lambda_x
        self._bias = (-cost.class_costs[:, cost.labels[1]] - squares_y).to(dtype)

    @property
    def backend(self) -> str:
        return "torch, scores streamed"

    def expected_costs(self, masses: Tensor) -> Tensor:
        return self._cost.expected_costs(masses)

    def own_costs(self) -> Tensor:
        return self._cost.own_costs()

    @property
    def execution(self) -> Execution:
        """Passes run as in the base class; one over some columns takes their share of a pass."""
        return super().execution._replace(over_columns=self._over_columns)

    def _over_columns(self, columns: Tensor, g: Tensor, epsilon: float) -> Tensor:
        part = StreamedOperator(self._cost.part(slice(None), columns), self.dtype)
        return part.softmin_rows(g, epsilon)

    def sample(self, rows: Tensor, columns: Tensor) -> StreamedOperator:
        return StreamedOperator(self._cost.sample(rows, columns), self.dtype)

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield S in blocks of rows, in a buffer that the next block overwrites."""
        n, m = self.shape
        budget = BLOCK_ELEMENTS_CPU if self.device.type == "cpu" else BLOCK_ELEMENTS_GPU
        height = max(1, min(n, budget // m))
        buffer = torch.empty((height, m), dtype=self.dtype, device=self.device)
        x, y = self._points
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            block = buffer[: rows.stop - start]
            torch.index_select(self._bias, 0, self._labels[rows], out=block)
            yield start, block.addmm_(x[rows], y.T, alpha=2 * self._lambda_x)

    def negative_costs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield -C of the original points in blocks of rows, float64, in a reused buffer."""
        n, m = self.shape
        budget = BLOCK_ELEMENTS_CPU if self.device.type == "cpu" else BLOCK_ELEMENTS_GPU
        height = max(1, min(n, budget // 4 // m))
        buffer = torch.empty((height, m), dtype=torch.float64, device=self.device)
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            block = buffer[: rows.stop - start]
            for part, columns, negative in cost_tiles(self._cost, self._products, rows):
                block[part.start - start : part.stop - start, columns] = negative
            yield start, block
