"""The solve of one term: from a start through the iterations to a certificate.

A cross term alternates two updates, each of which makes one marginal exact:

    f <- T(g),  g <- T'(f),      T(g)_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon)

The update of g also tells how far the plan before it was from the column masses, so checking
convergence costs nothing, and neither does the dual value.

A self term OT_epsilon(x, x) has one potential, as the optimal potentials of a cloud against itself
are equal. The averaged update

    f <- (f + T(f)) / 2

converges to them in ten to twenty steps at any epsilon where exp(-C / epsilon) is positive
definite (Feydy et al. 2019, Interpolating between optimal transport and MMD using Sinkhorn
divergences). Class distances can make it indefinite, and the averaged update slow. Adding k to f
lowers T(f) by k, so every evaluation of f first gives its plan mass 1. The dual value is then
2 <a, f>, and because it is concave and symmetric in both potentials, the averaged update raises it
by no less than the update of one of them would: <a, T(f) - f>.

`solve_term` is the order of both: a start, the levels of epsilon down to the final one, the
iterations, the certificate. `engine` takes the iterations: it evaluates the updates at a candidate,
decides by the evidence of that, and moves to the next candidate by a quasi-Newton step.
`divergence` and `labels.sinkhorn_pairs` call it; `small` takes the same steps in recordings.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.points import equal_masses
from otdd_flash.engine.problems import Evaluated, Iterations, Start
from otdd_flash.engine.run import run_one
from otdd_flash.formulas.decision import (
    CROSS,
    LEVEL_TOLERANCE,
    Form,
    Goal,
    Levels,
    first_level,
)
from otdd_flash.formulas.evidence import MOST_ERROR
from otdd_flash.operators.base import Operator
from otdd_flash.operators.one_problem import OneProblem, problem_of
from otdd_flash.solver.certificate import Certificate, certify, certify_self
from otdd_flash.solver.evidence import rounding_floor
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.result import StoppedBy, TermProgress, TransportTerm
from otdd_flash.solver.term.tolerance import LOOSEST_DEFAULT, goal_of, reachable_tolerance

# Costs that are rounded by so many times epsilon and the tolerance end a solve: marginal errors
# grow by less than that, and of many points one is off by some five times as much. Others are
# iterated to so many times what is aimed at, as one iteration more follows.
LITTLE_ROUNDING, BEFORE_REFINED = 0.2, 2.0

# What times the tolerance the iterations of a self term stop at: its certificate evaluates one
# update more, which at least halves the marginal error as a rule.
BEFORE_LAST_UPDATE = 2.0

# How often a solve goes on after a certificate that found more than the iterations had seen, and
# what part of the tolerance such a certificate should then find.
MOST_TRIES, TOLERANCE_AIM = 4, 0.9

# The share of the tolerance from which on it is worth the while to let errors hide less.
HIDDEN = 0.1

# The first level over the mean cost after a sample.
SAMPLED_TOP = 0.01

# Points of a side for one of its sample, and the fewest in that.
POINTS_PER_SAMPLED = 16
FEWEST = 256

# Scores for one between samples from which on they are worth their solve.
SCORES_PER_SAMPLED = 32

# What its solve may take.
SAMPLE_ITERATIONS = 200


def solve_term(
    operator: Operator,
    epsilon: float,
    options: Converged,
    form: Form = CROSS,
    *,
    start: Tensor | None = None,
    progress: TermProgress | None = None,
) -> TransportTerm:
    """Solve OT_epsilon between the two sides of an operator, or of a cloud with itself.

    Args:
        operator: the cost (n, m) and the masses; of a self term both sides are one.
        epsilon: regularisation, in units of the cost.
        options: when to stop; its `max_seconds` count from here.
        form: `CROSS`, or `SELF` of a cloud with itself.
        start: column potential (m,) to start from at the final epsilon, without levels.
        progress: called whenever the marginals were evaluated, as progress(iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    budget = Budget(epsilon, options, progress)
    # Most hopeless tolerances show before the first iteration, by the size of the costs alone.
    budget.admit(operator, rounding_floor(operator.costs, 0.0, epsilon))

    # Start, and levels of epsilon.
    candidate, levels, budget.passes = begin(budget, operator, form, start)

    # Evaluate, decide, move. A cost of rounded points comes first; its refined form, which knows
    # the original points, goes on from there, or certifies alone where rounding is little.
    refined, (refine, aim) = operator.refined, aim_of(budget, operator.costs, form)
    first = aim * BEFORE_REFINED if refine and refined is not operator else aim
    problem = problem_of(operator, symmetric=form.symmetric)
    goal, taken = goal_of(options, epsilon, first), torch.full((1,), budget.iterations).double()
    iterations = problem.iterations(candidate, goal, form, Start(levels, taken))
    iterate(budget, problem, iterations, first)
    if refined is not operator:
        last = problem.evaluated(iterations.vectors, epsilon)
        # Also where it only certifies: iterations go on with it if the certificate falls short.
        problem.change(refined, iterations)
        if refine or not budget.converged:
            go_on(budget, problem, iterations, last.g if form.symmetric else last.updated, aim)

    certificate = certify_solved(budget, problem, iterations, aim, refine=refine)
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=budget.iterations,
        passes=budget.passes + (1 if form.symmetric else 2) * budget.iterations,
        tolerance=budget.tolerance,
        asked=options.asked_tolerance,
        unless_converged=budget.stopped_by,
    )


