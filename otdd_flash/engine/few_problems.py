"""The iterations of a few problems side by side, whose numbers and decisions are Python floats.

They are those of `quasi_newton.QuasiNewton`, by the same formulas, so a change must be made in both
and in `quasi_newton_kernels` (`tests/engine/test_few_problems.py`). `operators.one_problem`, and
`operators.torch_pool` for a few problems, make a `FewQuasiNewton` where passes run in PyTorch: the
decisions of an iteration are some three hundred operations on numbers, which as tensors take longer
than the passes of a thousand points. `operators.kernel_pool` and `operators.one_kernel_problem`
remember as many differences (`MEMORY`).

Sums over points are products of matrices, many at once: on a processor it takes as long to ask
PyTorch for something as to add up thousands of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.engine.problems import Costs, Move, SegmentReport, Start, TorchProblems, numbers_of
from otdd_flash.formulas.decision import (
    Form,
    Goal,
    Levels,
    State,
    decide,
    evaluated_level,
    restarted,
    started,
)
from otdd_flash.formulas.differences import OneMemory
from otdd_flash.formulas.evidence import Evaluation, Products
from otdd_flash.formulas.marginals import Marginal


class FewProblems(TorchProblems, Protocol):
    """A few problems for `FewQuasiNewton`, whose numbers are floats."""

    @property
    def scalars(self) -> Sequence[Costs]:
        """The costs of each, in floats."""
        ...


class FewQuasiNewton:
    """The iterations of a few problems.

    Args:
        problems: whose costs they are.
        vectors: those of the problems, which it evaluates and moves.
        goal: when one is done.
        form: of the problems.
        start: levels of epsilon, and iterations taken before.
    """

    # A processor has nothing else to do meanwhile.
    waits = True

    def __init__(
        self, problems: FewProblems, vectors: FewVectors, goal: Goal, form: Form, start: Start
    ) -> None:
        self._problems, self.vectors, self._damping = problems, vectors, form.damping
        self._of_mass_one = form.symmetric and form.constraints.exact
        self._goal: Goal
        self._states: list[State]
        self._begin(goal, start)

    @property
    def terms(self) -> Tensor:
        """The `SegmentReport` of each problem, of when it was active last, (S, 8) float64."""
        return torch.tensor(self._reports, dtype=torch.float64)

    @property
    def active(self) -> Tensor:
        """Which problems are not done, (S,) bool."""
        return torch.tensor(self._active)

    @property
    def is_done(self) -> bool:
        """Whether all of them are."""
        return not any(self._active)

    @property
    def is_nan(self) -> bool:
        """Whether a marginal error is NaN, as costs that are not finite make it."""
        return any(math.isnan(SegmentReport(*report).marginal_error) for report in self._reports)

    def begin(self, settings: Tensor, start: Start, candidate: Tensor) -> None:
        """Begin afresh with other problems, to a goal and two unit roundoffs (7,) float64."""
        self.vectors.begin(candidate)
        self._begin(Goal.of_settings(settings), start)

    def step(self) -> None:
        """Evaluate the candidates and choose the next; nothing if all problems are done."""
        if self.is_done:
            return
        states = [
            state._replace(iterations=state.iterations + active)
            for state, active in zip(self._states, self._active, strict=True)
        ]
        levels = [evaluated_level(self._goal, state) for state in states]
        evaluations = self.vectors.evaluate(levels, self._active)
        for k, found in enumerate(evaluations):
            if not self._active[k]:
                continue
            decision = decide(self._goal, self._costs[k], states[k], found, self._of_mass_one)
            memory, slot = self._memories[k], self._memories[k].slot
            # Only the last g that was kept at this level has a residual to compare with.
            begun = math.isfinite(states[k].trust.dual)
            now = decision.plain, decision.rounding
            step = memory.advance(found, begun, *now, self._damping)
            self.vectors.move(k, Move.after(found, decision, slot, step))
            self._states[k], self._active[k] = decision.state, not decision.done
            self._reports[k] = [*decision.reported, float(not decision.done)]

    def advance(self) -> None:
        """Take one iteration."""
        self.step()

    def change(self) -> None:
        """Go on with another form of the costs, which the problems have taken already."""
        self._costs = [numbers_of(costs) for costs in self._problems.scalars]

    def restart(self, candidate: Tensor, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from other candidates."""
        self.vectors.go_on_from(candidate)
        self._goal = self._goal._replace(aim=aim)
        self._states = [restarted(state, self._goal.epsilon) for state in self._states]
        self._active = [True] * len(self._states)

    def keep(self, order: Tensor) -> None:
        """Go on with all problems, the only order there is: few are never compacted."""
        assert len(order) == len(self._states)

    def _begin(self, goal: Goal, start: Start) -> None:
        self._goal = goal
        self._costs = [numbers_of(costs) for costs in self._problems.scalars]
        iterations, *levels = (
            numbers.double().tolist() for numbers in (start.iterations, *start.levels)
        )
        self._states = [
            started(count, Levels(*of_one))
            for count, *of_one in zip(iterations, *levels, strict=True)
        ]
        self._memories = [OneMemory(self.vectors.memory) for _ in self._states]
        self._reports = [[0.0] * len(SegmentReport._fields) for _ in self._states]
        self._active = [True] * len(self._states)


