"""Two labelled clouds and their class distances: the three terms of a divergence, and its solve."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import ComputeOptions, GroundCost, build_operator
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import (
    Divergence,
    Solved,
    Start,
    solve_divergence,
    solve_identical,
)
from otdd_flash.solver.options import Progress, SolverOptions, check_epsilon

Cloud = LabeledSamples | Tensor


class TermInputs(NamedTuple):
    """What the cost of one term is made of: two clouds, their block of W (V_x, V_y), weights."""

    source: LabeledSamples
    target: LabeledSamples
    class_distances: Tensor
    weights: GroundCost


class Problem:
    """Two clouds, checked, and the three costs between them.

    Args:
        source: n points, with labels and weights if they are `LabeledSamples`.
        target: m points, likewise.
        epsilon: regularisation, in units of the cost.
        class_table: W (V_x + V_y, V_x + V_y), squared distances between all classes; None is 0.
        cost: its weights, lambda_x = lambda_y = 1/2 by default.
        compute: where and how passes run.

    Attributes:
        classes: the rows and columns of the table that belong to "x" and to "y".

    Raises:
        InputError: a bad epsilon, clouds of different dimension, or a table of another size or not
            finite.
    """

    def __init__(
        self,
        source: Cloud,
        target: Cloud,
        epsilon: float,
        class_table: Tensor | None = None,
        cost: GroundCost | None = None,
        compute: ComputeOptions | None = None,
    ) -> None:
        check_epsilon("epsilon", epsilon)
        self.epsilon = epsilon
        self.source, self.target = _as_samples(source), _as_samples(target)
        if self.source.dim != self.target.dim:
            raise InputError(
                f"source has {self.source.dim} features and target {self.target.dim}; transport "
                "needs one space: use the same extractor for both"
            )
        self.cost, self.compute = cost or GroundCost(), compute or ComputeOptions()
        sizes = self.source.class_total, self.target.class_total
        self.table = torch.zeros(sum(sizes), sum(sizes)) if class_table is None else class_table
        if self.table.shape != (sum(sizes), sum(sizes)):
            raise InputError(
                f"class_table must have shape {(sum(sizes), sum(sizes))} for {sizes[0]} + "
                f"{sizes[1]} classes, got {tuple(self.table.shape)}"
            )
        if not bool(torch.isfinite(self.table).all()):
            raise InputError("class_table holds NaN or infinite values")
        self.classes = {"x": slice(0, sizes[0]), "y": slice(sizes[0], sum(sizes))}

    @property
    def identical(self) -> bool:
        """Whether both sides are the same samples at the same class distances."""
        # Different clouds nearly always differ in their first row, which is read faster than all.
        first, other = (side.features[0].cpu() for side in (self.source, self.target))
        if len(self.source) != len(self.target) or not torch.equal(first, other):
            return False
        return self.source.fingerprint == self.target.fingerprint and all(
            torch.allclose(self.block("xx"), self.block(term), rtol=1e-6, atol=0)
            for term in ("xy", "yy")
        )

    def block(self, term: str) -> Tensor:
        """The class distances of the term "xy", "xx" or "yy"; [y, x] is never read."""
        return self.table[self.classes[term[0]], self.classes[term[1]]]

    def inputs(self, term: str) -> TermInputs:
        """What the cost of a term is made of."""
        sides = {"x": self.source, "y": self.target}
        return TermInputs(sides[term[0]], sides[term[1]], self.block(term), self.cost)

    def operator(self, term: str) -> Operator:
        """The cost of a term."""
        return build_operator(*self.inputs(term), self.compute)

    def solve(
        self,
        options: SolverOptions,
        *,
        debias: bool = True,
        start: Start | None = None,
        progress: Progress | None = None,
        solved: Solved | None = None,
    ) -> Divergence:
        """The divergence, or without `debias` the cross term alone.

        Clouds of equal fingerprint are one cloud: a single self term.
        """
        if debias and self.identical:
            return solve_identical(
                self.operator("xx"),
                self.epsilon,
                options,
                start=start,
                progress=progress,
                solved=solved,
            )
        return solve_divergence(
            self.operator,
            self.epsilon,
            options,
            debias=debias,
            start=start,
            progress=progress,
            solved=solved,
        )


def _as_samples(cloud: Cloud) -> LabeledSamples:
    return cloud if isinstance(cloud, LabeledSamples) else LabeledSamples(cloud, None, ())