class Budget:
    """What a term may take and has taken, over all operators, levels and certificates.

    Args:
        epsilon: the final regularisation, in units of the cost.
        options: when to stop; its `max_seconds` count from here.
        progress: called whenever the marginals were evaluated.

    Attributes:
        iterations: how many there were.
        passes: beside those of iterations.
        tolerance: marginal error to reach.
        stopped_by: what ends the solve if it does not converge.
        converged: whether the final epsilon was solved with the operator used last.
    """

    def __init__(self, epsilon: float, options: Converged, progress: TermProgress | None) -> None:
        self.epsilon, self.options, self.progress = epsilon, options, progress
        self.iterations, self.passes = 0, 0.0
        self.tolerance = options.asked_tolerance
        self.stopped_by: StoppedBy = "max_iterations"
        self.converged = False
        self._started = time.perf_counter()

    def admit(self, operator: Operator, floor: float) -> None:
        """Take the rounding floor at the final epsilon into account.

        Raises:
            InputError: rounding alone exceeds the tolerance.
        """
        given = self.options, floor, self.epsilon
        self.tolerance = reachable_tolerance(*given, operator.costs.dtype)

    @property
    def settled(self) -> bool:
        """Whether the last potentials were evaluated at the final epsilon, with none to come."""
        return self.converged or self.stopped_by == "rounding"

    @property
    def timed_out(self) -> bool:
        """Whether iterations ended because `max_seconds` were over."""
        return self.stopped_by == "max_seconds"

    def count(self, certificate: Certificate) -> None:
        """Count the iteration that certified."""
        self.iterations += 1
        if self.progress is not None:
            self.progress(self.iterations, certificate.marginal_error)

    def late(self) -> bool:
        """Whether `max_seconds` are over."""
        limit = self.options.max_seconds
        return limit is not None and time.perf_counter() - self._started >= limit

    def left(self) -> int:
        """Return the iterations left in the budget, without the certificate, the last one."""
        if self.iterations and self.late():
            self.stopped_by = "max_seconds"
            return 0
        return self.options.max_iterations - 1 - self.iterations


def begin(
    budget: Budget, operator: Operator, form: Form, start: Tensor | None
) -> tuple[Tensor, Levels, float]:
    """Choose where a term begins.

    Returns:
        A column potential (m,), the levels of epsilon, and the passes that these took.
    """
    if start is None and not form.symmetric:
        return approach(budget, operator)
    final = Levels.descending(torch.full((1,), budget.epsilon, dtype=torch.float64))
    if start is None:
        return _constant(operator, budget.epsilon).to(operator.costs.dtype), final, 0
    return start.to(operator.costs.dtype), final, 0 if form.symmetric else 0.0


def _constant(operator: Operator, epsilon: float) -> Tensor:
    """Return a constant f (n,) whose plan has about mass 1: half of -epsilon log of its mass at 0.

    By Jensen's inequality the mass at 0 is no less than exp(-mean cost / epsilon), its value far
    above the costs, nor less than that of the diagonal, sum_i a_i^2 exp(-C_ii / epsilon), all
    there is far below them.
    """
    highest = min(operator.costs.mean, -epsilon * float(operator.a.square().sum().log()))
    return torch.full_like(operator.a, highest / 2)


