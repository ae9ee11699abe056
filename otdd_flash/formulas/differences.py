"""L-BFGS in compact form: the quasi-Newton step from inner products of the stored pairs alone.

With steps s of the candidates and their residual differences y in the metric of the masses, as the
columns of S and Y,

    H r = c r + [S, c Y] [[R^-T (D + c Y^T Y) R^-1, -R^-T], [-R^-1, 0]] [S, c Y]^T r,

R_ij = s_i^T y_j for steps s_i no newer than y_j and 0 for the others, D its diagonal and c = tr D /
tr Y^T Y (Byrd, Nocedal & Schnabel 1994, Representations of quasi-Newton matrices). The latest pairs
(s, y) are stored in a fixed number of slots, and a new pair replaces the oldest one.

R^-1 is stored and updated, so that no system is solved. In order of age R is upper triangular.
Without the oldest pair R loses its first row and column, and the inverse of the rest is R^-1
without its first row and column. With a new pair R gains a last column (p, d), and

    [[R, p], [0, d]]^-1 = [[R^-1, -R^-1 p / d], [0, 1 / d]],    p = S^T y, d = s^T y.

In memory the rows and columns of R^-1 stand in the order of the slots, not of age.

`advance` does this for many problems in tensors (`engine.quasi_newton`), and is compiled for a
kernel (`kernels.segments.decision`). `OneMemory` does it for one problem in lists
(`engine.few_problems`): on a CPU a loop over 64 floats takes as long as two operations of PyTorch,
of which there are thirty here, and `math.fsum` adds exactly. A change must be made in both
(`tests/engine/test_few_problems.py` compares them), and one of the fields of `Memory` also in the
kernel, which stores them by their places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.formulas import operations as ops
from otdd_flash.formulas.evidence import Evaluation, Products, at_least
from otdd_flash.formulas.operations import Numbers

INFINITY = math.inf


class Memory(NamedTuple):
    """The L-BFGS memory of S problems: inner products of the stored pairs; empty slots are 0.

    Attributes:
        slot: (S,), the slot that the next pair goes to, a whole number.
        inverse: R^-1, (S, memory, memory).
        squares: Y^T Y, (S, memory, memory).
        curvatures: D, (S, memory).
    """

    slot: Any
    inverse: Any
    squares: Any
    curvatures: Any


class Step(NamedTuple):
    """The step to the next candidate, in the coefficients of `engine.problems.Move`.

    Attributes:
        learnt: whether the newest pair is stored, (S,) bool.
        scale: (S,), coefficient of the residual.
        shift: (S,), coefficient of the constant vector.
        weights: coefficients of the stored pairs, (S, memory) each; or those of one problem in a
            list, steps first, which is empty for a plain update.
    """

    learnt: Numbers
    scale: Numbers
    shift: Numbers
    weights: Any


class Direction(NamedTuple):
    """H r as scale r + sum_k weights_k v_k over the stored s and y; not finite without any."""

    scale: Any
    weights: Products


def empty_memory(like: Tensor, memory: int) -> Memory:
    """Return an empty memory of so many slots for the S problems of a tensor (S,)."""
    square = like.new_zeros((len(like), memory, memory))
    return Memory(torch.zeros_like(like, dtype=torch.int64), square, square, square[:, 0])


# The functions down to `direction` are compiled for kernels as well.


def advance(
    memory: Memory,
    slots: Any,
    found: Evaluation,
    started: Any,
    plain: Any,
    rounding: Any,
    damping: float,
) -> tuple[Memory, Step]:
    """Store the newest pair (s, y) where its curvature exceeds rounding, and choose the next step.

    Args:
        memory: before the evaluation.
        slots: (1, memory), numbers of slots from 0 on.
        found: the evaluation.
        started: whether there is a newest pair (S,).
        plain: whether the next step is a plain update (S,).
        rounding: typical rounding error of a single softmin (S,).
        damping: the plain update is g + damping r.
    """
    curvature = found.step_difference - found.mean_step * found.mean_difference
    learnt = started & is_sound(found, curvature, rounding)
    newest = slots == ops.where(learnt, memory.slot, -1)[:, None]
    following = ops.where(memory.slot == slots.shape[1] - 1, 0, memory.slot + 1)
    slot = ops.where(learnt, following, memory.slot)
    learned = learn(memory, newest, found, curvature)
    inverse, squares, curvatures = learned
    # A plain update follows a rejected step, so that r is that of this evaluation here.
    mean = found.mean_residual
    step_residual = found.step_residual - found.mean_step * mean
    difference_residual = found.difference_residual - found.mean_difference * mean
    remembered = found.remembered_residual
    steps = ops.where(newest, step_residual[:, None], remembered.steps)
    differences = ops.where(newest, difference_residual[:, None], remembered.differences)
    memory = Memory(slot, inverse, squares, curvatures)
    scale, weights = direction(memory, slots, steps, differences)
    sizes = ops.abs(weights.steps) + ops.abs(weights.differences)
    usable = (plain == 0) & (ops.abs(scale) + ops.sum(sizes, 1) < INFINITY)
    # The pairs have mean zero: along constants the step is a plain update.
    shift = ops.where(usable, (damping - scale) * mean, 0.0)
    weights = Products(
        ops.where(usable[:, None], weights.steps, 0.0),
        ops.where(usable[:, None], weights.differences, 0.0),
    )
    return memory, Step(learnt, ops.where(usable, scale, damping), shift, weights)


def is_sound(found: Evaluation, curvature: Numbers, rounding: Numbers) -> Numbers:
    """Return whether the curvature s^T y of the newest pair exceeds rounding."""
    square = found.step_step - found.mean_step * found.mean_step
    return (curvature > rounding * ops.sqrt(at_least(square, 0.0))) & (curvature < INFINITY)


def learn(memory: Memory, newest: Any, found: Evaluation, curvature: Any) -> tuple[Any, Any, Any]:
    """Return R^-1, Y^T Y and D with the newest pair stored in a slot, (S, memory) bool, if any."""
    square = found.difference_difference - found.mean_difference * found.mean_difference
    remembered = found.remembered_differences
    steps = ops.where(newest, curvature[:, None], remembered.steps)
    differences = ops.where(newest, square[:, None], remembered.differences)
    row, column = newest[:, :, None], newest[:, None, :]
    inverse = ops.where(row | column, 0.0, memory.inverse)
    last = ops.where(newest, 1.0, -ops.sum(inverse * steps[:, None, :], 2)) / curvature[:, None]
    inverse = ops.where(column, last[:, :, None], inverse)
    squares = ops.where(row, differences[:, None, :], memory.squares)
    squares = ops.where(column, differences[:, :, None], squares)
    return inverse, squares, ops.where(newest, steps, memory.curvatures)


def direction(memory: Memory, slots: Any, steps: Any, differences: Any) -> Direction:
    """Return H r, given the products (S, memory) of r with steps and residual differences."""
    inverse, squares, curvatures = memory.inverse, memory.squares, memory.curvatures
    diagonal = ops.where(slots[:, :, None] == slots[:, None, :], squares, 0.0)
    scale = ops.sum(curvatures, 1) / ops.sum(ops.sum(diagonal, 2), 1)
    inner = ops.sum(inverse * steps[:, None, :], 2)
    outer = ops.sum(squares * inner[:, None, :], 2) - differences
    outer = scale[:, None] * outer + curvatures * inner
    outer = ops.sum(inverse * outer[:, :, None], 1)
    return Direction(scale, Products(outer, -scale[:, None] * inner))


# The same for one problem on a CPU.


class OneMemory:
    """The L-BFGS memory of one problem; `Memory` is that of many.

    Attributes:
        slot: the slot that the next pair goes to.
    """

    def __init__(self, memory: int) -> None:
        self._inverse = [[0.0] * memory for _ in range(memory)]
        self._squares = [[0.0] * memory for _ in range(memory)]
        self._curvatures, self.slot = [0.0] * memory, 0

    def advance(
        self, found: Evaluation, started: bool, plain: bool, rounding: float, damping: float
    ) -> Step:
        """Store the newest pair and choose the next step; arguments as for `advance` of many."""
        slot, mean = self.slot, found.mean_residual
        steps, differences = map(list, found.remembered_residual)
        curvature = found.step_difference - found.mean_step * found.mean_difference
        learnt = started and is_sound(found, curvature, rounding)
        if learnt:
            self._learn(found, curvature)
            steps[slot] = found.step_residual - found.mean_step * mean
            differences[slot] = found.difference_residual - found.mean_difference * mean
            self.slot = (slot + 1) % len(steps)
        scale, weights = self._direction(steps, differences)
        if plain or not all(map(math.isfinite, (scale, *weights))):
            return Step(learnt, damping, 0.0, [])
        return Step(learnt, scale, (damping - scale) * mean, weights)

    def _learn(self, found: Evaluation, curvature: float) -> None:
        """Store the newest pair in its slot."""
        slot, (steps, differences) = self.slot, map(list, found.remembered_differences)
        mean = found.mean_difference
        steps[slot], differences[slot] = curvature, found.difference_difference - mean * mean
        for k, row in enumerate(self._inverse):
            row[slot] = 0.0
            if k == slot:
                row[:] = [0.0] * len(row)
        last = [-_dot(row, steps) / curvature for row in self._inverse]
        last[slot] = 1 / curvature
        for k, row in enumerate(self._inverse):
            row[slot] = last[k]
            self._squares[k][slot] = differences[k]
        self._squares[slot] = differences
        self._curvatures[slot] = curvature

    def _direction(self, steps: list[float], differences: list[float]) -> tuple[float, list[float]]:
        """Return scale and weights of H r, given the products of r."""
        squares = _sum(row[k] for k, row in enumerate(self._squares))
        if not squares:
            return math.nan, []
        scale = _sum(self._curvatures) / squares
        inner = [_dot(row, steps) for row in self._inverse]
        outer = [
            scale * (_dot(row, inner) - difference) + bend * part
            for row, difference, bend, part in zip(
                self._squares, differences, self._curvatures, inner, strict=True
            )
        ]
        outer = [_dot(column, outer) for column in zip(*self._inverse, strict=True)]
        return scale, outer + [-scale * part for part in inner]


def _dot(one: tuple[float, ...] | list[float], other: list[float]) -> float:
    return _sum(map(mul, one, other))


def _sum(values: Iterable[float]) -> float:
    """Add up numbers; NaN where a sum overflows, or infinities of both signs meet."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
