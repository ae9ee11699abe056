"""The iterations of S problems side by side: quasi-Newton steps for Sinkhorn's fixed points.

Every segment has its own differences, trust and level of epsilon, which depend on nothing but
itself: `formulas.decision` and `formulas.differences` have the rules. This file decides in tensors,
with vectors that are padded to one length, in float64 and plain PyTorch; entries of padding have no
mass, and their residuals are 0. `quasi_newton_kernels` decides by the same formulas in Triton, and
`few_problems` in Python floats, so a change must be made in all three
(`tests/engine/test_quasi_newton_kernels.py`, `tests/engine/test_few_problems.py`).
`operators.stored_segments` and `operators.torch_pool` make a `QuasiNewton`; `engine.problems.run`
advances the first, `solver.small.pooled_solve` steps the second.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from otdd_flash.engine.problems import Costs, Move, SegmentReport, Start, TorchProblems, numbers_of
from otdd_flash.formulas.decision import (
    Form,
    Goal,
    Levels,
    Progress,
    State,
    Trust,
    decide,
    evaluated_level,
    restarted,
    started,
)
from otdd_flash.formulas.differences import Memory, advance, empty_memory
from otdd_flash.formulas.evidence import Evaluation, Products


class Problems(Costs, Protocol):
    """The problems that `QuasiNewton` iterates on; `vectors` evaluate them."""

    def keep(self, order: Tensor) -> None:
        """Go on with the problems `order` (S',) only, in that order."""
        ...


class QuasiNewton:
    """The iterations of all segments.

    Args:
        problems: whose costs they are.
        vectors: those of the problems, which it evaluates and moves.
        goal: when one is done.
        form: of the problems.
        start: where to.

    Attributes:
        active: (S,) bool, which segments are not done.
        terms: (S, 8) float64, the `SegmentReport` of each, of when it was active last.
    """

    waits = False

    def __init__(
        self, problems: Problems, vectors: ManyVectors, goal: Goal, form: Form, start: Start
    ) -> None:
        self._problems, self.vectors, self._form = problems, vectors, form
        self._begin(goal, start)

    @property
    def is_nan(self) -> bool:
        """Whether a marginal error is NaN, as costs that are not finite make it."""
        return bool(self.terms[:, SegmentReport._fields.index("marginal_error")].isnan().any())

    def begin(self, settings: Tensor, start: Start, candidate: Tensor) -> None:
        """Begin afresh with other problems, to a goal and two unit roundoffs (7,) float64."""
        self.vectors.begin(candidate)
        self._begin(Goal.of_settings(settings), start)

    def _begin(self, goal: Goal, start: Start) -> None:
        problems, self._goal = self._problems, goal
        iterations = start.iterations.to(problems.mean_cost)
        levels = Levels(*(numbers.to(iterations) for numbers in start.levels))
        self._state, memory = started(iterations, levels), self.vectors.memory
        self._memory = empty_memory(iterations, memory)
        self._slots = torch.arange(memory, device=iterations.device)[None]
        self.active = torch.ones_like(iterations, dtype=torch.bool)
        self.terms = iterations.new_zeros((len(iterations), len(SegmentReport._fields)))

    def step(self) -> None:
        """Evaluate the candidates and choose the next."""
        active, state, form = self.active, self._state, self._form
        state = state._replace(iterations=state.iterations + active)
        found = self.vectors.evaluate(evaluated_level(self._goal, state), active)
        costs, slot = numbers_of(self._problems), self._memory.slot
        of_mass_one = form.symmetric and form.constraints.exact
        decision = decide(self._goal, costs, state, found, of_mass_one)
        # Only the last g that was kept at this level has a residual to compare with.
        begun = active & state.trust.dual.isfinite()
        plain, rounding = decision.plain, decision.rounding
        self._memory, step = advance(
            self._memory, self._slots, found, begun, plain, rounding, form.damping
        )
        step = step._replace(weights=torch.cat(step.weights, 1))
        self.vectors.move(Move.after(found, decision, slot, step), active)
        self._state, self.active = decision.state, active & ~decision.done
        reports = torch.stack((*decision.reported, (~decision.done).double()), 1)
        self.terms = torch.where(active[:, None], reports, self.terms)

    def advance(self) -> None:
        """Take one iteration, or eight on a GPU, where asking takes time."""
        for _ in range(8 if self.active.is_cuda else 1):
            self.step()

    def restart(self, candidate: Tensor, aim: float) -> None:
        """Go on at the final epsilon with the differences seen so far, from another candidate."""
        self.vectors.go_on_from(candidate)
        self._goal = self._goal._replace(aim=aim)
        self._state = restarted(self._state, self._goal.epsilon)
        self.active = torch.ones_like(self.active)

    def keep(self, order: Tensor) -> None:
        self._problems.keep(order)
        self.vectors.keep(order)
        self.active, self.terms = self.active[order], self.terms[order]
        iterations, levels, trust, progress = self._state
        self._state = State(
            iterations[order],
            Levels(*(numbers[order] for numbers in levels)),
            Trust(*(numbers[order] for numbers in trust)),
            Progress(*(numbers[order] for numbers in progress)),
        )
        self._memory = Memory(*(part[order] for part in self._memory))


class ManyVectors:
    """The vectors of S problems of m columns, (S, m) each; 8 (6 + 2 memory) S m bytes, or less.

    Args:
        problems: whose softmins are evaluated.
        candidate: (S, m), the first potentials, in the type in which they are stored.
        memory: how many differences are remembered.

    Attributes:
        memory: number of differences that are remembered.
        rows: (S, n), the potentials f of the last evaluation; None of clouds with themselves.
        kept: (S, m) float64, the potentials of columns that were kept last.
        residual: (S, m) float64, theirs.
    """

    def __init__(self, problems: TorchProblems, candidate: Tensor, memory: int) -> None:
        self._problems, self.memory = problems, memory
        self.begin(candidate)

    def begin(self, candidate: Tensor) -> None:
        """Begin afresh with other problems, which stand where the last ones did."""
        self._candidate = candidate
        masses, row_masses = self._problems.column_masses, self._problems.row_masses
        self.rows = None
        if row_masses is not None:
            self.rows = torch.zeros_like(row_masses, dtype=candidate.dtype)
        self.kept = candidate.double()
        self._fresh = self.residual = self._level = torch.zeros_like(masses)
        count, m = masses.shape
        self._remembered = masses.new_zeros((count, 2 * self.memory, m))
        self._every, self._left = candidate.clone(), torch.arange(count, device=candidate.device)

    def go_on_from(self, candidate: Tensor) -> None:
        """Evaluate other potentials (S, m) next."""
        self._candidate = candidate

    @property
    def updated(self) -> Tensor:
        """T'(T(g)) (S, m) float64 of the g kept last, or T(g); g before any evaluation."""
        return self.kept + self.residual

    @property
    def candidates(self) -> Tensor:
        """The last candidates of all problems, those that were left out included."""
        self._every[self._left] = self._candidate
        return self._every

    def evaluate(self, epsilon: Tensor, active: Tensor) -> Evaluation:
        """Evaluate the candidates g; numbers of problems that are not active are unspecified.

        Args:
            epsilon: (S,) float64.
            active: (S,) bool.
        """
        self.rows, updated = self._problems.softmins(self._candidate, self.rows, epsilon, active)
        masses, potential = self._problems.column_masses, self._candidate.double()
        constraints, row_masses = self._problems.constraints, self._problems.row_masses
        support, updated = masses > 0, updated.double()
        self._fresh, translation = updated - potential, None
        if self.rows is not None and row_masses is not None:
            translation = constraints.translation(row_masses, self.rows, masses, updated)
        if translation is not None:
            self._fresh = self._fresh - translation
        fresh = torch.where(support, self._fresh, 0)
        plain = fresh if translation is None else fresh + translation
        held = torch.where(support, potential, 0)
        terms = constraints.columns.terms(held, plain, epsilon[:, None])
        step, difference = potential - self.kept, self.residual - fresh
        lowest = torch.where(support, potential, torch.inf).amin(1)
        highest = torch.where(support, potential, -torch.inf).amax(1)
        products = (
            step,
            difference,
            fresh,
            step * step,
            step * difference,
            difference * difference,
            step * fresh,
            difference * fresh,
        )
        sums = totals(torch.stack((*terms, *products)) * masses)
        weighted = torch.stack((difference, fresh), 1) * masses[:, None]
        remembered = totals(self._remembered[:, None] * weighted[:, :, None])
        of_columns, others = sums[: len(terms)].unbind(), sums[len(terms) :].unbind()
        mean = others[2] if translation is None else others[2] + translation.squeeze(1)
        value, size, gap, mass, raised = constraints.columns.numbers(of_columns, mean)
        of_rows = torch.stack((value, size))
        if self.rows is not None and row_masses is not None:
            f = self.rows.double()
            of_rows = totals(torch.stack((constraints.rows.dual(f), f.abs())) * row_masses)
        ends = constraints.ends(lowest, highest)
        numbers = (*of_rows.unbind(), value, size, *ends, gap, mass, *others)
        each = [Products(*products.chunk(2, 1)) for products in remembered.unbind(1)]
        return Evaluation(*[*numbers, *each, raised])

    def move(self, move: Move, active: Tensor) -> None:
        """Choose the next candidates; the vectors of problems that are not active stay."""
        support, potential = self._problems.column_masses > 0, self._candidate.double()
        newest = torch.stack((potential - self.kept, self.residual - self._fresh), 1)
        newest = newest - torch.stack((move.mean_step, move.mean_difference), 1)[:, :, None]
        kept = (move.kept & active)[:, None]
        self._remember(torch.where(support[:, None], newest, 0), move.slot, move.learnt & active)
        self.kept = torch.where(kept, potential, self.kept)
        self.residual = torch.where(kept, self._fresh, self.residual)
        moved = self.kept + move.scale[:, None] * self.residual + move.shift[:, None]
        moved = moved + _halved(move.weights[:, :, None] * self._remembered)
        moved = torch.where(support, moved, self.kept + self.residual)
        ahead = moved + move.extrapolation[:, None] * (moved - self._level)
        self._level = torch.where((move.ends & active)[:, None], moved, self._level)
        ahead = torch.where(active[:, None], ahead, potential)
        self._candidate = ahead.to(self._candidate.dtype)

    def keep(self, order: Tensor) -> None:
        """Go on with some problems (S',); the problems keep theirs first."""
        self._every[self._left] = self._candidate
        self._left, self._candidate = self._left[order], self._candidate[order]
        self.rows = None if self.rows is None else self.rows[order]
        self._fresh, self.kept = self._fresh[order], self.kept[order]
        self.residual, self._level = self.residual[order], self._level[order]
        self._remembered = self._remembered[order]

    def _remember(self, newest: Tensor, slot: Tensor, where: Tensor) -> None:
        """Put vectors (S, 2, m), a step and its residual difference, into their slots."""
        segments = torch.arange(len(slot), device=slot.device)[:, None]
        place = segments, torch.stack((slot, slot + self.memory), 1)
        self._remembered[place] = torch.where(where[:, None, None], newest, self._remembered[place])


def _halved(values: Tensor) -> Tensor:
    """Sums over the middle dimension (S, 2^k, m), one half added to the other k times."""
    while values.shape[1] > 1:
        one, other = values.chunk(2, 1)
        values = one + other
    return values.squeeze(1)


def totals(values: Tensor) -> Tensor:
    """Sums along the last dimension, sixteen numbers at a time.

    How PyTorch adds up more of them depends on how many other sums there are.
    """
    while values.shape[-1] > 1:
        padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 16))
        values = padded.unflatten(-1, (-1, 16)).sum(-1)  # type: ignore[no-untyped-call]
    return values.squeeze(-1)
