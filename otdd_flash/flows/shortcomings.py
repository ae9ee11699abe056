"""What a flow that has ended warns of."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence

from otdd_flash.errors import NotConvergedWarning
from otdd_flash.flows.history import StepRecord
from otdd_flash.flows.loop_options import LoopOptions
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.shortfall import shortfall
from otdd_flash.solver.term.result import largest_tolerance

logger = logging.getLogger(__name__)


def report_growth(before: StepRecord, after: StepRecord, options: LoopOptions) -> None:
    """Warn where a flow that has nothing else to do has led away from its target."""
    assert before.upper is not None
    assert after.lower is not None
    if not options.functionals and after.lower > before.upper:
        box = options.flow.stepping.box
        logger.warning(
            "the flow ended farther from its target than it began, at %.5g after %.5g; lower %s%s",
            after.divergence,
            before.divergence,
            options.movers,
            "" if box is None else f", or widen flow.box=[{box[0]:g}, {box[1]:g}]",
        )


def report_convergence(
    history: Sequence[StepRecord], solver: Schedule, compute: ComputeOptions
) -> None:
    """Warn of evaluations that stopped before they reached what was asked for.

    The message names every reason to stop once, with the advice that belongs to it.
    """
    late = [record for record in history if not record.converged]
    said = []
    for reason in dict.fromkeys(record.stopped_by for record in late):
        found = [record for record in late if record.stopped_by == reason]
        said.append(
            shortfall(
                solver,
                reason,
                where=f"{len(found)} of {len(history)} evaluations",
                marginal_error=max(record.marginal_error for record in found),
                tolerance=largest_tolerance(record.tolerance for record in found),
                dtype=compute.dtype,
                bound_width=max(
                    math.inf if record.bound_width is None else record.bound_width
                    for record in found
                ),
            )
        )
    if said:
        warnings.warn("; ".join(said), NotConvergedWarning, stacklevel=4)
