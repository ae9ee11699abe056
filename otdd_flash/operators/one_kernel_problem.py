"""An operator in Triton as the only transport problem of the engine.

`one_problem.problem_of` makes it. `matrix_kernel.OneMatrix` inherits it, for a cost matrix.
`engine.quasi_newton_kernels` iterates on it and knows it by its protocol `KernelProblems`, which a
change must keep. Steps of short passes are recorded as a CUDA graph, so softmins must read epsilon
and potentials on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.engine.few_problems import MEMORY
from otdd_flash.engine.problems import Evaluated, Iterations, Start, Vectors
from otdd_flash.engine.quasi_newton_kernels import (
    KernelVectors,
    Pace,
    QuasiNewtonKernels,
    SegmentLayout,
    softness_of,
    whole_layout,
)
from otdd_flash.formulas.decision import Form, Goal
from otdd_flash.formulas.evidence import PassErrors
from otdd_flash.kernels.segments.step import Sums
from otdd_flash.operators.base import Operator
from otdd_flash.operators.one_problem import OneProblem


class OneKernelProblem(OneProblem):
    """An operator whose passes, sums and vectors are in Triton.

    If passes are short, steps are recorded as a CUDA graph. Facts of the costs are host tensors.
    """

    def __init__(self, operator: Operator, form: Form) -> None:
        super().__init__(operator, form)
        self._learn()
        self.device, self.masses = operator.a.device, (operator.a, operator.b)
        self.softness = softness_of(form.constraints, 1, self.device)
        n, m = len(operator.a), len(operator.b)
        rows, columns = self.ranges
        # A self term has one layout, for columns.
        self.layouts: list[SegmentLayout] = [
            whole_layout(m, n, self.device, rows if form.symmetric else columns)
        ]
        if not form.symmetric:
            self.layouts.insert(0, whole_layout(n, m, self.device, rows))

    @property
    def ranges(self) -> tuple[int, int]:
        """The numbers of partial sums of a row's and of a column's softmin; 1 if it is finished."""
        return 1, 1

    @property
    def pace(self) -> Pace:
        return "recorded" if self.operator.passes.recorded else "asking"

    @property
    def sum_dtype(self) -> torch.dtype:
        return self.dtype

    def iterations(
        self, candidate: Tensor, goal: Goal, form: Form, start: Start
    ) -> QuasiNewtonKernels:
        first = candidate.to(self.dtype).clone().contiguous()
        return QuasiNewtonKernels(self, KernelVectors(self, first, MEMORY), goal, form, start)

    def change(self, operator: Operator, iterations: Iterations) -> None:
        assert isinstance(iterations, QuasiNewtonKernels)
        self.operator = operator
        self._learn()
        iterations.change()

    def _learn(self) -> None:
        """Put the facts of the costs into tensors (1,)."""
        (of_one,) = self.scalars
        numbers = (of_one.mean_cost, of_one.cost_spread, of_one.offset, *of_one.errors)
        self.mean_cost, self.cost_spread, self.offset, *errors = torch.split(
            torch.tensor(numbers, dtype=torch.float64), 1
        )
        self.errors = PassErrors(*errors)

    def softmin_rows(
        self, g: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        """Return T(g) (n,), or its partial sums."""
        guess = self.constraints.rows.softmin_of(before, epsilon[0])
        return self.operator.softmin_rows(g, epsilon[0], guess)

    def softmin_columns(
        self, f: Tensor, before: Tensor, epsilon: Tensor, active: Tensor
    ) -> Sums | Tensor:
        """Return T'(f) (m,), or T(f) for a self term, or its partial sums."""
        if self.symmetric:
            return self.operator.softmin_self(f, epsilon[0])
        guess = self.constraints.columns.softmin_of(before, epsilon[0])
        return self.operator.softmin_columns(f, epsilon[0], guess)

    def keep(self, order: Tensor) -> None:
        """Do nothing: the only problem is never dropped."""

    def evaluated(self, vectors: Vectors, epsilon: float) -> Evaluated:
        assert vectors.rows is not None
        return Evaluated(vectors.rows.clone(), vectors.kept.clone(), vectors.updated)
