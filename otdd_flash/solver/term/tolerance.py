"""The marginal error at which a solve stops: as asked for, or as rounding allows."""

from __future__ import annotations

import torch

from otdd_flash.errors import InputError
from otdd_flash.formulas.decision import Goal
from otdd_flash.formulas.evidence import MOST_ERROR
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.epsilon import EpsilonOutOfRange, or_double

# How far the default tolerance gives way to rounding. With more the marginals would say little of
# the plan.
LOOSEST_DEFAULT = 0.1

# The marginal error that an advised epsilon should have, half of the most that is accepted.
AMPLE = LOOSEST_DEFAULT / 2


def goal_of(options: Converged, epsilon: float, aim: float) -> Goal:
    """When the iterations of a term end; the certificate is the last one."""
    asked = options.asked_tolerance
    gives_way = options.tolerance is None or options.bound_width is not None
    most = LOOSEST_DEFAULT if options.bound_width is None else MOST_ERROR
    loosest = max(asked, most) if gives_way else asked
    return Goal(epsilon, asked, loosest, options.max_iterations - 1, aim)


def reachable_tolerance(
    options: Converged, floor: float, epsilon: float, dtype: torch.dtype
) -> float:
    """The marginal error to stop at: the tolerance, or what rounding lets the marginals reach.

    The default tolerance gives way to rounding up to `LOOSEST_DEFAULT`. Where the width of the
    bounds decides, no marginal error was asked for: the lowest that rounding allows is then as good
    as a lower one.

    Raises:
        InputError: as `check_reachable`, where the tolerance does not give way or rounding leaves
            nothing of the plan.
    """
    asked, least = options.asked_tolerance, 2 * floor
    most = LOOSEST_DEFAULT if options.bound_width is None else MOST_ERROR
    if (options.tolerance is None or options.bound_width is not None) and least < most:
        return max(asked, least)
    check_reachable(asked, floor, epsilon, dtype)
    return asked


def check_reachable(tolerance: float, floor: float, epsilon: float, dtype: torch.dtype) -> None:
    """Refuse a tolerance below what rounding lets the marginals reach.

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
    """Refuse a plan of which rounding may hide more than `LOOSEST_DEFAULT`.

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
    """The error where rounding moves the marginals by so much; at the advised epsilon, `enough`."""
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
    """Say that float64 is a way out, where it is one; else ""."""
    gained = torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    return " or set precision=double" if dtype != torch.float64 and hidden * gained < enough else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
