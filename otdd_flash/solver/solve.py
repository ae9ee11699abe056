"""The solve of one term: from a start through the iterations to a certificate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import CROSS, SELF, Form
from otdd_flash.engine.evidence.oscillation import MOST_ERROR
from otdd_flash.engine.evidence.scale import rounding_floor
from otdd_flash.engine.levels import LEVEL_TOLERANCE, Levels, first_level
from otdd_flash.engine.rule import Goal, Rule, Start
from otdd_flash.engine.run import run_one
from otdd_flash.operators import base
from otdd_flash.operators.base import Operator
from otdd_flash.operators.one_segment import OneSegment
from otdd_flash.solver.certificate import Certificate, certify, certify_self
from otdd_flash.solver.term.result import SolverProgress, StoppedBy, TransportTerm
from otdd_flash.solver.term.tolerance import LOOSEST_DEFAULT, Limits, goal_of, reachable_tolerance


def solve_alternating(
    operator: Operator,
    epsilon: float,
    options: Limits,
    *,
    start: Tensor | None = None,
    progress: SolverProgress | None = None,
) -> TransportTerm:
    """OT_epsilon between the two sides of an operator.

    An operator that rounds the points iterates first; its refined form, which knows the original
    points, starts from there and ends the solve, or proves it alone where rounding is little beside
    the tolerance.

    Args:
        operator: the cost (n, m) and the masses.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: (m,) column potential to start from at the final epsilon, without levels.
        progress: called whenever the marginals were evaluated, as progress("xy", iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    solve = Iteration("xy", CROSS, epsilon, options, progress)
    # Most hopeless tolerances show before the first iteration, by the size of the costs alone.
    solve.admit(operator, rounding_floor(operator.costs, 0.0, epsilon))
    if start is None:
        candidate, levels, passes = approach(solve, operator)
    else:
        candidate, passes = start.to(operator.dtype), 0.0
        levels = Levels.descending(torch.full((1,), epsilon, dtype=torch.float64))

    rounding = solve.rounding(operator)
    refine = rounding > LITTLE_ROUNDING

    def prove(segment: OneSegment, polished: bool) -> Certificate:
        nonlocal passes
        if solve.settled:
            # The last evaluation has taken the certificate's first two passes.
            known = segment.rows, segment.kept, epsilon, segment.updated
            scaled = 0.0 if refine else solve.tolerance
            certificate = certify(segment.operator, *known, polished=polished, scaled=scaled)
        else:
            certificate = certify(segment.operator, segment.rows, segment.updated, epsilon)
            solve.count(certificate)
        passes += certificate.passes
        return certificate

    certificate = solve.solve(
        operator, candidate, levels, prove, refine=refine, room=0.0 if refine else rounding
    )
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=solve.iterations,
        passes=passes + 2 * solve.iterations,
        tolerance=solve.tolerance,
        asked=options.asked_tolerance,
        unless_converged=solve.budget,
    )


