"""What the solver asks of a cost: eight operations, whatever holds the matrix.

An operator stands for a ground cost C (n, m) together with the masses a (n,) and b (m,) of its two
sides. Points and labels streamed in tiles, a stored matrix, a GPU kernel or several ranks differ
only in how they carry out the operations below; the solver never sees the difference.

Notation: f (n,) and g (m,) are potentials in units of the cost and

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from otdd_flash.operators.one_segment import OneSegment

# A recorded step reads epsilon as a tensor () float64 on the device, whose value may change; only
# what runs in Triton records steps.
Epsilon = float | Tensor

# What formulas are for: a number that the host knows, or tensors.
Number = TypeVar("Number", float, Tensor)


class CostRange(NamedTuple):
    """Bounds on the cost over the support of both masses, in units of the cost."""

    lowest: float
    highest: float


class Applied(NamedTuple):
    """A plan applied to a matrix, and its masses on the side of the result.

    Attributes:
        values: P V (n, k), or P^T U (m, k).
        masses: P 1 (n,), or P^T 1 (m,), float64.
    """

    values: Tensor
    masses: Tensor


class Marginals(NamedTuple):
    """Row and column sums of one plan of f and g, every entry of which was computed once.

    The computed entries are a_i b_j exp((f_i + g_j - C'_ij) / epsilon) of costs C' near C, give or
    take `lost` a_i b_j:

        |C'_ij - C_ij| <= row_errors_i + column_errors_j + cost_rounding |C_ij|.

    Attributes:
        rows: (n,) row sums, float64.
        columns: (m,) column sums, float64.
        row_errors: (n,) float64, in units of the cost.
        column_errors: (m,) float64, likewise.
        cost_rounding: as said; 0 where costs are not stored.
        relative_error: of each sum, against the sum of the computed entries.
        lost: as said.
    """

    rows: Tensor
    columns: Tensor
    row_errors: Tensor
    column_errors: Tensor
    cost_rounding: float
    relative_error: float
    lost: float


class Costs(Protocol):
    """What the host knows of a cost C (n, m) between masses a (n,) and b (m,)."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials."""
        ...

    @property
    def cost_range(self) -> CostRange:
        """An interval that holds every C_ij with a_i b_j > 0."""
        ...

    @property
    def mean_cost(self) -> float:
        """sum_ij a_i b_j C_ij."""
        ...

    @property
    def cost_error(self) -> float:
        """Bound on the mean error of the costs of `marginals` over any plan between a and b.

        In units of the cost, and without what the potentials add to it.
        """
        ...


class Operator(Costs, Protocol):
    """A ground cost C (n, m) with masses a (n,) and b (m,)."""

    @property
    def a(self) -> Tensor:
        """Row masses (n,), float64, summing to 1."""
        ...

    @property
    def b(self) -> Tensor:
        """Column masses (m,), float64, summing to 1."""
        ...

    @property
    def backend(self) -> str:
        """How a pass runs, for reports."""
        ...

    @property
    def short_passes(self) -> bool:
        """Whether a pass runs on a GPU and takes less time than launching it, or not much more."""
        ...

    def segment(self, candidate: Tensor, *, symmetric: bool) -> OneSegment:
        """This problem as the only one of the engine, whose steps run where passes do.

        Args:
            candidate: (m,) column potential to evaluate first.
            symmetric: whether rows are columns.
        """
        ...

    @property
    def refined(self) -> Operator:
        """The same cost to the full accuracy of `dtype`, to end a solve on; often itself."""
        ...

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,).

        A `guess` (n,) near the result can save time and never changes the result beyond rounding.
        For the cost of a cloud with itself, `g` as its own guess says that there is one potential.
        """
        ...

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        ...

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,), with bounds on their errors.

        Potentials may be float32 or float64; those of points without mass are not read. The costs
        C' that the sums belong to are the same in every call that is `accurate`, and in every one
        that need not be.
        """
        ...

    def apply_plan(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        values: Tensor,
        *,
        row_factor: Tensor | None = None,
        column_factor: Tensor | None = None,
    ) -> Applied:
        """P V (n, k) for V (m, k); with A (n, r), B (m, r) given, (P o A B^T) V. And P 1 (n,)."""
        ...

    def apply_plan_transposed(
        self, f: Tensor, g: Tensor, epsilon: float, values: Tensor
    ) -> Applied:
        """P^T U (m, k) for U (n, k), and P^T 1 (m,)."""
        ...

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64; takes less than a pass."""
        ...

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64."""
        ...

    def sample(self, rows: Tensor, columns: Tensor) -> Operator:
        """The cost between some rows (k,) and columns (l,), int64; on each side of equal masses."""
        ...
