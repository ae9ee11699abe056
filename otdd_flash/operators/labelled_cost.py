"""Two labelled clouds and what every operator needs to know of the cost between them.

    C_ij = lambda_x ||x_i - y_j||^2 + lambda_y W[l_i, l_j]

The points stay as they were given; an operator takes what it needs, centred by their common mean: C
is unchanged by that and the rounding error shrinks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import CostRange

# Rows that are converted to float64 together; a GPU wants few, large launches.
ROWS_AT_ONCE = 4096
ROWS_AT_ONCE_GPU = 16384


class LabelledCost:
    """The cost between two labelled clouds.

    Args:
        x: (n, d) points.
        y: (m, d) points; the same object as `x` for the cost of a cloud with itself.
        a: (n,) masses, float64.
        b: (m,) masses, float64.
        labels_x: (n,) class indices, rows of W.
        labels_y: (m,) class indices, columns of W.
        class_costs: (V_x, V_y) the block of lambda_y W that these labels index, float64.
        lambda_x: weight of the squared Euclidean distance.

    Attributes:
        centre: (d,) float64, the mean of both clouds' means.
        largest: of all coordinates, in absolute value, after centring.
        cost_range: an interval that holds C on the support.
        mean_cost: sum_ij a_i b_j C_ij.
        symmetric: whether both sides are one cloud with one set of labels and masses.
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
    ) -> None:
        self.points, self.labels = (x, y), (labels_x, labels_y)
        self.a, self.b = a, b
        self.class_costs, self.lambda_x = class_costs, lambda_x
        self.symmetric = x is y and labels_x is labels_y and a is b
        mean_x = _mean(x, a)
        mean_y = mean_x if self.symmetric else _mean(y, b)
        self.centre = (mean_x + mean_y) / 2
        seen_x = _norms(x, a, self.centre)
        seen_y = seen_x if self.symmetric else _norms(y, b, self.centre)
        class_a = _mass_per_class(a, labels_x, class_costs.shape[0])
        class_b = _mass_per_class(b, labels_y, class_costs.shape[1])
        met = (class_a > 0)[:, None] & (class_b > 0)[None, :]
        products = (mean_x - self.centre) @ (mean_y - self.centre)
        # One tensor, so that the host waits once.
        numbers = torch.stack(
            (
                torch.maximum(seen_x.largest, seen_y.largest),
                seen_x.highest,
                seen_y.highest,
                seen_x.mean + seen_y.mean - 2 * products,
                torch.where(met, class_costs, math.inf).min(),
                torch.where(met, class_costs, -math.inf).max(),
                class_a @ class_costs @ class_b,
            )
        )
        self.largest, highest_x, highest_y, squares, low, high, classes = numbers.tolist()
        self.mean_cost = lambda_x * squares + classes
        # 0 <= ||x - y||^2 <= (max ||x|| + max ||y||)^2.
        reach = lambda_x * (math.sqrt(highest_x) + math.sqrt(highest_y)) ** 2
        self.cost_range = CostRange(low, reach + high)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.points[0].shape[0], self.points[1].shape[0]

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64: O((n + m) d), from q's moments."""
        x, y = self.points
        total, moment, squares = masses.sum(), torch.zeros_like(self.centre), masses.new_zeros(())
        for rows, weights in zip(_chunks(y), _chunks(masses), strict=True):
            centred, norms = self._centred_with_norms(rows)
            moment += weights @ centred
            squares += weights @ norms
        found = []
        for rows in _chunks(x):
            centred, norms = self._centred_with_norms(rows)
            found.append(total * norms - 2 * (centred @ moment) + squares)
        classes = self.class_costs @ _mass_per_class(
            masses, self.labels[1], self.class_costs.shape[1]
        )
        return self.lambda_x * torch.cat(found) + classes[self.labels[0]]

    def _centred_with_norms(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows minus the centre, and their squared norms, float64, in the memory of one copy."""
        centred = rows.to(torch.float64, copy=True).sub_(self.centre)
        return centred, torch.linalg.vector_norm(centred, dim=1).square()

    def own_costs(self) -> Tensor:
        """C_ii (n,) of a cloud with itself, float64."""
        return self.class_costs[self.labels[0], self.labels[0]]

    def sample(self, rows: Tensor, columns: Tensor) -> LabelledCost:
        """The cost between some rows (k,) and columns (l,), int64; on each side of equal masses."""
        (x, y), (labels_x, labels_y) = self.points, self.labels
        return LabelledCost(
            x[rows],
            y[columns],
            equal_masses(rows),
            equal_masses(columns),
            labels_x=labels_x[rows],
            labels_y=labels_y[columns],
            class_costs=self.class_costs,
            lambda_x=self.lambda_x,
        )

    def centred(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both clouds minus the centre, subtracted in float64 and rounded once."""
        x = _centred(self.points[0], self.centre, dtype)
        return x, x if self.symmetric else _centred(self.points[1], self.centre, dtype)


def equal_masses(points: Tensor) -> Tensor:
    """The same mass for each of some points, (k,) float64 that add up to 1."""
    count = len(points)
    return torch.full((count,), 1 / count, dtype=torch.float64, device=points.device)


def squared_norms(points: Tensor) -> Tensor:
    """||x_i||^2 (n,), float64."""
    return torch.cat([rows.double().square().sum(1) for rows in _chunks(points)])


class _Norms(NamedTuple):
    """What a cloud's norms say, each a tensor of one number."""

    largest: Tensor
    highest: Tensor
    mean: Tensor


def _norms(points: Tensor, masses: Tensor, centre: Tensor) -> _Norms:
    """The largest coordinate, and the highest (on the support) and mean squared norm."""
    largest, squares = [], []
    for rows in _chunks(points):
        centred = rows.double() - centre
        largest.append(centred.abs().max())
        squares.append(centred.square_().sum(1))
    norms = torch.cat(squares)
    return _Norms(
        torch.stack(largest).max(), torch.where(masses > 0, norms, 0.0).max(), masses @ norms
    )


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, ROWS_AT_ONCE_GPU if rows.is_cuda else ROWS_AT_ONCE)


def _mean(points: Tensor, masses: Tensor) -> Tensor:
    chunks = zip(_chunks(points), _chunks(masses), strict=True)
    return torch.stack([weights @ rows.double() for rows, weights in chunks]).sum(0)


def _centred(points: Tensor, centre: Tensor, dtype: torch.dtype) -> Tensor:
    """A few rows at a time, so that no float64 copy of all is made."""
    out = torch.empty(points.shape, dtype=dtype, device=points.device)
    for rows, kept in zip(_chunks(points), _chunks(out), strict=True):
        kept.copy_(rows.double() - centre)
    return out


def _mass_per_class(masses: Tensor, labels: Tensor, classes: int) -> Tensor:
    return torch.zeros(classes, dtype=masses.dtype, device=masses.device).index_add_(
        0, labels, masses
    )
