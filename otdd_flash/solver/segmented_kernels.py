"""`segmented_quasi_newton.QuasiNewton` with one launch between a look and a move.

In PyTorch the same decisions are two hundred launches, which for small problems take far longer
than the passes. What is decided is the same, up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.kernels.segmented_decision import (
    Limits,
    Standing,
    segmented_decision,
    state_width,
)
from otdd_flash.operators.segments import MEMORY, TritonSegments
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.evidence.oscillation import MOST_ERROR
from otdd_flash.solver.evidence.two_passes import TRIFLE, VALUE_TRIFLE
from otdd_flash.solver.segmented import Step
from otdd_flash.solver.segmented_quasi_newton import (
    DUAL_ROUNDING,
    FALLEN,
    LEVEL_TOLERANCE,
    STALLED,
    STALLED_FLOORS,
    Form,
    Progress,
    Start,
)
from otdd_flash.solver.trust import GROWTH, PATIENCE, Trust

LIMITS = Limits(
    DUAL_ROUNDING,
    GROWTH,
    PATIENCE,
    STALLED,
    STALLED_FLOORS,
    FALLEN,
    TRIFLE,
    VALUE_TRIFLE,
    MOST_ERROR,
)


class QuasiNewtonKernels:
    """The iterations of all segments; arguments as for `QuasiNewton`."""

    def __init__(
        self,
        segments: TritonSegments,
        options: Converged,
        epsilon: float,
        form: Form,
        start: Start,
    ) -> None:
        self._segments, self._form = segments, form
        costs = segments.mean_cost, segments.cost_spread, segments.offset, *segments.errors
        self._costs = torch.stack(costs, 1)
        tolerance, most = options.asked_tolerance, options.max_iterations
        units = (torch.finfo(dtype).eps / 2 for dtype in (segments.dtype, segments.sum_dtype))
        self._settings = self._costs.new_tensor(
            (epsilon, tolerance, max(LEVEL_TOLERANCE, tolerance), most, *units)
        )
        level = torch.where(start.iterations + 1 >= most, epsilon, start.level)
        state = level.new_zeros((len(level), state_width(MEMORY)))
        known = torch.stack((start.iterations, *Trust.fresh(level), *Progress.none(level)), 1)
        state[:, : known.shape[1]] = known
        self._standing = Standing(level, state)

    def step(self, active: Tensor) -> Step:
        """Look at the candidates and choose the next."""
        decision = segmented_decision(
            self._segments.numbers(self._standing.level, active),
            self._costs,
            self._settings,
            self._standing,
            memory=MEMORY,
            damping=self._form.damping,
            symmetric=self._form.symmetric,
            limits=LIMITS,
        )
        self._segments.move_by(decision.move, active)
        self._standing = decision.standing
        return Step(decision.done, decision.terms)

    def keep(self, order: Tensor) -> None:
        """Go on with some segments."""
        self._costs = self._costs[order]
        self._standing = Standing(*(part[order] for part in self._standing))
