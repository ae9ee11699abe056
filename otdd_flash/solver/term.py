"""One solved entropic transport term: potentials, value, bounds, and why it stopped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.solver.certificate import Certificate


@dataclass(frozen=True, eq=False)
class TransportTerm:
    """OT_epsilon between two clouds, with the proof of its accuracy.

    Attributes:
        f: (n,) row potential, in units of the cost.
        g: (m,) column potential; the same tensor as `f` for a self term.
        epsilon: entropic regularisation, in units of the cost.
        value: the dual value D(f, g).
        bounds: (lower, upper), an interval that holds OT_epsilon.
        marginal_error: L1 distance of the plan's marginals from the masses, rounding included.
        iterations: updates of both potentials, the certifying one included.
        passes: sweeps over the n x m scores, certification included.
        converged: whether `marginal_error` is within the tolerance.
    """

    f: Tensor
    g: Tensor
    epsilon: float
    value: float
    bounds: tuple[float, float]
    marginal_error: float
    iterations: int
    passes: int
    converged: bool

    @classmethod
    def from_certificate(
        cls,
        certificate: Certificate,
        epsilon: float,
        *,
        iterations: int,
        passes: int,
        tolerance: float,
    ) -> TransportTerm:
        """The term that a certificate proves, and what it took to get there."""
        return cls(
            certificate.f,
            certificate.g,
            epsilon,
            certificate.value,
            certificate.bounds,
            certificate.marginal_error,
            iterations,
            passes,
            converged=certificate.marginal_error <= tolerance,
        )

    @property
    def stopped_by(self) -> str:
        """`tolerance` or `max_iterations`."""
        return "tolerance" if self.converged else "max_iterations"

    def summary(self) -> dict[str, Any]:
        """What result.json says of one term."""
        return {
            "value": self.value,
            "bounds": list(self.bounds),
            "marginal_error": self.marginal_error,
            "iterations": self.iterations,
            "passes": self.passes,
            "converged": self.converged,
        }


def check_reachable(tolerance: float, floor: float, epsilon: float, dtype: torch.dtype) -> None:
    """Refuse a tolerance below what rounding lets the marginals reach.

    `floor`, the marginal error that rounding causes, counts twice: it is part of the reported
    error, and the measured rest cannot fall below it either.

    Raises:
        InputError: twice `floor` exceeds `tolerance`.
    """
    if 2 * floor > tolerance:
        name = str(dtype).removeprefix("torch.")
        way_out = "" if dtype == torch.float64 else ", set precision=double"
        raise InputError(
            f"solver.tolerance={tolerance:g} is too tight for {name} at epsilon={epsilon:g}: "
            f"rounding alone moves the marginals by up to {2 * floor:.1e}; "
            f"raise solver.tolerance or epsilon{way_out}"
        )