# Differences that are remembered, also by `KernelVectors` of one problem and of small ones.
MEMORY = 8

# Newest vectors: the step, its residual difference and the residual, without means taken off.
NEWEST = 3


class FewVectors:
    """Vectors of S problems with m columns each; 8 (8 + 2 memory) S m bytes.

    Where a column has no mass its step, its residual difference and its remembered entries are 0,
    so that one product has all inner products.

    Args:
        problems: whose softmins are evaluated.
        candidate: (S, m), the first potentials, in the type in which they are stored; copied.

    Attributes:
        memory: how many differences are remembered.
        candidate: (S, m), the potentials to evaluate next.
        rows: (S, n), the potentials f of the last evaluation; None of clouds with themselves.
        kept: (S, m) float64, the potentials of columns that were kept last.
        residual: (S, m) float64, theirs.
    """

    memory = MEMORY

    def __init__(self, problems: TorchProblems, candidate: Tensor) -> None:
        self._problems, self.candidate = problems, candidate.clone()
        masses = problems.column_masses
        count, length = masses.shape
        # A copy: a move writes into rows of it.
        self.kept = candidate.to(torch.float64, copy=True)
        self.residual, self._level, self._fresh = masses.new_zeros((3, count, length)).unbind()
        self._all = masses.new_zeros((count, NEWEST + 2 * MEMORY, length))
        # Views, as to make one takes as long as to add up thousands of numbers.
        self._newest, self._memory = self._all[:, :NEWEST], self._all[:, NEWEST:]
        self._by_newest, self._by_memory = self._newest.mT, self._memory.mT
        self._step, self._difference, self._residual = self._newest.unbind(1)
        self._each = [self._views(k) for k in range(count)]
        self._see()

    def begin(self, candidate: Tensor) -> None:
        """Begin afresh with other problems, which stand where the last ones did."""
        for part in (self.residual, self._level, self._all):
            part.zero_()
        self.candidate.copy_(candidate)
        self.kept.copy_(self.candidate)
        self._see()

    def go_on_from(self, candidate: Tensor) -> None:
        """Evaluate other potentials (S, m) next."""
        self.candidate.copy_(candidate)

    @property
    def candidates(self) -> Tensor:
        """The last candidates (S, m)."""
        return self.candidate

    @property
    def updated(self) -> Tensor:
        """T'(T(g)) (S, m) float64 of the g kept last, or T(g); g before any evaluation."""
        return self.kept + self.residual

    def _see(self) -> None:
        masses, row_masses = self._problems.column_masses, self._problems.row_masses
        absent = masses == 0
        self._absent = absent if bool(absent.any()) else None
        self._as_rows, self._as_columns = masses[:, None], masses[:, :, None]
        self.rows = self._row_masses = None
        if row_masses is not None:
            self.rows = torch.zeros_like(row_masses, dtype=self.candidate.dtype)
            self._row_masses = row_masses[:, :, None]

    def evaluate(self, epsilon: Sequence[float], active: Sequence[bool]) -> list[Evaluation]:
        """Evaluate the candidates g; numbers of problems that are not active are unspecified."""
        self.rows, updated = self._problems.softmins(self.candidate, self.rows, epsilon, active)
        potential, updated = self.candidate.double(), updated.double()
        constraints, masses = self._problems.constraints, self._problems.column_masses
        translation = None
        if self.rows is not None and self._problems.row_masses is not None:
            sides = self._problems.row_masses, self.rows, masses, updated
            translation = constraints.translation(*sides)
        torch.sub(updated, potential, out=self._fresh)
        if translation is not None:
            self._fresh.sub_(translation)
        torch.sub(potential, self.kept, out=self._step)
        torch.sub(self.residual, self._fresh, out=self._difference)
        self._residual.copy_(self._fresh)
        lowest = highest = potential
        if self._absent is not None:
            self._newest.masked_fill_(self._absent[:, None], 0)
            lowest = potential.masked_fill(self._absent, torch.inf)
            highest = potential.masked_fill(self._absent, -torch.inf)
            potential = potential.masked_fill(self._absent, 0)
        levels: float | Tensor = epsilon[0]
        if any(level != levels for level in epsilon):
            levels = torch.tensor(epsilon, dtype=torch.float64)[:, None]
        plain = self._residual if translation is None else self._residual + translation
        terms = constraints.columns.terms(potential, plain, levels)
        of_columns = of_rows = torch.bmm(torch.stack(terms, 1), self._as_columns)
        if self.rows is not None and self._row_masses is not None:
            f = self.rows.double()
            of_rows = torch.bmm(
                torch.stack((constraints.rows.dual(f), f.abs()), 1), self._row_masses
            )
        weighted = self._newest * self._as_rows
        lowest, highest = constraints.ends(lowest.amin(1), highest.amax(1))
        parts = (
            of_rows.tolist(),
            of_columns.tolist(),
            lowest.tolist(),
            highest.tolist(),
            weighted.sum(2).tolist(),
            torch.bmm(weighted, self._by_newest).tolist(),
            torch.bmm(weighted, self._by_memory).tolist(),
        )
        columns, moved = constraints.columns, [0.0] * len(epsilon)
        if translation is not None:
            moved = translation.squeeze(1).tolist()
        return [_evaluation(columns, *of_one) for of_one in zip(moved, *parts, strict=True)]

    def move(self, k: int, move: Move) -> None:
        """Choose the next candidate of a problem from the numbers of a move, which are floats."""
        each, absent = self._each[k], None if self._absent is None else self._absent[k]
        if move.learnt:
            slots = each.slots[move.slot], each.slots[move.slot + MEMORY]
            means = move.mean_step, move.mean_difference
            for slot, newest, mean in zip(slots, each.newest, means, strict=True):
                torch.sub(newest, mean, out=slot)
                if absent is not None:
                    slot.masked_fill_(absent, 0)
        if move.kept:
            each.kept.copy_(each.candidate)
            each.residual.copy_(each.fresh)
        moved = torch.add(each.kept, each.residual, alpha=move.scale).add_(move.shift)
        if move.weights:
            moved.addmv_(each.by_memory, moved.new_tensor(move.weights))
        if absent is not None:
            moved = torch.where(absent, each.kept + each.residual, moved)
        ahead = moved
        if move.extrapolation:
            ahead = moved + move.extrapolation * (moved - each.level)
        if move.ends:
            each.level.copy_(moved)
        each.candidate.copy_(ahead)

    def _views(self, k: int) -> _OneProblem:
        return _OneProblem(
            self.candidate[k],
            self.kept[k],
            self.residual[k],
            self._fresh[k],
            self._level[k],
            (self._step[k], self._difference[k]),
            self._memory[k].unbind(),
            self._by_memory[k],
        )


