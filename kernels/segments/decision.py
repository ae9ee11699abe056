"""Decisions of an iteration of `engine.quasi_newton` for every segment, and the moves that follow.

`engine.quasi_newton_kernels` calls `segmented_decision`, then `segmented_move`. A decision makes
from the numbers of an evaluation the dual value and its certified bounds, whether the potentials
are kept, whether their differences are remembered, whether the segment goes to the next level of
epsilon or is done, and the move

    g + scale r + shift + sum_k weights_k remembered_k

to the next candidate. The rules are those of `otdd_flash.formulas`, which `compiled` turns into
functions of a kernel; this file reads and writes their numbers.

Shapes: (S, 2) and (S, 14 + 4 memory) as in `formulas.evidence.Evaluation`, moves (S, 9 + 2 memory)
as in `engine.problems.Move`, terms (S, 8) as in `engine.problems.SegmentReport`, all float64. A
segment is at its level of epsilon and at `state_width` numbers,

    iterations,   dual, gain, lowest, stale, plain, penalty,   gap, dual, age,
    top, allowed, error, descended,   slot, R^-1, Y^T Y, D,

six of trust, three of progress and four of levels. Bounds on rounding are as `formulas.evidence`
derives them, from numbers of the passes that come with the costs.

With relaxed marginals an evaluation has the numbers that `segmented_evaluation` and
`segmented_softmin` describe, for updates that are not translated. The translation follows from them
here, and corrects the sums that hold r or y; it is the last number of a move before its weights.

One lane per segment, because all segments do the same with few numbers. The order of the numbers in
evaluations, states and moves must be the same in `segments.evaluation`,
`engine.quasi_newton_kernels` and the records of `formulas`. Decisions must be those of
`engine.quasi_newton` (`tests/engine/test_quasi_newton_kernels.py`).

`segmented_move` makes the next potentials to evaluate in all segments, as combinations of their
vectors, one program per block of columns of a segment. With the step s = g - g° and the residual
difference y = r° - r of an evaluation, less their means, as the newest remembered vectors where
they are learnt, and with (g°, r°) <- (g, r) where g is kept,

    h = g° + scale r° + shift + sum_k weights_k v_k,      v_k the remembered vectors,
    g <- h + extrapolation (h - level),

and level <- h where a level of epsilon ends. With relaxed marginals the translation, the last
number of a move before its weights, is subtracted from r. Columns without mass take h = g° + r°,
and none of their numbers is remembered.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.formulas import decision, differences, operations
from otdd_flash.formulas.decision import Goal, Levels, Progress, State, Trust
from otdd_flash.formulas.differences import Memory
from otdd_flash.formulas.evidence import CostNumbers, Evaluation, PassErrors, Products
from otdd_flash.kernels.launch import on_its_device
from otdd_flash.kernels.segments.evaluation import BLOCK, NUMBERS, RELAXED_NUMBERS, Vectors

# Numbers of a state before those remembered, of terms, and of costs: mean, spread, offset, errors.
TRUST, TERMS, COSTS = 14, 8, 12

# Segments of a program: one lane takes the time of many on a GPU, and one program that of many in
# the interpreter.
BLOCK_ON_GPU, BLOCK_IN_INTERPRETER = 1, 8


class SegmentState(NamedTuple):
    """The state of segments before an evaluation.

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


@cache
def globals_of(module: str) -> dict[str, Any]:
    """Return the first globals of the compiled functions of a module of formulas."""
    # The interpreter looks for the language among the globals.
    return {"__name__": module, "tl": tl}


