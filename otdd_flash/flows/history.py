"""The records of a flow's steps, the trajectory of its particles, and the moments of its steps.

A `Moment` is the state of a step from which an entropic map is built (`flows.result`).

`flows.objective` and `flows.run` make the records, `Recorder` thins the trajectory, and
`flows.checkpoint` stores records, moments and the state of the `Recorder`. `flows.result`,
`commands.messages` and the modules of `report` read them. The fields of `StepRecord` and
`Moment` are part of the checkpoint format, and those of `StepRecord` are the columns of
metrics.csv, so their names must stay.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.solver.term import StoppedBy


@dataclass(frozen=True)
class StepRecord:
    """The evaluation of the particles from which step number `step` was taken, and that step.

    A step on a minibatch uses some of the points, one with noise uses displaced points. Its value
    is an estimate of the divergence, so `objective`, `divergence`, `lower` and `upper`, which are
    of all points, are None; `bound_width` is that of the estimate's own solve.

    Attributes:
        step: k >= 0; the last record of a flow describes its end, from which no step was taken, and
            uses all points.
        objective: divergence plus functionals, in units of the cost; None for an estimate.
        divergence: S_epsilon(particles, target); None for an estimate.
        lower: the lower solver bound of S_epsilon at the current class distances; None for an
            estimate.
        upper: the upper solver bound.
        functionals: weight times value of each functional, by name, at the points of the step.
        gradient_norm: (sum_i a_i |v_i|^2)^1/2 of the velocities v of the particles that the step
            used, with masses a that sum to 1; in features per unit of time.
        step_size: time that the step moves forward; 0 at the end.
        iterations: of the cross term.
        marginal_error: the largest over the terms.
        tolerance: the largest marginal error that was accepted, as asked for, or the least that
            rounding allows; None if the solver stopped by the width of its bounds.
        converged: whether the solve reached its goal.
        stopped_by: what ended the solve.
        seconds: wall time of evaluation and step.
        estimate: S_epsilon of the points that the step used, after noise moved them; None if the
            step used all points without noise: then `divergence` is it.
        estimated_on: the number of particles of the estimate.
        bound_width: (upper - lower) / |value| of the divergence that was solved for this step, also
            of an estimate; None if the value is 0.
    """

    step: int
    objective: float | None
    divergence: float | None
    lower: float | None
    upper: float | None
    functionals: dict[str, float]
    gradient_norm: float
    step_size: float
    iterations: int
    marginal_error: float
    tolerance: float | None
    converged: bool
    stopped_by: StoppedBy
    seconds: float
    estimate: float | None = None
    estimated_on: int | None = None
    bound_width: float | None = None

    @property
    def seen(self) -> float:
        """The value that the step descended: the objective, or an estimate plus functionals."""
        value = self.divergence if self.estimate is None else self.estimate
        assert value is not None
        return value + sum(self.functionals.values())

    @property
    def described(self) -> str:
        """`seen` as text, with its name."""
        if self.estimate is None:
            return f"objective {self.seen:.5g}"
        return f"objective {self.seen:.5g}, an estimate on {self.estimated_on:,} points"

    def row(self) -> dict[str, Any]:
        """Return one line of metrics.csv: all attributes, with one column per functional."""
        row = asdict(self)
        for name, value in row.pop("functionals").items():
            row[f"functional.{name}"] = value
        return row


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The positions of some particles at some steps.

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


class Moment(NamedTuple):
    """The state of a step on the CPU, from which its velocity at any other point follows.

    Attributes:
        step_size: time that the step moved forward.
        features: (n, d) of the particles.
        table: W (V_x + V_y, V_x + V_y), the class distances between the V_x source and V_y target
            classes.
        g: (m,) target potential of the cross term, in units of the cost.
        f: (n,) potential of the particles' self term.
    """

    step_size: float
    features: Tensor
    table: Tensor
    g: Tensor
    f: Tensor


class Recorder:
    """Stores a thinned trajectory: at most `most` sets of positions, evenly spaced.

    When only the place for the end is left, every second stored position is dropped and the spacing
    doubles. What is stored after k steps depends on k alone, not on the number of steps to come.

    Args:
        rows: (k,) which particles to follow.
        most: the largest number of stored positions, at least 2.
    """

    def __init__(self, rows: Tensor, most: int) -> None:
        self.rows, self._most, self.every = rows, most, 1
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}

    def wants(self, step: int) -> bool:
        """Return whether the particles after `step` steps are to be stored."""
        return step % self.every == 0

    def keep(self, step: int, points: Tensor, labels: Tensor | None) -> None:
        """Store the followed rows of points (n, d) and labels (n,)."""
        self._kept[step] = self._followed(points, labels)
        while len(self._kept) >= self._most:
            self.every *= 2
            self._kept = {k: seen for k, seen in self._kept.items() if k % self.every == 0}

    def trajectory(self, step: int, points: Tensor, labels: Tensor | None) -> Trajectory:
        """Return what is stored, with the points and labels after `step` steps as the end."""
        kept = {**self._kept, step: self._followed(points, labels)}
        steps = sorted(kept)
        seen = [kept[k][1] for k in steps]
        return Trajectory(
            self.rows,
            torch.tensor(steps),
            torch.stack([kept[k][0] for k in steps]),
            None if labels is None else torch.stack([part for part in seen if part is not None]),
        )

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows, "every": self.every, "kept": dict(self._kept)}

    def restore(self, state: dict[str, Any]) -> None:
        self.rows, self.every, self._kept = state["rows"], state["every"], dict(state["kept"])

    def _followed(self, points: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rows = self.rows.to(points.device)
        return points[rows].cpu(), None if labels is None else labels[rows].cpu()
