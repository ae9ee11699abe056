"""How results show themselves where a session prints them: a line of numbers, no tensors."""

from __future__ import annotations


def interval_text(value: float, bounds: tuple[float, float]) -> str:
    """`value [lower, upper]`, with seven digits."""
    return f"{value:.7g} [{bounds[0]:.7g}, {bounds[1]:.7g}]"


def convergence_text(converged: bool) -> str:
    """Whether a solve reached what its options ask for."""
    return "converged" if converged else "not converged"
