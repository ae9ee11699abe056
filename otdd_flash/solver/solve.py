"""The solve of one term: from an initial potential through the iterations to a certificate.

A cross term alternates two updates, each of which makes one marginal exact:

    f <- T(g),  g <- T'(f),      T(g)_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon)

The update of g also measures the error of the column sums before it, so checking convergence costs
nothing, and neither does the dual value.

A self term OT_epsilon(x, x) has one potential, as the optimal potentials of a cloud against itself
are equal. The averaged update

    f <- (f + T(f)) / 2

converges to them in ten to twenty steps at any epsilon where exp(-C / epsilon) is positive definite
(Feydy et al. 2019, Interpolating between optimal transport and MMD using Sinkhorn divergences).
Class distances can make it indefinite, and the averaged update slow. Adding k to f lowers T(f) by
k, so every evaluation of f first gives its plan mass 1. The dual value is then 2 <a, f>, and
because it is concave and symmetric in both potentials, the averaged update raises it by no less
than the update of one of them would: <a, T(f) - f>.

`solve_term` solves both kinds in this order: an initial potential, the levels of epsilon down to
the final one, the iterations, the certificate. `engine` runs the iterations: it evaluates the
updates at a candidate, decides by their bounds and errors, and moves to the next candidate by a
quasi-Newton step. `divergence`, `exact.solve` and `labels.sinkhorn_pairs` call `solve_term`.
`small` takes the same steps for all terms side by side, on a GPU in recorded CUDA graphs, so a
change of the steps must be made there too (`tests/solver/test_solve_terms.py`); it imports
`TOLERANCE_AIM`, `BEFORE_LAST_UPDATE` and `within_reach`.

`labels.sinkhorn_pairs` calls `solve_segments`, which solves many terms side by side for tables of
class distances. Their bounds are those of the last evaluation: no term has an operator to certify
it.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.points import equal_masses
from otdd_flash.engine.problems import (
    Evaluated,
    Finished,
    Iterations,
    Segments,
    SegmentTerms,
    Start,
    numbers_of,
    run,
    run_one,
)
from otdd_flash.formulas.decision import (
    CROSS,
    LEVEL_TOLERANCE,
    Form,
    Goal,
    Levels,
    first_level,
)
from otdd_flash.formulas.evidence import MOST_ERROR, rounding_of
from otdd_flash.formulas.marginals import LEAST_MOVING, Constraints, log_mass
from otdd_flash.operators.base import Operator
from otdd_flash.operators.one_problem import OneProblem, problem_of
from otdd_flash.solver.certificate import (
    MOST_UNMOVED,
    Certificate,
    certify,
    certify_self,
    check_moving,
)
from otdd_flash.solver.evidence import rounding_floor
from otdd_flash.solver.penalties import refuse_beyond_digits
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.term import (
    LOOSEST_DEFAULT,
    StoppedBy,
    TermProgress,
    TransportTerm,
    goal_of,
    reachable_tolerance,
)

# If costs of rounded points are off by at most this times epsilon and the tolerance, iterations end
# with them: marginal errors grow by less than that, and of many points one is off by some five
# times as much. Otherwise they end at this many times the tolerance aimed at, as iterations with
# refined costs follow.
LITTLE_ROUNDING, BEFORE_REFINED = 0.2, 2.0

# The factor of the tolerance at which the iterations of a self term stop: its certificate takes one
# more update, which at least halves the marginal error as a rule.
BEFORE_LAST_UPDATE = 2.0

# How often iterations continue after a certificate with a larger marginal error than they had
# measured, and the share of the tolerance that the next certificate should have.
MOST_TRIES, TOLERANCE_AIM = 4, 0.9

# The undetectable error, over the tolerance, from which on a more accurate certificate of a cross
# term pays, and the most that iterations leave room for.
HIDDEN, MOST_HIDDEN = 0.1, 0.5

# A relaxed marginal owes no more than e^this times its masses where a solve starts.
MOST_OWED = 20.0

# The first level, over the mean cost, after the solve of a sample.
SAMPLED_TOP = 0.01

# Points of a side for each sampled one, and the fewest that are sampled.
POINTS_PER_SAMPLED = 16
FEWEST = 256

# Entries of the cost for each one between samples, from which on solving these pays.
SCORES_PER_SAMPLED = 32

# Most iterations of the solve of a sample.
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
        operator: the cost (n, m) and the masses; in a self term rows and columns are one cloud.
        epsilon: regularisation, in units of the cost.
        options: when to stop; its `max_seconds` count from here.
        form: `CROSS`, or `SELF` for a cloud with itself, with what marginals owe.
        start: column potential (m,) to start from at the final epsilon, without levels.
        progress: called whenever the marginals were evaluated, as progress(iteration, error).

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision, a plan that
            is solved moves no mass, or a penalty is far above all costs.
    """
    options, bounded = _limit_unmoved(operator, epsilon, options, form)
    budget = Budget(epsilon, options, progress)
    # Most unreachable tolerances are refused before the first iteration, by the size of the costs.
    budget.allow_for_rounding(operator, rounding_floor(operator.costs, 0.0, epsilon))

    if not form.symmetric:
        refuse_beyond_digits(form.constraints, operator.costs, epsilon)

    # Initial potential, and levels of epsilon.
    candidate, levels, passes = initial_potential(budget, operator, form, start)
    budget.passes = bounded + passes

    # Evaluate, decide, move: first with the cost of rounded points. The refined operator, with the
    # original points, continues from there, or only certifies where rounding is small.
    refined, (refine, aim) = operator.refined, aim_of(budget, operator.costs, form)
    first = aim * BEFORE_REFINED if refine and refined is not operator else aim
    problem = problem_of(operator, form)
    goal, taken = goal_of(options, epsilon, first), torch.full((1,), budget.iterations).double()
    iterations = problem.iterations(candidate, goal, form, Start(levels, taken))
    iterate(budget, problem, iterations, first)
    if refined is not operator:
        last = problem.evaluated(iterations.vectors, epsilon)
        # Also where it only certifies: iterations continue with it if the certificate misses the
        # tolerance.
        problem.change(refined, iterations)
        if refine or not budget.converged:
            continue_from(
                budget, problem, iterations, last.g if form.symmetric else last.updated, aim
            )

    certificate = certify_solved(budget, problem, iterations, aim, refine=refine)
    check_moving(certificate, epsilon, budget.iterations, settled=budget.settled)
    return TransportTerm.from_certificate(
        certificate,
        epsilon,
        iterations=budget.iterations,
        passes=budget.passes + (1 if form.symmetric else 2) * budget.iterations,
        tolerance=budget.tolerance,
        asked=options.asked_tolerance,
        unless_converged=budget.stopped_by,
    )


