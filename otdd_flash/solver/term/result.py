"""One solved entropic transport term: potentials, value, solver bounds, and why it stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from otdd_flash.solver.certificate import Certificate
from otdd_flash.solver.term.tolerance import check_usable

# progress(term, iteration, marginal_error): term is "xy", "xx" or "yy".
SolverProgress = Callable[[str, int, float], None]
# progress(iteration, marginal_error), of one term.
TermProgress = Callable[[int, float], None]

# Why a solve ended. `rounding`: at this precision the bounds cannot get narrower or the marginals
# better; `schedule`: the fixed number of updates was done; `infeasible`: no plan has these masses
# without forbidden pairs; `optimal`: the bounds of exact transport are as close as rounding allows.
StoppedBy = Literal[
    "tolerance",
    "bound_width",
    "max_seconds",
    "max_iterations",
    "rounding",
    "schedule",
    "infeasible",
    "optimal",
]

# The fields of a term in its summary, besides its bounds.
SUMMARIZED = (
    "value",
    "marginal_error",
    "tolerance",
    "iterations",
    "passes",
    "converged",
    "stopped_by",
)


@dataclass(frozen=True, eq=False)
class TransportTerm:
    """OT_epsilon between two clouds: potentials, value, and bounds of its errors.

    Attributes:
        f: (n,) row potential, in units of the cost.
        g: (m,) column potential; the same tensor as `f` for a self term.
        epsilon: entropic regularisation, in units of the cost.
        value: the dual value D(f, g); stopped by `schedule`, geomloss's number, which can lie
            outside of `bounds`.
        bounds: solver bounds (lower, upper): an interval that holds OT_epsilon.
        marginal_error: bound of the larger of ||P 1 - a||_1, ||P^T 1 - b||_1, rounding included.
        tolerance: the stopping tolerance, as asked for or as rounding allows; None where the width
            of the solver bounds decided.
        iterations: updates of both potentials, the certifying one included.
        passes: evaluations of the n x m scores, those of samples and certification included.
        converged: whether the goal of the options was reached.
        stopped_by: why the solve ended.
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
        """Build the term from its certificate and the work done.

        `asked` is the tolerance of the options, which rounding may have raised to `tolerance`.

        Raises:
            InputError: the undetectable part of the marginal error is too large.
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

    def moved(self, device: torch.device) -> Self:
        """Return the term on another device."""
        return replace(self, f=self.f.to(device), g=self.g.to(device))

    def widened(self, error: float) -> TransportTerm:
        """Widen bounds and error for a cost that is off by at most `error`."""
        low, high = self.bounds
        # No entry of the plan changes by more than this factor, nor do its marginals.
        growth = math.expm1(error / self.epsilon)
        return replace(
            self,
            bounds=(low - error, high + error),
            marginal_error=self.marginal_error + growth * (1 + self.marginal_error),
        )

    @classmethod
    def from_dict(
        cls, f: Tensor, g: Tensor, epsilon: float, summary: Mapping[str, Any]
    ) -> TransportTerm:
        """Restore a term from its potentials, (n,) and (m,), and the `summary` of `to_dict`."""
        low, high = summary["bounds"]
        # Infinite bounds, which JSON cannot hold, are null in files.
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        numbers = {key: summary[key] for key in SUMMARIZED}
        return cls(f, g, epsilon, bounds=(low, high), **numbers)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary of the term for result.json."""
        numbers = {key: getattr(self, key) for key in SUMMARIZED}
        return {"value": numbers.pop("value"), "bounds": list(self.bounds), **numbers}


def largest_tolerance(tolerances: Iterable[float | None]) -> float | None:
    """Return the largest tolerance that is not None; None if all are."""
    return max((known for known in tolerances if known is not None), default=None)