class _OneProblem(NamedTuple):
    """Views of the vectors (m,) of one problem.

    Attributes:
        candidate: the potential to evaluate next.
        kept: the potential kept last.
        residual: that of the potential kept last.
        fresh: of the candidate that was evaluated.
        level: where the last level of epsilon ended.
        newest: the step and its residual difference.
        slots: the steps and residual differences that are remembered.
        by_memory: (m, 2 memory), these as columns.
    """

    candidate: Tensor
    kept: Tensor
    residual: Tensor
    fresh: Tensor
    level: Tensor
    newest: tuple[Tensor, Tensor]
    slots: tuple[Tensor, ...]
    by_memory: Tensor


def _evaluation(
    marginal: Marginal,
    translation: float,
    of_rows: list[list[float]],
    of_columns: list[list[float]],
    lowest: float,
    highest: float,
    means: list[float],
    squares: list[list[float]],
    products: list[list[float]],
) -> Evaluation:
    """Put together the numbers of one problem."""
    (row_value,), (row_size,), *_ = of_rows
    of_terms = [total for (total,) in of_columns]
    value, size, gap, mass, raised = marginal.numbers(of_terms, means[2] + translation)
    (step_step, step_difference, step_residual), of_difference, _ = squares
    _, with_difference, with_residual = products
    return Evaluation(
        row_value=row_value,
        row_size=row_size,
        value=value,
        size=size,
        lowest=lowest,
        highest=highest,
        gap=gap,
        mass=mass,
        mean_step=means[0],
        mean_difference=means[1],
        mean_residual=means[2],
        step_step=step_step,
        step_difference=step_difference,
        difference_difference=of_difference[1],
        step_residual=step_residual,
        difference_residual=of_difference[2],
        remembered_differences=Products(with_difference[:MEMORY], with_difference[MEMORY:]),
        remembered_residual=Products(with_residual[:MEMORY], with_residual[MEMORY:]),
        raised=raised,
    )