@cache
def compiled(formula: FunctionType) -> Any:
    """Make a function of a kernel of a formula, and of all that it calls.

    Its text is compiled with other globals: `triton.language` in place of `operations`, and
    constants as a kernel takes them.
    """
    scope = globals_of(formula.__module__)
    # The compiler looks up names of annotations, for nothing. Triton compares globals at every
    # launch, but not modules.
    for name in formula.__annotations__.values():
        scope.setdefault(name, tl)
    for name in formula.__code__.co_names:
        value = formula.__globals__.get(name)
        if value is operations:
            scope[name] = tl
        elif isinstance(value, FunctionType):
            scope[name] = compiled(value)
        elif isinstance(value, int | float) and not triton.knobs.runtime.interpret:
            # To the interpreter all but tensors are constants.
            scope[name] = tl.constexpr(value)
        elif value is not None:
            scope[name] = value
    return triton.jit(FunctionType(formula.__code__, scope, formula.__name__))


decide, advance = compiled(decision.decide), compiled(differences.advance)


@triton.jit
def load_numbers(numbers, pointer, COUNT: tl.constexpr):
    """Add so many numbers in a row of each segment of a block to the end of a tuple."""
    for k in tl.static_range(COUNT):
        numbers = numbers + (tl.load(pointer + k),)  # noqa: RUF005
    return numbers


@triton.jit
def load_products(p_products, MEMORY: tl.constexpr):
    """The products of y and of r with the remembered vectors of each segment of a block."""
    of_difference = Products(tl.load(p_products), tl.load(p_products + MEMORY))
    p_products += 2 * MEMORY
    return of_difference, Products(tl.load(p_products), tl.load(p_products + MEMORY))