def _limit_unmoved(
    operator: Operator, epsilon: float, options: Converged, form: Form
) -> tuple[Converged, int]:
    """Lower the most iterations to `MOST_UNMOVED` where the optimal plan moves no mass.

    The objective of the optimal plan P is stationary in multiples of P. With the log-sum inequality
    for both penalties and Gibbs' for the cost and the entropy, its mass m satisfies, for all f, g,

        (rho_x + rho_y + epsilon) log m <= rho_x log sum_i a_i exp(-f_i / rho_x)
            + rho_y log sum_j b_j exp(-g_j / rho_y)
            + epsilon log sum_ij a_i b_j exp((f_i + g_j - C_ij) / epsilon),

    and all three sums are m at the optimal f and g. After an update of g the last two are the same.

    Returns:
        The options, and the passes that the bound took.
    """
    rows, columns = form.constraints.rows, form.constraints.columns
    if rows.exact or columns.exact or options.max_iterations <= MOST_UNMOVED:
        return options, 0
    rho_x, rho_y = float(rows.rho), float(columns.rho)
    most = (rho_x + rho_y + epsilon) * math.log(LEAST_MOVING)
    # No mass is below that of the best multiple of a b^T, if it has a finite cost: only then are
    # passes spent on the bound.
    if not operator.costs.forbidden and -operator.costs.mean >= most:
        return options, 0
    f = rows.updated(operator.softmin_rows(torch.zeros_like(operator.b), epsilon), epsilon)
    g = columns.updated(operator.softmin_columns(f, epsilon), epsilon)
    logs = log_mass(rows, operator.a, f), log_mass(columns, operator.b, g)
    bound = rho_x * float(logs[0]) + (rho_y + epsilon) * float(logs[1])
    return replace(options, max_iterations=MOST_UNMOVED) if bound < most else options, 2


