"""What an iteration of `solver.segmented_quasi_newton` decides for every segment, in one launch.

From the numbers of a look: the dual value and its certified bounds, whether the potentials are
kept, whether their differences are remembered, whether the segment falls to the next level of
epsilon or is done, and the move

    g + scale r + shift + sum_k weights_k remembered_k

to the next candidate. The rules are those of `trust` and `segmented_differences`.

Shapes: looks (S, 2) and (S, 14 + 4 MEMORY) as in `operators.segments.Look`, moves (S, 7 + 2 MEMORY)
as in `Move`, terms (S, 6) as in `solver.segmented.SegmentTerms`, all float64. A segment stands at
its level of epsilon and at `state_width` numbers,

    iterations,  dual, gain, lowest, stale, plain, penalty,  gap, dual, age,  slot, R^-1, Y^T Y, D,

the first six of trust, the next three of progress.

One lane per segment, as all of them do the same with few numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.evidence import COSTS, evaluate
from otdd_flash.kernels.segmented_differences import learn_and_direct, memory_width
from otdd_flash.kernels.segmented_look import NUMBERS
from otdd_flash.kernels.trust import judge

# Numbers of a state before those remembered, of terms, and of a move before its weights.
TRUST, TERMS, MOVE = 10, 6, 7

# Segments of a program.
BLOCK = 8


class Limits(NamedTuple):
    """Constants of the rules, as they are called in the solver."""

    dual_rounding: float
    growth: float
    patience: float
    stalled: float
    stalled_floors: float
    fallen: float
    trifle: float
    value_trifle: float
    most_error: float


class Standing(NamedTuple):
    """Where segments stand before a look, float64.

    Attributes:
        level: (S,) epsilon to look at.
        state: (S, `state_width`).
    """

    level: Tensor
    state: Tensor


class Decision(NamedTuple):
    """What is decided for all segments.

    Attributes:
        done: (S,) bool.
        terms: (S, 6) float64.
        move: (S, 7 + 2 MEMORY) float64.
        standing: before the next look.
    """

    done: Tensor
    terms: Tensor
    move: Tensor
    standing: Standing


@triton.jit
def update_progress(gap, dual, slack, restarted, p_progress, p_new_progress, FALLEN: tl.constexpr):
    """Iterations since the marginal error fell or the dual rose."""
    last_gap, last_dual = tl.load(p_progress), tl.load(p_progress + 1)
    fallen, risen = gap <= FALLEN * last_gap, dual > last_dual + slack
    age = tl.where(fallen | risen, 0.0, tl.load(p_progress + 2) + 1)
    new_gap, new_dual = tl.where(fallen, gap, last_gap), tl.where(risen, dual, last_dual)
    tl.store(p_new_progress, tl.where(restarted, float("inf"), new_gap))
    tl.store(p_new_progress + 1, tl.where(restarted, -float("inf"), new_dual))
    tl.store(p_new_progress + 2, tl.where(restarted, 0.0, age))
    return age


@triton.jit
def update_trust(
    dual,
    gain,
    gap,
    slack,
    restarted,  # whether trust starts afresh afterwards
    p_trust,  # (6,) dual, gain, lowest, stale, plain, penalty
    p_new_trust,  # (6,), overwritten
    GROWTH: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """Whether the potentials are kept, and plain updates to come."""
    last_dual, last_gain = tl.load(p_trust), tl.load(p_trust + 1)
    kept, lowest, stale, plain, penalty = judge(
        dual, gap, slack, last_dual, last_gain,
        tl.load(p_trust + 2), tl.load(p_trust + 3), tl.load(p_trust + 4), tl.load(p_trust + 5),
        GROWTH, PATIENCE,
    )  # fmt: skip
    tl.store(p_new_trust, tl.where(restarted, -float("inf"), tl.where(kept, dual, last_dual)))
    tl.store(p_new_trust + 1, tl.where(restarted, 0.0, tl.where(kept, gain, last_gain)))
    tl.store(p_new_trust + 2, tl.where(restarted, float("inf"), lowest))
    tl.store(p_new_trust + 3, tl.where(restarted, 0.0, stale))
    tl.store(p_new_trust + 4, tl.where(restarted, 0.0, plain))
    tl.store(p_new_trust + 5, tl.where(restarted, 1.0, penalty))
    return kept, plain


# A number of segments that the kernel was compiled for would change their bits.
@triton.jit(do_not_specialize=["count"])
def segmented_decision_kernel(
    count,
    rows_ptr,  # (S, 2) float64, of this stride
    row_stride,
    columns_ptr,  # (S, NUMBERS + 4 MEMORY) float64
    costs_ptr,  # (S, COSTS) float64: mean, spread, offset, errors of passes
    settings_ptr,  # (6,) float64
    level_ptr,  # (S,) float64
    state_ptr,  # (S, WIDTH) float64
    done_ptr,  # (S,) int8
    terms_ptr,  # (S, TERMS) float64
    move_ptr,  # (S, MOVE + 2 MEMORY) float64
    new_level_ptr,  # (S,) float64
    new_state_ptr,  # (S, WIDTH) float64
    SELF: tl.constexpr,
    DAMPING: tl.constexpr,
    DUAL_ROUNDING: tl.constexpr,
    GROWTH: tl.constexpr,
    PATIENCE: tl.constexpr,
    STALLED: tl.constexpr,
    STALLED_FLOORS: tl.constexpr,
    FALLEN: tl.constexpr,
    TRIFLE: tl.constexpr,
    VALUE_TRIFLE: tl.constexpr,
    MOST_ERROR: tl.constexpr,
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
    final_epsilon, tolerance = tl.load(settings_ptr), tl.load(settings_ptr + 1)
    level_tolerance, max_iterations = tl.load(settings_ptr + 2), tl.load(settings_ptr + 3)
    unit, unit_of_sums = tl.load(settings_ptr + 4), tl.load(settings_ptr + 5)
    epsilon, iterations = tl.load(level_ptr + i_segment), tl.load(p_state) + 1
    gap, mean_residual = tl.load(p_columns + 4), tl.load(p_columns + 8)
    dual, gain, noise, floor, value, lower, upper, error = evaluate(
        p_rows, p_columns, p_costs, epsilon, unit, unit_of_sums,
        SELF, TRIFLE, VALUE_TRIFLE, MOST_ERROR,
    )  # fmt: skip
    final = epsilon <= final_epsilon
    falls = (epsilon > final_epsilon) & (error <= level_tolerance)
    # Only the last g that was kept at this level has a residual to compare with.
    started = tl.abs(tl.load(p_state + 1)) < float("inf")
    kept, plain = update_trust(
        dual, gain, gap, DUAL_ROUNDING * (epsilon * noise), falls, p_state + 1, p_new_state + 1,
        GROWTH, PATIENCE,
    )  # fmt: skip
    age = update_progress(
        gap, dual, DUAL_ROUNDING * (epsilon * noise), falls, p_state + 7, p_new_state + 7, FALLEN
    )
    stalled = (age >= STALLED) & (gap <= STALLED_FLOORS * floor)
    # Where rounding alone exceeds the tolerance there is nothing to wait for.
    hopeless = 2 * floor > tolerance
    last = iterations >= max_iterations
    done = final & (last | (error <= tolerance) | hopeless | stalled)
    level = tl.maximum(tl.where(falls, epsilon / 2, epsilon), final_epsilon)
    level = tl.where(iterations + 1 >= max_iterations, final_epsilon, level)
    tl.store(done_ptr + i_segment, done.to(tl.int8))
    tl.store(new_level_ptr + i_segment, level)
    tl.store(p_new_state, iterations)

    p_terms = terms_ptr + TERMS * i_segment
    tl.store(p_terms, value)
    tl.store(p_terms + 1, lower)
    tl.store(p_terms + 2, upper)
    tl.store(p_terms + 3, error)
    tl.store(p_terms + 4, tl.where(stalled, error, floor))
    tl.store(p_terms + 5, iterations)

    sound, scale, steps, falls_weights = learn_and_direct(
        p_columns + 6, p_columns + NUMBERS, started, epsilon * noise,
        p_state + TRUST, p_new_state + TRUST, MEMORY,
    )  # fmt: skip
    largest = tl.abs(scale) + tl.sum(tl.abs(steps) + tl.abs(falls_weights), 1)
    ends = done | falls
    usable = (plain <= 0) & (ends == 0) & (largest < float("inf"))
    p_move = move_ptr + (MOVE + 2 * MEMORY) * i_segment
    p_weights = p_move[:, None] + (MOVE + tl.arange(0, MEMORY))[None, :]
    tl.store(p_move, (kept | ends).to(tl.float64))
    tl.store(p_move + 1, sound.to(tl.float64))
    tl.store(p_move + 2, tl.load(p_state + TRUST))
    tl.store(p_move + 3, tl.load(p_columns + 6))
    tl.store(p_move + 4, tl.load(p_columns + 7))
    tl.store(p_move + 5, tl.where(usable, scale, DAMPING))
    # The mean, of which the differences say nothing, moves as in a plain update.
    tl.store(p_move + 6, tl.where(usable, (DAMPING - scale) * mean_residual, 0.0))
    tl.store(p_weights, tl.where(usable[:, None], steps, 0.0))
    tl.store(p_weights + MEMORY, tl.where(usable[:, None], falls_weights, 0.0))


def state_width(memory: int) -> int:
    """Numbers of a state, with so many remembered differences."""
    return TRUST + memory_width(memory)


def constants_of(memory: int, damping: float, symmetric: bool, limits: Limits) -> dict[str, float]:
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
        "BLOCK": BLOCK,
    }


def segmented_decision(
    seen: tuple[Tensor, Tensor],
    costs: Tensor,
    settings: Tensor,
    standing: Standing,
    *,
    memory: int,
    damping: float,
    symmetric: bool,
    limits: Limits,
) -> Decision:
    """Decide for all segments.

    Args:
        seen: the numbers of a look, (S, 2) of rows and (S, 14 + 4 memory) of columns.
        costs: (S, `COSTS`) float64, mean, spread, offset and errors of
        `operators.segments.Segments`.
        settings: (6,) float64: the final epsilon, the tolerances there and above it, the most
            iterations, the unit roundoffs of potentials and of sums.
        standing: before the look.
        memory: remembered differences, a power of two.
        damping: the plain update is g + damping r.
        symmetric: whether rows are columns.
        limits: constants of the rules.
    """
    rows, columns = seen
    count, level = len(columns), standing.level
    done = torch.empty(count, dtype=torch.bool, device=level.device)
    terms, move = level.new_empty((count, TERMS)), level.new_empty((count, MOVE + 2 * memory))
    after = Standing(torch.empty_like(level), torch.empty_like(standing.state))
    segmented_decision_kernel[(triton.cdiv(count, BLOCK),)](
        count,
        rows,
        rows.stride(0),
        columns,
        costs,
        settings,
        *standing,
        done.view(torch.int8),
        terms,
        move,
        *after,
        **constants_of(memory, damping, symmetric, limits),
        num_warps=1,
    )
    return Decision(done, terms, move, after)
