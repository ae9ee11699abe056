"""Second derivatives of a loss by its points, for autograd's second pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.derivatives.gradient import POINTS
from otdd_flash.derivatives.hessian import (
    DivergenceCurvature,
    check_unchanged,
    or_in_double,
)
from otdd_flash.derivatives.plan_system import DEFAULTS, CGOptions, report_unsolved
from otdd_flash.derivatives.term_gradient import Input
from otdd_flash.errors import InputError
from otdd_flash.operators.comparison import Comparison
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.schedules.base import Schedule

# The tolerance of linear systems where a cloud is float64; others have that of `CGOptions`.
TIGHT = 1e-10

# Names of arguments where they differ from keys.
NAMES: dict[Input, str] = {"classes": "class_table"}


class SecondDerivatives:
    """The Hessian of a loss for autograd's second pass, from the points and potentials alone.

    Args:
        keys: the inputs that require a gradient.
        comparison: the clouds and costs.
        divergence: its terms.
        options: whether a missed tolerance is an error.
    """

    def __init__(
        self,
        keys: tuple[Input, ...],
        comparison: Comparison,
        divergence: Divergence,
        options: Schedule,
    ) -> None:
        self._keys, self._comparison, self._divergence = keys, comparison, divergence
        self._options, self._mark = options, comparison.mark

    def __call__(self, along: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the changes of the gradients by the points along directions of the points.

        Raises:
            InputError: an input other than points requires a gradient, points are streamed, or an
                input has been changed in place since.
            ConvergenceError: convergence is required and a linear system was not solved.
        """
        others = [key for key in self._keys if key not in POINTS]
        if others:
            names = ", ".join(NAMES.get(key, key) for key in others)
            raise InputError(
                "the loss is differentiable twice by x and y alone, and its gradient was to be "
                f"differentiated where {names} require one too; detach {names}"
            )
        if self._comparison.streaming is not None:
            raise InputError(
                "second derivatives need all points on the device, which does not hold them; take "
                "fewer points, or raise memory_budget"
            )
        check_unchanged(self._comparison, self._mark)
        directions = dict(zip(self._keys, along, strict=True))
        x, y = (side.features for side in self._comparison.given)

        def of(key: Input, points: Tensor) -> Tensor:
            one = directions.get(key)
            still = torch.zeros_like(points, dtype=torch.float64)
            return (still if one is None else one.to(still))[None]

        a, b = of("x", x), of("y", y) if "y" in self._keys else None
        tight = torch.float64 in (x.dtype, y.dtype)
        cg = CGOptions(tolerance=TIGHT) if tight else DEFAULTS
        curvature = DivergenceCurvature(self._comparison, self._divergence, cg)
        with self._comparison.within_memory():
            found = curvature.along(a, b)
        way_out = "otdd.sinkhorn_hessian takes a larger cg.tolerance"
        way_out += or_in_double(self._comparison.compute)
        required = self._options.require_convergence
        report_unsolved(found.residual, found.converged, way_out, required=required)
        changes = {"x": found.x} if found.y is None else {"x": found.x, "y": found.y}
        return [changes[key][0] for key in self._keys]