class Budget:
    """The budget of a term and its use, over all operators, levels and certificates.

    Args:
        epsilon: the final regularisation, in units of the cost.
        options: when to stop; its `max_seconds` count from here.
        progress: called whenever the marginals were evaluated.

    Attributes:
        iterations: their number so far.
        passes: those beside the iterations'.
        tolerance: marginal error to reach.
        stopped_by: what ends the solve if it does not converge.
        converged: whether the operator used last has reached the tolerance at the final epsilon.
    """

    def __init__(self, epsilon: float, options: Converged, progress: TermProgress | None) -> None:
        self.epsilon, self.options, self.progress = epsilon, options, progress
        self.iterations, self.passes = 0, 0.0
        self.tolerance = options.asked_tolerance
        self.stopped_by: StoppedBy = "max_iterations"
        self.converged = False
        self._started = time.perf_counter()

    def allow_for_rounding(self, operator: Operator, floor: float) -> None:
        """Raise the tolerance to what the rounding floor at the final epsilon allows, or refuse it.

        Raises:
            InputError: rounding alone exceeds the tolerance.
        """
        given = self.options, floor, self.epsilon
        self.tolerance = reachable_tolerance(*given, operator.costs.dtype)

    @property
    def settled(self) -> bool:
        """Whether iterations ended at the final epsilon: converged, or at the rounding floor."""
        return self.converged or self.stopped_by == "rounding"

    @property
    def timed_out(self) -> bool:
        """Whether iterations ended because `max_seconds` had passed."""
        return self.stopped_by == "max_seconds"

    def count(self, certificate: Certificate) -> None:
        """Count the certificate as an iteration, and report its marginal error."""
        self.iterations += 1
        if self.progress is not None:
            self.progress(self.iterations, certificate.marginal_error)

    def out_of_time(self) -> bool:
        """Return whether `max_seconds` have passed."""
        limit = self.options.max_seconds
        return limit is not None and time.perf_counter() - self._started >= limit

    def iterations_left(self) -> int:
        """Return the iterations left, without the last one, which is the certificate's."""
        if self.iterations and self.out_of_time():
            self.stopped_by = "max_seconds"
            return 0
        return self.options.max_iterations - 1 - self.iterations


def solve_segments(
    segments: Segments,
    form: Form,
    epsilon: float,
    options: Converged,
    finished: Finished | None = None,
) -> SegmentTerms:
    """Solve OT_epsilon of many pairs of clouds, or of many clouds with themselves, all at once.

    If segments have a faster form (`coarse`), iterations use that first and end on their own costs.

    Args:
        segments: the problems, between rows and columns; modified in place.
        form: `CROSS`, or `SELF` where each is of one cloud.
        epsilon: regularisation, in units of the cost.
        options: when a segment stops; a tolerance is not raised for rounding.
        finished: called with the number of segments that are done.
    """
    tolerance, most = options.asked_tolerance, options.max_iterations
    none = torch.zeros_like(segments.mean_cost)
    if form.symmetric:
        levels = Levels.descending(none + epsilon)
    else:
        # Where rounding of the costs alone exceeds the tolerance, levels above would be in vain.
        floor = rounding_of(numbers_of(segments), none, none, none, epsilon).floor
        levels = Levels.trying(epsilon, segments.mean_cost, 2 * floor > tolerance)
    goal = Goal(epsilon, tolerance, tolerance, most)
    candidate, start = segments.first, Start(levels, torch.zeros_like(none))
    coarse = segments.coarse(tolerance) if most > 1 else None
    if coarse is not None:
        # One iteration is left for the segments' own costs.
        first = goal._replace(max_iterations=most - 1)
        iterations = coarse.iterations(candidate, first, form, start)
        start = Start(Levels.descending(none + epsilon), run(iterations).iterations)
        candidate = iterations.vectors.candidates
        # Free their memory for the iterations that follow.
        del iterations, coarse
    return run(segments.iterations(candidate, goal, form, start), finished)


