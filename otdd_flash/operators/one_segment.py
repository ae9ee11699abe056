"""One transport problem, whatever holds its cost, as the only segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.few_problems import FewQuasiNewton
from otdd_flash.engine.rule import Rule, Start
from otdd_flash.engine.segments import Move
from otdd_flash.formulas.decision import Form, Goal
from otdd_flash.formulas.evidence import Evaluation, PassErrors
from otdd_flash.operators.base import Operator
from otdd_flash.operators.few_vectors import MEMORY, FewVectors


class Scalars(NamedTuple):
    """The costs of one problem as `engine.segments.Costs` has those of many, in floats."""

    dtype: torch.dtype
    sum_dtype: torch.dtype
    mean_cost: float
    cost_spread: float
    errors: PassErrors
    offset: float


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
        mean, reach = costs.error / 2, unit * costs.magnitude
        errors = PassErrors(mean, mean, 0.0, unit / 2, 0.0, 0.0, unit, reach, 0.0)
        self.scalars = [
            Scalars(costs.dtype, costs.dtype, costs.above_lowest, costs.spread, errors, 0.0)
        ]
        self.mean_cost, self.cost_spread, self.offset, *of_passes = torch.split(
            torch.tensor(
                (costs.above_lowest, costs.spread, 0.0, *errors),
                dtype=torch.float64,
                device=self._costs_on,
            ),
            1,
        )
        self.errors = PassErrors(*of_passes)

    def coarse(self, tolerance: float) -> None:
        return

    def keep(self, order: Tensor) -> None:
        """Do nothing: the potentials of a problem that is done are asked for later."""
        return


class TorchSegment(OneSegment):
    """A single problem with vectors in float64 and plain PyTorch, decided upon in Python floats."""

    def __init__(self, operator: Operator, candidate: Tensor, *, symmetric: bool) -> None:
        super().__init__(operator, symmetric=symmetric, costs_on=torch.device("cpu"))
        self._rows = torch.zeros_like(operator.a, dtype=self.dtype)
        # Vectors change in place, and the candidate is the caller's.
        own = candidate[None].to(self.dtype, copy=True)
        self._vectors = FewVectors(operator.b[None], own)
        self._row_masses = operator.a[None, :, None]

    def go_on_from(self, candidate: Tensor) -> None:
        self._vectors.candidate[0] = candidate

    @property
    def rows(self) -> Tensor:
        return self._rows

    @property
    def kept(self) -> Tensor:
        return self._vectors.kept[0].to(self.dtype, copy=True)

    @property
    def updated(self) -> Tensor:
        return (self._vectors.kept[0] + self._vectors.residual[0]).to(self.dtype)

    def iterations(self, goal: Goal, form: Form, start: Start) -> FewQuasiNewton:
        return FewQuasiNewton(self, goal, form, start)

    def repeat(self, step: Callable[[], None]) -> None:
        step()

    def evaluate(self, epsilon: Sequence[float], active: Sequence[bool]) -> list[Evaluation]:
        """Evaluate the candidate in two softmins, or one of a cloud with itself."""
        operator, g, (level,) = self.operator, self._vectors.candidate[0], epsilon
        if self.symmetric:
            updated = operator.softmin_rows(g, level, g)
            return self._vectors.evaluate(None, updated[None], epsilon)
        self._rows = operator.softmin_rows(g, level, self._rows)
        updated = operator.softmin_columns(self._rows, level, g)
        return self._vectors.evaluate((self._rows[None], self._row_masses), updated[None], epsilon)

    def move(self, k: int, move: Move) -> None:
        self._vectors.move(k, move)