@triton.jit
def translated(found, owed_rows, owed_columns, left, softness, raised, SELF: tl.constexpr):
    """Numbers of an evaluation with relaxed marginals, after the translation t, and t.

    r is less by t, and y more, as the residual kept before has its own taken off. Products with
    remembered vectors stay: these have mean zero. A self term needs no translation.
    """
    t = tl.zeros_like(left)
    if not SELF:
        # Masses below 1e-300 translate as 1e-300 does.
        ratio = tl.maximum(owed_rows, 1e-300) / tl.maximum(left, 1e-300)
        t = tl.log(ratio) / softness
    step, difference, residual = found.mean_step, found.mean_difference, found.mean_residual
    squares = found.difference_difference + t * (2 * difference + t)
    of_difference = found.difference_residual + t * (residual - difference - t)
    infinite = tl.full(left.shape, float("inf"), tl.float64)
    gap = found.gap / tl.maximum(owed_columns, 1e-300)
    return Evaluation(
        found.row_value, found.row_size, found.value, found.size, -infinite, infinite,
        gap, found.mass, step, difference + t, residual - t,
        found.step_step, found.step_difference + t * step, squares,
        found.step_residual - t * step, of_difference,
        found.remembered_differences, found.remembered_residual, raised,
    ), t  # fmt: skip


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
    softness_ptr,  # (S, 2) float64, 1 / rho of rows and columns, read if RELAXED
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
    RELAXED: tl.constexpr,
    OF_MASS_ONE: tl.constexpr,
    DAMPING: tl.constexpr,
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
    p_terms, p_new_terms = terms_ptr + TERMS * i_segment, new_terms_ptr + TERMS * i_segment
    p_move = move_ptr + (MOVE + 2 * MEMORY) * i_segment
    i_slot = tl.arange(0, MEMORY)[None, :]  # (1, MEMORY)
    p_products = (p_columns + NUMBERS)[:, None] + i_slot  # (BLOCK, MEMORY)

    goal = Goal(*load_numbers((), settings_ptr, 5))
    costs = CostNumbers(
        tl.load(p_costs),
        tl.load(p_costs + 1),
        tl.load(p_costs + 2),
        PassErrors(*load_numbers((), p_costs + 3, 9)),
        tl.load(settings_ptr + 5),
        tl.load(settings_ptr + 6),
    )
    numbers = load_numbers(load_numbers((), p_rows, 2), p_columns, 14)
    # The update of exact marginals raises the dual value by the mean of the residual, number 10.
    raised = numbers[10]
    found = Evaluation(*numbers, *(load_products(p_products, MEMORY) + (raised,)))  # noqa: RUF005
    if RELAXED:
        p_softness = softness_ptr + 2 * i_segment
        softness = tl.load(p_softness) + tl.load(p_softness + 1)
        owed_rows = tl.load(p_rows + (0 if SELF else 2))
        owed_columns, left = tl.load(p_columns + 14), tl.load(p_columns + 16)
        found, translation = translated(
            found, owed_rows, owed_columns, left, softness, tl.load(p_columns + 15), SELF
        )
    active = tl.load(active_ptr + i_segment)
    now = active != 0
    state = State(
        tl.load(p_state) + now.to(tl.float64),
        Levels(tl.load(level_ptr + i_segment), *load_numbers((), p_state + 10, 4)),
        Trust(*load_numbers((), p_state + 1, 6)),
        Progress(*load_numbers((), p_state + 7, 3)),
    )

    decision = decide(goal, costs, state, found, OF_MASS_ONE)
    iterations, levels, trust, progress = decision.state
    tl.store(new_active_ptr + i_segment, tl.where(decision.done, 0, active).to(tl.int8))
    # The last iteration is at the final epsilon.
    last = iterations + 1 >= goal.max_iterations
    tl.store(new_level_ptr + i_segment, tl.where(last, goal.epsilon, levels.level))
    tl.store(p_new_state, iterations)
    for k in tl.static_range(6):
        tl.store(p_new_state + 1 + k, trust[k])
    for k in tl.static_range(3):
        tl.store(p_new_state + 7 + k, progress[k])
    for k in tl.static_range(4):
        tl.store(p_new_state + 10 + k, levels[k + 1])
    for k in tl.static_range(7):
        tl.store(p_new_terms + k, tl.where(now, decision.reported[k], tl.load(p_terms + k)))
    tl.store(p_new_terms + 7, tl.where(now & (decision.done == 0), 1.0, 0.0))

    p_memory, p_new_memory = p_state + TRUST, p_new_state + TRUST
    o_square = 1 + MEMORY * tl.arange(0, MEMORY)[None, :, None] + i_slot[:, None, :]
    o_squares, o_curvatures = o_square + MEMORY * MEMORY, 1 + 2 * MEMORY * MEMORY + i_slot
    slot = tl.load(p_memory)
    memory = Memory(
        slot.to(tl.int32),
        tl.load(p_memory[:, None, None] + o_square),  # (BLOCK, MEMORY, MEMORY)
        tl.load(p_memory[:, None, None] + o_squares),
        tl.load(p_memory[:, None] + o_curvatures),  # (BLOCK, MEMORY)
    )
    # Only the last g that was kept at this level has a residual to compare with.
    started = now & (tl.abs(state.trust.dual) < float("inf"))
    memory, step = advance(
        memory, i_slot, found, started, decision.plain, decision.rounding, DAMPING
    )
    tl.store(p_new_memory, memory.slot.to(tl.float64))
    tl.store(p_new_memory[:, None, None] + o_square, memory.inverse)
    tl.store(p_new_memory[:, None, None] + o_squares, memory.squares)
    tl.store(p_new_memory[:, None] + o_curvatures, memory.curvatures)

    tl.store(p_move, decision.kept.to(tl.float64))
    tl.store(p_move + 1, step.learnt.to(tl.float64))
    tl.store(p_move + 2, slot)
    tl.store(p_move + 3, found.mean_step)
    tl.store(p_move + 4, found.mean_difference)
    tl.store(p_move + 5, step.scale)
    tl.store(p_move + 6, step.shift)
    tl.store(p_move + 7, decision.changes.to(tl.float64))
    tl.store(p_move + 8, decision.extrapolation)
    if RELAXED:
        tl.store(p_move + 9, translation)
    p_weights = p_move[:, None] + (MOVE + i_slot)
    tl.store(p_weights, step.weights.steps)
    tl.store(p_weights + MEMORY, step.weights.differences)


