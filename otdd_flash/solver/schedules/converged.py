"""`solver=converged`: iterate until a goal is reached or a budget is spent.

Entry points take a `Converged` from the user and make one by default; `solver.solve` and
`solver.small` iterate by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from otdd_flash.arguments import Count, Positive
from otdd_flash.solver.schedules.base import Schedule


@dataclass(frozen=True)
class Converged(Schedule):
    """Quasi-Newton steps on the dual, with epsilon scaling, until every term has converged.

    Args:
        tolerance: marginal error to reach in every term: the larger of the L1 errors of rows and of
            columns. A tolerance below the rounding error is refused. None: 1e-3, or what rounding
            allows at this epsilon and precision if that is more, up to 0.1; above, it is refused
            too.
        max_iterations: updates of both potentials, per term, after which a solve gives up. The
            update that certifies the result counts.
        bound_width: relative width of the solver bounds to reach, (upper - lower) / |value|, of the
            value asked for, debiased or not; replaces `tolerance`.
        max_seconds: wall time after which a solve gives up, all terms together. The two self terms
            of a debiased value are solved first, and the cross term gets the time that is left.
            Every term gets at least one iteration and its bounds, even when the time is over.
        require_convergence: raise a `ConvergenceError` instead of warning when it gives up.

    Raises:
        InputError: one of them is out of its range.
    """

    name = "converged"
    limits = "solver.max_iterations or solver.tolerance"

    max_iterations: Count = 100_000
    bound_width: Positive | None = None
    max_seconds: Positive | None = None
