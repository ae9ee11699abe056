"""The iterations of one term at one epsilon after the other, until converged or out of budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from otdd_flash.operators.base import Operator
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.evidence.certificate import Certificate
from otdd_flash.solver.evidence.scale import hidden_error, rounding_floor
from otdd_flash.solver.late_reader import LateReader, Reading
from otdd_flash.solver.quasi_newton import Track, restart
from otdd_flash.solver.schedule import Progress, StoppedBy
from otdd_flash.solver.stall import Stall
from otdd_flash.solver.sweep import Step, steps_between_looks, sweep
from otdd_flash.solver.term import reachable_tolerance

# (iteration, error): whether an epsilon had enough iterations.
Enough = Callable[[int, float], bool]

# (refined operator, track, polished): what a track proves, if asked for as well as it can.
Certify = Callable[[Operator, Track, bool], Certificate]

# How often a solve goes on after a certificate that found more than the iterations had seen, and
# what part of the tolerance such a certificate should then find.
MOST_TRIES, AIM = 4, 0.9
# The share of the tolerance from which on it is worth the while to let errors hide less.
HIDDEN = 0.1


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
        aim: what times the tolerance iterations stop at.

    Attributes:
        iterations: how many there were.
        tolerance: marginal error to reach.
        budget: what ends the solve if it does not converge.
        converged: whether the final epsilon was solved with the operator used last.
    """

    def __init__(
        self,
        name: str,
        step: Step,
        epsilon: float,
        options: Converged,
        progress: Progress | None,
        *,
        aim: float = 1.0,
    ) -> None:
        self.name, self.step, self.epsilon = name, step, epsilon
        self.options, self.progress = options, progress
        self.iterations = 0
        self.tolerance = options.asked_tolerance
        self._aim = aim
        self.budget: StoppedBy = "max_iterations"
        self.converged = False
        self._started = time.perf_counter()
        self._stall = Stall()
        # The lowest marginal error at the final epsilon, and its track.
        self._nearest: tuple[float, Track] | None = None

    def admit(self, operator: Operator, floor: float) -> None:
        """Take the rounding floor at the final epsilon into account.

        Raises:
            InputError: rounding alone exceeds the tolerance.
        """
        self.tolerance = reachable_tolerance(self.options, floor, self.epsilon, operator.dtype)

    def finish(
        self, operator: Operator, track: Track, certify: Certify, *, refine: bool = True
    ) -> Certificate:
        """Iterate at the final epsilon, then with the refined operator if there is one; certify.

        Without `refine` the certificate may do without iterations on the refined operator.
        A certificate may find a larger marginal error than the iterations did, whose sums are less
        accurate: then it takes exact updates, and if these do not suffice iterations go on, aiming
        lower.
        """
        refined = operator.refined
        if not self.converged:
            track = self._run_final(operator, track)
        if refined is not operator and (refine or not self.converged):
            track = self._run_final(refined, restart(track, track.g))
        certificate = certify(refined, track, False)
        missed = self.settled and certificate.marginal_error > self.tolerance
        if missed and (refine or certificate.hidden > HIDDEN * self.tolerance):
            certificate = certify(refined, track, True)
        for _ in range(MOST_TRIES):
            if not self.converged or certificate.marginal_error <= self.tolerance:
                return certificate
            self._aim *= AIM * self.tolerance / certificate.marginal_error
            track = self._run_final(refined, restart(track, certificate.g))
            certificate = certify(refined, track, True)
        if certificate.marginal_error > self.tolerance:
            self.budget = "rounding"
        return certificate

    def _run_final(self, operator: Operator, track: Track) -> Track:
        self.converged, self.budget = False, "max_iterations"
        self._stall, self._nearest = Stall(), None
        return self.run(operator, self.epsilon, track, lambda *_: False)

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
            if level == self.epsilon and error <= self._aim * self.tolerance:
                self.converged = True
                return reading.kept.track
            if level == self.epsilon and self._stalled(operator, reading):
                self.budget = "rounding"
                assert self._nearest is not None
                return self._nearest[1]
            if enough(reading.kept.iteration, error):
                return track
        late = reader.last()
        if late is not None:
            self._error(operator, level, late)
        return track

    def _error(self, operator: Operator, level: float, reading: Reading[_Look]) -> float:
        """The marginal error of a look, reported; refuses what rounding makes hopeless."""
        _, _, gap, size = reading.numbers
        error = gap + hidden_error(operator, size, level)
        if self.progress is not None:
            self.progress(self.name, reading.kept.iteration, error)
        if level == self.epsilon:
            self.admit(operator, rounding_floor(operator, size, level))
        return error

    def _stalled(self, operator: Operator, reading: Reading[_Look]) -> bool:
        dual, _, gap, size = reading.numbers
        if self._nearest is None or gap < self._nearest[0]:
            self._nearest = gap, reading.kept.track
        floor = rounding_floor(operator, size, self.epsilon)
        unit = torch.finfo(operator.dtype).eps / 2 * size
        return self._stall.over(reading.kept.iteration, gap, dual, floor=floor, unit=unit)

    @property
    def settled(self) -> bool:
        """Whether the last track is one that was looked at, with nothing better to come."""
        return self.converged or self.budget == "rounding"

    def count(self, certificate: Certificate) -> None:
        """Count the iteration that a certificate took."""
        self.iterations += 1
        if self.progress is not None:
            self.progress(self.name, self.iterations, certificate.marginal_error)

    def left(self) -> int:
        """Iterations within the budget; the certificate, the last one, is not among them."""
        limit = self.options.max_seconds
        if limit is not None and self.iterations and time.perf_counter() - self._started >= limit:
            self.budget = "max_seconds"
            return 0
        return self.options.max_iterations - 1 - self.iterations