def state_width(memory: int) -> int:
    """Return how many numbers a state has with so many remembered differences."""
    return TRUST + 1 + 2 * memory * memory + memory


def constants_of(
    memory: int, damping: float, symmetric: bool, block: int, *, relaxed: bool = False
) -> dict[str, float]:
    """Return the constants of the kernel; arguments as for `segmented_decision`."""
    return {
        "SELF": symmetric,
        "RELAXED": relaxed,
        "OF_MASS_ONE": symmetric and not relaxed,
        "DAMPING": damping,
        "NUMBERS": RELAXED_NUMBERS if relaxed else NUMBERS,
        "MEMORY": memory,
        "WIDTH": state_width(memory),
        "TRUST": TRUST,
        "TERMS": TERMS,
        "MOVE": RELAXED_MOVE if relaxed else MOVE,
        "COSTS": COSTS,
        "BLOCK": block,
    }


def segmented_decision(
    evaluation: tuple[Tensor, Tensor],
    costs: Tensor,
    settings: Tensor,
    before: SegmentState,
    after: SegmentState,
    *,
    memory: int,
    damping: float,
    symmetric: bool,
    softness: Tensor | None = None,
) -> Tensor:
    """Decide for all segments; return their moves, float64, as `segmented_move` takes them.

    Args:
        evaluation: its numbers, (S, 2) of rows and (S, 14 + 4 memory) of columns; with relaxed
            marginals 3 and 17 + 4 memory, but of rows still 2 where rows are columns.
        costs: (S, `COSTS`) float64, mean, spread, offset and errors of
            `engine.problems.Costs`.
        settings: (7,) float64, `formulas.decision.Goal` and the unit roundoffs of
            potentials and of sums.
        before: the state before the evaluation.
        after: the state after it, overwritten.
        memory: remembered differences, a power of two.
        damping: the plain update is g + damping r.
        symmetric: whether rows are columns.
        softness: (S, 2) float64, 1 / rho of rows and of columns; None where all are exact.
    """
    rows, columns = evaluation
    count = len(columns)
    relaxed = softness is not None
    move = costs.new_empty((count, (RELAXED_MOVE if relaxed else MOVE) + 2 * memory))
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
        settings if softness is None else softness,
        *next(states),
        *next(states),
        move,
        **constants_of(memory, damping, symmetric, block, relaxed=relaxed),
        num_warps=1,
    )
    return move


# Numbers of a move before its weights, and of one with relaxed marginals.
MOVE = 9
RELAXED_MOVE = 10


