"""One transport problem, whatever holds its cost, as the only segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import Form
from otdd_flash.engine.one_problem import OneQuasiNewton
from otdd_flash.engine.rule import Goal, Rule, Start
from otdd_flash.engine.segments import Evaluation, Move, PassErrors
from otdd_flash.operators.base import Operator

# Differences that are remembered.
MEMORY = 8


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
        self.scalars = Scalars(
            costs.dtype, costs.dtype, costs.above_lowest, costs.spread, errors, 0.0
        )
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
    """A single problem with vectors in float64 and plain PyTorch, decided upon in Python floats.

    The vectors are those of `engine.segments`. `_vectors` (3 + 2 memory, m) holds the newest step,
    its residual difference and the residual, all without means taken off, and those remembered;
    they are 0 where there is no mass, so that one product has all inner products.
    """

    def __init__(self, operator: Operator, candidate: Tensor, *, symmetric: bool) -> None:
        super().__init__(operator, symmetric=symmetric, costs_on=torch.device("cpu"))
        self._candidate = candidate.to(self.dtype)
        self._rows = torch.zeros_like(operator.a, dtype=self.dtype)
        masses, absent = operator.b, operator.b == 0
        self._absent = absent if bool(absent.any()) else None
        self._kept = self._candidate.double()
        self._residual = self._fresh = self._level = torch.zeros_like(masses)
        self._vectors = masses.new_zeros((3 + 2 * self.memory, len(masses)))

    def go_on_from(self, candidate: Tensor) -> None:
        self._candidate = candidate.to(self.dtype)

    @property
    def rows(self) -> Tensor:
        return self._rows

    @property
    def kept(self) -> Tensor:
        return self._kept.to(self.dtype)

    @property
    def updated(self) -> Tensor:
        return (self._kept + self._residual).to(self.dtype)

    def iterations(self, goal: Goal, form: Form, start: Start) -> OneQuasiNewton:
        return OneQuasiNewton(self, goal, form, start)

    def repeat(self, step: Callable[[], None]) -> None:
        step()

    def evaluate(self, epsilon: float) -> Evaluation:
        """Evaluate the candidate in two softmins, or one of a cloud with itself."""
        operator, g = self.operator, self._candidate
        if self.symmetric:
            self._rows, updated = g, operator.softmin_rows(g, epsilon, g)
        else:
            self._rows = operator.softmin_rows(g, epsilon, self._rows)
            updated = operator.softmin_columns(self._rows, epsilon, g)
        f, potential, masses = self._rows.double(), g.double(), operator.b
        self._fresh = updated.double() - potential
        newest, memory = self._vectors[:3], self._vectors[3:]
        torch.sub(potential, self._kept, out=newest[0])
        torch.sub(self._residual, self._fresh, out=newest[1])
        newest[2] = self._fresh
        seen = potential
        if self._absent is not None:
            newest.masked_fill_(self._absent, 0)
            seen = potential[~self._absent]
            potential = potential.masked_fill(self._absent, 0)
        change = torch.exp(newest[2] / -epsilon)
        rows = torch.stack((f, f.abs())) @ operator.a
        columns = torch.stack((potential, potential.abs(), (change - 1).abs(), change)) @ masses
        weighted = newest * masses
        means, squares = weighted.sum(1), weighted @ newest.T
        products = (weighted[1:] @ memory.T).tolist()
        (step_step, *of_step), (_, of_both, of_difference), _ = squares.tolist()
        lowest, highest = torch.aminmax(seen)
        numbers = [*rows.tolist(), *columns.tolist()]
        numbers[4:4] = float(lowest), float(highest)
        numbers += [*means.tolist(), step_step, of_step[0], of_both, of_step[1], of_difference]
        return Evaluation(*numbers, *products)

    def move(self, move: Move) -> None:
        """Choose the next candidate from the numbers of a move, which are floats."""
        candidate, (step, difference) = self._candidate.double(), self._vectors[:2]
        memory = self._vectors[3:]
        if move.learnt:
            slots = memory[move.slot], memory[move.slot + self.memory]
            means = move.mean_step, move.mean_difference
            for slot, newest, mean in zip(slots, (step, difference), means, strict=True):
                torch.sub(newest, mean, out=slot)
                if self._absent is not None:
                    slot.masked_fill_(self._absent, 0)
        if move.kept:
            self._kept, self._residual = candidate, self._fresh
        moved = torch.add(self._kept, self._residual, alpha=move.scale).add_(move.shift)
        if move.weights:
            moved += memory.T @ memory.new_tensor(move.weights)
        if self._absent is not None:
            moved = torch.where(self._absent, self._kept + self._residual, moved)
        ahead = moved
        if move.extrapolation:
            ahead = moved + move.extrapolation * (moved - self._level)
        if move.ends:
            self._level = moved
        self._candidate = ahead.to(self.dtype)
