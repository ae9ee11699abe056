"""The cost of one term of a pool, whose scores are stored in both directions on a GPU."""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from otdd_flash.kernels.adder import UNIT
from otdd_flash.kernels.stored_plan import stored_plan, stored_product
from otdd_flash.operators.base import CostFacts, CostRange, Epsilon, Execution, Marginals
from otdd_flash.operators.kernel_one_segment import KernelSegment
from otdd_flash.operators.score_pool import ScorePool
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.tiled import LEAST_EXPONENT

# Where the host does not know anything yet.
UNKNOWN = CostFacts(torch.float32, 0.0, 0.0, 0.0, 0.0)

BACKEND = "triton, scores kept"

# The rows' and the columns' side of each term.
SIDES = {"xy": (0, 1), "xx": (0, 0), "yy": (1, 1)}


class PooledOperator(StoredOperator):
    """A term of the first problem of a pool; it reads the pool, and is gone with what stands there.

    Args:
        pool: as `prepare` left it.
        term: "xy", "xx" or "yy".
        sizes: points of x and of y; by default as many as there is room for.
        costs: what is known of them, where the host knows it.
    """

    def __init__(
        self,
        pool: ScorePool,
        term: str,
        sizes: tuple[int, int] | None = None,
        costs: CostFacts = UNKNOWN,
    ) -> None:
        room, (one, two) = pool.room, SIDES[term]
        n, m = (room.n, room.m) if sizes is None else sizes
        parts = slice(0, n), slice(room.n, room.n + m)
        rows, columns = parts[one], parts[two]
        magnitudes = (pool.own_magnitudes if one == two else pool.cross_magnitudes)[0]
        both = magnitudes[rows], magnitudes[columns]
        super().__init__(
            pool.scores[0, rows, columns],
            pool.masses[0, rows],
            pool.masses[0, columns],
            cost_range=CostRange(costs.lowest, costs.highest),
            mean_cost=costs.mean,
            magnitudes=both,
            cost_errors=(pool.error_share * both[0], pool.error_share * both[1]),
            cost_rounding=UNIT,
        )
        self._known = costs
        self._transposed = pool.scores[0, columns, rows]

    @property
    def costs(self) -> CostFacts:
        """What the host knows."""
        return self._known

    @property
    def execution(self) -> Execution:
        """Passes in PyTorch, and vectors in Triton."""
        return Execution(BACKEND, partial(KernelSegment, self), self.sample)

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,), in float64 throughout."""
        f, g = self._present(f, g)
        level = torch.as_tensor(epsilon, dtype=torch.float64, device=f.device)
        rows = stored_plan(self.scores, f, g, self.b, level, LEAST_EXPONENT)
        columns = stored_plan(self._transposed, g, f, self.a, level, LEAST_EXPONENT)
        return self._measured(f, g, self.a * rows, self.b * columns)

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64; computed once."""
        return self._own_costs

    @cached_property
    def _own_costs(self) -> Tensor:
        return super().own_costs()

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64: one read of the scores."""
        return -stored_product(self.scores, masses)
