"""The iterations of one term at one epsilon after the other, until converged or out of budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from otdd_flash.operators.base import Operator
from otdd_flash.solver.certificate import rounding_floor
from otdd_flash.solver.late_reader import LateReader, Reading
from otdd_flash.solver.options import Progress, SolverOptions, StoppedBy
from otdd_flash.solver.quasi_newton import Track, restart
from otdd_flash.solver.sweep import Step, steps_between_looks, sweep
from otdd_flash.solver.term import reachable_tolerance

# (iteration, error): whether an epsilon had enough iterations.
Enough = Callable[[int, float], bool]


class _Look(NamedTuple):
    """Where a solve stood after some iterations."""

    iteration: int
    track: Track


class Iteration:
    """The iterations of one term, counted over all operators and levels that take part.

    Args:
        name: which term this is, for `progress`.
        step: one iteration, from one `Track` to the next.
        epsilon: the final regularisation, in units of the cost.
        options: when to stop; its `max_seconds` count from here.
        progress: called whenever the marginals were looked at.

    Attributes:
        iterations: how many there were.
        tolerance: marginal error to stop at.
        budget: what ends the solve if it does not converge.
        converged: whether the final epsilon was solved with the operator used last.
    """

    def __init__(
        self,
        name: str,
        step: Step,
        epsilon: float,
        options: SolverOptions,
        progress: Progress | None,
    ) -> None:
        self.name, self.step, self.epsilon = name, step, epsilon
        self.options, self.progress = options, progress
        self.iterations = 0
        self.tolerance = options.asked_tolerance
        self.budget: StoppedBy = "max_iterations"
        self.converged = False
        self._started = time.perf_counter()

    def admit(self, operator: Operator, floor: float) -> None:
        """Take the rounding floor at the final epsilon into account.

        Raises:
            InputError: rounding alone exceeds the tolerance.
        """
        self.tolerance = reachable_tolerance(self.options, floor, self.epsilon, operator.dtype)

    def finish(self, operator: Operator, track: Track) -> Track:
        """Iterate at the final epsilon, and then with the refined operator if there is one."""
        if not self.converged:
            track = self.run(operator, self.epsilon, track, lambda *_: False)
        refined = operator.refined
        if refined is operator:
            return track
        self.converged = False
        return self.run(refined, self.epsilon, restart(track, track.g), lambda *_: False)

    def run(self, operator: Operator, level: float, track: Track, enough: Enough) -> Track:
        """Iterate at one epsilon until enough, until converged at the final one, or the budget.

        Raises:
            InputError: rounding alone exceeds the tolerance at the final epsilon.
        """
        reader: LateReader[_Look] = LateReader(wait=not operator.short_passes)
        before = self.iterations
        # The certificate is the last iteration.
        while (left := self.left()) > 0:
            count = min(left, steps_between_looks(operator, self.iterations - before))
            track = Track(*sweep(operator, self.step, level, track, count))
            self.iterations += count
            reading = reader.exchange(track.look, _Look(self.iterations, track))
            if reading is None:
                continue
            error = self._error(operator, level, reading)
            if level == self.epsilon and error <= self.tolerance:
                self.converged = True
                return reading.kept.track
            if enough(reading.kept.iteration, error):
                return track
        late = reader.last()
        if late is not None:
            self._error(operator, level, late)
        return track

    def _error(self, operator: Operator, level: float, reading: Reading[_Look]) -> float:
        """The marginal error of a look, reported; refuses what rounding makes hopeless."""
        gap, size = reading.numbers
        floor = rounding_floor(operator, size, level)
        if self.progress is not None:
            self.progress(self.name, reading.kept.iteration, gap + floor)
        if level == self.epsilon:
            self.admit(operator, floor)
        return gap + floor

    def left(self) -> int:
        """Iterations within the budget; the certificate, the last one, is not among them."""
        limit = self.options.max_seconds
        if limit is not None and self.iterations and time.perf_counter() - self._started >= limit:
            self.budget = "max_seconds"
            return 0
        return self.options.max_iterations - 1 - self.iterations
