"""Epsilon and the tolerance of a term: resolved from the user's settings, checked against rounding.

Entry points resolve epsilon here; errors name the setting and the unit in which it was given.
`solver.solve` and `solver.small` take the stopping rule of the iterations and of the term from
here; `solver.certificate` and `term.result` refuse plans that are within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from otdd_flash.errors import EpsilonOutOfRange, InputError
from otdd_flash.formulas.decision import Goal
from otdd_flash.formulas.evidence import MOST_ERROR
from otdd_flash.solver.schedules.converged import Converged

# The default epsilon, over the mean cost.
DEFAULT_RELATIVE = 0.01
# The default epsilon of earlier versions, in units of the cost.
EARLIER_DEFAULT = 0.1

# The largest tolerance that rounding may raise the default one to. With a larger marginal error a
# plan would say little of the optimal one.
LOOSEST_DEFAULT = 0.1

# The marginal error that an advised epsilon should have, half of the most that is accepted.
AMPLE = LOOSEST_DEFAULT / 2


def refuse_both(epsilon: float | None, relative: float | None) -> None:
    """Refuse `epsilon` and `epsilon_relative` together.

    Raises:
        InputError: both are given.
    """
    if epsilon is not None and relative is not None:
        raise InputError(
            "give epsilon or epsilon_relative, one of them; got both, "
            f"epsilon={epsilon:g} and epsilon_relative={relative:g}"
        )


def default_hint(epsilon: object) -> str:
    """Return a hint that `epsilon` is the default of earlier versions; "" for another value."""
    if epsilon != EARLIER_DEFAULT:
        return ""
    return (
        f"; {EARLIER_DEFAULT} was the default of earlier versions, which epsilon={EARLIER_DEFAULT} "
        "gives today"
    )


def resolve_epsilon(
    epsilon: float | None, relative: float | None, mean_cost: Callable[[], float]
) -> tuple[str, float, float]:
    """Return the setting's name, its value, and the epsilon that follows, in units of the cost.

    By default epsilon is `DEFAULT_RELATIVE` of the mean cost, and 1 where that is 0, as for a cost
    that is 0 everywhere.

    Args:
        epsilon: in units of the cost, or None.
        relative: as a multiple of the mean cost, or None.
        mean_cost: computes the mean cost; called unless `epsilon` is given.

    Raises:
        InputError: both are given, or `relative` with a mean cost that is not positive.
    """
    refuse_both(epsilon, relative)
    if epsilon is not None:
        return "epsilon", epsilon, epsilon
    mean = mean_cost()
    if relative is None:
        value = DEFAULT_RELATIVE * mean
        # A NaN passes: it is reported later, with its cause.
        return "epsilon_relative", DEFAULT_RELATIVE, 1.0 if value <= 0 else value
    if not mean > 0:
        raise InputError(
            f"epsilon_relative needs a positive mean cost; here it is {mean:g}: set epsilon"
        )
    return "epsilon_relative", relative, relative * mean


@contextmanager
def epsilon_given_as(name: str, given: float, epsilon: float) -> Iterator[None]:
    """Raise errors of this epsilon again under the user's setting and unit.

    Args:
        name: of the setting.
        given: its value.
        epsilon: its value in units of the cost; errors of another epsilon pass unchanged.

    Raises:
        EpsilonOutOfRange: as it was raised inside, under that name.
    """
    try:
        yield
    except EpsilonOutOfRange as error:
        if error.epsilon != epsilon:
            raise
        raise EpsilonOutOfRange(
            error.words, error.epsilon, error.advised, name=name, given=given
        ) from None


@contextmanager
def epsilon_of_datasets(
    name: str, given: float, epsilon: float, mean_cost: Callable[[], float], standardized: float
) -> Iterator[None]:
    """Raise errors as `epsilon_given_as`, with further advice that applies to datasets.

    Args:
        name: of the setting.
        given: its value.
        epsilon: its value in units of the cost.
        mean_cost: computes the mean cost; called where that epsilon is too small.
        standardized: about the mean cost of standardized features.

    Raises:
        EpsilonOutOfRange: as it was raised inside, with that advice.
    """
    with epsilon_given_as(name, given, epsilon):
        try:
            yield
        except EpsilonOutOfRange as error:
            if error.advised is None or error.epsilon != epsilon:
                raise
            mean, ways = mean_cost(), ""
            if name == "epsilon" and DEFAULT_RELATIVE * mean >= error.advised:
                ways += f", or give epsilon_relative={DEFAULT_RELATIVE} in its place"
            if name == "epsilon" and epsilon * mean >= error.advised * standardized:
                ways += (
                    ", or standardize the features (extractor.standardize=true, in Python "
                    "otdd.extractors.standardize)"
                )
            raise EpsilonOutOfRange(error.words + ways, error.epsilon, error.advised) from None


def or_double(dtype: torch.dtype) -> str:
    """Return the advice to use float64, as part of a list; "" if it is used already."""
    return "" if dtype == torch.float64 else ", set precision=double"


def goal_of(options: Converged, epsilon: float, aim: float) -> Goal:
    """Return the stopping criterion of a term's iterations; the certificate counts as the last."""
    asked = options.asked_tolerance
    gives_way = options.tolerance is None or options.bound_width is not None
    most = LOOSEST_DEFAULT if options.bound_width is None else MOST_ERROR
    loosest = max(asked, most) if gives_way else asked
    return Goal(epsilon, asked, loosest, options.max_iterations - 1, aim)


