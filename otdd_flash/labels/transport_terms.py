"""OT_epsilon between many pairs of classes, as segmented problems.

On a CUDA device Triton kernels iterate all pairs at once in float32; what float32 cannot bring to
the tolerance, and everything on other devices, is solved in float64 in PyTorch. Which way a pair
goes follows from its own classes, so its numbers do not depend on the pairs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from otdd_flash.devices import check_triton
from otdd_flash.engine.evidence.oscillation import MOST_ERROR
from otdd_flash.engine.run import Finished, SegmentTerms
from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.errors import InputError
from otdd_flash.labels.classes import ClassCloud, masses_of
from otdd_flash.labels.pair_chunks import used_classes
from otdd_flash.labels.stored_terms import solve_in_float64
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.tolerance import rounded_away

if TYPE_CHECKING:
    # Its kernels need Triton, which is not everywhere.
    from otdd_flash.operators.class_pool import ClassPool


class TermSolver:
    """Solves the terms OT_epsilon between V classes, cost ||x - y||^2.

    Args:
        clouds: the classes.
        epsilon: regularisation, in units of ||.||^2.
        options: when a solve stops.
    """

    def __init__(self, clouds: Sequence[ClassCloud], epsilon: float, options: Converged) -> None:
        self._clouds, self._epsilon, self._options = clouds, epsilon, options
        self._pool: ClassPool | None = None
        if kernels_run_on(clouds[0].points.device):
            from otdd_flash.operators.class_pool import ClassPool

            points = (cloud.points.detach() for cloud in clouds)
            self._pool = ClassPool(list(map(WeightedPoints, points, masses_of(clouds))))

    def solve(self, pairs: Tensor, finished: Finished | None = None) -> SegmentTerms:
        """The terms of P pairs.

        Args:
            pairs: (P, 2) int64, where the points are; all of them are of a class with itself, or
                none is.
            finished: told how many more pairs are done.

        Returns:
            (P,) float64 each, where the points are.

        Raises:
            InputError: rounding alone exceeds the tolerance even in float64.
        """
        if self._pool is None:
            terms = self._in_float64(pairs, finished)
        else:
            from otdd_flash.labels.kernel_terms import solve_in_kernels

            terms = solve_in_kernels(self._pool, pairs, self._epsilon, self._options, finished)
            left = torch.nonzero(self._out_of_reach(terms)).squeeze(1)
            if len(left):
                for known, new in zip(terms, self._in_float64(pairs[left]), strict=True):
                    known[left] = new
        # What all of its error is called rounding of could do no better; the others never can.
        stalled = (terms.rounding == terms.marginal_error) & (terms.marginal_error < MOST_ERROR)
        lost = self._out_of_reach(terms) & ~stalled
        if bool(lost.any()):
            floor = float(terms.rounding[lost].max())
            tolerance = self._options.asked_tolerance
            raise rounded_away(2 * floor, self._epsilon, torch.float64, enough=tolerance)
        return terms

    def _in_float64(self, pairs: Tensor, finished: Finished | None = None) -> SegmentTerms:
        # Of thousands of classes, few pairs may be left to it.
        used, local = used_classes(self._clouds, pairs)
        classes = [WeightedPoints(cloud.points.detach(), cloud.masses) for cloud in used]
        return solve_in_float64(classes, local, self._epsilon, self._options, finished)

    def _out_of_reach(self, terms: SegmentTerms) -> Tensor:
        """Terms (P,) that rounding alone keeps from the tolerance."""
        tolerance = self._options.asked_tolerance
        return (terms.marginal_error > tolerance) & (2 * terms.rounding > tolerance)


def kernels_run_on(device: torch.device) -> bool:
    """Whether Triton kernels can run on a device."""
    if device.type != "cuda":
        return False
    try:
        check_triton(device)
    except InputError:
        return False
    return True
