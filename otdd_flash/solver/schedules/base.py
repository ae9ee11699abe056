"""The schedules of a solve, `solver=`: its updates, and when they stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import Tensor

from otdd_flash.arguments import MarginalError, check_fields
from otdd_flash.operators.base import Operator
from otdd_flash.solver.term.result import SolverProgress, TransportTerm
from otdd_flash.solver.term.tolerance import DEFAULT_TOLERANCE


@dataclass(frozen=True)
class Schedule(ABC):
    """One way to solve the terms of a divergence; its fields are its parameters.

    Attributes:
        name: as `solver.schedule=NAME` and in results.
        goes_on: whether a solve may start from given potentials and take terms solved before.
        tolerance: marginal error of a converged term, the larger L1 error of rows and of columns;
            None is 1e-3.
        require_convergence: raise a `ConvergenceError` instead of warning where it is missed.

    Raises:
        InputError: a field is not what it must be.
    """

    name: ClassVar[str]
    goes_on: ClassVar[bool] = True

    tolerance: MarginalError | None = None
    require_convergence: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, "solver.")

    @property
    def asked_tolerance(self) -> float:
        """The marginal error to aim at; `reachable_tolerance` is what rounding makes of it."""
        return DEFAULT_TOLERANCE if self.tolerance is None else self.tolerance

    def between(self, x: Tensor, y: Tensor) -> Self:
        """Return the schedule with what it takes from two clouds (n, d) and (m, d).

        Raises:
            InputError: they do not give it.
        """
        return self

    def for_term(
        self,
        tolerance: float | None,
        *,
        iterations: int,
        seconds: float,
        sharers: int,
        most: int | None = None,
    ) -> Self:
        """Limit the schedule for a term to what is left of the budget that terms share.

        Args:
            tolerance: L1 marginal error that it is to reach.
            iterations: those that it has had.
            seconds: since the first term began.
            sharers: terms that are still to come, this one included.
            most: iterations for now, None for all that are left.
        """
        return self

    @abstractmethod
    def solve_term(
        self,
        operator: Operator,
        epsilon: float,
        *,
        name: str,
        start: Tensor | None,
        progress: SolverProgress | None,
    ) -> TransportTerm:
        """Solve one term, with its bounds.

        Args:
            operator: the cost (n, m) and the masses.
            epsilon: regularisation, in units of the cost.
            name: "xy" for the cross term, else a self term, whose cost is symmetric.
            start: g (m,) of "xy" or "yy", f (n,) of "xx" to start from; None starts from nothing.
            progress: called as progress(name, iteration, marginal error).

        Raises:
            InputError: rounding alone exceeds what was asked for.
        """
