"""An operator as the only transport problem of the engine.

`solver.solve` calls `problem_of`, which chooses by where passes run: iterations in PyTorch decide
in Python floats, those in Triton run in kernels (`one_kernel_problem`). The engine has the vectors
of the iterations; a problem computes their softmins and has the facts of the costs. `torch_pool`
describes its own problems by `Scalars`. A change must keep to the protocols of `engine.problems`,
by which the engine knows problems.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.few_problems import FewQuasiNewton, FewVectors
from otdd_flash.engine.problems import Evaluated, Iterations, Start, Vectors
from otdd_flash.formulas.decision import Form, Goal
from otdd_flash.formulas.evidence import PassErrors
from otdd_flash.operators.base import Operator


class Scalars(NamedTuple):
    """The facts of `engine.problems.Costs` for one problem, as floats."""

    dtype: torch.dtype
    sum_dtype: torch.dtype
    mean_cost: float
    cost_spread: float
    errors: PassErrors
    offset: float


class OneProblem(ABC):
    """An operator as the only problem of the engine.

    Args:
        operator: the cost (n, m) and the masses.
        form: of the term; a self term has one potential for rows and columns.

    Attributes:
        operator: as given, or as last set by `change`.
        symmetric: whether it is a self term.
        constraints: exact or relaxed marginals.
    """

    def __init__(self, operator: Operator, form: Form) -> None:
        self.symmetric, self.constraints = form.symmetric, form.constraints
        self.operator = operator

    @property
    def dtype(self) -> torch.dtype:
        """The type of potentials and of sums."""
        return self.operator.costs.dtype

    @property
    def scalars(self) -> list[Scalars]:
        """Facts of the costs, in a list of one.

        Errors of passes are estimated by those of the certificate.
        """
        costs = self.operator.costs
        unit = torch.finfo(costs.dtype).eps / 2
        mean, reach = costs.error / 2, unit * costs.magnitude
        errors = PassErrors(mean, mean, 0.0, unit / 2, 0.0, 0.0, unit, reach, 0.0)
        return [Scalars(costs.dtype, costs.dtype, costs.above_lowest, costs.spread, errors, 0.0)]

    @abstractmethod
    def iterations(self, candidate: Tensor, goal: Goal, form: Form, start: Start) -> Iterations:
        """Make the iterations of the problem from column potentials (m,), where its passes run."""

    @abstractmethod
    def change(self, operator: Operator, iterations: Iterations) -> None:
        """Replace the operator by another form of the same cost; iterations continue with it."""

    @abstractmethod
    def evaluated(self, vectors: Vectors, epsilon: float) -> Evaluated:
        """Return the potentials of the last evaluation, at the final epsilon."""


class OneTorchProblem(OneProblem):
    """An operator in PyTorch as the only problem, with vectors in float64."""

    @property
    def row_masses(self) -> Tensor | None:
        """a (1, n); None for a self term."""
        return None if self.symmetric else self.operator.a[None]

    @property
    def column_masses(self) -> Tensor:
        """b (1, m)."""
        return self.operator.b[None]

    def iterations(self, candidate: Tensor, goal: Goal, form: Form, start: Start) -> FewQuasiNewton:
        vectors = FewVectors(self, candidate[None].to(self.dtype))
        return FewQuasiNewton(self, vectors, goal, form, start)

    def change(self, operator: Operator, iterations: Iterations) -> None:
        assert isinstance(iterations, FewQuasiNewton)
        self.operator = operator
        iterations.change()

    def softmins(
        self,
        g: Tensor,
        before: Tensor | None,
        epsilon: Sequence[float] | Tensor,
        active: Sequence[bool] | Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        operator, level = self.operator, float(epsilon[0])
        rows, columns = self.constraints.rows, self.constraints.columns
        if before is None:
            return None, columns.updated(operator.softmin_self(g[0], level), level)[None]
        guess, other = rows.softmin_of(before[0], level), columns.softmin_of(g[0], level)
        f = rows.updated(operator.softmin_rows(g[0], level, guess), level)
        return f[None], columns.updated(operator.softmin_columns(f, level, other), level)[None]

    def evaluated(self, vectors: Vectors, epsilon: float) -> Evaluated:
        g = vectors.kept[0].to(self.dtype, copy=True)
        f = g if vectors.rows is None else vectors.rows[0]
        return Evaluated(f, g, vectors.updated[0].to(self.dtype))


def problem_of(operator: Operator, form: Form) -> OneProblem:
    """Return an operator as the only problem of the engine, in PyTorch or in Triton."""
    if not operator.passes.in_triton:
        return OneTorchProblem(operator, form)
    # Triton may be missing where no kernel runs.
    from otdd_flash.operators.matrix_kernel import MatrixKernelOperator, OneMatrix
    from otdd_flash.operators.one_kernel_problem import OneKernelProblem

    if isinstance(operator, MatrixKernelOperator):
        return OneMatrix(operator, form)
    return OneKernelProblem(operator, form)
