"""The records of a flow's steps, and the trajectory of its particles."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.solver.term.result import StoppedBy


@dataclass(frozen=True)
class StepRecord:
    """The particles before step `step`, and the step that was then taken.

    A step of a minibatch sees some of the points, one with noise sees them displaced. What it finds
    is an estimate of the divergence, without solver bounds; what describes the whole is None then.

    Attributes:
        step: k >= 0; the last record of a flow describes its end, from which no step was taken, and
            is of the whole.
        objective: divergence plus functionals, in units of the cost; None beside an estimate.
        divergence: S_epsilon(particles, target); None beside an estimate.
        lower: the lower solver bound of S_epsilon, as long as class distances stay what they were;
            None beside an estimate.
        upper: the upper one.
        functionals: weight times value of each functional, by name, where the step saw the points.
        gradient_norm: (sum_i a_i |v_i|^2)^1/2 of the velocities v of the particles that the step
            saw, their masses a summing to 1; in features per unit of time.
        step_size: time that the step moves forward; 0 at the end.
        iterations: of the cross term.
        marginal_error: the largest of the terms'.
        tolerance: the largest that was enough, as asked for or as rounding allows; None where the
            width of the solver bounds decided.
        converged: whether the solve reached what was asked.
        stopped_by: what ended the solve.
        seconds: wall time of evaluation and step.
        estimate: S_epsilon of the points that the step saw, where it saw them; None where that is
            the divergence.
        estimated_on: how many particles those are.
        bound_width: (upper - lower) / |value| of the solve; None where the value is 0.
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
        """What the step descended: the objective, or an estimate plus functionals."""
        value = self.divergence if self.estimate is None else self.estimate
        assert value is not None
        return value + sum(self.functionals.values())

    @property
    def described(self) -> str:
        """`seen` with its right name, for people."""
        if self.estimate is None:
            return f"objective {self.seen:.5g}"
        return f"objective {self.seen:.5g}, an estimate on {self.estimated_on:,} points"

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


class Moment(NamedTuple):
    """The state of a step on the CPU, from which its velocity at any other point follows.

    Attributes:
        step_size: time that the step moved forward.
        features: (n, d) of the particles.
        table: W (V_x + V_y, V_x + V_y).
        g: (m,) potential of the cross term, in units of the cost.
        f: (n,) potential of the particles' self term.
    """

    step_size: float
    features: Tensor
    table: Tensor
    g: Tensor
    f: Tensor


class Recorder:
    """Keeps a thinned trajectory: at most `most` moments, evenly spread however long the flow is.

    Whenever the room is full, but for the end, every second moment goes and the distance between
    moments doubles. What is kept after k steps depends on k alone, not on how many will follow.

    Args:
        rows: (k,) which particles to follow.
        most: moments to keep, at least 2.
    """

    def __init__(self, rows: Tensor, most: int) -> None:
        self.rows, self._most = rows, most
        self.every = 1
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        # The rows where points are, and the labels seen last with those of the rows.
        self._there = rows
        self._seen: tuple[Tensor | None, Tensor | None] = (None, None)

    def wants(self, step: int) -> bool:
        """Whether the particles after `step` steps are to be kept."""
        return step % self.every == 0

    def keep(self, step: int, points: Tensor, labels: Tensor | None) -> None:
        """Keep the followed rows of points (n, d) and labels (n,)."""
        self._kept[step] = self._followed(points, labels)
        while len(self._kept) >= self._most:
            self.every *= 2
            self._kept = {k: seen for k, seen in self._kept.items() if k % self.every == 0}

    def trajectory(self, step: int, points: Tensor, labels: Tensor | None) -> Trajectory:
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
        self._there, self._seen = self.rows, (None, None)

    def _followed(self, points: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        # A GPU waits for what it is sent, and is waited for.
        rows = self._there = self._there.to(points.device)
        if labels is not self._seen[0]:
            self._seen = labels, None if labels is None else labels[rows].cpu()
        return points[rows].cpu(), self._seen[1]
