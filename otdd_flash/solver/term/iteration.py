"""The iterations of one term, until it has converged or is out of budget, and its certificate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import Form
from otdd_flash.engine.evidence.scale import rounding_floor
from otdd_flash.engine.levels import Levels
from otdd_flash.engine.rule import Rule, Start
from otdd_flash.engine.run import run_one
from otdd_flash.operators import base
from otdd_flash.operators.base import Operator
from otdd_flash.operators.one_segment import OneSegment
from otdd_flash.solver.certificate import Certificate
from otdd_flash.solver.term.result import SolverProgress, StoppedBy
from otdd_flash.solver.term.tolerance import LOOSEST_DEFAULT, Limits, goal_of, reachable_tolerance

# (segment, polished): what its potentials prove, if asked for as well as they can.
Certify = Callable[[OneSegment, bool], Certificate]

# How often a solve goes on after a certificate that found more than the iterations had seen, and
# what part of the tolerance such a certificate should then find.
MOST_TRIES, AIM = 4, 0.9
# The share of the tolerance from which on it is worth the while to let errors hide less.
HIDDEN = 0.1

# Costs that are rounded by so many times epsilon and the tolerance end a solve: marginal errors
# grow by less than that, and of many points one is off by some five times as much. Others are
# iterated to so many times what is aimed at, as one iteration more follows.
LITTLE_ROUNDING, BEFORE_REFINED = 0.2, 2.0


class Iteration:
    """The iterations of one term, counted over all operators and levels that take part.

    Args:
        name: which term this is, for `progress`.
        form: of the problem.
        epsilon: the final regularisation, in units of the cost.
        options: when to stop; its `max_seconds` count from here.
        progress: called whenever the marginals were evaluated.
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
        form: Form,
        epsilon: float,
        options: Limits,
        progress: SolverProgress | None,
        *,
        aim: float = 1.0,
    ) -> None:
        self.name, self.form, self.epsilon = name, form, epsilon
        self.options, self.progress = options, progress
        self.iterations = 0
        self.tolerance = options.asked_tolerance
        self._aim = aim
        self.budget: StoppedBy = "max_iterations"
        self.converged = False
        self._started = time.perf_counter()

    def admit(self, operator: Operator, floor: float) -> None:
        """Take the rounding floor at the final epsilon into account.

        Raises:
            InputError: rounding alone exceeds the tolerance.
        """
        self.tolerance = reachable_tolerance(self.options, floor, self.epsilon, operator.dtype)

    def rounding(self, operator: Operator) -> float:
        """Estimate the rounding of an operator's costs over epsilon and the tolerance."""
        rounded_by = operator.execution.rounded_by
        if operator.execution.refined is None or rounded_by is None:
            return math.inf
        return rounded_by() / (self.epsilon * self.tolerance)

    def solve(
        self,
        operator: Operator,
        candidate: Tensor,
        levels: Levels,
        certify: Certify,
        *,
        refine: bool = True,
        room: float = 0.0,
    ) -> Certificate:
        """Iterate from a column potential g (m,), then on the refined operator if any; certify.

        Without `refine` the certificate may do without iterations on the refined operator; those
        before it leave `room`, a part of what is aimed at, for what it finds beside.
        A certificate may find a larger marginal error than the iterations did, whose sums are less
        accurate: then it takes exact updates, and if these do not suffice iterations go on, aiming
        lower.
        """
        refined = base.refined(operator)
        coarse = refined is not operator
        self._aim *= 1 - room
        aim = self._aim * (BEFORE_REFINED if coarse and refine else 1)
        segment: OneSegment = operator.execution.segment(
            operator, candidate, symmetric=self.form.symmetric
        )
        taken = torch.full((1,), self.iterations, dtype=torch.float64)
        goal = goal_of(self.options, self.epsilon, aim)
        rule = segment.iterations(goal, self.form, Start(levels, taken))

        def iterate(operator: Operator, candidate: Tensor) -> None:
            if operator is not segment.operator:
                segment.change(operator)
            segment.go_on_from(candidate)
            rule.restart(self._aim)
            self._run(segment, rule, self._aim)

        self._run(segment, rule, aim)
        if coarse and (refine or not self.converged):
            iterate(refined, segment.kept if segment.symmetric else segment.updated)
        segment.operator = refined
        certificate = certify(segment, False)
        missed = self.settled and certificate.marginal_error > self.tolerance
        if missed and (refine or certificate.hidden > HIDDEN * self.tolerance):
            certificate = certify(segment, True)
        for _ in range(MOST_TRIES):
            if not self.converged or certificate.marginal_error <= self.tolerance:
                return certificate
            self._aim *= AIM * self.tolerance / certificate.marginal_error
            iterate(refined, certificate.g)
            certificate = certify(segment, True)
        if certificate.marginal_error > self.tolerance:
            self.budget = "rounding"
        return certificate

    def _run(self, segment: OneSegment, rule: Rule, aim: float) -> None:
        """Iterate until the term has converged, at `aim` tolerances, or is out of budget.

        Raises:
            InputError: rounding alone exceeds the tolerance at the final epsilon.
        """
        self.converged, self.budget = False, "max_iterations"
        if self.left() <= 0:
            return

        def watch(error: float, iterations: int) -> bool:
            self.iterations = iterations
            if self.progress is not None:
                self.progress(self.name, iterations, error)
            return self.left() <= 0

        told = run_one(segment, rule, watch, wait=segment.waits)
        error = told.marginal_error
        if self._timed_out or (self.left() <= 0 and error > LOOSEST_DEFAULT):
            return
        operator = segment.operator
        self.admit(operator, rounding_floor(operator.costs, told.size, self.epsilon))
        self.converged = error <= aim * self.tolerance
        if not self.converged and self.left() > 0:
            self.budget = "rounding"

    @property
    def _timed_out(self) -> bool:
        return self.budget == "max_seconds"

    @property
    def settled(self) -> bool:
        """Whether the last potentials were evaluated at the final epsilon, with none to come."""
        return self.converged or self.budget == "rounding"

    def count(self, certificate: Certificate) -> None:
        self.iterations += 1
        if self.progress is not None:
            self.progress(self.name, self.iterations, certificate.marginal_error)

    def late(self) -> bool:
        """Whether `max_seconds` are over."""
        limit = self.options.max_seconds
        return limit is not None and time.perf_counter() - self._started >= limit

    def left(self) -> int:
        """Return the iterations left in the budget, without the certificate, the last one."""
        if self.iterations and self.late():
            self.budget = "max_seconds"
            return 0
        return self.options.max_iterations - 1 - self.iterations
