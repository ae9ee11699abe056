"""The rules of the iterations: accept a step, end a level of epsilon, end a problem.

A rule is changed here and nowhere else. The certificate takes any potentials, so rules decide how
long a solve takes, never whether its bounds hold. `engine.quasi_newton` calls `decide` for many
problems in tensors, `engine.few_problems` for a few in floats, and `kernels.segments.decision`
compiles it: `formulas` says what a compiled function may contain. That kernel reads and writes the
fields of `Goal`, `Levels`, `Trust`, `Progress` and of the decision's report by their places, so a
change of these must be made there too. `solver` sets the `Goal` and the first `Levels`; `solver`
and `labels.sinkhorn_pairs` choose the `Form`.

**Levels of epsilon.** A small epsilon is approached through levels, each ended at a coarse marginal
error and started from the potentials of those before (Schmitzer 2019, Stabilized sparse scaling
algorithms for entropy regularized transport problems). Levels are epsilon 2^k, which is exact: no
two problems differ in them by rounding. Well separated points converge in a few iterations at any
epsilon. So a solve first tries the final one, and gives that up when the first marginal error is
large, or its decrease since the last evaluation forecasts more iterations than a descent through
levels would take. Between two levels the potential is extrapolated as a linear function of epsilon,

    g(epsilon / 2) = g(epsilon) + (g(epsilon) - g(2 epsilon)) / 2.

A level is left when its marginal error falls to `LEVEL_TOLERANCE`, or to what rounding allows.

**Trust.** A plain Sinkhorn update raises the dual by at least a known amount, the gain. A
quasi-Newton step is accepted (`kept`) if it raises the dual by that much, and otherwise rejected.
After a rejected step come plain updates: one, then two after the next rejected step, then four;
accepted steps whose gain exceeds rounding, or with a new lowest marginal error, halve the number
again. Near convergence the gain is smaller than the rounding error of the dual, so the dual cannot
tell whether a step gained it. Such a step is accepted while the marginal error is at most `GROWTH`
times its lowest, and the lowest is not older than `PATIENCE` iterations.

**Termination.** A problem is done after an evaluation at the final epsilon whose marginal error is
within tolerance, which rounding may raise up to `Goal.loosest`; where rounding alone exceeds that;
or in its last iteration. The floor is a worst-case bound of what rounding adds to the marginal
error. Even where it is below the tolerance, rounding may keep iterations from getting further. So a
problem ends after `STALLED` iterations in which neither its marginal error fell to `FALLEN` times
its lowest, nor its dual rose by more than its rounding error, if the marginal error is at most
`STALLED_FLOORS` floors. All of that error is then reported as rounding. `FALLEN` asks for a tenth.
To ask that the error halve would also end slow solves which still converge. To ask for a tenth ends
solves that rounding has stopped all the same: their error fluctuates at random between one floor
and ten, and new lows, each a tenth below the one before, run out after 22.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.formulas import operations as ops
from otdd_flash.formulas.evidence import (
    CostNumbers,
    Evaluation,
    at_least,
    at_most,
    evaluate_cross,
    evaluate_self,
)
from otdd_flash.formulas.marginals import EXACT, Constraints
from otdd_flash.formulas.operations import Numbers, constant

INFINITY = math.inf

# The first level, about, over the mean cost. Above it a solve takes a few steps from any start.
TOP = 0.1

# The marginal error that ends a level, and about how many iterations that takes.
LEVEL_TOLERANCE = 0.02
ITERATIONS_PER_LEVEL = 4

# A try at the final epsilon is given up if its first marginal error exceeds this.
FAR = 0.5

# The largest k of a level epsilon 2^k: an int64 holds 2^62.
MOST_LEVELS = 62

# Where the change of the dual is within rounding: by what factor the marginal error may exceed its
# lowest, and for how many iterations.
GROWTH = 4.0
PATIENCE = 10.0

# The rounding error of a difference of dual values over that of a single softmin: most of it
# averages out over the points of a cloud.
DUAL_ROUNDING = 0.25

# Iterations without progress after which the marginal error counts as rounding, if it is at most so
# many times the floor; and the factor to which it falls in a progress.
STALLED, STALLED_FLOORS, FALLEN = 20, 10.0, 0.9


class Goal(NamedTuple):
    """The stopping criterion of a problem.

    Attributes:
        epsilon: the final regularisation, in units of the cost.
        tolerance: marginal error to reach.
        loosest: the largest tolerance that rounding may raise it to; at least `tolerance`.
        max_iterations: evaluations after which it ends in any case, the last at `epsilon`.
        aim: the share of the tolerance to reach.
    """

    epsilon: float
    tolerance: float
    loosest: float
    max_iterations: int
    aim: float = 1.0

    @classmethod
    def of_settings(cls, settings: Tensor) -> Goal:
        """Return the goal at the head of settings (7,), before two unit roundoffs."""
        epsilon, tolerance, loosest, most, aim, *_ = settings.tolist()
        return cls(epsilon, tolerance, loosest, int(most), aim)


class Form(NamedTuple):
    """The kind of a term: a cross term of two clouds, or a self term of one.

    Attributes:
        damping: the plain update is g + damping r.
        symmetric: whether rows and columns are the same points.
        constraints: exact or relaxed marginals.
    """

    damping: float
    symmetric: bool
    constraints: Constraints = EXACT


CROSS, SELF = Form(damping=1.0, symmetric=False), Form(damping=0.5, symmetric=True)


class Levels(NamedTuple):
    """The state of epsilon scaling, (S,) float64 each.

    Attributes:
        level: epsilon to evaluate at.
        top: the first level of a descent.
        allowed: iterations that a try at the final epsilon may take; 0 if none is under way.
        error: the marginal error of the last evaluation; inf before the first.
        descended: 1 once there are potentials of a level above, else 0.
    """

    level: Numbers
    top: Numbers
    allowed: Numbers
    error: Numbers
    descended: Numbers

    @classmethod
    def trying(
        cls, epsilon: float | Tensor, mean_cost: Tensor, at_once: Tensor | None = None
    ) -> Levels:
        """Try the final epsilon first, and fall back to the levels from `first_level` on.

        Args:
            epsilon: the final one.
            mean_cost: (S,), above the lowest cost if that is negative.
            at_once: (S,) or () bool, whether there are no levels to fall back to.
        """
        top = first_level(epsilon, mean_cost)
        if at_once is not None:
            top = torch.where(at_once, epsilon, top)
        _, ratio = torch.frexp(top / epsilon)
        allowed = ITERATIONS_PER_LEVEL * (ratio - 1).double()
        zero = torch.zeros_like(top)
        return cls(zero + epsilon, top, allowed, torch.full_like(top, torch.inf), zero)

    @classmethod
    def descending(cls, top: Numbers) -> Levels:
        """Descend from the level `top` (S,)."""
        zero = constant(top, 0.0)
        return cls(top, top, zero, constant(top, math.inf), zero)


class Trust(NamedTuple):
    """The state of the acceptance test of quasi-Newton steps, (S,) float64 each.

    Attributes:
        dual: dual value of the potentials accepted last; -inf after a restart.
        gain: the least that the plain update adds to it.
        lowest: the lowest marginal error accepted since the last restart.
        stale: iterations since it was found.
        plain: plain updates still to come.
        penalty: plain updates that follow the next rejected step.
    """

    dual: Numbers
    gain: Numbers
    lowest: Numbers
    stale: Numbers
    plain: Numbers
    penalty: Numbers


class Progress(NamedTuple):
    """The state of the stagnation test at this level of epsilon, (S,) float64 each.

    Attributes:
        gap: the last marginal error that counted as progress.
        dual: the last dual value that did.
        age: iterations since either.
    """

    gap: Numbers
    dual: Numbers
    age: Numbers


class State(NamedTuple):
    """The state of the iterations of S problems.

    Attributes:
        iterations: their number so far.
        levels: of epsilon.
        trust: in quasi-Newton steps.
        progress: of the marginal error and the dual.
    """

    iterations: Numbers
    levels: Levels
    trust: Trust
    progress: Progress


class Judgement(NamedTuple):
    """Whether potentials are accepted, () or (S,) bool, and the trust that follows."""

    kept: Numbers
    trust: Trust


class Decision(NamedTuple):
    """The decision after an evaluation; each (S,) or of one problem.

    Attributes:
        kept: whether the potentials are accepted, so that the next step starts from them.
        plain: whether a plain update follows, or nothing.
        changes: whether a level of epsilon ends or a try at the final one is given up.
        done: whether the problem ends.
        extrapolation: as in `engine.problems.Move`.
        rounding: typical rounding error of a single softmin, in units of the cost.
        reported: numbers, which are the fields of `engine.problems.SegmentReport` but the last.
        state: after the evaluation.
    """

    kept: Numbers
    plain: Numbers
    changes: Numbers
    done: Numbers
    extrapolation: Numbers
    rounding: Numbers
    reported: tuple[Numbers, ...]
    state: State


# The initial state.


def first_level(epsilon: float | Tensor, mean_cost: Tensor, share: float = TOP) -> Tensor:
    """Return the level epsilon 2^k, k >= 0, in (c / 2, c] for a share c of the mean cost (S,)."""
    _, exponent = torch.frexp(share * mean_cost / epsilon)
    exponent = (exponent - 1).clamp(0, MOST_LEVELS).to(torch.int64)
    return epsilon * (torch.ones_like(exponent) << exponent).double()


def started(iterations: Numbers, levels: Levels) -> State:
    """Return the initial state (S,) at some levels, after so many iterations."""
    fresh = fresh_trust(True, Trust(*[0.0] * 6)), fresh_progress(True, Progress(*[0.0] * 3))
    trust, progress = ([constant(iterations, value) for value in each] for each in fresh)
    return State(iterations, levels, Trust(*trust), Progress(*progress))


def restarted(state: State, epsilon: float) -> State:
    """Go on at the final epsilon; only the iterations taken so far count."""
    iterations = state.iterations
    return started(iterations, Levels.descending(constant(iterations, epsilon)))


# All functions from here on are compiled for kernels as well.


def decide(
    goal: Goal, costs: CostNumbers, state: State, found: Evaluation, of_mass_one: bool
) -> Decision:
    """Decide whether to accept the potentials, and whether the level or the problem ends.

    Args:
        goal: the stopping criterion.
        costs: facts and error bounds of the costs.
        state: before the evaluation, but its iterations count it.
        found: the numbers of the evaluation.
        of_mass_one: whether there is one potential, whose plan is given mass 1 by a constant: that
            of a symmetric form whose marginals are exact.
    """
    iterations, levels = state.iterations, state.levels
    epsilon = evaluated_level(goal, state)
    if of_mass_one:
        evidence, size = evaluate_self(costs, found, epsilon), 2 * found.size
    else:
        evidence, size = evaluate_cross(costs, found, epsilon), found.row_size + found.size
    rounding = epsilon * evidence.noise
    slack = DUAL_ROUNDING * rounding
    kept, trust = judge(state.trust, evidence.dual, evidence.gain, found.gap, slack)
    progress = progress_after(state.progress, found.gap, evidence.dual, slack)
    stalled = (progress.age >= STALLED) & (found.gap <= STALLED_FLOORS * evidence.floor)
    # Where rounding alone exceeds the tolerance, further iterations are in vain. A plan far from
    # its marginals, or of a step to reject, does not show that: its rounding errors are larger.
    tolerance = at_most(at_least(2 * evidence.reach, goal.tolerance), goal.loosest)
    near = found.gap <= at_least(evidence.reach, LEVEL_TOLERANCE)
    hopeless = kept & near & (2 * evidence.reach > tolerance)
    final, reached = epsilon <= goal.epsilon, evidence.error <= goal.aim * tolerance
    last = iterations >= goal.max_iterations
    done = final & (last | reached | hopeless | stalled)
    # The last iteration alone accepts nothing: its step may be one to reject.
    near_enough = final & (reached | stalled)
    # A loose tolerance holds at the final epsilon alone: ending a level above at potentials far
    # from its marginals costs hundreds of iterations more below than it saves there.
    coarse = evidence.error <= at_least(2 * evidence.reach, LEVEL_TOLERANCE)
    ends = (epsilon > goal.epsilon) & coarse
    gives_up = (done == 0) & is_hopeless(levels, iterations, evidence.error, tolerance)
    changes = ends | gives_up
    hidden = ops.where(stalled, evidence.error, evidence.floor)
    return Decision(
        kept | near_enough | changes,
        done | changes | (trust.plain > 0),
        changes,
        done,
        ops.where(ends, levels.descended / 2, 0.0),
        rounding,
        (
            evidence.value,
            evidence.lower,
            evidence.upper,
            evidence.error,
            hidden,
            iterations,
            size,
        ),
        State(
            iterations,
            levels_after(levels, evidence.error, ends, gives_up, goal.epsilon),
            fresh_trust(changes, trust),
            fresh_progress(changes, progress),
        ),
    )


def evaluated_level(goal: Goal, state: State) -> Numbers:
    """Return the epsilon (S,) to evaluate at: the final one in the last iteration."""
    return ops.where(state.iterations >= goal.max_iterations, goal.epsilon, state.levels.level)


def is_hopeless(levels: Levels, iterations: Any, error: Any, tolerance: Any) -> Any:
    """Return whether to give up a try at the final epsilon, from its marginal error (S,)."""
    # Numbers that are not positive become 1; results computed from them are not used.
    decrease = ops.log(levels.error / ops.where(error > 0, error, 1.0))
    falls = (error > 0) & (decrease > 0)
    needed = ops.log(error / tolerance) / ops.where(falls, decrease, 1.0)
    late = (falls == 0) | (iterations + needed > levels.allowed)
    # Before the second evaluation there is no decrease.
    hopeless = ops.where(levels.error < INFINITY, late, error > FAR)
    return (levels.allowed > 0) & hopeless


def levels_after(levels: Levels, error: Any, ends: Any, gives_up: Any, epsilon: Any) -> Levels:
    """Return the levels after an evaluation, where a level `ends` (S,) or a try `gives_up` (S,)."""
    below = at_least(ops.where(ends, levels.level / 2, levels.level), epsilon)
    return Levels(
        ops.where(gives_up, levels.top, below),
        levels.top,
        ops.where(gives_up, 0.0, levels.allowed),
        error,
        ops.where(ends, 1.0, ops.where(gives_up, 0.0, levels.descended)),
    )


def judge(trust: Trust, dual: Numbers, gain: Numbers, gap: Numbers, slack: Numbers) -> Judgement:
    """Accept or reject the potentials that were just evaluated.

    Args:
        trust: before the evaluation.
        dual: their dual value.
        gain: the least that the plain update from them adds to it.
        gap: their marginal error.
        slack: rounding error of a difference of dual values.
    """
    lower, surplus = gap < trust.lowest, dual - trust.dual - trust.gain
    better, level = surplus > slack, surplus >= -slack
    steady = (gap <= GROWTH * trust.lowest) & (trust.stale < PATIENCE)
    kept = (trust.plain > 0) | (trust.dual == -INFINITY) | better | (level & steady)
    # A step whose gain exceeds rounding, or with a new lowest marginal error, restores trust.
    forgiven = kept & (trust.plain <= 0) & (better | lower)
    penalty = ops.where(forgiven, at_least(trust.penalty / 2, 1.0), trust.penalty)
    return Judgement(
        kept,
        Trust(
            ops.where(kept, dual, trust.dual),
            ops.where(kept, gain, trust.gain),
            ops.where(kept & lower, gap, trust.lowest),
            ops.where(kept & lower, 0.0, trust.stale + 1),
            ops.where(kept, at_least(trust.plain - 1, 0.0), penalty),
            ops.where(kept, penalty, 2 * penalty),
        ),
    )


def fresh_trust(changed: Numbers, trust: Trust) -> Trust:
    """Restart the acceptance test where the flags (S,) are set."""
    return Trust(
        ops.where(changed, -INFINITY, trust.dual),
        ops.where(changed, 0.0, trust.gain),
        ops.where(changed, INFINITY, trust.lowest),
        ops.where(changed, 0.0, trust.stale),
        ops.where(changed, 0.0, trust.plain),
        ops.where(changed, 1.0, trust.penalty),
    )


def progress_after(progress: Progress, gap: Numbers, dual: Numbers, slack: Numbers) -> Progress:
    """Count one more evaluation; `slack` is the rounding error of a difference of dual values."""
    fallen, risen = gap <= FALLEN * progress.gap, dual > progress.dual + slack
    return Progress(
        ops.where(fallen, gap, progress.gap),
        ops.where(risen, dual, progress.dual),
        ops.where(fallen | risen, 0.0, progress.age + 1),
    )


def fresh_progress(changed: Numbers, progress: Progress) -> Progress:
    """Restart the stagnation test where the flags (S,) are set."""
    return Progress(
        ops.where(changed, INFINITY, progress.gap),
        ops.where(changed, -INFINITY, progress.dual),
        ops.where(changed, 0.0, progress.age),
    )