def approach(budget: Budget, operator: Operator) -> tuple[Tensor, Levels, float]:
    """Find a start of a cross term near its solution: levels, and a sample of the points.

    A small epsilon is approached through levels, each ended at a coarse marginal error and started
    from the potentials of those before (Schmitzer 2019, Stabilized sparse scaling algorithms for
    entropy regularized transport problems), unless the first iterations promise to do without.

    A large problem is first solved between a sample of each side, at a small part of a pass an
    iteration. Its potentials extend to all points by the softmin over its columns, which is defined
    anywhere (Pooladian & Niles-Weed 2021, Entropic estimation of optimal transport maps):

        f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon),    j in the sample.

    The masses b_j in this softmin are the original ones. Equal masses for all sampled points were
    tried and saved no iterations.

    The smaller epsilon is, the nearer are the points that decide a potential. Below some epsilon a
    sample has too few points near any other to tell it; levels with all points follow from there.

    Args:
        budget: counts the iterations.
        operator: the cost (n, m) and the masses.

    Returns:
        A column potential (m,), the levels, and the passes that it took, in units of n m, beside
        two an iteration: between samples, and less what an iteration over a sample of the columns
        saves.
    """
    sample = draw_sample(operator) if budget.left() > 0 else None
    if sample is None:
        nothing = torch.zeros_like(operator.b, dtype=operator.costs.dtype)
        top = first_level(budget.epsilon, _scale(operator))
        return nothing, Levels.trying(budget.epsilon, top), 0.0
    top = first_level(budget.epsilon, _scale(operator), SAMPLED_TOP)
    f, passes = _of_sample(budget, operator, *sample, float(top))
    budget.iterations += 1
    return operator.softmin_columns(f, float(top)), Levels.descending(top), passes


