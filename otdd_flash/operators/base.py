"""What the solver asks of a cost: eleven members, whatever holds the matrix.

An operator stands for a ground cost C (n, m) together with the masses a (n,) and b (m,) of its two
sides. Points and labels streamed in tiles, a stored matrix, a GPU kernel or several ranks differ
only in how they carry out the operations below; the solver never sees the difference. How they run
is chosen where an operator is built, and stands in its `execution`.

Notation: f (n,) and g (m,) are potentials in units of the cost and

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts

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

    Where the plan is computed as a symmetric one, columns and their errors are those of the rows,
    the same tensors.

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


class Execution(NamedTuple):
    """How the operations of an operator run: chosen once, where it is built.

    Attributes:
        backend: how a pass runs, for reports.
        in_triton: whether passes run in Triton, and with them the iterations.
        recorded: whether steps are recorded, as a pass takes less time than launching it, or not
            much more. Such a pass has no use for a sample.
        refined: makes the same cost to the full accuracy of the potentials, to end a solve on; None
            where the operator is that already.
        sampled: the cost between some rows (k,) and columns (l,), int64, each side of equal masses;
            None where it tells nothing of the whole.
        prepared_plan: prepares the plan of f (n,), g (m,) and an epsilon for many products, a
            `plan.Plan`, held only in so many bytes, half of free memory for None; None where
            `apply_plan` is as good, or memory is short.
        rounded_plan: prepares one near it for products that take less time, a `plan.Products`,
            likewise; None where it has none.
        in_blocks: `apply_plan` of values that are made block by block, for one block of the result
            after the other, `BlockedOperator.applied_blocks`; None where all points are on
            the device.
        on_points: `apply_plan` of the other side's points less an origin (d,), a `LessOrigin`, as
            on_points(f, g, epsilon, origin, transposed=...): by ranks that have the points, so that
            no values are sent. None where values are as good.
        rounded_by: by how much costs differ from those of `refined`, root mean square, about.
        over_columns: the softmin (n,) of all rows over some columns (l,), int64, of the masses that
            they have, and of their potential g (l,), as over_columns(columns, g, epsilon); None
            where it takes as long as one over all columns.
        point_products: prepares products of such a plan with the points, where they are packed, as
            point_products(plan, f, g, epsilon), a `point_products.PointProducts`; None from it, or
            in its place, where products with any matrix are as good.
    """

    backend: str
    sampled: Callable[[Tensor, Tensor], Operator] | None
    refined: Callable[[], Operator] | None = None
    in_triton: bool = False
    recorded: bool = False
    prepared_plan: Callable[[Tensor, Tensor, float, int | None], Any] | None = None
    rounded_plan: Callable[[Tensor, Tensor, float, int | None], Any] | None = None
    in_blocks: Callable[..., Any] | None = None
    on_points: Callable[..., Applied] | None = None
    rounded_by: Callable[[], float] | None = None
    over_columns: Callable[[Tensor, Tensor, float], Tensor] | None = None
    point_products: Callable[..., Any] | None = None


class Certifiable(Protocol):
    """What a certificate asks of a cost C (n, m) with masses a (n,) and b (m,).

    Of B costs with masses (B, n) and (B, m), all tensors have that leading dimension.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The type of the potentials, float32 or float64."""
        ...

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

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64."""
        ...


class Operator(Certifiable, Protocol):
    """A ground cost C (n, m) with masses a (n,) and b (m,)."""

    @property
    def execution(self) -> Execution: ...

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,).

        A `guess` (n,) near the result can save time and never changes the result beyond rounding.
        For the cost of a cloud with itself, `g` as its own guess says that there is one potential.
        """
        ...

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        ...

    def apply_plan(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        values: Tensor,
        *,
        transposed: bool = False,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> Applied:
        """P V (n, k) for V (m, k), and P 1 (n,); with `factors` A (n, r), B (m, r), (P o A B^T) V.

        If `transposed`, P^T U (m, k) for U (n, k), and P^T 1 (m,), or (P o A B^T)^T U.
        """
        ...


def refined(operator: Operator) -> Operator:
    """Return the cost at the full accuracy of the potentials; often the operator itself."""
    refine = operator.execution.refined
    return operator if refine is None else refine()
