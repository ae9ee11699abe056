"""A cost of points and labels whose scores are computed again in every pass, never stored.

    C_ij = lambda_x ||x_i - y_j||^2 + lambda_y W[l_i, l_j] = lambda_x ||x_i||^2 - S_ij
    S_ij = 2 lambda_x x_i . y_j + bias[l_i, j]
    bias[c, j] = -lambda_x ||y_j||^2 - lambda_y W[c, l_j]

The bias table (V_x, m) holds all that depends on a row only through its class; a block of scores is
that table gathered by class, plus one matrix product on top of it. Memory is O((n + m) d + V_x m)
and one block. Both clouds are centred by their common mean first: C is unchanged and the rounding
error shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from otdd_flash.operators.base import CostRange
from otdd_flash.operators.tiled import TiledOperator

# Elements of one block of scores: large enough for the matrix product to run at full speed.
BLOCK_ELEMENTS_CPU = 1 << 23
BLOCK_ELEMENTS_GPU = 1 << 27

# Rows that are converted to float64 together while an operator is built.
ROWS_AT_ONCE = 4096


class StreamedOperator(TiledOperator):
    """Scores of labelled points, recomputed block by block.

    Args:
        x: (n, d) points.
        y: (m, d) points.
        a: (n,) masses, float64.
        b: (m,) masses, float64.
        labels_x: (n,) class indices, rows of W.
        labels_y: (m,) class indices, columns of W.
        class_costs: (V_x, V_y) the block of lambda_y W that these labels index, float64.
        lambda_x: weight of the squared Euclidean distance.
        dtype: float32 or float64, the type of scores and potentials.

    Attributes:
        points: both clouds (n, d) and (m, d), centred by their common mean.
        labels: labels_x and labels_y.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        labels_x: Tensor,
        labels_y: Tensor,
        class_costs: Tensor,
        lambda_x: float,
        dtype: torch.dtype,
    ) -> None:
        centre = (_mean(x, a) + _mean(y, b)) / 2
        x, y = _centred(x, centre, dtype), _centred(y, centre, dtype)
        squares_x, squares_y = lambda_x * _squares(x), lambda_x * _squares(y)
        class_a = _mass_per_class(a, labels_x, class_costs.shape[0])
        class_b = _mass_per_class(b, labels_y, class_costs.shape[1])
        cost_range = _cost_range(
            squares_x[a > 0], squares_y[b > 0], class_costs[class_a > 0][:, class_b > 0]
        )
        super().__init__(
            a,
            b,
            squares_x.to(dtype),
            cost_range=cost_range,
            mean_cost=float(
                a @ squares_x
                + b @ squares_y
                - 2 * lambda_x * _mean(x, a) @ _mean(y, b)
                + class_a @ class_costs @ class_b
            ),
            cost_error=_relative_error(x.shape[1], dtype) * cost_range.highest,
        )
        self.points = x, y
        self.labels = labels_x, labels_y
        self.class_costs = class_costs
        self.lambda_x = lambda_x
        self._bias = (-class_costs[:, labels_y] - squares_y).to(dtype)

    @property
    def backend(self) -> str:
        """How the scores are held."""
        return "torch, scores streamed"

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield S in blocks of rows, in a buffer that the next block overwrites."""
        n, m = self.shape
        budget = BLOCK_ELEMENTS_CPU if self.device.type == "cpu" else BLOCK_ELEMENTS_GPU
        height = max(1, min(n, budget // m))
        buffer = torch.empty((height, m), dtype=self.dtype, device=self.device)
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            block = buffer[: rows.stop - start]
            torch.index_select(self._bias, 0, self.labels[0][rows], out=block)
            x, y = self.points
            yield start, block.addmm_(x[rows], y.T, alpha=2 * self.lambda_x)


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, ROWS_AT_ONCE)


def _mean(points: Tensor, masses: Tensor) -> Tensor:
    chunks = zip(_chunks(points), _chunks(masses), strict=True)
    return torch.stack([weights @ rows.double() for rows, weights in chunks]).sum(0)


def _centred(points: Tensor, centre: Tensor, dtype: torch.dtype) -> Tensor:
    """Points minus the centre: subtracted in float64, then rounded once; few rows at a time."""
    out = torch.empty(points.shape, dtype=dtype, device=points.device)
    for rows, kept in zip(_chunks(points), _chunks(out), strict=True):
        kept.copy_(rows.double() - centre)
    return out


def _squares(points: Tensor) -> Tensor:
    """||x_i||^2 of the rounded points, so that every cost is that of one cloud."""
    return torch.cat([rows.double().square().sum(1) for rows in _chunks(points)])


def _mass_per_class(masses: Tensor, labels: Tensor, classes: int) -> Tensor:
    return torch.zeros(classes, dtype=masses.dtype, device=masses.device).index_add_(
        0, labels, masses
    )


def _cost_range(squares_x: Tensor, squares_y: Tensor, class_costs: Tensor) -> CostRange:
    """Bound C by the largest norms: 0 <= ||x - y||^2 <= (max ||x|| + max ||y||)^2."""
    reach = (math.sqrt(float(squares_x.max())) + math.sqrt(float(squares_y.max()))) ** 2
    return CostRange(float(class_costs.min()), reach + float(class_costs.max()))


def _relative_error(dim: int, dtype: torch.dtype) -> float:
    """Relative error of a computed cost: a dot product of d terms, then three more roundings.

    The rounding errors of d products add up like a random walk, hence sqrt(d) and not d.
    """
    return torch.finfo(dtype).eps / 2 * (3 + math.sqrt(dim))
