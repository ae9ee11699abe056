"""A cost whose passes are shared by several processes, each of which holds all points.

Rank r owns rows R_r and columns C_r. It holds two parts of the cost,

    P_r = C[R_r, :],    Q_r = C[:, C_r],

each an operator like any other: f = softmin_rows(g) is computed by the P_r and gathered, g =
softmin_columns(f) by the Q_r. Of a cloud with itself the P_r are enough. Column sums of a plan are
sums over the P_r, added in float64 in the order of the ranks.

The masses of a part's own side are divided by their sum w_r, so that they sum to 1; what is
proportional to them is multiplied by w_r again.

Rank 0 has the operator, and orders what all ranks do: the functions of this file that take `ranks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import (
    Applied,
    CostFacts,
    Epsilon,
    Execution,
    Marginals,
    Operator,
    refined,
)
from otdd_flash.operators.labelled_cost import DOUBLE_UNIT, LabelledCost
from otdd_flash.ranks import Ranks

# build(cost): the operator of a cost that one process computes.
Build = Callable[[LabelledCost], Operator]

EVERY, FIRST = slice(None), slice(0, 1)

# Roundings of a mass that is divided by its share's and multiplied again.
ROUNDINGS = 4


class ShardedOperator:
    """A cost between two labelled clouds, shared by ranks, as rank 0 has it.

    Args:
        ranks: that share it.
        number: of the `Parts` that they hold.
        sampled: makes the operator of a sample of the cost, for this process alone.
    """

    def __init__(self, ranks: Ranks, number: int, sampled: Build) -> None:
        self.ranks, self._number, self._sampled = ranks, number, sampled
        weakref.finalize(self, ranks.drop, number)
        parts: Parts = ranks.held[number]
        self._first = parts.first
        self.cost = cost = parts.cost
        self.a, self.b, self.shape = cost.a, cost.b, cost.shape
        error = ranks.order(_error, number)
        self.costs = CostFacts(self.dtype, cost.mean_cost, *cost.cost_range, error)

    @property
    def dtype(self) -> torch.dtype:
        """Of the potentials."""
        return self._first.dtype

    @property
    def execution(self) -> Execution:
        """As parts run; nothing is recorded, as ranks wait for each other in every pass."""
        part = self._first.execution
        refine = None if part.refined is None else self._refine
        return Execution(
            f"{part.backend}, {self.ranks.size} ranks", part.segment, self.sample, refine
        )

    def _refine(self) -> ShardedOperator:
        number = self.ranks.number()
        self.ranks.order(_refine, self._number, number)
        return ShardedOperator(self.ranks, number, self._sampled)

    def sample(self, rows: Tensor, columns: Tensor) -> Operator:
        """The cost between some rows (k,) and columns (l,), int64, of this process alone."""
        return self._sampled(self.cost.sample(rows, columns))

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        near = None if guess is g else guess
        return self.ranks.order(_softmin, self._number, False, g, epsilon, near, guess is g)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        if self.cost.symmetric:
            return self.softmin_rows(f, epsilon, guess)
        return self.ranks.order(_softmin, self._number, True, f, epsilon, guess, False)

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,), of the P_r."""
        return self.ranks.order(_marginals, self._number, f, g, epsilon, accurate)

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
        """P V (n, k) and P 1 (n,), or P^T U (m, k) and P^T 1 (m,); of P o A B^T with `factors`."""
        left, right = factors or (None, None)
        if transposed and self.cost.symmetric:
            # The same plan, turned.
            f, g, left, right, transposed = g, f, right, left, False
        return self.ranks.order(
            _apply_plan, self._number, transposed, f, g, epsilon, values, left, right
        )

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64."""
        return self.ranks.order(_expected_costs, self._number, masses)

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64."""
        return self.cost.own_costs()


class Part(NamedTuple):
    """The operator of some rows or columns, and the mass of these."""

    operator: Operator
    mass: float

    @property
    def refined(self) -> Part:
        """The same at full accuracy."""
        return self._replace(operator=refined(self.operator))


class Parts(NamedTuple):
    """What a rank holds of a cost; parts of nothing are None.

    Attributes:
        cost: the whole.
        rows: P_r.
        columns: Q_r; None of a cloud with itself.
        first: the cost of the first row and column, which tells how parts run; on all ranks.
    """

    cost: LabelledCost
    rows: Part | None
    columns: Part | None
    first: Operator

    @classmethod
    def of(cls, cost: LabelledCost, ranks: Ranks, build: Build) -> Parts:
        """This rank's parts of the whole cost."""

        def part(rows: slice, columns: slice) -> Part | None:
            cut, mass = cost.part(rows, columns), 1.0
            if 0 in cut.shape:
                return None
            if rows is not EVERY:
                cut.a, mass = _normalised(cut.a)
            if columns is not EVERY:
                cut.b, mass = _normalised(cut.b)
            return Part(build(cut), mass)

        n, m = cost.shape
        columns = None if cost.symmetric else part(EVERY, ranks.share(m))
        first = part(FIRST, FIRST)
        assert first is not None
        return cls(cost, part(ranks.share(n), EVERY), columns, first.operator)

    def by(self, *, columns: bool) -> tuple[Part | None, int]:
        """The part by rows or by columns, and how many all parts of its kind have."""
        n, m = self.cost.shape
        return (self.columns, m) if columns else (self.rows, n)

    @property
    def refined(self) -> Parts:
        """The same at full accuracy."""
        rows, columns = (part and part.refined for part in (self.rows, self.columns))
        return self._replace(rows=rows, columns=columns, first=refined(self.first))


