"""A cost whose passes are shared by several processes.

Rank 0 has the operator, and orders what all ranks do with their parts: the functions of `parts`.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.points import LabelledCost
from otdd_flash.cost.rounding import float16_rounding
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators import parts
from otdd_flash.operators.base import Applied, Epsilon, Execution, Marginals, Operator
from otdd_flash.operators.parts import Build, Facts, Parts


class ShardedOperator:
    """A cost between two labelled clouds, shared by ranks, as rank 0 has it.

    Args:
        ranks: that share it.
        number: of the `Parts` that they hold.
        cost: the whole.
        facts: of these parts.
        sampled: makes the operator of a sample of the cost, for this process alone.
    """

    def __init__(
        self, ranks: Ranks, number: int, cost: LabelledCost, facts: Facts, sampled: Build
    ) -> None:
        self.ranks, self._number, self._facts, self._sampled = ranks, number, facts, sampled
        weakref.finalize(self, ranks.drop, number)
        held: Parts = ranks.held[number]
        self._dtype, self._by_pairs = held.telling.dtype, held.share is not None
        execution = held.telling.execution
        self._backend, self._in_triton = execution.backend, execution.in_triton
        self._refines = execution.refined is not None
        self._ring = held.cost is not cost
        self._replicated = not self._ring and isinstance(cost.points[0], Tensor)
        self.cost = cost
        self.a, self.b, self.shape = cost.a, cost.b, cost.shape
        self.costs = CostFacts(self.dtype, cost.mean_cost, *cost.cost_range, facts.error)
        self._takes_columns = not cost.symmetric and facts.takes_columns
        self._refined: ShardedOperator | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def execution(self) -> Execution:
        """Passes run as parts do; nothing is recorded, as ranks wait for each other in each."""
        refine = self._refine if self._refines else None
        ring = ", points in a ring" if self._ring else ""
        return Execution(
            f"{self._backend}, {self.ranks.size} ranks{ring}",
            self.sample,
            refine,
            self._in_triton,
            on_points=self._on_points if self._replicated else None,
            rounded_by=partial(float16_rounding, self.cost),
            over_columns=self._over_columns if self._takes_columns else None,
        )

    def _over_columns(self, columns: Tensor, g: Tensor, epsilon: float) -> Tensor:
        order = parts.softmin_over_columns
        return self.ranks.order(order, self._number, columns, g, epsilon)

    def _on_points(
        self, f: Tensor, g: Tensor, epsilon: float, origin: Tensor, *, transposed: bool
    ) -> Applied:
        if transposed and self.cost.symmetric:
            f, g, transposed = g, f, False
        order = parts.apply_plan_to_points
        return self.ranks.order(order, self._number, transposed, f, g, epsilon, origin)

    def _refine(self) -> ShardedOperator:
        """Build the refined operator once: a solve ends on it, and its gradient begins with it."""
        if self._refined is None:
            ranks, number = self.ranks, self.ranks.number()
            ranks.order(parts.refine, self._number, number)
            self._refined = ShardedOperator(ranks, number, self.cost, self._facts, self._sampled)
        return self._refined

    def sample(self, rows: Tensor, columns: Tensor) -> Operator:
        """The cost between some rows (k,) and columns (l,), int64, of this process alone."""
        return self._sampled(self.cost.sample(rows, columns))

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        if self._by_pairs:
            return self.ranks.order(parts.softmin_self, self._number, g, epsilon)
        return self.ranks.order(parts.softmin, self._number, False, g, epsilon, guess)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        if self.cost.symmetric:
            return self.softmin_rows(f, epsilon, guess)
        return self.ranks.order(parts.softmin, self._number, True, f, epsilon, guess)

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,)."""
        if self._by_pairs and f is g:
            return self.ranks.order(parts.marginals_self, self._number, f, epsilon, accurate)
        return self.ranks.order(parts.marginals, self._number, f, g, epsilon, accurate)

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
            parts.apply_plan, self._number, transposed, f, g, epsilon, values, left, right
        )

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64."""
        if self._by_pairs:
            return self.cost.expected_costs(masses)
        return self.ranks.order(parts.expected_costs, self._number, masses)

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64."""
        return self.cost.own_costs()
