"""Where a cross term starts from: levels of epsilon on the way down, and a sample of the points.

A small epsilon is approached through levels, each ended at a coarse marginal error and started from
the potentials of those before (Schmitzer 2019, Stabilized sparse scaling algorithms for entropy
regularized transport problems), unless the first iterations promise to do without.

A large problem is first solved between a sample of each side, at a small part of a pass an
iteration. Its potentials extend to all points by the softmin over its columns, which is defined
anywhere (Pooladian & Niles-Weed 2021, Entropic estimation of optimal transport maps):

    f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon),    j in the sample.

The masses b_j in this softmin are the original ones. Equal masses for all sampled points were tried
and saved no iterations.

The smaller epsilon is, the nearer are the points that decide a potential. Below some epsilon a
sample has too few points near any other to tell it; from there on levels with all points follow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.evidence.evaluated import CROSS
from otdd_flash.engine.evidence.oscillation import MOST_ERROR
from otdd_flash.engine.levels import LEVEL_TOLERANCE, Levels, first_level
from otdd_flash.engine.rule import Goal, Start
from otdd_flash.engine.run import run_one
from otdd_flash.operators.base import Operator
from otdd_flash.operators.one_segment import OneSegment
from otdd_flash.solver.term.iteration import Iteration

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
