"""One transport problem, whatever holds its cost, as the only segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import Form
from otdd_flash.engine.quasi_newton import QuasiNewton
from otdd_flash.engine.rule import Goal, Rule, Start
from otdd_flash.engine.segments import Evaluation, Move, PassErrors
from otdd_flash.operators.base import Operator
from otdd_flash.operators.padded_vectors import PaddedVectors

# Differences that are remembered.
MEMORY = 8


class OneSegment(ABC):
    """What all single problems share: the costs, and potentials in the operator's type.

    Args:
        operator: the cost (n, m) and the masses.
        symmetric: whether rows are columns.
        costs_on: the device for numbers of the cost, which are known on the host.

    Attributes:
        operator: as given, or as changed.
        symmetric: likewise.
        waits: whether to ask the device after every step, as one takes longer than to launch the
            next.
    """

    memory = MEMORY

    def __init__(self, operator: Operator, *, symmetric: bool, costs_on: torch.device) -> None:
        self.symmetric, self._costs_on = symmetric, costs_on
        self.change(operator)

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """The f (n,) of the last evaluation."""

    @property
    @abstractmethod
    def kept(self) -> Tensor:
        """The g (m,) that was kept last, the first candidate before any evaluation.

        After the end, that of the last evaluation.
        """

    @property
    @abstractmethod
    def updated(self) -> Tensor:
        """T'(T(g)) (m,) of that, or T(g) of a cloud with itself; g before any evaluation."""

    @abstractmethod
    def go_on_from(self, candidate: Tensor) -> None:
        """Evaluate another g (m,) next."""

    @abstractmethod
    def iterations(self, goal: Goal, form: Form, start: Start) -> Rule:
        """The iterations of the problem, where its passes run."""

    @abstractmethod
    def repeat(self, step: Callable[[], None]) -> None:
        """Take as many iterations as pay before the device is asked."""

    def change(self, operator: Operator) -> None:
        """Take another form of the cost; errors of passes are about those of the certificate."""
        self.operator = operator
        self.waits = not operator.execution.recorded
        costs = operator.costs
        self.dtype = self.sum_dtype = costs.dtype
        unit = torch.finfo(costs.dtype).eps / 2
        facts = (
            costs.above_lowest,
            costs.spread,
            costs.error / 2,
            unit / 2,
            unit,
            unit * costs.magnitude,
        )
        self.mean_cost, self.cost_spread, mean, sums, potentials, reach = torch.split(
            torch.tensor(facts, dtype=torch.float64, device=self._costs_on), 1
        )
        none = self.offset = torch.zeros_like(mean)
        self.errors = PassErrors(mean, mean, none, sums, none, none, potentials, reach, none)

    def coarse(self, tolerance: float) -> None:
        return

    def keep(self, order: Tensor) -> None:
        """Do nothing: the potentials of a problem that is done are asked for later."""
        return


class TorchSegment(OneSegment):
    """A single problem with vectors in float64 and plain PyTorch."""

    def __init__(self, operator: Operator, candidate: Tensor, *, symmetric: bool) -> None:
        super().__init__(operator, symmetric=symmetric, costs_on=operator.a.device)
        self._candidate = candidate.to(self.dtype)
        self._rows = torch.zeros_like(operator.a, dtype=self.dtype)
        self._vectors = PaddedVectors(operator.b[None], self.memory)
        self._vectors.kept = self._candidate.double()[None]

    def go_on_from(self, candidate: Tensor) -> None:
        self._candidate = candidate.to(self.dtype)

    @property
    def rows(self) -> Tensor:
        return self._rows

    @property
    def kept(self) -> Tensor:
        return self._vectors.kept[0].to(self.dtype)

    @property
    def updated(self) -> Tensor:
        return (self._vectors.kept + self._vectors.residual)[0].to(self.dtype)

    def iterations(self, goal: Goal, form: Form, start: Start) -> QuasiNewton:
        return QuasiNewton(self, goal, form, start)

    def repeat(self, step: Callable[[], None]) -> None:
        step()

    def evaluate(self, epsilon: Tensor, active: Tensor) -> Evaluation:
        operator, g = self.operator, self._candidate
        level = epsilon[0] if epsilon.is_cuda else float(epsilon)
        if self.symmetric:
            self._rows, updated = g, operator.softmin_rows(g, level, g)
        else:
            self._rows = operator.softmin_rows(g, level, self.rows)
            updated = operator.softmin_columns(self.rows, level, g)
        rows = self.rows.double()[None], operator.a[None]
        return self._vectors.evaluate(rows, g.double()[None], updated.double()[None], epsilon)

    def move(self, move: Move, active: Tensor) -> None:
        moved = self._vectors.move(self._candidate.double()[None], move, active)
        self._candidate = moved[0].to(self.dtype)
