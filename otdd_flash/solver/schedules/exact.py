"""`solver=exact`: the unregularised transport cost, epsilon = 0, with a proven interval.

Entry points call `schedule_of`; `solver.exact.solve` reads the options.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from otdd_flash.arguments import NotNegative, Positive
from otdd_flash.errors import InputError
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term import refuse_both


@dataclass(frozen=True)
class Exact(Schedule):
    """Linear programs on few pairs of points, and passes over all pairs that bound their error.

    `epsilon=0` selects it, and it takes no other epsilon. The bounds hold even if it stopped early.

    Args:
        bound_width: relative width of the bounds to reach, (upper - lower) / |upper|, of the
            distance with its self terms; 0: as narrow as rounding allows.
        max_seconds: wall time after which no further round begins, all terms together. A linear
            program or pass under way is not interrupted.
        require_convergence: raise a `ConvergenceError` instead of warning if `bound_width` is
            missed.

    Raises:
        InputError: one of them is out of its range.
    """

    name = "exact"
    limits = "solver.max_seconds or solver.bound_width"
    exact_alone = (
        "epsilon=0, which solver=exact is for, takes exact marginals; leave out unbalanced, or set "
        "a positive epsilon and solver=converged"
    )

    # Marginals are those of the masses but for rounding.
    tolerance: None = field(default=None, init=False)
    bound_width: NotNegative = 1e-4
    max_seconds: Positive | None = None


def needs_zero() -> InputError:
    """Return the error for `Exact` where epsilon is positive, or must be."""
    return InputError(
        "solver=exact is for distances at epsilon=0; a positive epsilon, and losses, flows and "
        "derivatives, which need one, take solver=converged"
    )


def refuse_start(options: Schedule, start: object) -> None:
    """Refuse potentials to start from where `Exact` finds its own.

    Raises:
        InputError: both are given.
    """
    if start and isinstance(options, Exact):
        raise InputError(
            "start holds potentials of a positive epsilon; exact transport finds its own: leave it "
            "out"
        )


def schedule_of(
    options: Schedule | None, epsilon: float | None, relative: float | None
) -> tuple[Schedule, float | None, float | None]:
    """Return the schedule that goes with an epsilon, and epsilon and its multiple of the mean cost.

    An epsilon of 0 selects `Exact`, and `Exact` without an epsilon is of 0.

    Raises:
        InputError: both epsilons, `Exact` with a positive one, or another schedule with 0.
    """
    refuse_both(epsilon, relative)
    given = {"epsilon": epsilon, "epsilon_relative": relative}
    positive = {name: value for name, value in given.items() if value}
    if isinstance(options, Exact) and positive:
        name, value = next(iter(positive.items()))
        raise InputError(
            f"solver=exact is for epsilon=0, got {name}={value:g}; set {name}=0, or take "
            "solver=converged"
        )
    if 0 not in given.values() and not isinstance(options, Exact):
        return options or Converged(), epsilon, relative
    if options is not None and not isinstance(options, Exact):
        raise InputError(
            f"epsilon=0 is solved by solver=exact (in Python otdd.Exact()), got solver="
            f"{options.name}; leave solver out, or set a positive epsilon"
        )
    return options or Exact(), 0.0, None
