"""`solver=converged`: iterate until a goal is reached or a budget is spent."""

from __future__ import annotations

from dataclasses import dataclass

from otdd_flash.arguments import Count, Positive
from otdd_flash.solver.schedules.base import Schedule


@dataclass(frozen=True)
class Converged(Schedule):
    """Quasi-Newton steps on the dual, from levels of epsilon, until every term has converged.

    Args:
        tolerance: marginal error to reach in every term, the larger L1 error of rows and of
            columns; refused where rounding alone exceeds it. None is 1e-3, or what rounding allows
            at this epsilon and precision if that is more; above 0.1 that is refused too.
        max_iterations: updates of both potentials, per term, after which a solve gives up; the one
            that certifies the result is among them.
        bound_width: (upper - lower) / |value| to reach, of the number asked for, with or without
            debiasing; replaces `tolerance`.
        max_seconds: wall time after which a solve gives up, all terms together. The two self terms
            of a debiased value are solved first, and the cross term gets the time that is left.
            Every term gets at least one iteration and its bounds, however late it is.
        require_convergence: raise a `ConvergenceError` instead of warning when it gives up.

    Raises:
        InputError: one of them is out of its range.
    """

    name = "converged"
    limits = "solver.max_iterations or solver.tolerance"

    max_iterations: Count = 100_000
    bound_width: Positive | None = None
    max_seconds: Positive | None = None
