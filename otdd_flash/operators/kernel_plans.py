"""How a cost in Triton prepares the plan of two potentials for many products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.memory import holds
from otdd_flash.cost.points import LabelledCost
from otdd_flash.kernels.passes.fused_product import (
    HELD_COORDINATES,
    NARROW,
    FusedProduct,
    most_columns,
)
from otdd_flash.kernels.passes.plan_application import hold_plan
from otdd_flash.kernels.passes.plan_terms import LOG2_SCALE, PlanTerms, plan_terms
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.passes.weighted_product import WeightedProduct
from otdd_flash.operators.plan import KeptPlan, StreamedPlan
from otdd_flash.operators.point_products import PointProducts
from otdd_flash.operators.triton_plans import ExactFusedPlan, FusedPlan, HeldPlan

# The most that a plan in float64 takes, and coordinates up to which it may fill half of what memory
# is free: computing it then takes no longer than reading it.
KEPT_BYTES, FEW_COORDINATES = 1 << 28, 16

# Columns from which on a plan is written to blocks, over those of a fused product.
FEW_CHUNKS = 2


# A side by the parts of products, 1 or 3, which tell its norms.
Seen = dict[int, Side]

# What computes a plan, and its transpose.
Computed = tuple[Side, Side, Scores, PlanTerms]
Sides = tuple[Computed, Computed]


class KernelPlans(NamedTuple):
    """What plans of a cost are made of.

    Attributes:
        cost: two labelled clouds.
        seen: packed points of both.
        scores: how they make scores.
        transposed: the same with sides exchanged.
    """

    cost: LabelledCost
    seen: tuple[Seen, Seen]
    scores: Scores
    transposed: Scores

    @property
    def rows(self) -> Side:
        """The rows, rounded to as many parts as the scores take."""
        return self.seen[0][self.scores.parts]

    @property
    def columns(self) -> Side:
        """The columns, rounded to as many parts as the scores take."""
        return self.seen[1][self.scores.parts]

    def prepared(
        self, streamed: StreamedPlan, f: Tensor, g: Tensor, epsilon: float, most: int | None
    ) -> KeptPlan | ExactFusedPlan | None:
        """Prepare the plan of the original points: held in float64 if that is cheap, or fused.

        What is held takes up to `most` bytes, half of what is free for None.
        """
        (n, m), dim = self.cost.shape, self.cost.points[0].shape[1]
        needed = 8 * n * m
        worthwhile = needed <= KEPT_BYTES or dim <= FEW_COORDINATES
        if worthwhile and holds(needed, most, f.device):
            quick = self.rounded(f, g, epsilon, most)
            return KeptPlan(self.cost.plan_entries(f, g, epsilon), quick)
        columns = most_columns(self.rows.points.coordinates.shape[1], self.scores.parts, f.device)
        if self.scores.parts == 1 or columns == NARROW:
            return None
        layouts = self.rows.points.layout, self.columns.points.layout
        masses, sides = (self.cost.a, self.cost.b), self._sides(f, g, epsilon)
        return ExactFusedPlan(
            _products(sides),
            masses,
            layouts,
            FEW_CHUNKS * columns,
            streamed,
            lambda side: WeightedProduct(*sides[side], masses[side]),
            lambda: self.rounded(f, g, epsilon, most, sides[0]),
        )

    def rounded(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        most: int | None,
        there: Computed | None = None,
    ) -> HeldPlan | FusedPlan | None:
        """Prepare the plan in float16: held in `most` bytes, or evaluated from points of one part.

        Of points far from all others a rounded coordinate moves costs by more than epsilon, and
        what is solved with such a plan is of no use: one that is made once is of all parts.

        None where a row, or a column, has sums that float16 does not. `there` is what computes the
        plan, where that is known.
        """
        layouts = of_rows, of_columns = self.rows.points.layout, self.columns.points.layout
        masses = self.cost.a, self.cost.b
        if holds(2 * of_rows.size * of_columns.size, most, f.device):
            entries = hold_plan(*(there or self._there(f, g, epsilon)))
            return HeldPlan.of(entries, 2.0**-LOG2_SCALE, masses[0], layouts)
        products = _products(self._of_one_part()._sides(f, g, epsilon))
        return FusedPlan.of(products, masses, layouts)

    def with_points(
        self, streamed: StreamedPlan, f: Tensor, g: Tensor, epsilon: float
    ) -> PointProducts | None:
        """Prepare products with the points, if these have too many coordinates to be fused."""
        dim = self.cost.points[0].shape[1]
        if dim <= HELD_COORDINATES:
            return None
        return PointProducts(
            (self.seen[0][3], self.seen[1][3]),
            (self.scores._replace(parts=3), self.transposed._replace(parts=3)),
            (single(f), single(g)),
            epsilon,
            (self.cost.a, self.cost.b),
            streamed,
            dim,
        )

    def _of_one_part(self) -> KernelPlans:
        scores, transposed = (scores._replace(parts=1) for scores in (self.scores, self.transposed))
        return self._replace(scores=scores, transposed=transposed)

    def _there(self, f: Tensor, g: Tensor, epsilon: float) -> Computed:
        there = self.rows, self.columns, self.scores
        return *there, plan_terms(*there, (single(f), single(g)), epsilon, self.cost.a)

    def _sides(self, f: Tensor, g: Tensor, epsilon: float) -> Sides:
        """Compute the terms of the plan and of its transpose, once for a symmetric plan."""
        there = self._there(f, g, epsilon)
        if self.cost.symmetric and f is g:
            return there, there
        back = self.columns, self.rows, self.transposed
        return there, (*back, plan_terms(*back, (single(g), single(f)), epsilon, self.cost.b))


def _products(sides: Sides) -> tuple[FusedProduct, FusedProduct]:
    there, back = sides
    product = FusedProduct(*there)
    return product, product if back is there else FusedProduct(*back)


def single(potential: Tensor) -> Tensor:
    """Return a potential as kernels read it, contiguous float32."""
    return potential.to(torch.float32).contiguous()
