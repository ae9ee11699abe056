"""Entropic transport between labelled point clouds: the tensor-level entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import ComputeOptions, GroundCost, build_operator
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.alternating import solve_alternating
from otdd_flash.solver.divergence import (
    Divergence,
    report_convergence,
    solve_divergence,
    solve_identical,
)
from otdd_flash.solver.options import Progress, SolverOptions, check_epsilon
from otdd_flash.solver.term import TransportTerm

Cloud = LabeledSamples | Tensor


def sinkhorn(
    source: Cloud,
    target: Cloud,
    *,
    epsilon: float,
    class_table: Tensor | None = None,
    cost: GroundCost | None = None,
    options: SolverOptions | None = None,
    compute: ComputeOptions | None = None,
    progress: Progress | None = None,
) -> TransportTerm:
    """OT_epsilon(source, target) = min_P <C, P> + epsilon KL(P | a b^T).

    Args:
        source: n points, with labels and weights if they are `LabeledSamples`.
        target: m points, likewise.
        epsilon: regularisation, in units of the cost.
        class_table: W (V_x + V_y, V_x + V_y), squared distances between all classes; None is 0.
        cost: its weights, lambda_x = lambda_y = 1/2 by default.
        options: when to stop.
        compute: where and how passes run.
        progress: called as progress("xy", iteration, marginal error).

    Returns:
        Potentials, value and bounds.

    Raises:
        InputError: a bad epsilon, clouds of different dimension, a table of another size, or a
            tolerance that the precision cannot reach.
    """
    problem = _Problem(source, target, epsilon, class_table, cost, compute)
    return solve_alternating(
        problem.operator("xy"), epsilon, options or SolverOptions(), progress=progress
    )


def sinkhorn_divergence(
    source: Cloud,
    target: Cloud,
    *,
    epsilon: float,
    class_table: Tensor | None = None,
    cost: GroundCost | None = None,
    options: SolverOptions | None = None,
    compute: ComputeOptions | None = None,
    debias: bool = True,
    progress: Progress | None = None,
) -> Divergence:
    """S_epsilon = OT_epsilon(x, y) - OT_epsilon(x, x) / 2 - OT_epsilon(y, y) / 2.

    Arguments and errors as for `sinkhorn`; without `debias`, the cross term alone. Clouds of equal
    fingerprint are one cloud: a single self term, the value 0 and the bounds [0, 0].

    Raises:
        ConvergenceError: `options.require_convergence` is set and a term stopped early.
    """
    options = options or SolverOptions()
    problem = _Problem(source, target, epsilon, class_table, cost, compute)
    if debias and problem.identical:
        divergence = solve_identical(problem.operator("xx"), epsilon, options, progress=progress)
    else:
        divergence = solve_divergence(
            problem.operator, epsilon, options, debias=debias, progress=progress
        )
    report_convergence(divergence, options)
    return divergence


class _Problem:
    """Two clouds, checked, and the three costs between them."""

    def __init__(
        self,
        source: Cloud,
        target: Cloud,
        epsilon: float,
        class_table: Tensor | None,
        cost: GroundCost | None,
        compute: ComputeOptions | None,
    ) -> None:
        check_epsilon("epsilon", epsilon)
        self.source, self.target = _as_samples(source), _as_samples(target)
        if self.source.dim != self.target.dim:
            raise InputError(
                f"source has {self.source.dim} features and target {self.target.dim}; transport "
                "needs one space: use the same extractor for both"
            )
        self.cost, self.compute = cost or GroundCost(), compute or ComputeOptions()
        sizes = self.source.class_total, self.target.class_total
        table = torch.zeros(sum(sizes), sum(sizes)) if class_table is None else class_table
        if table.shape != (sum(sizes), sum(sizes)):
            raise InputError(
                f"class_table must have shape {(sum(sizes), sum(sizes))} for {sizes[0]} + "
                f"{sizes[1]} classes, got {tuple(table.shape)}"
            )
        first = sizes[0]
        self.blocks = {
            "xx": table[:first, :first],
            "xy": table[:first, first:],
            "yy": table[first:, first:],
        }

    @property
    def identical(self) -> bool:
        """Whether both sides are the same samples at the same class distances."""
        return self.source.fingerprint == self.target.fingerprint and all(
            torch.allclose(self.blocks["xx"], self.blocks[term], rtol=1e-6, atol=0)
            for term in ("xy", "yy")
        )

    def operator(self, term: str) -> Operator:
        """The cost of the term "xy", "xx" or "yy"."""
        sides = {"x": self.source, "y": self.target}
        return build_operator(
            sides[term[0]], sides[term[1]], self.blocks[term], self.cost, self.compute
        )


def _as_samples(cloud: Cloud) -> LabeledSamples:
    return cloud if isinstance(cloud, LabeledSamples) else LabeledSamples(cloud, None, ())
