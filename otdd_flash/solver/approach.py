"""Where a cross term starts from: levels of epsilon on the way down, and a sample of the points.

A small epsilon is approached through levels, each ended at a coarse marginal error and started from
the potentials of those before (Schmitzer 2019, Stabilized sparse scaling algorithms for entropy
regularized transport problems), unless the first iterations promise to do without.

A large problem is first solved between a sample of each side, at a small part of a pass an
iteration. Its potentials extend to all points by the softmin over its columns, which is defined
anywhere (Pooladian & Niles-Weed 2021, Entropic estimation of optimal transport maps):

    f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon),    j in the sample.

Weights as drawn, equal ones, save no iteration over those b_j.

A sample knows the potential down to an epsilon below which it has too few points near any other;
levels take over from there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.iteration import Enough, Iteration
from otdd_flash.solver.levels import (
    ITERATIONS_PER_LEVEL,
    LEVEL_TOLERANCE,
    Extrapolation,
    Outlook,
    levels_above,
)
from otdd_flash.solver.quasi_newton import Track, begin, restart

# The first level over the mean cost. Above it a solve takes a few steps from anywhere.
TOP = 0.1

# The same after a sample.
SAMPLED_TOP = 0.01

# Points of a side for one of its sample, and the fewest in that.
POINTS_PER_SAMPLED = 16
FEWEST = 256

# Scores for one between samples from which on they are worth their solve.
SCORES_PER_SAMPLED = 32

# What its solve may take.
SAMPLE_ITERATIONS = 200

# Exponents below which a float32 holds nothing.
UNSEEN = 200


class Sample(NamedTuple):
    """Some points of both sides, each with the same mass: (k,) rows and (l,) columns, int64."""

    rows: Tensor
    columns: Tensor


def approach(solve: Iteration, operator: Operator) -> tuple[Track, float]:
    """A point near the solution, from nothing.

    Args:
        solve: whose iterations are taken; it may converge.
        operator: the cost (n, m) and the masses.

    Returns:
        Where to go on at the final epsilon, and the passes between samples, in units of n m.
    """
    sample = draw_sample(operator) if solve.left() > 0 else None
    if sample is None:
        return _try_or_descend(solve, operator), 0.0
    level = max(solve.epsilon, SAMPLED_TOP * _scale(operator))
    g, passes = _of_sample(solve, operator, sample, level)
    f = operator.softmin_rows(g, level)
    track = begin(f, operator.softmin_columns(f, level))
    solve.iterations += 1
    return _descend(solve, operator, track, levels_above(solve.epsilon, level)), passes


def draw_sample(operator: Operator) -> Sample | None:
    """One point of each equal share of the mass, on both sides; None if that does not pay."""
    n, m = operator.shape
    rows, columns = (min(size, max(FEWEST, size // POINTS_PER_SAMPLED)) for size in (n, m))
    if operator.short_passes or SCORES_PER_SAMPLED * rows * columns > n * m:
        return None
    draw = torch.Generator().manual_seed(0)
    return Sample(_drawn(operator.a, rows, draw), _drawn(operator.b, columns, draw))


def _drawn(masses: Tensor, count: int, draw: torch.Generator) -> Tensor:
    shares = torch.arange(count) + torch.rand(count, generator=draw, dtype=torch.float64)
    places = (shares / count).to(masses.device)
    return torch.searchsorted(masses.cumsum(0), places, right=True).clamp_max(len(masses) - 1)


def _of_sample(
    solve: Iteration, operator: Operator, sample: Sample, level: float
) -> tuple[Tensor, float]:
    """The column potential (m,) of a sample, absent elsewhere, and the passes that took."""
    sampled = operator.sample(*sample)
    # A width, so that rounding in a sample, where nothing is proved, is no reason to refuse.
    options = Converged(
        max_iterations=SAMPLE_ITERATIONS, bound_width=1.0, max_seconds=solve.options.max_seconds
    )
    coarse = Iteration(solve.name, solve.step, level, options, None)
    levels = levels_above(level, TOP * _scale(sampled))
    track = _descend(coarse, sampled, _nothing(sampled), levels)
    track = coarse.run(sampled, level, track, _reaches(LEVEL_TOLERANCE))
    g = _absent(operator, level, track.updated).expand(len(operator.b)).clone()
    g[sample.columns] = track.updated
    part = len(sample.rows) * len(sample.columns) / (operator.shape[0] * operator.shape[1])
    return g, 2 * coarse.iterations * part


def _try_or_descend(solve: Iteration, operator: Operator) -> Track:
    """Some iterations at the final epsilon, and if they promise too little, levels."""
    track = _nothing(operator)
    levels = levels_above(solve.epsilon, TOP * _scale(operator))
    if not levels:
        return track
    outlook = Outlook(solve.tolerance, most=ITERATIONS_PER_LEVEL * len(levels))
    track = solve.run(operator, solve.epsilon, track, outlook.poor)
    if solve.converged:
        return track
    return _descend(solve, operator, begin(track.f, track.updated), levels)


def _descend(solve: Iteration, operator: Operator, track: Track, levels: list[float]) -> Track:
    """Solve every level roughly, from the levels before."""
    enough, path = _reaches(max(LEVEL_TOLERANCE, solve.tolerance)), Extrapolation()
    for level, following in pairwise([*levels, solve.epsilon]):
        track = solve.run(operator, level, track, enough)
        path.add(level, track.updated)
        track = restart(track, path.at(following))
    return track


def _nothing(operator: Operator) -> Track:
    a, b = operator.a, operator.b
    return begin(*(torch.zeros_like(side, dtype=operator.dtype) for side in (a, b)))


def _scale(operator: Operator) -> float:
    """The mean cost, above the lowest one if that is negative."""
    return operator.mean_cost - min(0.0, operator.cost_range.lowest)


def _reaches(tolerance: float) -> Enough:
    return lambda _, error: error <= tolerance


def _absent(operator: Operator, level: float, present: Tensor) -> Tensor:
    """Stands for a potential of -inf beside those of a sample (l,): finite, and without weight.

    Whatever the costs, such a column is more than UNSEEN levels worse for a row than any with the
    highest of these potentials. The size of costs and level is all that this goes by: in any other
    unit the potential could be out of the range of floats, or one that counts.
    """
    lowest, highest = operator.cost_range
    most = torch.finfo(operator.dtype).max / 2
    return present.max() - min(highest - lowest + UNSEEN * level, most)
