"""When a solve stops, and whom it tells on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from otdd_flash import arguments
from otdd_flash.checks import check_fields
from otdd_flash.errors import InputError

# progress(term, iteration, marginal_error): term is "xy", "xx" or "yy".
Progress = Callable[[str, int, float], None]

# What ended a solve. `rounding`: at this precision the bounds cannot get narrower or the marginals
# better; `schedule`: the fixed number of updates was done.
StoppedBy = Literal[
    "tolerance", "bound_width", "max_seconds", "max_iterations", "rounding", "schedule"
]

# Aimed at where no tolerance is given, and how far that gives way to rounding. With more than the
# latter the marginals would say little of the plan.
DEFAULT_TOLERANCE = 1e-3
LOOSEST_DEFAULT = 0.1


@dataclass(frozen=True)
class SolverOptions:
    """Stopping rule of a Sinkhorn solve.

    Args:
        tolerance: L1 marginal error to reach, in every term; refused where rounding alone exceeds
            it. None is 1e-3, or what rounding allows at this epsilon and precision if that is
            more; above 0.1 that is refused too.
        max_iterations: updates of both potentials, per term, after which a solve gives up; the one
            that certifies the result is among them.
        require_convergence: raise a `ConvergenceError` instead of warning when it does.
        bound_width: (upper - lower) / |value| to reach, of the number asked for, with or without
            debiasing; replaces `tolerance`.
        max_seconds: wall time after which a solve gives up, all terms together; self terms come
            first, and what they leave is the cross term's. Every term gets an iteration and its
            bounds, however late it is.
        schedule: `converged`, or `geomloss` for the fixed number of updates of that library, with
            its own value; see `geomloss_schedule`. Then `tolerance`, or 1e-3, only tells whether
            the result counts as converged.
        scaling: of schedule `geomloss`, the ratio of successive blurs epsilon^(1/2).
        diameter: of schedule `geomloss`, the first blur; None is the diagonal of the box around
            the features.
    """

    tolerance: float | None = None
    max_iterations: int = 100_000
    require_convergence: bool = False
    bound_width: float | None = None
    max_seconds: float | None = None
    schedule: str = "converged"
    scaling: float = 0.5
    diameter: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, arguments.SOLVER_OPTIONS, "solver.")
        if self.schedule != "converged" and (self.bound_width or self.max_seconds):
            raise InputError(
                f"solver.schedule={self.schedule} has a fixed number of updates; leave out "
                "solver.bound_width and solver.max_seconds or take solver.schedule=converged"
            )

    @property
    def asked_tolerance(self) -> float:
        """The marginal error to aim at; `term.reachable_tolerance` is what rounding makes of it."""
        return DEFAULT_TOLERANCE if self.tolerance is None else self.tolerance
