"""The outer loop of Gromov-Wasserstein: linearise, solve, repeat, from several starts.

`gromov.distance` calls `prepare` and `solve_gromov`, `otdd_flash.pairwise` calls `prepare`, and
`otdd_flash.result` calls `prepare` and `last_linearised`. Each step is a `Comparison` of the same
two datasets whose transformed points are those of the linearised cost, so that solvers, kernels and
plans take it as any other comparison by inner products.

With F(P) = lambda_x E(P) + lambda_y <W, P> (`gromov.problem`) and E linearised at M = X^T P Y
(`gromov.energy`), the objective F(P) + epsilon KL(P | a b^T) does not rise from step to step, and
decides between starts; F alone may rise, as entropy grows. The value of a result is F of a plan
whose sums are corrected (Altschuler et al. 2017, Near-linear time approximation algorithms for
optimal transport), evaluated in float64: an upper bound of the least F, whatever the solves did. A
change must keep both: an accepted step has a lower objective, and the value is such a bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import NO_OFFSET, GroundCost
from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.gromov.bounds import class_bound, eccentricity_bound, spectral_bound
from otdd_flash.gromov.energy import OPERATIONS, TERMS
from otdd_flash.gromov.problem import Problem, RoundedPlan, plan_of, round_plan
from otdd_flash.gromov.record import GromovRecord, Start
from otdd_flash.gromov.starts import starts
from otdd_flash.memory import check_memory
from otdd_flash.operators.comparison import Comparison, cost_size
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.schedules import Converged, Exact
from otdd_flash.solver.solving import solve
from otdd_flash.solver.term import SolverProgress, StoppedBy, TransportTerm, UnreachableTolerance

# Descents end where the objective falls by less than LEAST_FALL times the tolerance, in units of
# F(a b^T), and at epsilon 0 where it falls by no more than rounding.
LEAST_FALL, EXACT_FALL = 1e-3, 1e-13

# At first all starts descend by solves of LOOSE, whose dual values are exact to its square, until
# falls are below EXPLORED or for EXPLORED_STEPS: bad ones descend slowest. Those within NEAR of the
# best go on to the end, both in units of F(a b^T). In 60 problems of 50 to 120 points no other one
# would have become the best; with 0.02 one would, in one of them.
LOOSE, EXPLORED, EXPLORED_STEPS, NEAR = 1e-2, 1e-4, 8, 0.05

# The last solve of the best is this much tighter, as E of a plan with corrected sums is off by
# about ten times their error, which must not hide what local minima differ by. It is in float64
# where rounding does not allow it, but at more than DOUBLE_CELLS entries, where that would take the
# longest of all, less tight.
LAST_SHARE, LESS_SHARE = 1e-2, 1e-1
DOUBLE_CELLS = 2**28
FEWEST_LAST = 500

# How far beyond the last plan's M a step linearises, over the distance from that before. Where
# steps shrink by a constant factor q, their sum is q / (1 - q) times the last: 0.5 for q = 1/3; 8
# for q = 0.9, above which the known direction is out of date.
FIRST_STRETCH, MOST_STRETCH = 0.5, 8.0

MOST_STEPS = 1000

# The seconds of a solve whose time is over: it then gets its one iteration.
NO_TIME = 1e-9


class Step(NamedTuple):
    """One linearised problem.

    Attributes:
        matrix: M (d_x, d_y) at which it is linearised.
        following: X^T P Y of its plan.
        solved: its solve.
        objective: F + epsilon KL of its plan: by the dual value of a converged solve, whose error
            is of second order. For any other, F of its plan with corrected sums, and the most that
            epsilon KL may be.
        potential: (m,) of the inner products, from which the next one starts.
    """

    matrix: Tensor
    following: Tensor
    solved: Divergence
    objective: float
    potential: Tensor


class Descent(NamedTuple):
    """The result of the steps from one start.

    Attributes:
        last: the best step, whose solve counts the iterations and passes of all.
        objectives: of every accepted step whose solve converged.
        steps: accepted.
        finished: whether it was followed to the end.
        plan: that of `last` with corrected sums, once it is the best.
    """

    last: Step
    objectives: tuple[float, ...]
    steps: int
    finished: bool = False
    plan: RoundedPlan | None = None

    @property
    def objective(self) -> float:
        """F + epsilon KL reached; no less than F, which the rounding of sums may lift above it."""
        known = -math.inf if self.plan is None else self.plan.value
        return max(self.last.objective, known)


def take_step(
    problem: Problem,
    matrix: Tensor,
    options: Converged | Exact,
    potential: Tensor | None = None,
    progress: SolverProgress | None = None,
) -> Step:
    """Linearise at M (d_x, d_y) and solve.

    Args:
        problem: at its epsilon.
        matrix: M, of any plan or of none.
        options: of the solve.
        potential: (m,) of `Step` to start from.
        progress: called in every iteration.
    """
    energy, linear = problem.energy, problem.linearised(matrix)
    # Potentials of squared distances differ from those of inner products by these.
    lengths = problem.lengths(linear.transformed[1])
    start = None if potential is None else {"xy": potential + lengths}
    solved = solve(linear, options, start=start, progress=progress)
    term = solved.xy
    product = plan_of(linear, term)(problem.values[:, : problem.moving], False)
    norms, following = problem.moments(product.values.double())
    if term.converged:
        above = energy.value(norms, following) - energy.linear(matrix, norms, following)
        objective = solved.value + problem.compared.ground.lambda_x * above
    else:
        objective = round_plan(problem, matrix, term).value + problem.most_entropy
    return Step(matrix, following, solved, objective, term.g.double() - lengths)


@dataclass(frozen=True)
class Search:
    """The search for the plan of the least objective, until a time.

    Attributes:
        problem: at its epsilon.
        options: of every solve.
        end: of the time that there is, by `time.perf_counter`.
        progress: called in every iteration of the solves.
    """

    problem: Problem
    options: Converged | Exact
    end: float = math.inf
    progress: SolverProgress | None = None

    def best_of(self, number: int) -> tuple[dict[str, Descent], str]:
        """Return where `number` starts led, and the best, whose plan is evaluated."""
        found = self.explore(number)
        near = min(each.objective for each in found.values())
        # At epsilon 0 all are at their ends.
        near += NEAR * self.problem.independent if isinstance(self.options, Converged) else math.inf
        for name, each in found.items():
            found[name] = self.finish(each) if each.objective <= near else each
        # Another one may be below those that were finished, or below the plan of the best.
        while found[best := min(found, key=lambda each: found[each].objective)].plan is None:
            work = self.settle if found[best].finished else self.finish
            found[best] = work(found[best])
        return found, best

    def explore(self, number: int) -> dict[str, Descent]:
        """Descend from starts, or as many as there is time for, until steps are short."""
        problem, options, found = self.problem, self.options, dict[str, Descent]()
        least, tried, most = EXACT_FALL * problem.independent, [options], MOST_STEPS
        if isinstance(options, Converged):
            least = max(EXPLORED, LEAST_FALL * options.asked_tolerance) * problem.independent
            # A tolerance that was not given is raised to what rounding allows.
            tried.insert(0, replace(options, tolerance=max(LOOSE, options.asked_tolerance)))
            most = EXPLORED_STEPS
        for name, matrix in starts(problem.energy, problem.compared, number):
            for each in tried if not found or time.perf_counter() < self.end else ():
                try:
                    found[name] = self.descend(matrix, each, least, most=most)
                    break
                except UnreachableTolerance:
                    if each is options:
                        raise
        return found

    def finish(self, found: Descent) -> Descent:
        """Follow a descent to the end."""
        found = found._replace(finished=True)
        before, options = found.last.solved.xy, self.options
        if isinstance(options, Exact) or not before.converged or time.perf_counter() >= self.end:
            return found
        least = LEAST_FALL * options.asked_tolerance * self.problem.independent
        more = self.descend(found.last.following, options, least, found.last.potential)
        last = _with_work(more.last, before)
        term = last.solved.xy
        if not term.converged and found.objective <= more.objective:
            # A solve that stopped early does not take the place of one before.
            return found._replace(
                last=_changed(found.last, converged=False, stopped_by=term.stopped_by)
            )
        objectives = (*found.objectives, *more.objectives)
        return Descent(last, objectives, found.steps + more.steps, finished=True)

    def settle(self, found: Descent) -> Descent:
        """Evaluate the plan of the best descent, of a tighter solve where it converged."""
        last, options = found.last, self.options
        if isinstance(options, Converged) and last.solved.converged:
            tight = self._tightened(last, options)
            if tight is not None and tight.solved.converged:
                # The objective, which tells starts apart, stays as it was, and so does the
                # tolerance that was asked for.
                before = last.solved.xy
                last = _with_work(tight._replace(objective=last.objective), before)
                last = _changed(last, tolerance=before.tolerance, stopped_by=before.stopped_by)
        return found._replace(last=last, plan=round_plan(self.problem, last.matrix, last.solved.xy))

    def _tightened(self, last: Step, options: Converged) -> Step | None:
        """Solve the last step again, tighter; None where rounding does not allow it."""
        compared = self.problem.compared
        in_double = replace(compared.compute, precision="double", backend="auto")
        doubled = replace(compared, compute=in_double)
        tries = [(compared, LAST_SHARE), (doubled, LAST_SHARE), (compared, LESS_SHARE)]
        if math.prod(compared.shape) > DOUBLE_CELLS:
            del tries[1]
        for each, share in tries:
            # At small epsilon tightening may take far longer than all before.
            most = min(options.max_iterations, max(FEWEST_LAST, last.solved.xy.iterations))
            tight = replace(options, max_iterations=most, max_seconds=self._seconds())
            tight = replace(tight, tolerance=share * options.asked_tolerance)
            with suppress(UnreachableTolerance):
                other = replace(self.problem, compared=each)
                return take_step(other, last.following, tight, last.potential, self.progress)
        return None

    def descend(
        self,
        matrix: Tensor,
        options: Converged | Exact,
        least: float,
        potential: Tensor | None = None,
        most: int = MOST_STEPS,
    ) -> Descent:
        """Step from M (d_x, d_y) until the objective falls by no more than `least`, or `most`.

        With entropy, steps become longer as long as they fall: they linearise at M beyond the last
        plan's, on the line from that before. One that rises is taken again from the last plan's M.
        """
        best: Step | None = None
        stretch, objectives, steps, iterations, passes = 0.0, list[float](), 0, 0, 0.0
        while True:
            limited = replace(options, max_seconds=self._seconds())
            step = take_step(self.problem, matrix, limited, potential, self.progress)
            term = step.solved.xy
            iterations, passes = iterations + term.iterations, passes + term.passes
            fall = math.inf if best is None else best.objective - step.objective
            stretched = stretch > 0
            if best is None or fall > 0:
                # At epsilon 0 plans are vertices, and M on the line between two is of none.
                grown = max(FIRST_STRETCH, min(2 * stretch, MOST_STRETCH))
                stretch = grown if best is not None and isinstance(options, Converged) else 0.0
                further = 0.0 if best is None else step.following - best.following
                best, potential, steps = step, step.potential, steps + 1
                objectives += [step.objective] * term.converged
                matrix = step.following + stretch * further
            else:
                matrix, stretch = best.following, 0.0
            # A NaN ends, too.
            ended = not fall > least and not (stretched and not fall > 0)
            late = not ended and time.perf_counter() >= self.end
            if ended or late or steps == most:
                last = _changed(best, iterations=iterations, passes=passes)
                if late or (not ended and most == MOST_STEPS):
                    reason: StoppedBy = "max_seconds" if late else "max_iterations"
                    last = _changed(last, converged=False, stopped_by=reason)
                elif not term.converged:
                    last = _changed(last, converged=False, stopped_by=term.stopped_by)
                return Descent(last, tuple(objectives), steps)

    def _seconds(self) -> float | None:
        return None if self.end == math.inf else max(self.end - time.perf_counter(), NO_TIME)


def _with_work(step: Step, before: TransportTerm) -> Step:
    """Return a step whose solve counts the work of an earlier one."""
    term = step.solved.xy
    iterations, passes = before.iterations + term.iterations, before.passes + term.passes
    return _changed(step, iterations=iterations, passes=passes)


def _changed(step: Step, **changes: Any) -> Step:
    """Return a step with other attributes of its term."""
    term = replace(step.solved.xy, **changes)
    return step._replace(solved=replace(step.solved, xy=term, passes=term.passes))


def solve_gromov(
    problem: Problem,
    options: Converged | Exact,
    number: int,
    progress: SolverProgress | None = None,
) -> tuple[Comparison, Divergence, GromovRecord]:
    """Find the best local minimum of `number` starts.

    Returns:
        The comparison by the last linearised cost; its solve, with value and bounds of F; and the
        rest.
    """
    end = math.inf if options.max_seconds is None else time.perf_counter() + options.max_seconds
    if isinstance(options, Exact):
        # A plan that is not the best of its step need not have a smaller E.
        options = replace(options, bound_width=0.0)
    return _result(problem, *Search(problem, options, end, progress).best_of(number))


def _result(
    problem: Problem, found: Mapping[str, Descent], best: str
) -> tuple[Comparison, Divergence, GromovRecord]:
    """Return the result of `solve_gromov`, from the best descent."""
    compared, energy, ground = problem.compared, problem.energy, problem.compared.ground
    last, objectives, plan = found[best].last, found[best].objectives, found[best].plan
    assert plan is not None
    of_energy = eccentricity_bound(energy), spectral_bound(energy)
    of_classes = class_bound(problem.table, *problem.class_masses)
    told = (Start(name, one.objective, one.steps, one.finished) for name, one in found.items())
    parts = plan.energy, of_energy, plan.class_cost, of_classes, problem.independent
    coordinates = energy.x.coordinates, energy.y.coordinates
    record = GromovRecord(*parts, tuple(told), objectives, last.matrix.cpu(), coordinates)
    # Sums of as many products as there are points; W is that of `compared`.
    spread, largest = energy.x.spread + energy.y.spread, float(problem.table.abs().max())
    sums = (sum(compared.shape) + OPERATIONS) * DOUBLE_UNIT + plan.rounding
    rounding = ground.lambda_x * (energy.rounding + TERMS * plan.rounding * spread)
    rounding += ground.lambda_y * sums * largest + compared.label_error
    lower = ground.lambda_x * max(of_energy) + ground.lambda_y * of_classes - compared.label_error
    # The potentials and the marginal error are those of the linearised cost.
    term = replace(last.solved.xy, value=plan.value, bounds=(lower, plan.value + rounding))
    solved = replace(last.solved, xy=term, offset=NO_OFFSET)
    return problem.linearised(last.matrix), solved, record


def last_linearised(compared: Comparison, record: GromovRecord) -> Comparison:
    """Return the comparison by the last linearised cost again, for the plan of a loaded result."""
    with compared.within_memory():
        problem = Problem.of(compared, record.coordinates)
        return problem.linearised(record.matrix.to(problem.energy.x.points))


def prepare(
    datasets: Sequence[LabeledSamples], cost: GroundCost, compute: ComputeOptions
) -> Comparison:
    """Move datasets to the device; every two of them can be compared then, by `ground="inner"`.

    Raises:
        InputError: they do not fit there, with what E needs.
    """
    compared, needed = Comparison.prepare(datasets, cost, compute, debias=False, resident=True), 0
    for n, d in (samples.features.shape for samples in datasets):
        # In float64 the points and their coordinates, linearised ones and products, S and its
        # eigenvectors, M of two steps and their differences.
        r = min(n, d)
        needed += 8 * (n * d + 4 * n * r + 6 * r * r)
    needed += compared.needed
    size = cost_size(datasets[0], datasets[-1])
    fewer = "fewer dimensions (of each side, beforehand)"
    check_memory(size, needed, compared.device, compute.dtype, fewer)
    return replace(compared, needed=needed)
