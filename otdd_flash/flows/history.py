"""What a flow tells of its steps, and where its particles have been."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """The particles before step `step`, and the step that was then taken.

    Attributes:
        step: k >= 0; the last record of a flow describes its end, from which no step was taken.
        objective: divergence plus functionals, in units of the cost.
        divergence: S_epsilon(particles, target).
        lower: of an interval that holds S_epsilon, as long as class distances stay what they were.
        upper: of the same interval.
        functionals: weight times value of each functional, by name.
        gradient_norm: (sum_i a_i |v_i|^2)^1/2 of the particles' velocities v, in features per unit
            of time.
        step_size: time that the step moves forward; 0 at the end.
        iterations: of the cross term.
        marginal_error: the largest of the terms'.
        converged: whether all terms reached the tolerance.
        seconds: wall time of evaluation and step.
    """

    step: int
    objective: float
    divergence: float
    lower: float
    upper: float
    functionals: dict[str, float]
    gradient_norm: float
    step_size: float
    iterations: int
    marginal_error: float
    converged: bool
    seconds: float

    def row(self) -> dict[str, Any]:
        """One line of metrics.csv: every attribute, every functional in a column of its own."""
        row = asdict(self)
        for name, value in row.pop("functionals").items():
            row[f"functional.{name}"] = value
        return row


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Where some of the particles were at some of the steps.

    Attributes:
        rows: (k,) int64, which particles, ascending.
        steps: (s,) int64, the numbers of steps taken, ascending; the first is 0, the last the end.
        points: (s, k, d) their positions, on the CPU.
        labels: (s, k) int64 their class indices, or None for unlabelled particles.
    """

    rows: Tensor
    steps: Tensor
    points: Tensor
    labels: Tensor | None