def _normalised(masses: Tensor) -> tuple[Tensor, float]:
    """Masses over their sum, and the sum; where that is 0 as they are, and 1."""
    mass = float(masses.sum()) or 1.0
    return masses / mass, mass


def _refine(ranks: Ranks, number: int, refined: int) -> None:
    ranks.held[refined] = ranks.held[number].refined


def _error(ranks: Ranks, number: int) -> float:
    """The mean of the parts' `CostFacts.error`."""
    parts: Parts = ranks.held[number]
    own = 0.0 if parts.rows is None else parts.rows.mass * parts.rows.operator.costs.error
    total = float(ranks.summed(torch.tensor(own, dtype=torch.float64, device=_device(parts))))
    return total * (1 + (ranks.size + ROUNDINGS) * DOUBLE_UNIT)


def _softmin(
    ranks: Ranks,
    number: int,
    columns: bool,
    potential: Tensor,
    epsilon: Epsilon,
    guess: Tensor | None,
    own_guess: bool,
) -> Tensor:
    """The softmin of all rows (n,), or columns (m,), of the other side's potential."""
    parts: Parts = ranks.held[number]
    part, count = parts.by(columns=columns)
    found = potential.new_empty(0, dtype=parts.first.dtype)
    if part is not None:
        near = potential if own_guess else guess
        near = None if near is None else near[ranks.share(count)]
        softmin = part.operator.softmin_columns if columns else part.operator.softmin_rows
        found = softmin(potential, epsilon, near)
    return ranks.gathered(found, count)


def _marginals(
    ranks: Ranks, number: int, f: Tensor, g: Tensor, epsilon: Epsilon, accurate: bool
) -> Marginals:
    parts: Parts = ranks.held[number]
    n, m = parts.cost.shape
    rows = f.new_zeros((0, 2), dtype=torch.float64)
    columns = column_errors = f.new_zeros(m, dtype=torch.float64)
    numbers = f.new_zeros(3, dtype=torch.float64)
    if (part := parts.rows) is not None:
        found = part.operator.marginals(f[ranks.share(n)], g, epsilon, accurate=accurate)
        rows = torch.stack((part.mass * found.rows, found.row_errors), 1)
        columns, column_errors = part.mass * found.columns, found.column_errors
        numbers = rows.new_tensor((found.cost_rounding, found.relative_error, found.lost))
    sums, row_errors = ranks.gathered(rows, n).unbind(1)
    total, most_errors = ranks.summed(columns), ranks.each(column_errors).amax(0)
    cost_rounding, relative_error, lost = ranks.each(numbers).amax(0).tolist()
    return Marginals(
        sums.contiguous(),
        total,
        row_errors.contiguous(),
        most_errors,
        cost_rounding,
        relative_error + (ranks.size + ROUNDINGS) * DOUBLE_UNIT,
        lost,
    )


def _apply_plan(
    ranks: Ranks,
    number: int,
    transposed: bool,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    values: Tensor,
    left: Tensor | None,
    right: Tensor | None,
) -> Applied:
    parts: Parts = ranks.held[number]
    part, count = parts.by(columns=transposed)
    own = ranks.share(count)
    rows, columns = (EVERY, own) if transposed else (own, EVERY)
    applied = values.new_zeros((0, values.shape[1]), dtype=parts.first.dtype)
    masses = f.new_zeros(0, dtype=torch.float64)
    if part is not None:
        factors = None if left is None or right is None else (left[rows], right[columns])
        found = part.operator.apply_plan(
            f[rows], g[columns], epsilon, values, transposed=transposed, factors=factors
        )
        applied, masses = part.mass * found.values, part.mass * found.masses
    return Applied(ranks.gathered(applied, count), ranks.gathered(masses, count))


def _expected_costs(ranks: Ranks, number: int, masses: Tensor) -> Tensor:
    parts: Parts = ranks.held[number]
    found = masses.new_zeros(0)
    if parts.rows is not None:
        found = parts.rows.operator.expected_costs(masses)
    return ranks.gathered(found, parts.cost.shape[0])


def _device(parts: Parts) -> torch.device:
    return parts.first.a.device
