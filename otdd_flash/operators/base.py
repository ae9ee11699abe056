"""What the solver asks of a cost with masses, whatever holds the matrix.

An operator stands for a ground cost C (n, m) together with the masses a (n,) and b (m,) of its two
sides. Points and labels streamed in tiles, a stored matrix, a GPU kernel or several ranks differ
only in how they carry out the operations below; the solver never sees the difference. Every member
is there for every operator.

Notation: f (n,) and g (m,) are potentials in units of the cost and

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.points import Cut, Masses

if TYPE_CHECKING:
    # It imports this file.
    from otdd_flash.operators.plans import EvaluatedPlan

# A recorded step reads epsilon as a tensor () float64 on the device, whose value may change; only
# what runs in Triton records steps.
Epsilon = float | Tensor


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
        cost_rounding: relative error of a stored cost; 0 if costs are recomputed.
        relative_error: of each sum, against the sum of the computed entries.
        lost: bound on what underflow takes from an entry, over a_i b_j.
    """

    rows: Tensor
    columns: Tensor
    row_errors: Tensor
    column_errors: Tensor
    cost_rounding: float
    relative_error: float
    lost: float


class Certifiable(Protocol):
    """What the certificate of a cross term asks of a cost C (n, m) with masses a (n,) and b (m,).

    Of B costs with masses (B, n) and (B, m), all tensors have that leading dimension.
    """

    @property
    def costs(self) -> CostFacts:
        """Facts of C; computing them may take long."""
        ...

    @property
    def a(self) -> Tensor:
        """Row masses (n,), float64, summing to 1."""
        ...

    @property
    def b(self) -> Tensor:
        """Column masses (m,), float64, summing to 1."""
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

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64; takes less than a pass."""
        ...


class SelfCertifiable(Protocol):
    """What the certificate of a self term asks: of the cost of a cloud with itself.

    Of B costs with masses (B, n), all tensors have that leading dimension.
    """

    @property
    def costs(self) -> CostFacts:
        """Facts of C; computing them may take long."""
        ...

    @property
    def a(self) -> Tensor:
        """Masses (n,), float64, summing to 1."""
        ...

    @property
    def b(self) -> Tensor:
        """The same masses."""
        ...

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """As for `Certifiable`; without `g`, of the only potential f of a cloud with itself.

        Its plan is symmetric but for rounding, and may be computed as one that is.
        """
        ...

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64."""
        ...


class Operator(Certifiable, SelfCertifiable, Protocol):
    """A ground cost C (n, m) with masses a (n,) and b (m,)."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials, `costs.dtype`, which is known before the costs are."""
        ...

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """As for `SelfCertifiable`."""
        ...

    @property
    def backend(self) -> str:
        """How passes run and what they read, for reports."""
        ...

    @property
    def in_triton(self) -> bool:
        """Whether passes run in Triton, and with them the iterations."""
        ...

    @property
    def recorded(self) -> bool:
        """Whether steps are recorded: a pass takes not much more time than launching it."""
        ...

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,).

        A `guess` (n,) near the result can save time and never changes the result beyond rounding.
        """
        ...

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        ...

    def softmin_self(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """The softmin (n,) of the only potential of a cloud with itself, which is near it."""
        ...

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> EvaluatedPlan:
        """The plan of f (n,) and g (m,), or of the only potential of a cloud with itself.

        What it prepares for many products takes `most` bytes, half of free memory for None.
        """
        ...

    def part(self, rows: Cut, columns: Cut, masses: Masses | None = None) -> Operator:
        """The cost between some rows (k,) and columns (l,), int64, or all of a side.

        Of these masses, which sum to 1 on either side; by default of those that the points have in
        the whole, whose facts its facts then are.
        """
        ...

    @property
    def refined(self) -> Operator:
        """The same cost to the full accuracy of the potentials; itself where it is that already."""
        ...