def solve_symmetric(
    operator: Operator,
    epsilon: float,
    options: Limits,
    *,
    name: str = "xx",
    start: Tensor | None = None,
    progress: SolverProgress | None = None,
) -> TransportTerm:
    """OT_epsilon of a cloud with itself.

    As in `solve_alternating`, an operator that rounds the points iterates first and its refined
    form ends the solve.

    Args:
        operator: the symmetric cost (n, n), with the same masses on both sides.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        name: which term this is, for `progress`.
        start: (n,) potential to start from.
        progress: called whenever the marginals were evaluated, as progress(name, iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    f = (_constant(operator, epsilon) if start is None else start).to(operator.dtype)
    # The certificate evaluates one update more, which at least halves the marginal error as a rule.
    solve = Iteration(name, SELF, epsilon, options, progress, aim=2.0)
    solve.admit(operator, rounding_floor(operator.costs, 0.0, epsilon))

    passes = 0

    def prove(segment: OneSegment, polished: bool) -> Certificate:
        nonlocal passes
        f = (segment.kept + segment.updated) / 2
        certificate = certify_self(segment.operator, f, epsilon, accurate=polished)
        solve.count(certificate)
        passes += certificate.passes - 1
        return certificate

    levels = Levels.descending(torch.full((1,), epsilon, dtype=torch.float64))
    certificate = solve.solve(operator, f, levels, prove, refine=False)
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=solve.iterations,
        passes=passes + solve.iterations,
        tolerance=solve.tolerance,
        asked=options.asked_tolerance,
        unless_converged=solve.budget,
    )


def _constant(operator: Operator, epsilon: float) -> Tensor:
    """A constant potential (n,) whose plan has about mass 1: -epsilon log of its mass at 0, halved.

    By Jensen's inequality the mass at 0 is no less than exp(-mean cost / epsilon), its value far
    above the costs, nor less than that of the diagonal, sum_i a_i^2 exp(-C_ii / epsilon), all
    there is far below them.
    """
    highest = min(operator.costs.mean, -epsilon * float(operator.a.square().sum().log()))
    return torch.full_like(operator.a, highest / 2)


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


# The first level over the mean cost after a sample.
SAMPLED_TOP = 0.01

# Points of a side for one of its sample, and the fewest in that.
POINTS_PER_SAMPLED = 16
FEWEST = 256

# Scores for one between samples from which on they are worth their solve.
SCORES_PER_SAMPLED = 32

# What its solve may take.
SAMPLE_ITERATIONS = 200

# exp of less than minus this is 0 in float32.
UNSEEN = 200


class Sample(NamedTuple):
    """Some points of both sides, each with the same mass.

    Attributes:
        rows: (k,) int64.
        columns: (l,) int64.
        operator: the cost between them.
    """

    rows: Tensor
    columns: Tensor
    operator: Operator


class Approach(NamedTuple):
    """The start of a term: a column potential g (m,), levels, and the passes it took.

    Attributes:
        candidate: g, in units of the cost.
        levels: of the one problem.
        passes: in units of n m, beside two an iteration: between samples, and less what an
            iteration over a sample of the columns saves.
    """

    candidate: Tensor
    levels: Levels
    passes: float


def approach(solve: Iteration, operator: Operator) -> Approach:
    """Find a start near the solution; iterations are counted by `solve`.

    Args:
        solve: of the term.
        operator: the cost (n, m) and the masses.
    """
    sample = draw_sample(operator) if solve.left() > 0 else None
    if sample is None:
        nothing = torch.zeros_like(operator.b, dtype=operator.dtype)
        top = first_level(solve.epsilon, _scale(operator))
        return Approach(nothing, Levels.trying(solve.epsilon, top), 0.0)
    top = first_level(solve.epsilon, _scale(operator), SAMPLED_TOP)
    f, passes = _of_sample(solve, operator, sample, float(top))
    solve.iterations += 1
    return Approach(operator.softmin_columns(f, float(top)), Levels.descending(top), passes)


def draw_sample(operator: Operator) -> Sample | None:
    """Draw one point of each equal share of the mass, on both sides; None if that does not pay."""
    n, m = len(operator.a), len(operator.b)
    rows, columns = (min(size, max(FEWEST, size // POINTS_PER_SAMPLED)) for size in (n, m))
    sampled = operator.execution.sampled
    if (
        sampled is None
        or operator.execution.recorded
        or SCORES_PER_SAMPLED * rows * columns > n * m
    ):
        return None
    draw = torch.Generator().manual_seed(0)
    drawn = _drawn(operator.a, rows, draw), _drawn(operator.b, columns, draw)
    return Sample(*drawn, sampled(*drawn))


def _drawn(masses: Tensor, count: int, draw: torch.Generator) -> Tensor:
    shares = torch.arange(count) + torch.rand(count, generator=draw, dtype=torch.float64)
    places = (shares / count).to(masses.device)
    return torch.searchsorted(masses.cumsum(0), places, right=True).clamp_max(len(masses) - 1)


def _of_sample(
    solve: Iteration, operator: Operator, sample: Sample, level: float
) -> tuple[Tensor, float]:
    """Solve a sample; return its row potential (n,) and passes beside those of an iteration."""
    sampled = sample.operator
    # Rounding in a sample, where nothing is proved, is no reason to refuse.
    goal = Goal(level, LEVEL_TOLERANCE, MOST_ERROR, SAMPLE_ITERATIONS)
    nothing = torch.zeros_like(sampled.b)
    segment: OneSegment = sampled.execution.segment(sampled, nothing, symmetric=False)
    levels = Levels.descending(first_level(level, _scale(sampled)))
    rule = segment.iterations(goal, CROSS, Start(levels, torch.zeros_like(levels.level)))
    told = run_one(segment, rule, lambda *_: solve.late(), wait=segment.waits)
    f, part = _extended(operator, sample.columns, segment.updated, level)
    share = len(sample.rows) * len(sample.columns) / (len(operator.a) * len(operator.b))
    return f, 2 * told.iterations * share + part - 1


def _extended(
    operator: Operator, columns: Tensor, potential: Tensor, level: float
) -> tuple[Tensor, float]:
    """Return the softmin (n,) over columns of a potential (l,), and the part of a pass it took."""
    over_columns = operator.execution.over_columns
    if over_columns is None:
        g = _absent(operator, level, potential).expand(len(operator.b)).clone()
        g[columns] = potential
        return operator.softmin_rows(g, level), 1.0
    # A point of much mass may have been drawn more than once.
    drawn, place = torch.unique(columns, return_inverse=True)
    g = potential.new_empty(len(drawn))
    g[place] = potential
    return over_columns(drawn, g, level), len(drawn) / len(operator.b)


def _scale(operator: Operator) -> Tensor:
    """Return the mean cost (1,), above the lowest cost if that is negative."""
    return torch.tensor([operator.costs.above_lowest], dtype=torch.float64)


def _absent(operator: Operator, level: float, present: Tensor) -> Tensor:
    """Return a finite potential that has no weight beside those of a sample (l,).

    Whatever the costs, such a column is more than UNSEEN levels worse for a row than any with the
    highest of these potentials. The size of costs and level is all that this goes by: in any other
    unit the potential could be out of the range of floats, or one that counts.
    """
    costs = operator.costs
    most = torch.finfo(costs.dtype).max / 2
    return present.max() - min(costs.spread + UNSEEN * level, most)
