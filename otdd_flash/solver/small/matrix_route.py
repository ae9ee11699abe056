"""Whether a given cost matrix is solved in kept CUDA graphs, and its term from there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from otdd_flash.kernels.matrix.place import is_aligned, numbers_of
from otdd_flash.kernels.matrix.sweep import MOST_COLUMNS
from otdd_flash.operators.matrix_kernel import MatrixKernelOperator
from otdd_flash.operators.score_pool import Room
from otdd_flash.solver.divergence import Potentials
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.small.pooled_solve import GivenCosts, kept
from otdd_flash.solver.small.route import padded, solve_single
from otdd_flash.solver.term.result import SolverProgress, TransportTerm

if TYPE_CHECKING:
    from otdd_flash.solver.matrix_comparison import MatrixComparison


def is_recorded_matrix(comparison: MatrixComparison, options: Converged) -> bool:
    """Whether a matrix is solved in recordings that read it where it is.

    Not with self costs, forbidden pairs, a width to reach or a time limit, and not where a sweep
    cannot hold a row.
    """
    if comparison.self_costs is not None:
        return False
    if options.bound_width is not None or options.max_seconds is not None:
        return False
    held = (
        comparison.in_triton
        and comparison.device.type == "cuda"
        and comparison.facts.partners is None
    )
    return held and _lines(comparison)[0].shape[1] <= MOST_COLUMNS


def matrix_room(lines: Tensor) -> Room:
    """A room for costs (n, m) whose rows are contiguous."""
    n, m = (padded(size) for size in lines.shape)
    return Room(1, n, m, 0, 1, lines.dtype, lines.device, aligned=is_aligned(lines))


def _lines(comparison: MatrixComparison) -> tuple[Tensor, bool]:
    """Costs with contiguous rows, and whether they are the transpose."""
    operator = comparison.operator("xy")
    assert isinstance(operator, MatrixKernelOperator)
    return operator.lines, operator.transposed


def solve_recorded_matrix(
    comparison: MatrixComparison,
    epsilon: float,
    options: Converged,
    *,
    start: Potentials | None = None,
    progress: SolverProgress | None = None,
) -> TransportTerm | None:
    """The cross term of a given matrix, or None where it needs another solve.

    An iteration reads whole contiguous rows: where columns are contiguous the transpose is solved.

    Args:
        comparison: for which `is_recorded_matrix` holds.
        epsilon: regularisation, in units of the cost.
        options: when to stop.
        start: {"xy": g (m,)} to start from, or nothing.
        progress: as for `solve_small`.

    Raises:
        InputError: rounding alone exceeds the tolerance at this epsilon and precision.
    """
    facts, (lines, transposed) = comparison.facts, _lines(comparison)
    masses, magnitudes = (comparison.a, comparison.b), facts.magnitudes
    if transposed:
        masses, magnitudes = masses[::-1], magnitudes[::-1]
        start = {
            name: comparison.operator("xy").softmin_rows(g, epsilon)
            for name, g in (start or {}).items()
        }
    batch = GivenCosts(lines, masses, magnitudes, numbers_of(lines))
    with kept(matrix_room(lines), False) as solve:
        small = solve_single(
            solve,
            batch,
            (facts.mean, *facts.range),
            epsilon,
            options,
            known=comparison.torch_operator("xy").costs,
            start=start,
            progress=progress,
        )
    if small is None:
        return None
    term = small.terms["xy"]
    return replace(term, f=term.g, g=term.f) if transposed else term
