"""What the solver asks of a cost with masses, and of the plan of two potentials.

An operator stands for a ground cost C (n, m) together with the masses a (n,) and b (m,) of its two
sides. Points and labels streamed in tiles, a stored matrix, a GPU kernel or several ranks differ
only in how they carry out the operations below; the solver never sees the difference. Every member
is there for every operator.

Notation: f (n,) and g (m,) are potentials in units of the cost and

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon),      r = P 1,  c = P^T 1.

An operator evaluates its plan anew for every product; where it is held instead, a product is one
read of it. Row and column sums are those of the very numbers that are multiplied, whatever rounded
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.host_points import Block
from otdd_flash.cost.points import Cut, Masses, Points

if TYPE_CHECKING:
    # It imports this file, and Triton.
    from otdd_flash.operators.triton_plans import PointProducts, Way

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


# Unit roundoffs that long sums are off by: a few, as those of their terms are of either sign.
SUM_UNITS = 8

# A (n, r) and B (m, r), entries of whose product A B^T weight those of a plan.
Factors = tuple[Tensor, Tensor]


class Products(Protocol):
    """Products with a plan P (n, m), and the float64 sums of what they multiply."""

    @property
    def precision(self) -> float:
        """The error of products, relative to the product of the sizes of both factors."""
        ...

    @property
    def ways(self) -> tuple[Way, Way] | None:
        """Products there and back on tensor cores; None if they run otherwise."""
        ...

    @property
    def rows(self) -> Tensor:
        """P 1 (n,), float64."""
        ...

    @property
    def columns(self) -> Tensor:
        """P^T 1 (m,), float64."""
        ...

    def times(self, values: Tensor) -> Tensor:
        """P V (n, k) for V (m, k)."""
        ...

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (m, k) for U (n, k)."""
        ...


class Plan(Products, Protocol):
    """A plan P (n, m) to the accuracy of its operator's type."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of products, and the least of their factors: float32 or float64."""
        ...

    @property
    def quick(self) -> Products:
        """The plan, or one near it, whose products are faster and less accurate."""
        ...

    @property
    def with_points(self) -> PointProducts | None:
        """Products with the points of its sides, which need no copy of them; None for others."""
        ...

    def times(
        self, values: Tensor, factors: Factors | None = None, other: Factors | None = None
    ) -> Tensor:
        """P V (n, k) for V (m, k), or (P o A B^T) V, of the sum with C D^T."""
        ...

    def transposed_times(
        self, values: Tensor, factors: Factors | None = None, other: Factors | None = None
    ) -> Tensor:
        """P^T U (m, k) for U (n, k), or (P o A B^T)^T U, of the sum with C D^T."""
        ...


# Some points of a side, and they (k, d) on the device: gives the values (k, c) to be multiplied.
Make = Callable[[Cut, Tensor], Tensor]

ALL = Block(slice(None), slice(None))


class PlanBlock(NamedTuple):
    """What a plan makes of values, for some points of the side of the result.

    Attributes:
        block: which points.
        points: (k, d) on the device.
        applied: P V (k, c) and P 1 (k,), or P^T U and P^T 1.
    """

    block: Block
    points: Tensor
    applied: Applied


class EvaluatedPlan(ABC):
    """A plan that is evaluated anew for every product, which gives its sums as well.

    Args:
        dtype: of products.
        masses: a (n,) and b (m,), float64.
        f: (n,) potential, in units of the cost.
        g: (m,) potential; None for the only potential of a cloud with itself.
        epsilon: regularisation, in units of the cost.
        most: bytes that a plan may take that is held, half of free memory for None.
    """

    ways: tuple[Way, Way] | None = None

    def __init__(
        self,
        dtype: torch.dtype,
        masses: tuple[Tensor, Tensor],
        f: Tensor,
        g: Tensor | None,
        epsilon: float,
        most: int | None,
    ) -> None:
        self.dtype, self.masses = dtype, masses
        self._at, self._most = (f, f if g is None else g, epsilon), most
        # Of rows, and of columns, once something was multiplied.
        self._sums: dict[bool, Tensor] = {}

    @abstractmethod
    def applied(
        self, values: Tensor, *, transposed: bool = False, factors: Factors | None = None
    ) -> Applied:
        """P V (n, k) for V (m, k), and P 1 (n,); with `factors` A, B, (P o A B^T) V.

        If `transposed`, P^T U (m, k) for U (n, k), and P^T 1 (m,), or (P o A B^T)^T U.
        """

    def blocks(
        self, points: tuple[Points, Points], make: Make, *, transposed: bool = False
    ) -> Iterator[PlanBlock]:
        """P V for all rows, or P^T U for all columns: at once, or in blocks where points stream.

        So neither values nor results need be on the device at once.

        Args:
            points: x (n, d) and y (m, d).
            make: gives the values; a `LessOrigin` where `points` are those of the cost.
            transposed: whether the result is of the columns.
        """
        own, other = points[::-1] if transposed else points
        values = make(ALL.rows, other[ALL.rows])
        yield PlanBlock(ALL, own[ALL.rows], self.applied(values, transposed=transposed))

    @property
    def prepared(self) -> Plan:
        """The plan for many products: held where that pays and memory allows."""
        return self

    @property
    def quick(self) -> Products:
        """A plan near it whose products take less time, if there is one."""
        return self

    @property
    def with_points(self) -> PointProducts | None:
        """Products with the points, where these are packed."""
        return None

    @property
    def precision(self) -> float:
        """Of products of this type."""
        return SUM_UNITS * torch.finfo(self.dtype).eps / 2

    @property
    def rows(self) -> Tensor:
        """P 1 (n,)."""
        if False not in self._sums:
            self.times(_ones(self.masses[1]))
        return self._sums[False]

    @property
    def columns(self) -> Tensor:
        """P^T 1 (m,)."""
        if True not in self._sums:
            self.transposed_times(_ones(self.masses[0]))
        return self._sums[True]

    def times(
        self, values: Tensor, factors: Factors | None = None, other: Factors | None = None
    ) -> Tensor:
        """P V (n, k), or (P o A B^T) V, of the sum with C D^T."""
        return self._times(values, _balanced(factors, other), transposed=False)

    def transposed_times(
        self, values: Tensor, factors: Factors | None = None, other: Factors | None = None
    ) -> Tensor:
        """P^T U (m, k), or (P o A B^T)^T U, of the sum with C D^T."""
        return self._times(values, _balanced(factors, other), transposed=True)

    def _times(self, values: Tensor, factors: Factors | None, *, transposed: bool) -> Tensor:
        found = self.applied(values, transposed=transposed, factors=factors)
        self._sums.setdefault(transposed, found.masses)
        return found.values.to(self.dtype)


