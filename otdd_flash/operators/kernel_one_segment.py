"""One transport problem as the only segment, its passes, sums and vectors in Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from otdd_flash.devices import current
from otdd_flash.engine.quasi_newton_kernels import QuasiNewtonKernels
from otdd_flash.engine.recording import Repeated
from otdd_flash.engine.rule import Start
from otdd_flash.formulas.decision import Form, Goal
from otdd_flash.kernels.segments.step import Sums
from otdd_flash.operators.base import Operator
from otdd_flash.operators.kernel_vectors import KernelVectors, whole_layout
from otdd_flash.operators.one_segment import OneSegment


class KernelSegment(OneSegment):
    """A single problem in Triton; its steps become a CUDA graph where passes are short."""

    def __init__(self, operator: Operator, candidate: Tensor, *, symmetric: bool) -> None:
        super().__init__(operator, symmetric=symmetric, costs_on=torch.device("cpu"))
        self.device = operator.a.device
        n, m = len(operator.a), len(operator.b)
        ranges = self.ranges(operator)
        # Of a cloud with itself columns are summed as rows.
        layouts = [whole_layout(m, n, candidate.device, ranges[0 if symmetric else 1])]
        if not symmetric:
            layouts.insert(0, whole_layout(n, m, candidate.device, ranges[0]))
        masses = operator.a, operator.b
        first = candidate.to(self.dtype).clone().contiguous()
        self._vectors = KernelVectors(masses, layouts, first, self.memory)
        self._vectors.columns.kept.copy_(first)

    def ranges(self, operator: Operator) -> tuple[int, int]:
        """In how many parts the softmins of rows and of columns come, where they are sums."""
        return 1, 1

    def softmin_rows(self, g: Tensor, epsilon: Tensor, guess: Tensor) -> Sums | Tensor:
        """Return T(g) (n,), or the sums that it is made of."""
        return self.operator.softmin_rows(g, epsilon, guess)

    def softmin_columns(self, f: Tensor, epsilon: Tensor, guess: Tensor) -> Sums | Tensor:
        """Return T'(f) (m,), or the sums that it is made of."""
        return self.operator.softmin_columns(f, epsilon, guess)

    def change(self, operator: Operator) -> None:
        super().change(operator)
        self._repeated: Repeated | None = None

    def go_on_from(self, candidate: Tensor) -> None:
        self._vectors.columns.candidate.copy_(candidate)

    @property
    def rows(self) -> Tensor:
        return self._vectors.rows.clone()

    @property
    def kept(self) -> Tensor:
        return self._vectors.columns.kept.clone()

    @property
    def updated(self) -> Tensor:
        columns = self._vectors.columns
        return columns.kept + columns.residual

    def iterations(self, goal: Goal, form: Form, start: Start) -> QuasiNewtonKernels:
        return QuasiNewtonKernels(self, goal, form, start)

    def repeat(self, step: Callable[[], None]) -> None:
        """Once, or as often as a recording does where passes are short."""
        if self.waits:
            step()
            return
        if self._repeated is None:
            self._repeated = Repeated()
        with current(self.device):
            self._repeated.run(step)

    def numbers(self, epsilon: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        vectors, level = self._vectors, epsilon[0]
        g = vectors.columns.candidate
        if self.symmetric:
            return vectors.evaluate(self.softmin_rows(g, level, g), epsilon, active)
        f = self.softmin_rows(g, level, vectors.rows)
        vectors.take(f, epsilon, active)
        return vectors.evaluate(self.softmin_columns(vectors.rows, level, g), epsilon, active)

    def move_by(self, numbers: Tensor, active: Tensor) -> None:
        self._vectors.move(numbers, active)
