"""The interfaces of a cost with masses and of its plans: what solver and derivatives call.

An operator stands for a ground cost C (n, m) together with the masses a (n,) and b (m,) of its two
sides. `Comparison.operator` and `solver.matrix_comparison` return one. Points and labels streamed
in tiles, a stored matrix, a GPU kernel or several ranks differ in how they carry out the operations
below, and every operator has every member. `one_problem`, `solver.small`, `solver.exact` and
`flows.stepping` make use of more than these where an operator is of a kind that they know.

Notation: f (n,) and g (m,) are potentials in units of the cost and

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon),      r = P 1,  c = P^T 1.

`Operator.plan` returns an `EvaluatedPlan`, whose entries are computed again in every product; its
`prepared` form is for many products, and may hold the entries (`StoredPlan`; in Triton see
`triton_plans`). Gradients, Hessians and maps read these, and certificates `Operator.marginals`.
After a change the sums of a plan must still be those of the entries that are multiplied, rounding
included; `tests/conformance` checks every operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.host_points import Block
from otdd_flash.cost.points import Cut, Masses, Points

if TYPE_CHECKING:
    # It imports this file, and Triton.
    from otdd_flash.operators.triton_plans import HalfProducts, PointProducts

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

    Entries are computed up to an underflow of at most `underflow` a_i b_j, for costs C' near C:

        a_i b_j exp((f_i + g_j - C'_ij) / epsilon),
        |C'_ij - C_ij| <= row_errors_i + column_errors_j + cost_rounding |C_ij|.

    Attributes:
        rows: (n,) row sums, float64.
        columns: (m,) column sums, float64.
        row_errors: (n,) float64, in units of the cost.
        column_errors: (m,) float64, in units of the cost.
        cost_rounding: relative error of a stored cost; 0 if costs are recomputed.
        relative_error: of each sum, relative to the sum of the computed entries.
        underflow: bound on the underflow of an entry, over a_i b_j.
        own_costs: C_ii (n,) float64, if f alone is on both sides of a self term; else None.
    """

    rows: Tensor
    columns: Tensor
    row_errors: Tensor
    column_errors: Tensor
    cost_rounding: float
    relative_error: float
    underflow: float
    own_costs: Tensor | None = None


class Passes(NamedTuple):
    """How the passes of an operator run; known before its `costs` are computed.

    Attributes:
        dtype: the type of their potentials, which is `CostFacts.dtype`.
        backend: what runs them and what they read, for reports.
        in_triton: whether they, and so the iterations, run in Triton.
        recorded: whether steps are recorded as CUDA graphs: passes are about as short as a launch.
    """

    dtype: torch.dtype
    backend: str
    in_triton: bool = False
    recorded: bool = False


class Certifiable(Protocol):
    """A cost C (n, m) with masses a (n,) and b (m,), as the evidence of certificates reads it.

    For B costs with masses (B, n) and (B, m), all tensors have that leading dimension.
    """

    @property
    def passes(self) -> Passes:
        """How its passes run."""
        ...

    @property
    def a(self) -> Tensor:
        """Row masses (n,), float64, summing to 1."""
        ...

    @property
    def b(self) -> Tensor:
        """Column masses (m,), float64, summing to 1; the row masses in a self term."""
        ...

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Compute row and column sums of the plan of f (n,) and g (m,), with error bounds.

        Without `g`, f is on both sides of a self term. That plan is symmetric up to rounding, and
        may be computed as a symmetric one.

        Potentials may be float32 or float64; those of points without mass are not read. The costs
        C' of the sums are the same in all calls with `accurate`, and the same in all without.
        """
        ...

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64, in less time than a pass."""
        ...


