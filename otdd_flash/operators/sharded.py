"""A cost whose passes are shared by several processes, as the operator of rank 0.

`sharing` builds it. Each operation orders all ranks to run one function of `parts` on their
`Parts`, which exchanges the results.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cached_property

from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.points import Cut, LabelledCost, LessOrigin, Masses, Points
from otdd_flash.cost.rounding import float16_rounding
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators import parts
from otdd_flash.operators.base import (
    ALL,
    Applied,
    Epsilon,
    EvaluatedPlan,
    Factors,
    Make,
    Marginals,
    Operator,
    PlanBlock,
)
from otdd_flash.operators.parts import Build, Parts
from otdd_flash.operators.ring import nowhere


class ShardedOperator:
    """A cost between two labelled clouds that ranks share, on rank 0.

    Args:
        ranks: the processes that share it.
        number: under which ranks hold their `Parts`.
        cost: the whole cost.
        error: its `CostFacts.error`.
        sampled: builds the operator of a sample of the cost, for this process alone.
    """

    def __init__(
        self, ranks: Ranks, number: int, cost: LabelledCost, error: float, sampled: Build
    ) -> None:
        self.ranks, self.number, self._error, self._sampled = ranks, number, error, sampled
        weakref.finalize(self, ranks.drop, number)
        held: Parts = ranks.held[number]
        self._by_pairs = held.share is not None
        self._refines = held.representative.refined is not held.representative
        ring = held.cost is not cost
        of_one = held.representative.passes
        backend = f"{of_one.backend}, {ranks.size} ranks{', points in a ring' if ring else ''}"
        # Ranks wait for each other in every pass.
        self.passes = of_one._replace(backend=backend, recorded=False)
        self.replicated = not ring and isinstance(cost.points[0], Tensor)
        self.cost = cost
        self.a, self.b, self.shape = cost.a, cost.b, cost.shape
        self._refined: ShardedOperator | None = None

    @cached_property
    def costs(self) -> CostFacts:
        cost = self.cost
        rounding = float16_rounding(cost) if self._refines and not cost.symmetric else 0.0
        facts = self.passes.dtype, cost.mean_cost, *cost.cost_range, self._error
        return CostFacts(*facts, rounding=rounding)

    @property
    def refined(self) -> ShardedOperator:
        """The same cost at full accuracy; built once, for the end of a solve and its gradient."""
        if not self._refines:
            return self
        if self._refined is None:
            ranks, number = self.ranks, self.ranks.number()
            ranks.order(parts.refine, self.number, number)
            self._refined = ShardedOperator(ranks, number, self.cost, self._error, self._sampled)
        return self._refined

    def part(self, rows: Cut, columns: Cut, masses: Masses | None = None) -> Operator:
        """Return the cost between some rows and columns; with `masses`, of this process alone.

        Without, it is shared, for all rows and some columns (l,), int64, of the cost between two
        clouds, and has no softmin of columns.
        """
        if masses is not None:
            return self._sampled(self.cost.sample(rows, columns, masses))
        assert rows == parts.EVERY
        assert isinstance(columns, Tensor)
        ranks, number = self.ranks, self.ranks.number()
        ranks.order(parts.cut_columns, self.number, number, columns)
        # The ranks' parts have the points.
        points = nowhere(self.cost, len(self.a)), nowhere(self.cost, len(columns))
        cost = self.cost.part(rows, columns, points)
        return ShardedOperator(ranks, number, cost, self._error, self._sampled)

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        if self._by_pairs:
            return self.ranks.order(parts.softmin_self, self.number, g, epsilon)
        return self.ranks.order(parts.softmin, self.number, False, g, epsilon, guess)

    def softmin_self(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute T(f) (n,) for the potential f of a self term, which is near T(f)."""
        return self.softmin_rows(f, epsilon, f)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        if self.cost.symmetric:
            return self.softmin_rows(f, epsilon, guess)
        return self.ranks.order(parts.softmin, self.number, True, f, epsilon, guess)

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Compute the row and column sums of the plan of f (n,) and g (m,)."""
        if g is None and self._by_pairs:
            return self.ranks.order(parts.marginals_self, self.number, f, epsilon, accurate)
        return self.ranks.order(parts.marginals, self.number, f, g, epsilon, accurate)

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> SharedPlan:
        """Build the plan of f (n,) and g (m,); see `Operator.plan`."""
        return SharedPlan(self, f, g, epsilon, most)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64."""
        if self._by_pairs:
            return self.cost.expected_costs(masses)
        return self.ranks.order(parts.expected_costs, self.number, masses)


class SharedPlan(EvaluatedPlan):
    """A plan whose products ranks share; see `EvaluatedPlan`."""

    def __init__(
        self,
        operator: ShardedOperator,
        f: Tensor,
        g: Tensor | None,
        epsilon: float,
        most: int | None,
    ) -> None:
        super().__init__(operator.passes.dtype, (operator.a, operator.b), f, g, epsilon, most)
        self._operator = operator

    def applied(
        self, values: Tensor, *, transposed: bool = False, factors: Factors | None = None
    ) -> Applied:
        operator, (f, g, epsilon), (left, right) = self._operator, self._at, factors or (None, None)
        if transposed and operator.cost.symmetric:
            # P^T is the plan with f and g exchanged.
            f, g, left, right, transposed = g, f, right, left, False
        given = operator.number, transposed, f, g, epsilon, values, left, right
        return operator.ranks.order(parts.apply_plan, *given)

    def blocks(
        self, points: tuple[Points, Points], make: Make, *, transposed: bool = False
    ) -> Iterator[PlanBlock]:
        operator, (f, g, epsilon), own = self._operator, self._at, points[transposed]
        if not (operator.replicated and isinstance(make, LessOrigin)):
            yield from super().blocks(points, make, transposed=transposed)
            return
        # Ranks have the points and compute the values: none are sent.
        if transposed and operator.cost.symmetric:
            f, g, transposed = g, f, False
        given = operator.number, transposed, f, g, epsilon, make.origin
        applied = operator.ranks.order(parts.apply_plan_to_points, *given)
        yield PlanBlock(ALL, own[ALL.rows], applied)
