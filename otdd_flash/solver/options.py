"""When a solve stops, and whom it tells on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from otdd_flash.errors import InputError

# progress(term, iteration, marginal_error): term is "xy", "xx" or "yy".
Progress = Callable[[str, int, float], None]


def check_epsilon(name: str, value: float) -> None:
    """Raise an `InputError` unless a regularisation is positive and finite."""
    if not 0 < value < float("inf"):
        raise InputError(f"{name} must be positive and finite, got {value}")


@dataclass(frozen=True)
class SolverOptions:
    """Stopping rule of a Sinkhorn solve.

    Args:
        tolerance: L1 marginal error to reach, in every term.
        max_iterations: updates of both potentials, per term, after which a solve gives up; the one
            that certifies the result is among them.
        require_convergence: raise a `ConvergenceError` instead of warning when it does.
    """

    tolerance: float = 1e-3
    max_iterations: int = 100_000
    require_convergence: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 2:
            raise InputError(
                f"solver.tolerance must lie in (0, 2), an L1 distance of two masses, "
                f"got {self.tolerance}"
            )
        if self.max_iterations < 1:
            raise InputError(f"solver.max_iterations must be positive, got {self.max_iterations}")
