"""A cost of labelled points whose half-steps run in Triton kernels on a GPU.

In base-2 logarithms, with the scores split as in `streamed`,

    f_i = lambda_x ||x_i||^2 - epsilon ln(2) LSE2_j[scale x_i . y_j + bias[l_i, j]]
    scale = 2 lambda_x log2(e) / epsilon
    bias[c, j] = log2(b_j) + (g_j - lambda_x ||y_j||^2 - lambda_y W[c, l_j]) log2(e) / epsilon

Where classes are so small that class-pure blocks would be mostly padding, bias has one row without
W and the kernel gathers lambda_y W[l_i, l_j] per score.

The norms are those of the rounded points, so that an iteration in `fast` precision is exact for one
slightly perturbed cloud. `refined` is the same cost in `high` precision; it shares the coordinates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.kernels.row_log_sum_exp import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    ClassTerm,
    row_log_sum_exp,
)
from otdd_flash.operators.packed import PackedPoints, pack, power_of_two_scale
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.operators.tiled import LN_2, LOG2_E, LOG2_ZERO

PARTS = {"fast": 1, "high": 3}

# Tensor cores add 16 products at a time and cut off what does not fit: errors of one sign.
PRODUCT_DEPTH = 16


class KernelOperator:
    """Labelled points on a GPU, half-steps by `row_log_sum_exp`.

    Plans are applied by the streamed PyTorch operator that it is made from.

    Args:
        streamed: the same cost, from which points, labels and masses are taken.
        precision: `fast` or `high`.
        sides: both clouds packed, and their exponent, when another operator has packed them.
    """

    def __init__(
        self,
        streamed: StreamedOperator,
        precision: str,
        sides: tuple[PackedPoints, PackedPoints, int] | None = None,
    ) -> None:
        self.streamed, self._precision = streamed, precision
        self.a, self.b = streamed.a, streamed.b
        self.shape, self.dtype = streamed.shape, streamed.dtype
        self.mean_cost, self.cost_range = streamed.mean_cost, streamed.cost_range
        self._sides = sides or _pack_sides(streamed)
        x, y, exponent = self._sides
        self._parts = PARTS[precision]
        steps = x.coordinates.shape[1] * self._parts / PRODUCT_DEPTH
        unit = torch.finfo(self.dtype).eps / 2
        self.cost_error = unit * (3 + steps) * self.cost_range.highest
        costs, lambda_x = streamed.class_costs.float(), streamed.lambda_x
        squares_x = (lambda_x * x.squares(self._parts, exponent)).float()
        squares_y = (lambda_x * y.squares(self._parts, exponent)).float()
        scale = 2 * lambda_x * 2.0 ** (-2 * exponent)
        self._rows = _HalfStep(x, y, squares_x, squares_y, self.b, costs, scale, self._parts)
        self._columns = _HalfStep(y, x, squares_y, squares_x, self.a, costs.T, scale, self._parts)

    @property
    def backend(self) -> str:
        """How a pass runs."""
        return f"triton, scores streamed, {self._precision}"

    @property
    def refined(self) -> KernelOperator:
        """The cost of the original points, to float32 accuracy."""
        if self._precision == "high":
            return self
        return KernelOperator(self.streamed, "high", self._sides)

    def seen_points(self) -> tuple[Tensor, Tensor]:
        """Both clouds as this precision rounds them, (n, d) and (m, d) float64, in their order."""
        *sides, exponent = self._sides
        x, y = (side.rounded(self._parts, exponent)[side.position] for side in sides)
        dim = self.streamed.points[0].shape[1]
        return x[:, :dim], y[:, :dim]

    def softmin_rows(self, g: Tensor, epsilon: float) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        return self._rows(g, epsilon)

    def softmin_columns(self, f: Tensor, epsilon: float) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        return self._columns(f, epsilon)

    def apply_plan(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        values: Tensor,
        *,
        row_factor: Tensor | None = None,
        column_factor: Tensor | None = None,
    ) -> Tensor:
        """P V (n, k) for V (m, k); with A (n, r) and B (m, r) given, (P o A B^T) V."""
        return self.streamed.apply_plan(
            f, g, epsilon, values, row_factor=row_factor, column_factor=column_factor
        )

    def apply_plan_transposed(self, f: Tensor, g: Tensor, epsilon: float, values: Tensor) -> Tensor:
        """P^T U (m, k) for U (n, k)."""
        return self.streamed.apply_plan_transposed(f, g, epsilon, values)


class _HalfStep:
    """The softmin over the columns of one side for the rows of the other.

    Args:
        rows: the side whose potential is updated.
        columns: the side that is summed over.
        squares_rows: (n,) lambda_x ||.||^2 of the packed rows.
        squares_columns: (m,) likewise.
        masses: of the columns, in their original order.
        costs: lambda_y W (V_rows, V_columns).
        scale: of the products of packed coordinates, in units of the cost.
        parts: of the coordinates that the kernel multiplies.
    """

    def __init__(
        self,
        rows: PackedPoints,
        columns: PackedPoints,
        squares_rows: Tensor,
        squares_columns: Tensor,
        masses: Tensor,
        costs: Tensor,
        scale: float,
        parts: int,
    ) -> None:
        self.rows, self.columns, self.scale, self.parts = rows, columns, scale, parts
        self.squares = squares_rows[rows.position]
        self.log2_masses = _log2_masses(masses, columns)
        self.costs = None if rows.pure else costs.contiguous()
        # (V, m), or (1, m) for rows of mixed classes: what a column subtracts from the scores.
        self.offset = squares_columns.unsqueeze(0)
        if rows.pure:
            self.offset = costs[:, columns.labels] + self.offset

    def __call__(self, potential: Tensor, epsilon: float) -> Tensor:
        """-epsilon log sum_j b_j exp((g_j - C_ij) / epsilon) for the original rows, float32."""
        scale = LOG2_E / epsilon
        bias = torch.sub(potential.float()[self.columns.origin], self.offset)
        bias = torch.add(self.log2_masses, bias, alpha=scale)
        term = None
        if self.costs is not None:
            term = ClassTerm(self.costs * -scale, self.rows.labels, self.columns.labels)
        logs = row_log_sum_exp(
            self.rows.coordinates,
            self.columns.coordinates,
            bias,
            self.rows.block_class,
            self.scale * scale,
            parts=self.parts,
            class_term=term,
        )
        return self.squares - (epsilon * LN_2) * logs[self.rows.position]


def _pack_sides(streamed: StreamedOperator) -> tuple[PackedPoints, PackedPoints, int]:
    x, y = streamed.points
    exponent = power_of_two_scale(x, y)
    sizes = {"block": BLOCK_ROWS, "multiple": BLOCK_COLUMNS}
    return (
        pack(x, streamed.labels[0], exponent, **sizes),
        pack(y, streamed.labels[1], exponent, **sizes),
        exponent,
    )


def _log2_masses(masses: Tensor, points: PackedPoints) -> Tensor:
    """log2 of the packed masses (n,), with padding as points without mass."""
    packed = torch.where(points.filled, masses[points.origin], 0.0)
    return packed.log2().clamp_min(LOG2_ZERO).float()