class Operator(Certifiable, Protocol):
    """A ground cost C (n, m) with masses a (n,) and b (m,)."""

    @property
    def costs(self) -> CostFacts:
        """Facts of C; computing them may take long."""
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

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> Operator:
        """Return the cost between some rows (k,) and columns (l,), int64, with other masses.

        These sum to 1 on each side. The cost has facts of its own.
        """
        ...

    def softmin_over(self, columns: Tensor, g: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute `softmin_rows` (n,) over some columns (l,), int64, with potentials g (l,).

        Columns keep the masses that they have in the whole.
        """
        ...

    @property
    def refined(self) -> Operator:
        """The same cost at the full accuracy of the potentials; itself if it has that already."""
        ...


# Error of a long sum in unit roundoffs: a few, as rounding errors of its terms have both signs.
SUM_UNITS = 8

# A (n, r) and B (m, r): the entries of a plan are multiplied by those of A B^T, or of the sum of
# these over several pairs.
Factors = tuple[Tensor, Tensor]


class Products(Protocol):
    """Products with a plan P (n, m), and the float64 sums of the entries that are multiplied."""

    @property
    def precision(self) -> float:
        """Relative error of products, over the product of the norms of both factors."""
        ...

    @property
    def half_products(self) -> HalfProducts | None:
        """Products with P and with P^T on packed values, on tensor cores; None without these."""
        ...

    @property
    def rows(self) -> Tensor:
        """P 1 (n,), float64."""
        ...

    @property
    def columns(self) -> Tensor:
        """P^T 1 (m,), float64."""
        ...

    def times(self, values: Tensor, *, transposed: bool = False) -> Tensor:
        """Compute P V (n, k) for V (m, k), or if `transposed` P^T U (m, k) for U (n, k)."""
        ...


class Plan(Products, Protocol):
    """A plan P (n, m) at the accuracy of its operator's type."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of products, to which narrower values are converted: float32 or float64."""
        ...

    @property
    def quick(self) -> Products:
        """The plan rounded for faster, less accurate products; itself if there is none."""
        ...

    @property
    def with_points(self) -> PointProducts | None:
        """Products with the packed points of its sides; None if points are not packed."""
        ...

    def times(
        self, values: Tensor, pairs: Sequence[Factors] = (), *, transposed: bool = False
    ) -> Tensor:
        """Compute P V (n, k) for V (m, k), or if `transposed` P^T U (m, k) for U (n, k).

        With one or two pairs, the product is that of P o W, with W the sum of their A B^T.
        """
        ...


# make(rows, points (k, d) on the device): returns the values (k, c) to be multiplied.
Make = Callable[[Cut, Tensor], Tensor]

ALL = Block(slice(None), slice(None))


class PlanBlock(NamedTuple):
    """A product with a plan, for a block of points of the side of the result.

    Attributes:
        block: which points.
        points: (k, d) on the device.
        applied: P V (k, c) and P 1 (k,), or P^T U and P^T 1.
    """

    block: Block
    points: Tensor
    applied: Applied


class EvaluatedPlan(ABC):
    """A plan whose entries are computed again in every product, and its sums with them.

    Args:
        operator: the cost and the masses.
        f: (n,) potential, in units of the cost.
        g: (m,) potential; None for the only potential of a cloud with itself.
        epsilon: regularisation, in units of the cost.
        most: bytes that a held plan may take, half of free memory for None.

    Attributes:
        operator: as given; a subclass names the kind that it multiplies by.
        dtype: of products.
        masses: a (n,) and b (m,), float64.
        symmetric: whether f is on both sides of a self term.
    """

    half_products: HalfProducts | None = None

    def __init__(
        self, operator: Certifiable, f: Tensor, g: Tensor | None, epsilon: float, most: int | None
    ) -> None:
        self.operator, self.symmetric = operator, g is None
        self.dtype, self.masses = operator.passes.dtype, (operator.a, operator.b)
        self._at, self._most = (f, f if g is None else g, epsilon), most
        # Row sums (False) and column sums (True), once a product has computed them.
        self._sums: dict[bool, Tensor] = {}

    @abstractmethod
    def applied(
        self, values: Tensor, *, transposed: bool = False, factors: Factors | None = None
    ) -> Applied:
        """Compute P V (n, k) for V (m, k), and P 1 (n,); with `factors` A, B, (P o A B^T) V.

        If `transposed`, compute P^T U (m, k) for U (n, k), and P^T 1 (m,), or (P o A B^T)^T U.
        """

    def blocks(
        self, points: tuple[Points, Points], make: Make, *, transposed: bool = False
    ) -> Iterator[PlanBlock]:
        """Yield P V for blocks of rows, or P^T U for blocks of columns; one block unless streamed.

        So the device never holds all values or results of streamed points.

        Args:
            points: x (n, d) and y (m, d).
            make: computes the values; a `cost.points.LessOrigin` if `points` are those of the cost.
            transposed: whether the product is with P^T.
        """
        own, other = points[::-1] if transposed else points
        values = make(ALL.rows, other[ALL.rows])
        yield PlanBlock(ALL, own[ALL.rows], self.applied(values, transposed=transposed))

    @property
    def prepared(self) -> Plan:
        """The plan for many products: held if that is faster and memory allows it."""
        return self

    @property
    def quick(self) -> Products:
        """The plan rounded for faster products; itself if there is none."""
        return self

    @property
    def with_points(self) -> PointProducts | None:
        """Products with packed points; None if points are not packed."""
        return None

    @property
    def precision(self) -> float:
        """Relative error of products in this type."""
        return SUM_UNITS * torch.finfo(self.dtype).eps / 2

    @property
    def rows(self) -> Tensor:
        """P 1 (n,)."""
        if False not in self._sums:
            self.times(torch.ones_like(self.masses[1]).unsqueeze(1))
        return self._sums[False]

    @property
    def columns(self) -> Tensor:
        """P^T 1 (m,)."""
        if True not in self._sums:
            self.times(torch.ones_like(self.masses[0]).unsqueeze(1), transposed=True)
        return self._sums[True]

    def times(
        self, values: Tensor, pairs: Sequence[Factors] = (), *, transposed: bool = False
    ) -> Tensor:
        """Compute P V or P^T U, or these of P o W; see `Plan.times`."""
        found = self.applied(values, transposed=transposed, factors=_balanced(pairs))
        self._sums.setdefault(transposed, found.masses)
        return found.values.to(self.dtype)


class StoredPlan:
    """A plan stored as a matrix P (n, m), float64.

    Args:
        entries: P.
        quick: faster products with a rounded plan; None uses this one.

    Attributes:
        entries: P.
    """

    dtype, precision = torch.float64, SUM_UNITS * torch.finfo(torch.float64).eps / 2
    half_products = with_points = None

    def __init__(self, entries: Tensor, quick: Products | None = None) -> None:
        self.entries, self.quick = entries, quick or self

    @cached_property
    def rows(self) -> Tensor:
        """P 1 (n,)."""
        return self.entries.sum(1)

    @cached_property
    def columns(self) -> Tensor:
        """P^T 1 (m,)."""
        return self.entries.sum(0)

    def times(
        self, values: Tensor, pairs: Sequence[Factors] = (), *, transposed: bool = False
    ) -> Tensor:
        """Compute P V or P^T U, or these of P o W; see `Plan.times`."""
        entries, values = self.entries.T if transposed else self.entries, values.double()
        factors = _side_by_side(pairs)
        if factors is None:
            return entries @ values
        left, right = (factor.double() for factor in factors)
        if left.shape[1] * values.shape[1] <= FEW_COLUMNS:
            own, other = (right, left) if transposed else (left, right)
            return _unfolded(entries, values, own, other)
        found = values.new_zeros((len(entries), values.shape[1]))
        for rows, weighted in self._weighted(left, right):
            if transposed:
                found.addmm_(weighted.T, values[rows])
            else:
                torch.mm(weighted, values, out=found[rows])
        return found

    def _weighted(self, left: Tensor, right: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows and their entries, weighted by A B^T."""
        n, m = self.entries.shape
        height = max(1, (BLOCK_GPU if left.is_cuda else BLOCK_CPU) // m)
        for first in range(0, n, height):
            rows = slice(first, first + height)
            yield rows, (left[rows] @ right.T).mul_(self.entries[rows])


# Entries that are weighted at once: those that a cache holds, and few launches on a GPU.
BLOCK_CPU, BLOCK_GPU = 1 << 20, 1 << 25

# Columns by which P is multiplied in less time than its entries are weighted, which moves some
# three times their bytes.
FEW_COLUMNS = 128


def _unfolded(entries: Tensor, values: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute (P o L R^T) V (n, k) as sum_r L_r o P (R_r o V), one product with r k columns."""
    weighted = (right[:, :, None] * values[:, None]).flatten(1)
    images = (entries @ weighted).view(len(left), left.shape[1], -1)
    return torch.einsum("nr,nrk->nk", left, images)


def _side_by_side(pairs: Sequence[Factors]) -> Factors | None:
    """Return A B^T + C D^T of two pairs as one product [A, C] [B, D]^T; None without any."""
    if len(pairs) < 2:
        return pairs[0] if pairs else None
    left, right = (torch.cat(sides, 1) for sides in zip(*pairs, strict=True))
    return left, right


def _balanced(pairs: Sequence[Factors]) -> Factors | None:
    """Return [A, C] and [B, D] with A, B and C, D rescaled, as each pair is rounded on one scale.

    A is multiplied by a power of two and B divided by it until both have one size, C and D too.
    """
    if len(pairs) < 2:
        return _side_by_side(pairs)
    norms = [torch.linalg.vector_norm(side, torch.inf) for pair in pairs for side in pair]
    logs = torch.stack(norms).clamp_min(torch.finfo(norms[0].dtype).tiny).log2().view(2, 2)
    scales = ((logs[:, 1] - logs[:, 0]) / 2).round().exp2()
    return _side_by_side(
        [(left * scale, right / scale) for (left, right), scale in zip(pairs, scales, strict=True)]
    )
