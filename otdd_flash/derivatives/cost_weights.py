"""Derivatives by points, class distances and lambdas, from the derivative M by the costs.

    dL/dC = M,    M_ij = e_ij (A_i . B_j b_j + h_i b_j + a_i k_j),

with e_ij = exp((f_i + g_j - C_ij) / epsilon), the `Entries` of `adjoint`, and h, k, A, B of what is
differentiated: `potentials` and `transport_map` give them. The derivatives by x, y, the class
distances and both lambdas need only products M V and M^T U:

    dL/dx = 2 lambda_x ((M 1) o x - M y)         dL/dlambda_x = sum_ij M_ij ||x_i - y_j||^2
    dL/dy = 2 lambda_x ((M^T 1) o y - M^T x)     dL/dlambda_y = sum_ij M_ij W[l_i, l_j]
    dL/dW[k, l] = lambda_y sum of M over the pairs of classes k, l.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from otdd_flash.cost.points import class_indices, less_origin
from otdd_flash.derivatives.adjoint import Entries
from otdd_flash.derivatives.centred import mean_near
from otdd_flash.operators.base import Factors
from otdd_flash.operators.comparison import Comparison


class CostWeights:
    """M of the module docstring: dL/dC.

    Args:
        entries: e, with a and b.
        h: (n,) float64.
        k: (m,) float64.
        factors: A (n, r) and B (m, r), float64; None for 0.

    Attributes:
        entries: e, with a and b.
    """

    def __init__(
        self, entries: Entries, h: Tensor, k: Tensor, factors: Factors | None = None
    ) -> None:
        self.entries, self._factors = entries, factors
        self._h, self._k = h, k

    def times(self, values: Tensor) -> Tensor:
        """Return M V (n, j) for V (m, j)."""
        if self._held is not None:
            return self._held @ values
        entries, b = self.entries, self.entries.b
        of_b, of_k = entries.times(values, weights=(b, self._k)).chunk(2, 1)
        found = torch.addcmul(self._h[:, None] * of_b, entries.a[:, None], of_k)
        del of_b, of_k
        if self._factors is not None:
            found += entries.times(values, self._factors, (b,))
        return found

    def transposed_times(self, values: Tensor) -> Tensor:
        """Return M^T U (m, j) for U (n, j)."""
        if self._held is not None:
            return self._held.T @ values
        entries, b = self.entries, self.entries.b[:, None]
        of_h, of_a = entries.transposed_times(values, weights=(self._h, entries.a)).chunk(2, 1)
        found = torch.addcmul(b * of_h, self._k[:, None], of_a)
        del of_h, of_a
        if self._factors is not None:
            found += entries.transposed_times(values, self._factors).mul_(b)
        return found

    @cached_property
    def _held(self) -> Tensor | None:
        """M itself (n, m) if the plan is stored and small, else None."""
        entries, held = self.entries, self.entries.small
        if held is None:
            return None
        left, right = entries.masses
        h, k = self._h / left, self._k / right
        if entries.whole:
            found = h[:, None] + k
        else:
            found = torch.outer(h, entries.b / right).addr_(entries.a / left, k)
        if self._factors is not None:
            of_rows, of_columns = self._factors
            if not entries.whole:
                of_columns = of_columns * (entries.b / right)[:, None]
            found.addmm_(of_rows / left[:, None], of_columns.T)
        return found.mul_(held)


def cost_gradient(
    comparison: Comparison, weights: CostWeights, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Compute the derivatives in `needs`: by "x", "y", "classes" and both lambdas, float64.

    "classes" is the table (V_x + V_y, V_x + V_y), 0 outside of the block [x, y].
    """
    gradient: dict[str, Tensor] = {}
    ground, (source, target) = comparison.ground, comparison.sides("xy")
    # Points of x are about as far from it as from the points that the plan sends them to.
    origin = mean_near(target.features, weights.entries.b)
    # Computed where they are used, as a product needs only one of them in memory.
    x, y = (partial(less_origin, side.features, origin) for side in (source, target))
    factor, dim = 2 * ground.squared.lambda_x, source.features.shape[1]
    by_class = bool(needs & {"classes", "lambda_y"})
    if needs & {"x", "lambda_x"} or by_class:
        parts: list[Callable[[], Tensor]] = [lambda: origin.new_ones((len(target), 1))]
        if needs & {"x", "lambda_x"}:
            parts.append(y)
        if by_class:
            distances = comparison.block("xy")
            classes = distances.shape[1]
            belonging = partial(torch.nn.functional.one_hot, class_indices(target), classes)
            parts.append(lambda: belonging().double())
        found = weights.times(torch.cat([part() for part in parts], 1))
        rows, moved = found[:, :1], found[:, 1 : 1 + dim]
        if "x" in needs:
            gradient["x"] = factor * (rows * x() - moved)
        if by_class:
            block = torch.zeros_like(distances)
            block.index_add_(0, class_indices(source), found[:, -classes:])
            gradient["lambda_y"] = (block * distances).sum()
            gradient["classes"] = comparison.classes.around("xy", ground.lambda_y * block)
    if needs & {"y", "lambda_x"}:
        ones = origin.new_ones((len(source), 1))
        back = weights.transposed_times(torch.cat((ones, x()), 1) if "y" in needs else ones)
        if "y" in needs:
            gradient["y"] = factor * (back[:, :1] * y() - back[:, 1:])
        if "lambda_x" in needs:
            of_squares = (rows * x().square()).sum() + (back[:, :1] * y().square()).sum()
            gradient["lambda_x"] = of_squares - 2 * (x() * moved).sum()
    return gradient
