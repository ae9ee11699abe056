"""One solved entropic transport term: potentials, value, bounds, and why it stopped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from otdd_flash.engine.evidence.oscillation import MOST_ERROR
from otdd_flash.errors import InputError
from otdd_flash.solver.certificate import Certificate
from otdd_flash.solver.epsilon import EpsilonOutOfRange, or_double
from otdd_flash.solver.schedule import LOOSEST_DEFAULT, StoppedBy

if TYPE_CHECKING:
    from otdd_flash.solver.converged import Converged

# The marginal error that an advised epsilon should have, half of the most that is accepted.
AMPLE = LOOSEST_DEFAULT / 2


@dataclass(frozen=True, eq=False)
class TransportTerm:
    """OT_epsilon between two clouds, with the proof of its accuracy.

    Attributes:
        f: (n,) row potential, in units of the cost.
        g: (m,) column potential; the same tensor as `f` for a self term.
        epsilon: entropic regularisation, in units of the cost.
        value: the dual value D(f, g); stopped by `schedule`, geomloss's number, which can lie
            outside of `bounds`.
        bounds: (lower, upper), an interval that holds OT_epsilon.
        marginal_error: L1 distance of the plan's marginals from the masses, rounding included.
        tolerance: the marginal error that was enough, as asked for or as rounding allows; None
            where the width of the bounds decided.
        iterations: updates of both potentials, the certifying one included.
        passes: sweeps over the n x m scores, those of samples and certification included.
        converged: whether what the options ask for was reached.
        stopped_by: what ended the solve.
    """

    f: Tensor
    g: Tensor
    epsilon: float
    value: float
    bounds: tuple[float, float]
    marginal_error: float
    tolerance: float | None
    iterations: int
    passes: float
    converged: bool
    stopped_by: StoppedBy

    @classmethod
    def from_certificate(
        cls,
        certificate: Certificate,
        epsilon: float,
        *,
        iterations: int,
        passes: float,
        tolerance: float,
        asked: float,
        unless_converged: StoppedBy,
    ) -> TransportTerm:
        """The term that a certificate proves, and what it took to get there.

        `asked` is the tolerance before rounding made it `tolerance`.

        Raises:
            InputError: rounding may hide more of the marginals than is of use.
        """
        check_usable(certificate.hidden, epsilon, certificate.f.dtype)
        converged = certificate.marginal_error <= tolerance
        reached: StoppedBy = "tolerance" if certificate.marginal_error <= asked else "rounding"
        return cls(
            certificate.f,
            certificate.g,
            epsilon,
            certificate.value,
            certificate.bounds,
            certificate.marginal_error,
            tolerance,
            iterations,
            passes,
            converged,
            stopped_by=reached if converged else unless_converged,
        )

    def widened(self, error: float) -> TransportTerm:
        """The same for a cost that is off by at most `error`."""
        low, high = self.bounds
        # No entry of the plan changes by more than this factor, nor do its marginals.
        growth = math.expm1(error / self.epsilon)
        return replace(
            self,
            bounds=(low - error, high + error),
            marginal_error=self.marginal_error + growth * (1 + self.marginal_error),
        )

    def summary(self) -> dict[str, Any]:
        """What result.json says of one term."""
        return {
            "value": self.value,
            "bounds": list(self.bounds),
            "marginal_error": self.marginal_error,
            "tolerance": self.tolerance,
            "iterations": self.iterations,
            "passes": self.passes,
            "converged": self.converged,
            "stopped_by": self.stopped_by,
        }


def largest_tolerance(tolerances: Iterable[float | None]) -> float | None:
    """The largest that is there; None where the width of the bounds decided."""
    return max((known for known in tolerances if known is not None), default=None)


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
    """The way out by float64, where it is one."""
    gained = torch.finfo(torch.float64).eps / torch.finfo(dtype).eps
    return " or set precision=double" if dtype != torch.float64 and hidden * gained < enough else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
