"""The options that all ways to solve share: the tolerance, and whether convergence is required.

`converged`, `exact` and `geomloss` derive their options from `Schedule`, which entry points and
`commands.settings` name in annotations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from otdd_flash.arguments import MarginalError, check_fields

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
