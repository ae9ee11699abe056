"""One term of all problems of a pool, as certificates see it."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.kernels.stored.plan import stored_plan, stored_product
from otdd_flash.operators.base import CostFacts, CostRange, Epsilon, Marginals
from otdd_flash.operators.score_pool import ScorePool
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.tiled import LEAST_EXPONENT, measured, present

# The host does not know more while everything is launched.
UNKNOWN = CostFacts(torch.float32, 0.0, 0.0, 0.0, 0.0)

BACKEND = "triton, scores kept"

# The rows' and the columns' side of each term.
SIDES = {"xy": (0, 1), "xx": (0, 0), "yy": (1, 1)}


class PooledTerm:
    """A term of B problems; it reads the pool, and is gone with what stands there.

    Potentials and all that is made of them have a leading dimension B.

    Args:
        pool: as `prepare` left it.
        term: "xy", "xx" or "yy".
    """

    dtype, costs = torch.float32, UNKNOWN

    def __init__(self, pool: ScorePool, term: str) -> None:
        self._pool, (one, two) = pool, SIDES[term]
        rows, columns = pool.room.sides[one], pool.room.sides[two]
        self.a, self.b = pool.masses[:, rows], pool.masses[:, columns]
        self._scores = pool.scores[:, rows, columns], pool.scores[:, columns, rows]
        magnitudes = pool.own_magnitudes if one == two else pool.cross_magnitudes
        self._magnitudes = magnitudes[:, rows], magnitudes[:, columns]

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (B, n) and g (B, m), in float64 throughout."""
        scores, transposed = self._scores
        f, g = present(self.a, f), present(self.b, g)
        level = torch.as_tensor(epsilon, dtype=torch.float64, device=f.device)
        rows = stored_plan(scores, f, g, self.b, level, LEAST_EXPONENT)
        columns = stored_plan(transposed, g, f, self.a, level, LEAST_EXPONENT)
        share, (x, y) = self._pool.error_share, self._magnitudes
        sums, errors = (self.a * rows, self.b * columns), (share * x, share * y)
        return measured(sums, (f, g), self._magnitudes, errors, self._pool.rounding)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (B, n) for masses q (B, m), float64: one read of the scores."""
        return -stored_product(self._scores[0], masses)

    def own_costs(self) -> Tensor:
        """C_ii (B, n) for the cost of a cloud with itself, float64; computed once."""
        return self._own_costs

    @cached_property
    def _own_costs(self) -> Tensor:
        return -self._scores[0].diagonal(dim1=1, dim2=2).double()


def single_operator(
    pool: ScorePool, term: str, sizes: tuple[int, int], costs: CostFacts
) -> StoredOperator:
    """The cost of a term of the first problem, of so many points, of which so much is known."""
    starts, (one, two) = (0, pool.room.n), SIDES[term]
    rows, columns = (slice(starts[k], starts[k] + sizes[k]) for k in (one, two))
    magnitudes = (pool.own_magnitudes if one == two else pool.cross_magnitudes)[0]
    both = magnitudes[rows], magnitudes[columns]
    return StoredOperator(
        pool.scores[0, rows, columns],
        pool.masses[0, rows],
        pool.masses[0, columns],
        cost_range=CostRange(costs.lowest, costs.highest),
        mean_cost=costs.mean,
        magnitudes=both,
        cost_errors=(pool.error_share * both[0], pool.error_share * both[1]),
        cost_rounding=pool.rounding,
    )
