"""The options `solver=`, a class for each way to solve a term.

All derive from `Schedule`, which has the tolerance and whether convergence is required. Entry
points take one from the user, call `schedule_of` where an epsilon of 0 selects `Exact`, and make a
`Converged` by default. `solver.solving` chooses a route by the class: `solver.solve` and
`solver.small` read the options of `Converged`, `solver.exact.solve` those of `Exact`.

`solver.geomloss` derives a third class, `GeomlossSchedule`, and `solver.divergence` has the table
of all three (SCHEDULES), from which `commands.settings` makes the user's choice.

Names of schedules and of their fields are settings of users and keys of `conf/solver`, and results
hold the names of schedules, so they must stay. `tests/solver/test_schedules.py` checks that each
has its file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from otdd_flash.arguments import Count, MarginalError, NotNegative, Positive, check_fields
from otdd_flash.errors import InputError
from otdd_flash.solver.term import refuse_both

# The marginal error to reach where no tolerance is given.
DEFAULT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Schedule:
    """The options of one way to solve the terms of a divergence.

    `SOLVES` of `solver.divergence` maps each class to the function that solves a term.

    Attributes:
        name: as `solver.schedule=NAME` and in results.
        limits: the settings to raise where terms stop early.
        exact_alone: what to say of relaxed marginals, if it takes exact ones alone.
        tolerance: marginal error of a converged term, the larger L1 error of rows and of columns;
            None is 1e-3.
        require_convergence: raise a `ConvergenceError` instead of warning where it is missed.

    Raises:
        InputError: a field is not what it must be.
    """

    name: ClassVar[str]
    limits: ClassVar[str] = "solver.tolerance"
    exact_alone: ClassVar[str] = ""

    tolerance: MarginalError | None = None
    require_convergence: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, "solver.")

    @property
    def asked_tolerance(self) -> float:
        """The tolerance, or its default; `reachable_tolerance` adjusts it to rounding."""
        return DEFAULT_TOLERANCE if self.tolerance is None else self.tolerance


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
