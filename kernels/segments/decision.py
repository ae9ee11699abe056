"""What an iteration of `engine.quasi_newton` decides for every segment, in one launch.

From the numbers of an evaluation: the dual value and its certified bounds, whether the potentials
are kept, whether their differences are remembered, whether the segment goes to the next level of
epsilon or is done, and the move

    g + scale r + shift + sum_k weights_k remembered_k

to the next candidate. The rules are those of `engine.trust` and `engine.differences`.

Shapes: (S, 2) and (S, 14 + 4 memory) as in `engine.segments.Evaluation`, moves (S, 9 + 2 memory) as
in `Move`, terms (S, 8) as in `engine.run.Told`, all float64. A segment is at its level of epsilon
and at `state_width` numbers,

    iterations,   dual, gain, lowest, stale, plain, penalty,   gap, dual, age,
    top, allowed, error, descended,   slot, R^-1, Y^T Y, D,

six of trust, three of progress and four of levels. What rounding may have done is as
`engine.evidence` derives it, from numbers of the passes that come with the costs.

One lane per segment, as all of them do the same with few numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.segments.differences import learn_and_direct, memory_width
from otdd_flash.kernels.segments.evaluation import NUMBERS
from otdd_flash.kernels.segments.evidence import COSTS, evaluate
from otdd_flash.kernels.segments.move import MOVE
from otdd_flash.kernels.segments.trust import judge

# Numbers of a state before those remembered, and of terms.
TRUST, TERMS = 14, 8

# Segments of a program: one lane takes the time of many on a GPU, and one program that of many in
# the interpreter.
BLOCK_ON_GPU, BLOCK_IN_INTERPRETER = 1, 8


class Limits(NamedTuple):
    """Constants of the rules, as they are called in the solver."""

    dual_rounding: float
    growth: float
    patience: float
    stalled: float
    stalled_floors: float
    fallen: float
    value_trifle: float
    most_error: float
    least_mass: float
    most_mass: float
    level_tolerance: float
    far: float


class State(NamedTuple):
    """Where segments are before an evaluation.

    Attributes:
        active: (S,) bool, which are not done.
        level: (S,) float64, epsilon to evaluate.
        numbers: (S, `state_width`) float64.
        terms: (S, 8) float64, of the last evaluation of each while it was active.
    """

    active: Tensor
    level: Tensor
    numbers: Tensor
    terms: Tensor


@triton.jit
def update_progress(gap, dual, slack, p_progress, FALLEN: tl.constexpr):
    """The marginal error that has to fall, the dual that has to rise, and since when."""
    last_gap, last_dual = tl.load(p_progress), tl.load(p_progress + 1)
    fallen, risen = gap <= FALLEN * last_gap, dual > last_dual + slack
    age = tl.where(fallen | risen, 0.0, tl.load(p_progress + 2) + 1)
    return tl.where(fallen, gap, last_gap), tl.where(risen, dual, last_dual), age


@triton.jit
def judge_step(dual, gap, slack, p_trust, GROWTH: tl.constexpr, PATIENCE: tl.constexpr):
    """Whether the potentials are kept; lowest error, its age, plain updates to come, penalty."""
    return judge(
        dual, gap, slack, tl.load(p_trust), tl.load(p_trust + 1),
        tl.load(p_trust + 2), tl.load(p_trust + 3), tl.load(p_trust + 4), tl.load(p_trust + 5),
        GROWTH, PATIENCE,
    )  # fmt: skip


@triton.jit
def update_trust(
    dual,
    gain,
    judged,  # of `judge_step`
    restarted,  # whether trust starts afresh afterwards
    p_trust,  # (6,) dual, gain, lowest, stale, plain, penalty
    p_new_trust,  # (6,), overwritten
):
    """Trust after a step."""
    kept, lowest, stale, plain, penalty = judged
    dual, gain = tl.where(kept, dual, tl.load(p_trust)), tl.where(kept, gain, tl.load(p_trust + 1))
    tl.store(p_new_trust, tl.where(restarted, -float("inf"), dual))
    tl.store(p_new_trust + 1, tl.where(restarted, 0.0, gain))
    tl.store(p_new_trust + 2, tl.where(restarted, float("inf"), lowest))
    tl.store(p_new_trust + 3, tl.where(restarted, 0.0, stale))
    tl.store(p_new_trust + 4, tl.where(restarted, 0.0, plain))
    tl.store(p_new_trust + 5, tl.where(restarted, 1.0, penalty))


@triton.jit
def update_levels(
    iterations,
    level,
    error,
    tolerance,
    reach,
    done,
    p_levels,  # (4,) top, allowed, error, descended
    p_new_levels,  # (4,), overwritten
    final_epsilon,
    LEVEL_TOLERANCE: tl.constexpr,
    FAR: tl.constexpr,
):
    """Whether the level ends, whether a try gives up, the next level, and the extrapolation."""
    top, allowed, last_error = tl.load(p_levels), tl.load(p_levels + 1), tl.load(p_levels + 2)
    descended = tl.load(p_levels + 3)
    ends = (level > final_epsilon) & (error <= tl.maximum(2 * reach, LEVEL_TOLERANCE))
    decrease = tl.log(last_error / error)
    forecast = iterations + tl.log(error / tolerance) / decrease
    late = ((error > 0) & (decrease > 0) & (forecast <= allowed)) == 0
    late = tl.where(last_error < float("inf"), late, error > FAR)
    gives_up = (allowed > 0) & late & (done == 0)
    below = tl.maximum(tl.where(ends, level / 2, level), final_epsilon)
    tl.store(p_new_levels, top)
    tl.store(p_new_levels + 1, tl.where(gives_up, 0.0, allowed))
    tl.store(p_new_levels + 2, error)
    tl.store(p_new_levels + 3, tl.where(ends, 1.0, tl.where(gives_up, 0.0, descended)))
    return ends, gives_up, tl.where(gives_up, top, below), tl.where(ends, descended / 2, 0.0)


# A number of segments that the kernel was compiled for would change their bits.
@on_its_device
@triton.jit(do_not_specialize=["count"])
def segmented_decision_kernel(
    count,
    rows_ptr,  # (S, 2) float64, of this stride
    row_stride,
    columns_ptr,  # (S, NUMBERS + 4 MEMORY) float64
    costs_ptr,  # (S, COSTS) float64: mean, spread, offset, errors of passes
    settings_ptr,  # (7,) float64
    active_ptr,  # (S,) int8
    level_ptr,  # (S,) float64
    state_ptr,  # (S, WIDTH) float64
    terms_ptr,  # (S, TERMS) float64
    new_active_ptr,  # (S,) int8
    new_level_ptr,  # (S,) float64
    new_state_ptr,  # (S, WIDTH) float64
    new_terms_ptr,  # (S, TERMS) float64
    move_ptr,  # (S, MOVE + 2 MEMORY) float64
    SELF: tl.constexpr,
    DAMPING: tl.constexpr,
    DUAL_ROUNDING: tl.constexpr,
    GROWTH: tl.constexpr,
    PATIENCE: tl.constexpr,
    STALLED: tl.constexpr,
    STALLED_FLOORS: tl.constexpr,
    FALLEN: tl.constexpr,
    VALUE_TRIFLE: tl.constexpr,
    MOST_ERROR: tl.constexpr,
    LEAST_MASS: tl.constexpr,
    MOST_MASS: tl.constexpr,
    LEVEL_TOLERANCE: tl.constexpr,
    FAR: tl.constexpr,
    NUMBERS: tl.constexpr,
    MEMORY: tl.constexpr,
    WIDTH: tl.constexpr,
    TRUST: tl.constexpr,
    TERMS: tl.constexpr,
    MOVE: tl.constexpr,
    COSTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of segments; lanes past the last segment repeat it."""
    i_lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i_segment = tl.minimum(i_lane, count - 1).to(tl.int64)
    p_columns = columns_ptr + (NUMBERS + 4 * MEMORY) * i_segment
    p_costs, p_rows = costs_ptr + COSTS * i_segment, rows_ptr + row_stride * i_segment
    p_state, p_new_state = state_ptr + WIDTH * i_segment, new_state_ptr + WIDTH * i_segment
    final_epsilon, goal = tl.load(settings_ptr), tl.load(settings_ptr + 1)
    loosest, max_iterations = tl.load(settings_ptr + 2), tl.load(settings_ptr + 3)
    aim = tl.load(settings_ptr + 4)
    unit, unit_of_sums = tl.load(settings_ptr + 5), tl.load(settings_ptr + 6)
    active = tl.load(active_ptr + i_segment)
    now = active != 0
    epsilon = tl.load(level_ptr + i_segment)
    iterations = tl.load(p_state) + now.to(tl.float64)
    gap = tl.load(p_columns + 4)
    dual, gain, noise, floor, reach, value, lower, upper, error = evaluate(
        p_rows, p_columns, p_costs, epsilon, unit, unit_of_sums, SELF,
        VALUE_TRIFLE, MOST_ERROR, LEAST_MASS, MOST_MASS,
    )  # fmt: skip
    # Where rounding alone exceeds the tolerance there is nothing to wait for. A plan far from its
    # marginals has larger errors than the one that it becomes, and so has a step too far.
    tolerance = tl.minimum(tl.maximum(2 * reach, goal), loosest)
    slack = DUAL_ROUNDING * (epsilon * noise)
    judged = judge_step(dual, gap, slack, p_state + 1, GROWTH, PATIENCE)
    kept, plain = judged[0], judged[3]
    near = gap <= tl.maximum(reach, LEVEL_TOLERANCE)
    hopeless = kept & near & (2 * reach > tolerance)
    new_gap, new_dual, age = update_progress(gap, dual, slack, p_state + 7, FALLEN)
    stalled = (age >= STALLED) & (gap <= STALLED_FLOORS * floor)
    last = iterations >= max_iterations
    reached = error <= aim * tolerance
    done = (epsilon <= final_epsilon) & (last | reached | hopeless | stalled)
    # What the last iteration ends may be a step too far.
    near_enough = (epsilon <= final_epsilon) & (reached | stalled)
    ends, gives_up, level, extrapolation = update_levels(
        iterations, epsilon, error, tolerance, reach, done, p_state + 10, p_new_state + 10,
        final_epsilon, LEVEL_TOLERANCE, FAR,
    )  # fmt: skip
    changes = ends | gives_up
    tl.store(p_new_state + 7, tl.where(changes, float("inf"), new_gap))
    tl.store(p_new_state + 8, tl.where(changes, -float("inf"), new_dual))
    tl.store(p_new_state + 9, tl.where(changes, 0.0, age))
    # Only the last g that was kept at this level has a residual to compare with.
    started = now & (tl.abs(tl.load(p_state + 1)) < float("inf"))
    update_trust(dual, gain, judged, changes, p_state + 1, p_new_state + 1)
    level = tl.where(iterations + 1 >= max_iterations, final_epsilon, level)
    tl.store(new_active_ptr + i_segment, tl.where(done, 0, active).to(tl.int8))
    tl.store(new_level_ptr + i_segment, level)
    tl.store(p_new_state, iterations)

    p_terms, p_new_terms = terms_ptr + TERMS * i_segment, new_terms_ptr + TERMS * i_segment
    tl.store(p_new_terms, tl.where(now, value, tl.load(p_terms)))
    tl.store(p_new_terms + 1, tl.where(now, lower, tl.load(p_terms + 1)))
    tl.store(p_new_terms + 2, tl.where(now, upper, tl.load(p_terms + 2)))
    tl.store(p_new_terms + 3, tl.where(now, error, tl.load(p_terms + 3)))
    hidden = tl.where(stalled, error, floor)
    tl.store(p_new_terms + 4, tl.where(now, hidden, tl.load(p_terms + 4)))
    tl.store(p_new_terms + 5, tl.where(now, iterations, tl.load(p_terms + 5)))
    rows_size, columns_size = tl.load(p_rows + 1), tl.load(p_columns + 1)
    size = 2 * columns_size if SELF else rows_size + columns_size
    tl.store(p_new_terms + 6, tl.where(now, size, tl.load(p_terms + 6)))
    tl.store(p_new_terms + 7, tl.where(now & (done == 0), 1.0, 0.0))

    sound, scale, steps, falls_weights = learn_and_direct(
        p_columns + 6, p_columns + NUMBERS, started, epsilon * noise,
        p_state + TRUST, p_new_state + TRUST, MEMORY,
    )  # fmt: skip
    largest = tl.abs(scale) + tl.sum(tl.abs(steps) + tl.abs(falls_weights), 1)
    usable = (plain <= 0) & ((done | changes) == 0) & (largest < float("inf"))
    p_move = move_ptr + (MOVE + 2 * MEMORY) * i_segment
    p_weights = p_move[:, None] + (MOVE + tl.arange(0, MEMORY))[None, :]
    tl.store(p_move, (kept | near_enough | changes).to(tl.float64))
    tl.store(p_move + 1, sound.to(tl.float64))
    tl.store(p_move + 2, tl.load(p_state + TRUST))
    tl.store(p_move + 3, tl.load(p_columns + 6))
    tl.store(p_move + 4, tl.load(p_columns + 7))
    tl.store(p_move + 5, tl.where(usable, scale, DAMPING))
    # The mean, of which the differences say nothing, moves as in a plain update.
    tl.store(p_move + 6, tl.where(usable, (DAMPING - scale) * tl.load(p_columns + 8), 0.0))
    tl.store(p_move + 7, changes.to(tl.float64))
    tl.store(p_move + 8, extrapolation)
    tl.store(p_weights, tl.where(usable[:, None], steps, 0.0))
    tl.store(p_weights + MEMORY, tl.where(usable[:, None], falls_weights, 0.0))