def draw_sample(operator: Operator) -> tuple[Tensor, Operator] | None:
    """Draw one point of each equal share of the mass, on both sides; None if that does not pay.

    Returns:
        The columns (l,) int64, and the cost between the rows and these, of equal masses each.
    """
    n, m = len(operator.a), len(operator.b)
    rows, columns = (min(size, max(FEWEST, size // POINTS_PER_SAMPLED)) for size in (n, m))
    # What lacks pairs tells nothing of the whole.
    if operator.costs.forbidden or operator.recorded or SCORES_PER_SAMPLED * rows * columns > n * m:
        return None
    draw = torch.Generator().manual_seed(0)
    of_rows, of_columns = _drawn(operator.a, rows, draw), _drawn(operator.b, columns, draw)
    masses = equal_masses(of_rows), equal_masses(of_columns)
    return of_columns, operator.part(of_rows, of_columns, masses)


def _drawn(masses: Tensor, count: int, draw: torch.Generator) -> Tensor:
    shares = torch.arange(count) + torch.rand(count, generator=draw, dtype=torch.float64)
    places = (shares / count).to(masses.device)
    return torch.searchsorted(masses.cumsum(0), places, right=True).clamp_max(len(masses) - 1)


def _of_sample(
    budget: Budget, operator: Operator, columns: Tensor, sampled: Operator, level: float
) -> tuple[Tensor, float]:
    """Solve a sample; return its row potential (n,) and passes beside those of an iteration."""
    # Rounding in a sample, where nothing is proved, is no reason to refuse.
    goal = Goal(level, LEVEL_TOLERANCE, MOST_ERROR, SAMPLE_ITERATIONS)
    nothing = torch.zeros_like(sampled.b)
    problem = problem_of(sampled, symmetric=False)
    levels = Levels.descending(first_level(level, _scale(sampled)))
    start = Start(levels, torch.zeros_like(levels.level))
    iterations = problem.iterations(nothing, goal, CROSS, start)
    told = run_one(iterations, lambda *_: budget.late())
    updated = problem.evaluated(iterations.vectors, level).updated
    f, part = _extended(operator, columns, updated, level)
    share = len(sampled.a) * len(sampled.b) / (len(operator.a) * len(operator.b))
    return f, 2 * told.iterations * share + part - 1


def _extended(
    operator: Operator, columns: Tensor, potential: Tensor, level: float
) -> tuple[Tensor, float]:
    """Return the softmin (n,) over columns of a potential (l,), and the part of a pass it took."""
    # A point of much mass may have been drawn more than once.
    drawn, place = torch.unique(columns, return_inverse=True)
    g = potential.new_empty(len(drawn))
    g[place] = potential
    some = operator.part(slice(None), drawn)
    return some.softmin_rows(g, level), len(drawn) / len(operator.b)


def _scale(operator: Operator) -> Tensor:
    """Return the mean cost (1,), above the lowest cost if that is negative."""
    return torch.tensor([operator.costs.above_lowest], dtype=torch.float64)


def aim_of(budget: Budget, costs: CostFacts, form: Form) -> tuple[bool, float]:
    """Choose how an operator with these costs ends a solve.

    Returns:
        Whether its refined form has to iterate as well, and at what times the tolerance the last
        iterations stop, which leaves room for what a certificate finds beside.
    """
    if form.symmetric:
        return False, BEFORE_LAST_UPDATE
    rounding = costs.rounding / (budget.epsilon * budget.tolerance)
    return (True, 1.0) if rounding > LITTLE_ROUNDING else (False, 1 - rounding)


def iterate(budget: Budget, problem: OneProblem, iterations: Iterations, aim: float) -> None:
    """Iterate until the term has converged, at `aim` tolerances, or is out of budget.

    Raises:
        InputError: rounding alone exceeds the tolerance at the final epsilon.
    """
    budget.converged, budget.stopped_by = False, "max_iterations"
    if budget.left() <= 0:
        return

    def watch(error: float, taken: int) -> bool:
        budget.iterations = taken
        if budget.progress is not None:
            budget.progress(taken, error)
        return budget.left() <= 0

    told = run_one(iterations, watch)
    error = told.marginal_error
    if budget.timed_out or (budget.left() <= 0 and error > LOOSEST_DEFAULT):
        return
    costs = problem.operator.costs
    budget.admit(problem.operator, rounding_floor(costs, told.size, budget.epsilon))
    budget.converged = error <= aim * budget.tolerance
    if not budget.converged and budget.left() > 0:
        budget.stopped_by = "rounding"


def go_on(
    budget: Budget, problem: OneProblem, iterations: Iterations, candidate: Tensor, aim: float
) -> None:
    """Iterate at the final epsilon from a column potential (m,), to `aim` tolerances.

    Raises:
        InputError: rounding alone exceeds the tolerance at the final epsilon.
    """
    iterations.restart(candidate, aim)
    iterate(budget, problem, iterations, aim)


def certify_solved(
    budget: Budget, problem: OneProblem, iterations: Iterations, aim: float, *, refine: bool
) -> Certificate:
    """Certify, and go on where that falls short.

    A certificate may find a larger marginal error than the iterations did, whose sums are less
    accurate: then it takes exact updates, and if these do not suffice iterations go on, aiming
    lower.
    """
    last = problem.evaluated(iterations.vectors, budget.epsilon)
    certificate = prove(budget, problem, last, polished=False, refine=refine)
    missed = budget.settled and certificate.marginal_error > budget.tolerance
    if missed and (refine or certificate.hidden > HIDDEN * budget.tolerance):
        certificate = prove(budget, problem, last, polished=True, refine=refine)
    for _ in range(MOST_TRIES):
        if not budget.converged or certificate.marginal_error <= budget.tolerance:
            return certificate
        aim *= TOLERANCE_AIM * budget.tolerance / certificate.marginal_error
        go_on(budget, problem, iterations, certificate.g, aim)
        last = problem.evaluated(iterations.vectors, budget.epsilon)
        certificate = prove(budget, problem, last, polished=True, refine=refine)
    if certificate.marginal_error > budget.tolerance:
        budget.stopped_by = "rounding"
    return certificate


def prove(
    budget: Budget, problem: OneProblem, last: Evaluated, *, polished: bool, refine: bool
) -> Certificate:
    """Certify the potentials evaluated last; if `polished`, as well as they can be.

    Without `refine` a scaling within the tolerance is taken as it is.
    """
    operator, epsilon = problem.operator, budget.epsilon
    if problem.symmetric:
        f = (last.g + last.updated) / 2
        certificate = certify_self(operator, f, epsilon, accurate=polished)
        budget.count(certificate)
        budget.passes += certificate.passes - 1
        return certificate
    if budget.settled:
        # The last evaluation has taken the certificate's first two passes.
        known = last.f, last.g, epsilon, last.updated
        scaled = 0.0 if refine else budget.tolerance
        certificate = certify(operator, *known, polished=polished, scaled=scaled)
    else:
        certificate = certify(operator, last.f, last.updated, epsilon)
        budget.count(certificate)
    budget.passes += certificate.passes
    return certificate
