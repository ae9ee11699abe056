"""Messages for a solve that did not converge: why it stopped, what it missed, what would help.

`Divergence.shortfall` calls `shortfall` for one solve; `pairwise`, `flows.run` and
`sampling.comparison` call `joint_shortfall` for several. Users copy what a message advises, so it
must name an option that exists and a value that is not refused
(`test_the_warning_names_reason_goal_and_way_out` of `tests/solver/test_budget.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from otdd_flash.solver.schedules import Converged, Exact, Schedule
from otdd_flash.solver.term import StoppedBy, largest_tolerance

K = TypeVar("K")


class FinishedSolve(Protocol):
    """A finished solve, or a step of a flow that took one, as messages describe it."""

    @property
    def stopped_by(self) -> StoppedBy:
        """The reason why it ended."""

    @property
    def marginal_error(self) -> float:
        """The largest marginal error of its terms."""

    @property
    def tolerance(self) -> float | None:
        """The stopping tolerance; None where the width of the solver bounds decided."""

    @property
    def bound_width(self) -> float | None:
        """(upper - lower) / |value|; None where that is not finite."""


def shortfall(
    options: Schedule,
    stopped_by: StoppedBy,
    *,
    where: str,
    marginal_error: float,
    tolerance: float | None,
    dtype: torch.dtype,
    bound_width: float | None = None,
) -> str:
    """Describe why a solve stopped early, by how much it missed its goal, and what would help.

    Args:
        options: what was asked for.
        stopped_by: what ended the solve instead.
        where: which terms, pairs or steps stopped early.
        marginal_error: the largest of those reached.
        tolerance: the largest stopping tolerance; None where the width was the goal.
        dtype: of the potentials.
        bound_width: (upper - lower) / |value| that was reached, where it was the goal.
    """
    if isinstance(options, Exact):
        goal, asked = "solver.bound_width", options.bound_width
        reached = f"the bounds are {bound_width:.2e} of the value wide"
        if marginal_error == math.inf:
            reached = "no plan without forbidden pairs was found"
    elif tolerance is not None:
        goal, asked = "solver.tolerance", tolerance
        reached = f"marginal error {marginal_error:.2e}"
    else:
        assert isinstance(options, Converged)
        assert options.bound_width is not None
        goal, asked = "solver.bound_width", options.bound_width
        reached = f"the solver bounds are {bound_width:.2e} of the value wide"
    match stopped_by:
        case "max_seconds":
            assert isinstance(options, Converged | Exact)
            limit = f"within solver.max_seconds={options.max_seconds:g}"
            goals = f" or {goal}" if isinstance(options, Exact) else f", {goal} or epsilon"
            advice = f"Raise solver.max_seconds{goals}"
        case "rounding" if isinstance(options, Exact):
            limit = "as far as rounding allows"
            advice = (
                "Lower costs that are far above the others, or set them to inf to forbid their "
                f"pairs, or raise {goal}"
            )
        case "infeasible":
            limit = "as far as rounding of the masses allows"
            advice = "Allow more pairs, or change a and b so that allowed pairs can hold them"
        case "rounding":
            limit = "as far as rounding allows"
            double = "" if dtype == torch.float64 else ", or set precision=double"
            advice = f"Raise {goal} or epsilon{double}"
        case "schedule":
            limit = f"by the schedule of {options.name}"
            advice = (
                f"The value is that of {options.name}; take solver=converged to solve to the end"
            )
        case _:
            assert isinstance(options, Converged)
            limit = f"after {options.max_iterations} iterations"
            advice = "Raise solver.max_iterations or epsilon"
    missed = f"{reached} against {goal}={asked:.3g}"
    return f"not converged {limit} in {where}: {missed}; the solver bounds still hold. {advice}"


def joint_shortfall(
    late: Mapping[K, FinishedSolve],
    options: Schedule,
    where: Callable[[Sequence[K]], str],
    dtype: torch.dtype,
) -> str:
    """Describe several solves by `shortfall`, once for every reason to stop and kind of goal.

    `where` formats keys of `late`, the solves that stopped early.
    """
    alike: dict[tuple[StoppedBy, bool], dict[K, FinishedSolve]] = {}
    for key, each in late.items():
        alike.setdefault((each.stopped_by, each.tolerance is None), {})[key] = each
    said = []
    for (reason, _), found in alike.items():
        widths = (each.bound_width for each in found.values())
        said.append(
            shortfall(
                options,
                reason,
                where=where([*found]),
                marginal_error=max(each.marginal_error for each in found.values()),
                tolerance=largest_tolerance(each.tolerance for each in found.values()),
                dtype=dtype,
                bound_width=max(math.inf if width is None else width for width in widths),
            )
        )
    return "; ".join(said)