class KeptPlan:
    """Held as a matrix P (n, m), float64.

    Args:
        entries: P.
        quick: products with a plan near it that take less time, if there are any.

    Attributes:
        entries: P.
    """

    dtype, precision = torch.float64, SUM_UNITS * torch.finfo(torch.float64).eps / 2
    ways = with_points = None

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
        self, values: Tensor, factors: Factors | None = None, other: Factors | None = None
    ) -> Tensor:
        """P V (n, k) for V (m, k), or (P o A B^T) V, of the sum with C D^T."""
        factors = _side_by_side(factors, other)
        if factors is not None and _few(factors, values):
            left, right = (factor.double() for factor in factors)
            return _unfolded(self.times, values.double(), left, right)
        if factors is None:
            return self.entries @ values.double()
        found = values.new_empty((len(self.entries), values.shape[1]), dtype=torch.float64)
        for rows, entries in self._blocks(factors):
            torch.mm(entries, values.double(), out=found[rows])
        return found

    def transposed_times(
        self, values: Tensor, factors: Factors | None = None, other: Factors | None = None
    ) -> Tensor:
        """P^T U (m, k) for U (n, k), or (P o A B^T)^T U, of the sum with C D^T."""
        factors = _side_by_side(factors, other)
        if factors is not None and _few(factors, values):
            left, right = (factor.double() for factor in factors)
            return _unfolded(self.transposed_times, values.double(), right, left)
        if factors is None:
            return self.entries.T @ values.double()
        found = values.new_zeros((self.entries.shape[1], values.shape[1]), dtype=torch.float64)
        for rows, entries in self._blocks(factors):
            found.addmm_(entries.T, values[rows].double())
        return found

    def _blocks(self, factors: Factors) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows and their entries, weighted by A B^T."""
        n, m = self.entries.shape
        left, right = (factor.double() for factor in factors)
        height = max(1, (BLOCK_GPU if left.is_cuda else BLOCK_CPU) // m)
        for first in range(0, n, height):
            rows = slice(first, first + height)
            yield rows, (left[rows] @ right.T).mul_(self.entries[rows])


# Entries that are weighted at once: what a cache holds, and few launches.
BLOCK_CPU, BLOCK_GPU = 1 << 20, 1 << 25

# Columns that P is multiplied by in less time than its entries are weighted, which reads and writes
# some 3 times their size.
FEW_COLUMNS = 128


def _few(factors: Factors, values: Tensor) -> bool:
    return factors[0].shape[1] * values.shape[1] <= FEW_COLUMNS


def _unfolded(
    times: Callable[[Tensor], Tensor], values: Tensor, left: Tensor, right: Tensor
) -> Tensor:
    """(P o L R^T) V (n, k) as sum_r L_r o P (R_r o V), one product with r k columns."""
    weighted = (right[:, :, None] * values[:, None]).flatten(1)
    images = times(weighted).view(len(left), left.shape[1], -1)
    return torch.einsum("nr,nrk->nk", left, images)


def _side_by_side(factors: Factors | None, other: Factors | None) -> Factors | None:
    """A B^T + C D^T as one product, of A beside C and of B beside D."""
    if factors is None or other is None:
        return factors
    return torch.cat((factors[0], other[0]), 1), torch.cat((factors[1], other[1]), 1)


def _balanced(factors: Factors | None, other: Factors | None) -> Factors | None:
    """Balance factors whose products are rounded side by side, on one scale.

    One side of each is multiplied by a power of two and the other divided, for sides of one size.
    """
    if factors is None or other is None:
        return factors
    pairs = factors, other
    norms = [torch.linalg.vector_norm(side, torch.inf) for pair in pairs for side in pair]
    logs = torch.stack(norms).clamp_min(torch.finfo(norms[0].dtype).tiny).log2().view(2, 2)
    scales = ((logs[:, 1] - logs[:, 0]) / 2).round().exp2()
    first, second = (
        (left * scale, right / scale) for (left, right), scale in zip(pairs, scales, strict=True)
    )
    return _side_by_side(first, second)


def _ones(masses: Tensor) -> Tensor:
    return torch.ones_like(masses).unsqueeze(1)