def state_width(memory: int) -> int:
    """Numbers of a state, with so many remembered differences."""
    return TRUST + memory_width(memory)


def constants_of(
    memory: int, damping: float, symmetric: bool, limits: Limits, block: int
) -> dict[str, float]:
    """What the kernel is compiled for; arguments as for `segmented_decision`."""
    return {
        "SELF": symmetric,
        "DAMPING": damping,
        **{name.upper(): value for name, value in limits._asdict().items()},
        "NUMBERS": NUMBERS,
        "MEMORY": memory,
        "WIDTH": state_width(memory),
        "TRUST": TRUST,
        "TERMS": TERMS,
        "MOVE": MOVE,
        "COSTS": COSTS,
        "BLOCK": block,
    }


def segmented_decision(
    evaluation: tuple[Tensor, Tensor],
    costs: Tensor,
    settings: Tensor,
    before: State,
    after: State,
    *,
    memory: int,
    damping: float,
    symmetric: bool,
    limits: Limits,
) -> Tensor:
    """Decide for all segments; returns their moves (S, 9 + 2 memory) float64.

    Args:
        evaluation: its numbers, (S, 2) of rows and (S, 14 + 4 memory) of columns.
        costs: (S, `COSTS`) float64, mean, spread, offset and errors of
            `engine.segments.Costs`.
        settings: (7,) float64, `engine.rule.Goal` and the unit roundoffs of
            potentials and of sums.
        before: the evaluation.
        after: it, overwritten.
        memory: remembered differences, a power of two.
        damping: the plain update is g + damping r.
        symmetric: whether rows are columns.
        limits: constants of the rules.
    """
    rows, columns = evaluation
    count = len(columns)
    move = costs.new_empty((count, MOVE + 2 * memory))
    states = (
        (state.active.view(torch.int8), state.level, state.numbers, state.terms)
        for state in (before, after)
    )
    block = BLOCK_ON_GPU if costs.is_cuda else BLOCK_IN_INTERPRETER
    segmented_decision_kernel[(triton.cdiv(count, block),)](
        count,
        rows,
        rows.stride(0),
        columns,
        costs,
        settings,
        *next(states),
        *next(states),
        move,
        **constants_of(memory, damping, symmetric, limits, block),
        num_warps=1,
    )
    return move
