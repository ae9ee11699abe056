"""Whether a cost matrix that is given is solved for in recordings, and how."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from otdd_flash.kernels.matrix.place import is_aligned
from otdd_flash.kernels.matrix.rough import rough_unit
from otdd_flash.kernels.matrix.sweep import MOST_COLUMNS
from otdd_flash.operators.matrix_kernel import MatrixKernelOperator
from otdd_flash.operators.memory import holds, stated_budget
from otdd_flash.operators.score_pool import Room
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.small.exchanged import GivenCosts
from otdd_flash.solver.small.kept_solves import kept
from otdd_flash.solver.small.route import padded
from otdd_flash.solver.small.single import Roughly, SingleSolve
from otdd_flash.solver.term.result import Progress, TransportTerm
from otdd_flash.solver.term_solves import Potentials

if TYPE_CHECKING:
    from otdd_flash.solver.matrix.problem import MatrixProblem

# Bytes of costs in float32 from which on a copy in float16 may pay: they exceed a cache.
LEAST_COPIED = 1 << 26
# What the rounding of the largest cost of a copy may be, over epsilon, and the tolerance of its
# iterations over that: roundings of many pairs of a point even out.
MOST_ROUNDING, ROUGH_TOLERANCE = 0.25, 2.0**-7


def is_recorded_matrix(problem: MatrixProblem, options: Converged) -> bool:
    """Whether costs that are given are solved for in recordings, where they are."""
    if problem.self_costs is not None:
        return False
    if options.bound_width is not None or options.max_seconds is not None:
        return False
    held = problem.in_triton and problem.device.type == "cuda" and problem.facts.partners is None
    return held and _lines(problem)[0].shape[1] <= MOST_COLUMNS


def matrix_room(lines: Tensor) -> Room:
    """A room for costs whose rows are contiguous."""
    n, m = (padded(size) for size in lines.shape)
    return Room(1, n, m, 0, 1, lines.dtype, lines.device, is_aligned(lines))


def _lines(problem: MatrixProblem) -> tuple[Tensor, bool]:
    """Costs with contiguous rows, and whether they are the transpose."""
    operator = problem.operator
    assert isinstance(operator, MatrixKernelOperator)
    return operator.lines, operator.turned


def solve_recorded_matrix(
    problem: MatrixProblem,
    epsilon: float,
    options: Converged,
    *,
    start: Potentials | None = None,
    progress: Progress | None = None,
) -> TransportTerm | None:
    """The term of costs that are given, or None where it needs another solve.

    Where columns of the costs are contiguous the transpose is solved, as an iteration reads whole
    rows.

    Args:
        problem: for which `is_recorded_matrix` holds.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: potentials to start from, by term.
        progress: as for `solve_small`.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    facts, (lines, turned) = problem.facts, _lines(problem)
    masses, magnitudes = (problem.a, problem.b), facts.magnitudes
    if turned:
        masses, magnitudes = masses[::-1], magnitudes[::-1]
        start = {
            name: problem.operator.softmin_rows(g, epsilon) for name, g in (start or {}).items()
        }
    batch = GivenCosts(lines, masses, magnitudes)
    with kept(matrix_room(lines), False) as solve:
        small = SingleSolve(solve, batch.sizes, epsilon, options, problem.tiles.costs)
        roughly = _roughly(problem, lines, epsilon)
        terms = small.solved(batch, (facts.mean, *facts.range), start, progress, roughly)
    if terms is None:
        return None
    term = terms["xy"]
    return replace(term, f=term.g, g=term.f) if turned else term


def _roughly(problem: MatrixProblem, lines: Tensor, epsilon: float) -> Roughly | None:
    """How to iterate on a copy of the costs in float16; None where that is no good.

    It takes as long as one and a half iterations to make, and half as long to read. Its rounding
    has to leave the plan what it is, about.
    """
    compute, spread = problem.compute, problem.operator.costs.spread
    size = lines.numel() * lines.itemsize
    if compute.precision != "fast" or lines.dtype != torch.float32 or size < LEAST_COPIED:
        return None
    rounding = torch.finfo(torch.float16).eps / 2 * spread
    if spread <= 0 or rounding > MOST_ROUNDING * epsilon:
        return None
    if not holds(size // 2, stated_budget(compute.memory_budget), lines.device):
        return None
    return Roughly(rough_unit(spread), ROUGH_TOLERANCE * rounding / epsilon)