def initial_potential(
    budget: Budget, operator: Operator, form: Form, start: Tensor | None
) -> tuple[Tensor, Levels, float]:
    """Choose the initial potential and the levels of epsilon.

    Returns:
        A column potential (m,), the levels, and the passes that computing it took.
    """
    if start is None and not form.symmetric:
        return initial_cross_potential(budget, operator, form)
    final = Levels.descending(torch.full((1,), budget.epsilon, dtype=torch.float64))
    if start is None:
        return _constant(operator, budget.epsilon, form).to(operator.costs.dtype), final, 0
    most = max(operator.costs.highest, operator.costs.spread)
    start = within_reach(start, form.constraints, most)
    return start.to(operator.costs.dtype), final, 0 if form.symmetric else 0.0


def within_reach(start: Tensor, constraints: Constraints, most: float = math.inf) -> Tensor:
    """Return potentials (m,) of columns to start from, moved to where relaxed ones may be.

    Those of exact marginals, or of a larger penalty, may owe e^1000 times a mass, with which
    iterations would not begin. Of an exact side they are softmins of costs less potentials of the
    other, which are bounded so. `most` is the most that costs add to a potential.
    """
    if constraints.exact:
        return start
    rows, columns = constraints.rows, constraints.columns
    reach = MOST_OWED * float(rows.rho if columns.exact else columns.rho)
    return start.clamp(-most - reach if columns.exact else -reach, most + reach)


def _constant(operator: Operator, epsilon: float, form: Form) -> Tensor:
    """Return a constant f (n,) whose plan has about mass 1: half of -epsilon log of its mass at 0.

    Where the marginal is relaxed it is lower, that of the largest dual value of a constant.

    By Jensen's inequality the mass at 0 is no less than exp(-mean cost / epsilon), its limit for
    epsilon far above the costs. Nor is it less than that of the diagonal, sum_i a_i^2
    exp(-C_ii / epsilon), its limit for epsilon far below them.
    """
    highest = min(operator.costs.mean, -epsilon * float(operator.a.square().sum().log()))
    return form.constraints.rows.updated(torch.full_like(operator.a, highest / 2), epsilon / 2)


def initial_cross_potential(
    budget: Budget, operator: Operator, form: Form
) -> tuple[Tensor, Levels, float]:
    """Compute the initial potential of a cross term, 0 or from a sample, and its levels of epsilon.

    A small epsilon is approached through levels, each ended at a coarse marginal error and started
    from the potentials of those before (Schmitzer 2019, Stabilized sparse scaling algorithms for
    entropy regularized transport problems), unless the first iterations promise to do without.

    A large problem is first solved between a sample of each side, at a small part of a pass an
    iteration. Its potentials extend to all points by the softmin over its columns, which is defined
    anywhere (Pooladian & Niles-Weed 2021, Entropic estimation of optimal transport maps):

        f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon),    j in the sample.

    The masses b_j in this softmin are the original ones. Equal masses for all sampled points were
    tried and saved no iterations.

    The smaller epsilon is, the nearer are the points that determine a potential. Below some epsilon
    a sample has too few points near any other; levels with all points follow from there.

    Args:
        budget: counts the iterations.
        operator: the cost (n, m) and the masses.
        form: a cross term, with what marginals owe.

    Returns:
        A column potential (m,), the levels, and passes in units of n m, beside two for each counted
        iteration: those between samples, less what the softmin over sampled columns alone saves.
    """
    sample = draw_sample(operator) if budget.iterations_left() > 0 else None
    if sample is None:
        nothing = torch.zeros_like(operator.b, dtype=operator.costs.dtype)
        return nothing, Levels.trying(budget.epsilon, _scale(operator)), 0.0
    top = first_level(budget.epsilon, _scale(operator), SAMPLED_TOP)
    f, passes = _of_sample(budget, operator, *sample, float(top), form)
    budget.iterations += 1
    softmin = operator.softmin_columns(f, float(top))
    updated = form.constraints.columns.updated(softmin, float(top))
    return updated, Levels.descending(top), passes


