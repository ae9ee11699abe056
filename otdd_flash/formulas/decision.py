"""The rules of the iterations: what an evaluation decides, for S problems side by side.

A rule is changed here and nowhere else. The certificate takes any potentials, so rules decide how
long a solve takes, never what it proves. `engine.quasi_newton` decides by them for many problems in
tensors, `engine.few_problems` for a few in floats, `kernels.segments.decision` in Triton.

**Levels of epsilon.** A small epsilon is approached through levels, each ended at a coarse marginal
error and started from the potentials of those before (Schmitzer 2019, Stabilized sparse scaling
algorithms for entropy regularized transport problems). Levels are epsilon 2^k: no rounding makes
two problems differ. Well separated points are solved at once at any epsilon. So a solve first tries
the final one, and gives up when the first marginal error is large, or its decrease since the last
evaluation forecasts more iterations than a descent would take. Between two levels the potential is
taken for a linear function of epsilon,

    g(epsilon / 2) = g(epsilon) + (g(epsilon) - g(2 epsilon)) / 2.

A level is left when its marginal error falls to `LEVEL_TOLERANCE`, or to what rounding allows.

**Trust.** A plain Sinkhorn update raises the dual by at least a known amount, the gain. A
quasi-Newton step is kept if it raises the dual by that much, and otherwise taken back. After a step
that was taken back come plain updates: one, then two after the next such step, then four; steps
that certainly gain something halve the number again. Near convergence the gain is smaller than the
rounding error of the dual, and the dual cannot tell whether a step gained it. Such a step is kept
while the marginal error is at most `GROWTH` times its lowest, and the lowest is not older than
`PATIENCE` iterations.

**The end.** A problem is done after an evaluation at the final epsilon whose marginal error is
within tolerance. The floor is a worst-case bound of what rounding adds to the marginal error. Even
where it is below the tolerance, rounding may keep iterations from getting further. So a problem
ends after `STALLED` iterations in which neither its marginal error fell to `FALLEN` times its
lowest, nor its dual rose by more than its rounding error, if that error is at most `STALLED_FLOORS`
floors. All of the error is then reported as rounding. `FALLEN` asks for a tenth. To ask that the
error halve would also end slow solves which still converge. To ask for a tenth ends solves that
rounding has stopped all the same: their error fluctuates at random between one floor and ten, and
new lows, each a tenth below the one before, run out after 22.
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
from otdd_flash.formulas.operations import Numbers, constant

INFINITY = math.inf

# The first level over the mean cost, about. Above it a solve takes a few steps from anywhere.
TOP = 0.1

# The marginal error that ends a level, and the iterations that this takes, about.
LEVEL_TOLERANCE = 0.02
ITERATIONS_PER_LEVEL = 4

# The marginal error after the first evaluation of a try from which on it is given up at once.
FAR = 0.5

# The most levels: a float64 has no more.
MOST_LEVELS = 62

# How far the marginal error may grow over its lowest where the dual cannot tell, and for how long.
GROWTH = 4.0
PATIENCE = 10.0

# What a difference of duals may be off by, in units of what a single softmin may be off by: over
# the points of a cloud most of that averages out.
DUAL_ROUNDING = 0.25

# Iterations without progress after which the marginal error is rounding, if it is at most so many
# times the floor.
STALLED, STALLED_FLOORS, FALLEN = 20, 10.0, 0.9


class Goal(NamedTuple):
    """When a problem is done.

    Attributes:
        epsilon: the final one, in units of the cost.
        tolerance: marginal error to reach.
        loosest: what the tolerance gives way to where rounding asks for it; at least `tolerance`.
        max_iterations: evaluations after which it ends wherever it is, the last at `epsilon`.
        aim: the share of the tolerance to reach.
    """

    epsilon: float
    tolerance: float
    loosest: float
    max_iterations: int
    aim: float = 1.0


class Form(NamedTuple):
    """What differs between cross terms and self terms.

    Attributes:
        damping: the plain update is g + damping r.
        symmetric: whether rows are columns.
    """

    damping: float
    symmetric: bool


CROSS, SELF = Form(damping=1.0, symmetric=False), Form(damping=0.5, symmetric=True)


class Levels(NamedTuple):
    """Where problems are on their way down, (S,) float64 each.

    Attributes:
        level: epsilon to evaluate at.
        top: the first level of a descent.
        allowed: iterations that a try at the final epsilon may take; 0 if none is under way.
        error: the marginal error of its last evaluation; inf before.
        descended: 1 once there are potentials of a level above, else 0.
    """

    level: Numbers
    top: Numbers
    allowed: Numbers
    error: Numbers
    descended: Numbers

    @classmethod
    def trying(cls, epsilon: float | Tensor, top: Tensor) -> Levels:
        """A try at the final epsilon, before the levels (S,) from `top` on if there are any."""
        _, ratio = torch.frexp(top / epsilon)
        allowed = ITERATIONS_PER_LEVEL * (ratio - 1).double()
        zero = torch.zeros_like(top)
        return cls(zero + epsilon, top, allowed, torch.full_like(top, torch.inf), zero)

    @classmethod
    def descending(cls, top: Numbers) -> Levels:
        """A descent from `top` (S,)."""
        zero = constant(top, 0.0)
        return cls(top, top, zero, constant(top, math.inf), zero)


class Trust(NamedTuple):
    """Trust in quasi-Newton steps, (S,) float64 each.

    Attributes:
        dual: dual value of the potentials that were kept last.
        gain: what the plain update adds to it at the least.
        lowest: the lowest marginal error that was kept since the last restart.
        stale: iterations since it was found.
        plain: plain updates to come.
        penalty: how many follow the next step that is not kept.
    """

    dual: Numbers
    gain: Numbers
    lowest: Numbers
    stale: Numbers
    plain: Numbers
    penalty: Numbers


class Progress(NamedTuple):
    """Of what a segment has made progress, at this level of epsilon; (S,) float64 each.

    Attributes:
        gap: the marginal error that has to fall.
        dual: the dual that has to rise.
        age: iterations since one of them did.
    """

    gap: Numbers
    dual: Numbers
    age: Numbers


class State(NamedTuple):
    """Where S problems stand.

    Attributes:
        iterations: that were taken.
        levels: of epsilon.
        trust: in quasi-Newton steps.
        progress: of the marginal error and the dual.
    """

    iterations: Numbers
    levels: Levels
    trust: Trust
    progress: Progress


class Judgement(NamedTuple):
    """Which potentials are kept, () or (S,) bool, and trust then."""

    kept: Numbers
    trust: Trust


class Decision(NamedTuple):
    """What follows from an evaluation; each (S,) or of one problem.

    Attributes:
        kept: whether the potentials are, as something to go on from.
        plain: whether a plain update follows, or nothing.
        changes: whether a level of epsilon ends or a try at the final one is given up.
        done: whether the problem is.
        extrapolation: as in `engine.problems.Move`.
        rounding: what a single softmin may be off by.
        told: the fields of `engine.run.Told` but the last.
        state: after the evaluation.
    """

    kept: Numbers
    plain: Numbers
    changes: Numbers
    done: Numbers
    extrapolation: Numbers
    rounding: Numbers
    told: tuple[Numbers, ...]
    state: State


# What problems start from.


def first_level(epsilon: float | Tensor, mean_cost: Tensor, share: float = TOP) -> Tensor:
    """The level epsilon 2^k, k >= 0, within a factor of 2 below a share of the mean cost (S,)."""
    _, exponent = torch.frexp(share * mean_cost / epsilon)
    exponent = (exponent - 1).clamp(0, MOST_LEVELS).to(torch.int64)
    return epsilon * (torch.ones_like(exponent) << exponent).double()


def started(iterations: Numbers, levels: Levels) -> State:
    """The state (S,) at some levels, after so many iterations, with nothing known."""
    fresh = fresh_trust(True, Trust(*[0.0] * 6)), fresh_progress(True, Progress(*[0.0] * 3))
    trust, progress = ([constant(iterations, value) for value in each] for each in fresh)
    return State(iterations, levels, Trust(*trust), Progress(*progress))


# From here on, what is compiled.


def decide(
    goal: Goal, costs: CostNumbers, state: State, found: Evaluation, symmetric: bool
) -> Decision:
    """Decide what to keep, when a level or the problem ends, and how to go on.

    Args:
        goal: when a problem is done.
        costs: of the problems.
        state: before the evaluation, which its iterations include.
        found: the numbers of the evaluation.
        symmetric: whether rows are columns.
    """
    iterations, levels = state.iterations, state.levels
    epsilon = evaluated_level(goal, state)
    if symmetric:
        evidence, size = evaluate_self(costs, found, epsilon), 2 * found.size
    else:
        evidence, size = evaluate_cross(costs, found, epsilon), found.row_size + found.size
    rounding = epsilon * evidence.noise
    slack = DUAL_ROUNDING * rounding
    kept, trust = judge(state.trust, evidence.dual, evidence.gain, found.gap, slack)
    progress = progress_after(state.progress, found.gap, evidence.dual, slack)
    stalled = (progress.age >= STALLED) & (found.gap <= STALLED_FLOORS * evidence.floor)
    # Where rounding alone exceeds the tolerance there is nothing to wait for. A plan far from
    # its marginals has larger errors than the one that it becomes, and so has a step too far.
    tolerance = at_most(at_least(2 * evidence.reach, goal.tolerance), goal.loosest)
    near = found.gap <= at_least(evidence.reach, LEVEL_TOLERANCE)
    hopeless = kept & near & (2 * evidence.reach > tolerance)
    final, reached = epsilon <= goal.epsilon, evidence.error <= goal.aim * tolerance
    last = iterations >= goal.max_iterations
    done = final & (last | reached | hopeless | stalled)
    # What the last iteration ends may be a step too far.
    near_enough = final & (reached | stalled)
    # A loose tolerance is for the end alone: steps from potentials of a level above that are
    # far from its marginals take hundreds of iterations more than they save there.
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
    """Whether a try, after so many iterations at a marginal error (S,), should give up."""
    # In place of numbers that are not positive, whose quotients decide nothing, there are ones.
    decrease = ops.log(levels.error / ops.where(error > 0, error, 1.0))
    falls = (error > 0) & (decrease > 0)
    needed = ops.log(error / tolerance) / ops.where(falls, decrease, 1.0)
    late = (falls == 0) | (iterations + needed > levels.allowed)
    # Before the second evaluation there is no decrease.
    hopeless = ops.where(levels.error < INFINITY, late, error > FAR)
    return (levels.allowed > 0) & hopeless


def levels_after(levels: Levels, error: Any, ends: Any, gives_up: Any, epsilon: Any) -> Levels:
    """After an evaluation: where its level ends (S,), or a try gives up (S,)."""
    below = at_least(ops.where(ends, levels.level / 2, levels.level), epsilon)
    return Levels(
        ops.where(gives_up, levels.top, below),
        levels.top,
        ops.where(gives_up, 0.0, levels.allowed),
        error,
        ops.where(ends, 1.0, ops.where(gives_up, 0.0, levels.descended)),
    )


def judge(trust: Trust, dual: Numbers, gain: Numbers, gap: Numbers, slack: Numbers) -> Judgement:
    """Keep the potentials that were just evaluated or not.

    Args:
        trust: before.
        dual: theirs.
        gain: theirs.
        gap: their marginal error.
        slack: what a difference of duals may be off by.
    """
    lower, surplus = gap < trust.lowest, dual - trust.dual - trust.gain
    better, level = surplus > slack, surplus >= -slack
    steady = (gap <= GROWTH * trust.lowest) & (trust.stale < PATIENCE)
    kept = (trust.plain > 0) | (trust.dual == -INFINITY) | better | (level & steady)
    # Trust comes back with a step that certainly gained something.
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
    """Know nothing of the problems where the flags (S,) are set."""
    return Trust(
        ops.where(changed, -INFINITY, trust.dual),
        ops.where(changed, 0.0, trust.gain),
        ops.where(changed, INFINITY, trust.lowest),
        ops.where(changed, 0.0, trust.stale),
        ops.where(changed, 0.0, trust.plain),
        ops.where(changed, 1.0, trust.penalty),
    )


def progress_after(progress: Progress, gap: Numbers, dual: Numbers, slack: Numbers) -> Progress:
    """Count one more evaluation; a dual may be off by `slack`. Marks only get harder."""
    fallen, risen = gap <= FALLEN * progress.gap, dual > progress.dual + slack
    return Progress(
        ops.where(fallen, gap, progress.gap),
        ops.where(risen, dual, progress.dual),
        ops.where(fallen | risen, 0.0, progress.age + 1),
    )


def fresh_progress(changed: Numbers, progress: Progress) -> Progress:
    """Start afresh the problems where the flags (S,) are set."""
    return Progress(
        ops.where(changed, INFINITY, progress.gap),
        ops.where(changed, -INFINITY, progress.dual),
        ops.where(changed, 0.0, progress.age),
    )