def reachable_tolerance(
    options: Converged, floor: float, epsilon: float, dtype: torch.dtype
) -> float:
    """Return the marginal error to stop at: the tolerance, or the least that rounding allows.

    Rounding may raise the default tolerance up to `LOOSEST_DEFAULT`. Where the width of the bounds
    decides, no marginal error was asked for, and the least that rounding allows is always accepted.

    Raises:
        InputError: as `check_reachable`, where the tolerance may not be raised, or not so far.
    """
    asked, least = options.asked_tolerance, 2 * floor
    most = LOOSEST_DEFAULT if options.bound_width is None else MOST_ERROR
    if (options.tolerance is None or options.bound_width is not None) and least < most:
        return max(asked, least)
    check_reachable(asked, floor, epsilon, dtype)
    return asked


def check_reachable(tolerance: float, floor: float, epsilon: float, dtype: torch.dtype) -> None:
    """Refuse a tolerance below the marginal error that rounding allows.

    `floor`, the marginal error that rounding causes, counts twice: it is part of the reported
    error, and the measured rest cannot fall below it either.

    Raises:
        InputError: twice `floor` exceeds `tolerance`.
    """
    if 2 * floor > tolerance:
        if 2 * floor >= LOOSEST_DEFAULT:
            raise rounded_away(2 * floor, epsilon, dtype)
        raise InputError(
            f"solver.tolerance={tolerance:g} is too tight for {_name(dtype)} at epsilon="
            f"{epsilon:g}: rounding alone moves the marginals by up to {2 * floor:.1e}; raise "
            f"solver.tolerance or epsilon{_or_double(2 * floor, tolerance, dtype)}"
        )


def check_usable(hidden: float, epsilon: float, dtype: torch.dtype) -> None:
    """Refuse a plan whose undetectable marginal error `hidden` exceeds `LOOSEST_DEFAULT`.

    Raises:
        InputError: `hidden` does.
    """
    if not hidden < float("inf"):
        raise EpsilonOutOfRange(
            "some costs are too far above the mean at {given}: rounding alone decides about the "
            f"masses of their points; raise {{name}}{or_double(dtype)} or leave out points that "
            "are far from all others",
            epsilon,
        )
    if hidden > LOOSEST_DEFAULT:
        raise rounded_away(hidden, epsilon, dtype)


def rounded_away(
    hidden: float, epsilon: float, dtype: torch.dtype, enough: float = AMPLE
) -> EpsilonOutOfRange:
    """Return the error for marginals that rounding moves by `hidden`; by `enough` as advised."""
    advised = epsilon * hidden / enough
    if not advised < float("inf"):
        return EpsilonOutOfRange(
            f"{{given}} is too small for {_name(dtype)}: rounding leaves nothing of the marginals; "
            "raise {name}",
            epsilon,
        )
    return EpsilonOutOfRange(
        f"{{given}} is too small for {_name(dtype)}: rounding alone moves the marginals by up to "
        f"{hidden:.1e}; raise {{name}} to about {{advised}}{_or_double(hidden, enough, dtype)}",
        epsilon,
        advised,
    )


def _or_double(hidden: float, enough: float, dtype: torch.dtype) -> str:
    """Return the advice to use float64 where that would do, else ""."""
    gained = torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    return " or set precision=double" if dtype != torch.float64 and hidden * gained < enough else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
