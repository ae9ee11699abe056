"""The operations on a cost with masses that solver, engine and certificates call.

An operator stands for a ground cost C (n, m) together with the masses a (n,) and b (m,) of its two
sides. Points and labels streamed in tiles, a stored matrix, a GPU kernel or several ranks differ
only in how they carry out the operations below; the solver never sees the difference. Every
operator has every member.

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

# A step that is recorded as a CUDA graph reads epsilon from a tensor () float64 on the device,
# whose value may change between replays; only operators in Triton record steps.
Epsilon = float | Tensor


class Applied(NamedTuple):
    """A plan applied to a matrix, and the plan's marginal on the side of the result.

    Attributes:
        values: P V (n, k), or P^T U (m, k).
        masses: P 1 (n,), or P^T 1 (m,), float64.
    """

    values: Tensor
    masses: Tensor


class Marginals(NamedTuple):
    """Row and column sums of one plan of f and g, every entry of which was computed once.

    Up to an underflow of `lost` a_i b_j the computed entries are a_i b_j exp((f_i + g_j - C'_ij) /
    epsilon), with costs C' near C:

        |C'_ij - C_ij| <= row_errors_i + column_errors_j + cost_rounding |C_ij|.

    Attributes:
        rows: (n,) row sums, float64.
        columns: (m,) column sums, float64.
        row_errors: (n,) float64, in units of the cost.
        column_errors: (m,) float64, in units of the cost.
        cost_rounding: relative error of a stored cost; 0 if costs are recomputed.
        relative_error: of each sum, relative to the sum of the computed entries.
        lost: bound on the underflow of an entry, over a_i b_j.
    """

    rows: Tensor
    columns: Tensor
    row_errors: Tensor
    column_errors: Tensor
    cost_rounding: float
    relative_error: float
    lost: float


class Certifiable(Protocol):
    """A cost C (n, m) with masses a (n,) and b (m,), as the certificate of a cross term reads it.

    For B costs with masses (B, n) and (B, m), all tensors have that leading dimension.
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
        """Compute row and column sums of the plan of f (n,) and g (m,), with error bounds.

        Potentials may be float32 or float64; those of points without mass are not read. The costs
        C' of the sums are the same in all calls with `accurate`, and the same in all without.
        """
        ...

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64, in less time than a pass."""
        ...


class SelfCertifiable(Protocol):
    """The cost of a cloud with itself, as the certificate of a self term reads it.

    For B costs with masses (B, n), all tensors have that leading dimension.
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
        """Compute the sums of `Certifiable.marginals`; without `g`, for f on both sides.

        That plan is symmetric up to rounding, and may be computed as a symmetric one.
        """
        ...

    def own_costs(self) -> Tensor:
        """Return C_ii (n,) for the cost of a cloud with itself, float64."""
        ...


class Operator(Certifiable, SelfCertifiable, Protocol):
    """A ground cost C (n, m) with masses a (n,) and b (m,)."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials, `costs.dtype`, known before `costs` are computed."""
        ...

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Compute the sums of `SelfCertifiable.marginals`."""
        ...

    @property
    def backend(self) -> str:
        """A description of how passes run and what they read, for reports."""
        ...

    @property
    def in_triton(self) -> bool:
        """Whether passes, and so the iterations, run in Triton."""
        ...

    @property
    def recorded(self) -> bool:
        """Whether steps are recorded as CUDA graphs: passes are about as short as a launch."""
        ...

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,).

        A `guess` (n,) near the result can save time and never changes the result beyond rounding.
        """
        ...

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        ...

    def softmin_self(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute T(f) (n,) for the potential f of a self term, which is near T(f)."""
        ...

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> EvaluatedPlan:
        """Build the plan of f (n,) and g (m,); without `g`, of f on both sides of a self term.

        A plan that is held for many products takes at most `most` bytes, half of free memory for
        None.
        """
        ...

    def part(self, rows: Cut, columns: Cut, masses: Masses | None = None) -> Operator:
        """Return the cost between some rows (k,) and columns (l,), int64, or all of a side.

        With `masses`, which sum to 1 on each side, it is a cost with facts of its own. By default
        points keep the masses that they have in the whole, and the part has the facts of the whole.
        """
        ...

    @property
    def refined(self) -> Operator:
        """The same cost at the full accuracy of the potentials; itself if it has that already."""
        ...
