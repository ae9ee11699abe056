"""What options of all solves share, `solver=`: a marginal error, and whether it is required."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from otdd_flash.arguments import MarginalError, check_fields

# Aimed at where no tolerance is given.
DEFAULT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Schedule:
    """The options of one way to solve the terms of a divergence.

    `SOLVES` of `solver.divergence` says which function solves a term as they ask.

    Attributes:
        name: as `solver.schedule=NAME` and in results.
        tolerance: marginal error of a converged term, the larger L1 error of rows and of columns;
            None is 1e-3.
        require_convergence: raise a `ConvergenceError` instead of warning where it is missed.

    Raises:
        InputError: a field is not what it must be.
    """

    name: ClassVar[str]

    tolerance: MarginalError | None = None
    require_convergence: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, "solver.")

    @property
    def asked_tolerance(self) -> float:
        """The marginal error to aim at; `reachable_tolerance` is what rounding makes of it."""
        return DEFAULT_TOLERANCE if self.tolerance is None else self.tolerance