def draw_sample(operator: Operator) -> tuple[Tensor, Operator] | None:
    """Draw one point from each equal share of the mass, on both sides; None if that does not pay.

    Returns:
        The sampled columns (l,) int64, and the operator between the samples, with equal masses.
    """
    n, m = len(operator.a), len(operator.b)
    rows, columns = (min(size, max(FEWEST, size // POINTS_PER_SAMPLED)) for size in (n, m))
    # With forbidden pairs a sample may admit no plan.
    forbidden, recorded = operator.costs.forbidden, operator.passes.recorded
    if forbidden or recorded or SCORES_PER_SAMPLED * rows * columns > n * m:
        return None
    draw = torch.Generator().manual_seed(0)
    of_rows, of_columns = _drawn(operator.a, rows, draw), _drawn(operator.b, columns, draw)
    masses = equal_masses(of_rows), equal_masses(of_columns)
    return of_columns, operator.sample(of_rows, of_columns, masses)


def _drawn(masses: Tensor, count: int, draw: torch.Generator) -> Tensor:
    shares = torch.arange(count) + torch.rand(count, generator=draw, dtype=torch.float64)
    places = (shares / count).to(masses.device)
    return torch.searchsorted(masses.cumsum(0), places, right=True).clamp_max(len(masses) - 1)


def _of_sample(
    budget: Budget,
    operator: Operator,
    columns: Tensor,
    sampled: Operator,
    level: float,
    form: Form,
) -> tuple[Tensor, float]:
    """Solve a sample; return its extended row potential (n,), and passes as its caller."""
    # A sample is not certified: rounding there is no reason to refuse.
    goal = Goal(level, LEVEL_TOLERANCE, MOST_ERROR, SAMPLE_ITERATIONS)
    nothing = torch.zeros_like(sampled.b)
    problem = problem_of(sampled, form)
    levels = Levels.descending(first_level(level, _scale(sampled)))
    start = Start(levels, torch.zeros_like(levels.level))
    iterations = problem.iterations(nothing, goal, form, start)
    told = run_one(iterations, lambda *_: budget.out_of_time())
    updated = problem.evaluated(iterations.vectors, level).updated
    softmin, part = _extended(operator, columns, updated, level)
    f = form.constraints.rows.updated(softmin, level)
    share = len(sampled.a) * len(sampled.b) / (len(operator.a) * len(operator.b))
    return f, 2 * told.iterations * share + part - 1


def _extended(
    operator: Operator, columns: Tensor, potential: Tensor, level: float
) -> tuple[Tensor, float]:
    """Return the softmin (n,) over columns with a potential (l,), and its share of a pass."""
    # A point of large mass may have been drawn more than once.
    drawn, place = torch.unique(columns, return_inverse=True)
    g = potential.new_empty(len(drawn))
    g[place] = potential
    return operator.softmin_over(drawn, g, level), len(drawn) / len(operator.b)


def _scale(operator: Operator) -> Tensor:
    """Return the mean cost (1,), above the lowest cost if that is negative."""
    return torch.tensor([operator.costs.above_lowest], dtype=torch.float64)


def aim_of(budget: Budget, costs: CostFacts, form: Form) -> tuple[bool, float]:
    """Choose whether the refined costs iterate, and the tolerance of the last iterations.

    Returns:
        Whether the refined operator has to iterate as well; and the factor of the tolerance at
        which the last iterations stop, as the certificate adds rounding of costs or one update.
    """
    if form.symmetric:
        return False, BEFORE_LAST_UPDATE
    rounding = costs.rounding / (budget.epsilon * budget.tolerance)
    return (True, 1.0) if rounding > LITTLE_ROUNDING else (False, 1 - rounding)


def iterate(budget: Budget, problem: OneProblem, iterations: Iterations, aim: float) -> None:
    """Iterate until the marginal error is `aim` times the tolerance, or the budget is spent.

    Raises:
        InputError: rounding alone exceeds the tolerance at the final epsilon.
    """
    budget.converged, budget.stopped_by = False, "max_iterations"
    if budget.iterations_left() <= 0:
        return

    def watch(error: float, taken: int) -> bool:
        budget.iterations = taken
        if budget.progress is not None:
            budget.progress(taken, error)
        return budget.iterations_left() <= 0

    told = run_one(iterations, watch)
    error = told.marginal_error
    if budget.timed_out or (budget.iterations_left() <= 0 and error > LOOSEST_DEFAULT):
        return
    costs = problem.operator.costs
    budget.allow_for_rounding(problem.operator, rounding_floor(costs, told.size, budget.epsilon))
    budget.converged = error <= aim * budget.tolerance
    if not budget.converged and budget.iterations_left() > 0:
        budget.stopped_by = "rounding"


def continue_from(
    budget: Budget, problem: OneProblem, iterations: Iterations, candidate: Tensor, aim: float
) -> None:
    """Continue at the final epsilon from a column potential (m,), to `aim` times the tolerance.

    Raises:
        InputError: rounding alone exceeds the tolerance at the final epsilon.
    """
    iterations.restart(candidate, aim)
    iterate(budget, problem, iterations, aim)


def certify_solved(
    budget: Budget, problem: OneProblem, iterations: Iterations, aim: float, *, refine: bool
) -> Certificate:
    """Certify, and continue to iterate where the certificate misses the tolerance.

    A certificate may find a larger marginal error than the iterations, whose sums are less
    accurate. It is made again at the same potentials, with updates in float64, where that pays:
    where iterations have nothing left to do, have gone on once already, or rounding hides much of
    the tolerance of a cross term. A self term has no updates to repeat. If that does not suffice,
    iterations continue to a lower tolerance, which leaves room for what rounding hides.
    """
    accurate = False
    for attempt in range(MOST_TRIES + 1):
        last = problem.evaluated(iterations.vectors, budget.epsilon)
        certificate = certify_last(budget, problem, last, polished=accurate, refine=refine)
        missed = budget.settled and certificate.marginal_error > budget.tolerance
        hides_much = refine or certificate.undetectable > HIDDEN * budget.tolerance
        pays = not budget.converged or attempt > 0 or (hides_much and not problem.symmetric)
        if missed and pays and not accurate:
            accurate = True
            certificate = certify_last(budget, problem, last, polished=True, refine=refine)
        if not budget.converged or certificate.marginal_error <= budget.tolerance:
            return certificate
        if attempt < MOST_TRIES:
            accurate |= certificate.undetectable > MOST_HIDDEN * budget.tolerance
            hidden = 0.0 if accurate else certificate.undetectable
            wanted = TOLERANCE_AIM * budget.tolerance - hidden
            aim *= wanted / (certificate.marginal_error - hidden)
            continue_from(budget, problem, iterations, certificate.g, aim)
    budget.stopped_by = "rounding"
    return certificate


def certify_last(
    budget: Budget, problem: OneProblem, last: Evaluated, *, polished: bool, refine: bool
) -> Certificate:
    """Certify the potentials evaluated last; if `polished`, with updates in float64.

    Without `refine` a scaling within the tolerance is accepted.
    """
    operator, constraints, epsilon = problem.operator, problem.constraints, budget.epsilon
    if problem.symmetric:
        f = (last.g + last.updated) / 2
        certificate = certify_self(operator, f, epsilon, constraints, accurate=polished)
        budget.count(certificate)
        budget.passes += certificate.passes - 1
        return certificate
    if budget.settled:
        # The last evaluation has taken the certificate's first two passes.
        known = last.f, last.g, epsilon, last.updated
        scaled = 0.0 if refine else budget.tolerance
        certificate = certify(operator, *known, constraints, polished=polished, scaled=scaled)
    else:
        certificate = certify(operator, last.f, last.updated, epsilon, constraints=constraints)
        budget.count(certificate)
    budget.passes += certificate.passes
    return certificate