@on_its_device
@triton.jit
def segmented_move_kernel(
    masses_ptr,  # (n,) float64
    blocks_ptr,  # (programs, 2) int32: segment, and which of its blocks
    segments_ptr,  # (S, 8) int64, columns as rows
    active_ptr,  # (S,) int8
    move_ptr,  # (S, MOVE + VECTORS) float64
    candidate_ptr,  # (entries,) float32, overwritten
    fresh_ptr,  # (entries,) float32
    kept_ptr,  # (entries,) float32, overwritten
    residual_ptr,  # (entries,) float32, overwritten
    level_ptr,  # (entries,) float32, overwritten
    remembered_ptr,  # (VECTORS entries,) float32, overwritten
    RELAXED: tl.constexpr,
    MOVE: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of columns of a segment."""
    i_program = tl.program_id(0)
    i_segment = tl.load(blocks_ptr + 2 * i_program).to(tl.int64)
    p_segment = segments_ptr + 8 * i_segment
    start, columns, offset = (
        tl.load(p_segment), tl.load(p_segment + 1), tl.load(p_segment + 2)
    )  # fmt: skip
    o_column = tl.load(blocks_ptr + 2 * i_program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < tl.where(tl.load(active_ptr + i_segment) != 0, columns, 0)
    p_move = move_ptr + (MOVE + VECTORS) * i_segment
    is_kept, is_learnt, ends = (
        tl.load(p_move) != 0, tl.load(p_move + 1) != 0, tl.load(p_move + 7) != 0
    )  # fmt: skip
    # There is no vector of a negative number.
    slot = tl.where(is_learnt, tl.load(p_move + 2).to(tl.int32), -VECTORS)
    mean_step, mean_difference = (
        tl.load(p_move + 3).to(tl.float32),
        tl.load(p_move + 4).to(tl.float32),
    )
    scale, shift = tl.load(p_move + 5).to(tl.float32), tl.load(p_move + 6).to(tl.float32)
    extrapolation = tl.load(p_move + 8).to(tl.float32)
    i_vector = tl.arange(0, VECTORS)
    weights = tl.load(p_move + MOVE + i_vector).to(tl.float32)  # (VECTORS,)
    m_step = (i_vector == slot)[:, None]
    m_newest = m_step | (i_vector == slot + VECTORS // 2)[:, None]
    o_entry = offset + o_column
    m_mass = tl.load(masses_ptr + start + o_column, mask=m_column, other=0.0) > 0
    potential = tl.load(candidate_ptr + o_entry, mask=m_column, other=0.0)
    fresh = tl.load(fresh_ptr + o_entry, mask=m_column, other=0.0)
    if RELAXED:
        fresh -= tl.load(p_move + 9).to(tl.float32)
    kept = tl.load(kept_ptr + o_entry, mask=m_column, other=0.0)
    residual = tl.load(residual_ptr + o_entry, mask=m_column, other=0.0)
    level = tl.load(level_ptr + o_entry, mask=m_column, other=0.0)
    p_remembered = (
        remembered_ptr + VECTORS * offset + i_vector[:, None] * columns + o_column[None, :]
    )
    remembered = tl.load(p_remembered, mask=m_column[None, :], other=0.0)
    step = tl.where(m_mass, potential - kept - mean_step, 0.0)
    difference = tl.where(m_mass, residual - fresh - mean_difference, 0.0)
    newest = tl.where(m_step, step[None, :], difference[None, :])  # (VECTORS, BLOCK)
    tl.store(p_remembered, newest, mask=m_newest & m_column[None, :])
    remembered = tl.where(m_newest, newest, remembered)
    kept = tl.where(is_kept, potential, kept)
    residual = tl.where(is_kept, fresh, residual)
    tl.store(kept_ptr + o_entry, kept, mask=m_column)
    tl.store(residual_ptr + o_entry, residual, mask=m_column)
    combined = scale * residual + shift + tl.sum(remembered * weights[:, None], 0)
    moved = kept + tl.where(m_mass, combined, residual)
    tl.store(level_ptr + o_entry, tl.where(ends, moved, level), mask=m_column)
    tl.store(candidate_ptr + o_entry, moved + extrapolation * (moved - level), mask=m_column)


def segmented_move(
    masses: Tensor, blocks: Tensor, table: Tensor, active: Tensor, move: Tensor, vectors: Vectors
) -> None:
    """Move the candidates of all active segments.

    Args:
        masses: (n,) float64, of the pool.
        blocks: (P, 2) int32, of `blocks_of`.
        table: (S, 8) int64, as for `segmented_step`, with the columns as rows.
        active: (S,) bool, segments to work on.
        move: (S, 9 + 2 memory) float64, the numbers of `engine.problems.Move`; of relaxed marginals
            with a translation before the weights.
        vectors: of the columns; overwritten.
    """
    numbers = move.shape[1] - vectors.vectors
    segmented_move_kernel[(len(blocks),)](
        masses,
        blocks,
        table,
        active.view(torch.int8),
        move,
        *vectors,
        RELAXED=numbers == RELAXED_MOVE,
        MOVE=numbers,
        VECTORS=vectors.vectors,
        BLOCK=BLOCK,
    )
