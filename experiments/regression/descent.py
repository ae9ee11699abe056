"""Adam while the Hessian has a direction down, Newton with Armijo's rule where it has none."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.regression.problem import Loss, Point, Spectrum

LEARNING_RATE = 0.03
LEAST_EIGENVALUE, STEPS_PER_CHECK = 1e-3, 10
ARMIJO, HALVINGS = 0.1, 10
# Twice Newton's step, at most, where its decrease cannot be seen: the gradient then is no larger.
LONGEST_UNSEEN = 2.0
SMALL_GRADIENT, PATIENCE = 5e-3, 3
# Above this gradient norm Adam makes do with gradients of solves that end early.
LARGE_GRADIENT = 10 * SMALL_GRADIENT


@dataclass(frozen=True)
class Rules:
    """How a descent goes.

    Attributes:
        max_steps: after which it ends.
        first_step: the length of a Newton step that is tried first, then halved; None: Adam alone,
            and no eigenvalue is measured.
        adam_tolerance: L1 marginal error of solves between Adam's steps, where no eigenvalue is
            measured next; None: that of all others.
    """

    max_steps: int = 500
    first_step: float | None = 10.0
    adam_tolerance: float | None = None


@dataclass
class Trace:
    """What was seen at the weights before every step, and how it went on.

    Attributes:
        modes: a letter for each step: "a" for Adam, "n" for Newton, "." for the end.
        loss: L.
        gradient_norm: |grad L|_F.
        marginal_error: of the solves, the largest.
        seconds: since the start.
        checks: steps at which eigenvalues were measured.
        eigenvalue: the smallest one, at each of them.
        iterations: of conjugate gradients, at each of them.
        residual: of the linear systems that they left, relative, at each of them.
        check_seconds: that each of them took.
        lengths: of accepted Newton steps, in Newton directions.
        escapes: steps from which Adam handed over to Newton.
        returns: steps from which Newton handed back: an eigenvalue too small, or no length
            that decreases the loss enough.
    """

    modes: str = ""
    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    marginal_error: float = 0.0
    seconds: list[float] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    eigenvalue: list[float] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)
    check_seconds: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    escapes: list[int] = field(default_factory=list)
    returns: list[int] = field(default_factory=list)

    @property
    def ended_by_gradient(self) -> bool:
        """Whether the last gradients were small, as many as it takes."""
        last = self.gradient_norm[-PATIENCE:]
        return len(last) == PATIENCE and max(last) < SMALL_GRADIENT

    def compact(self) -> dict[str, Any]:
        """As JSON holds it: six digits of each number in a list."""
        return {
            name: [_short(entry) for entry in value] if isinstance(value, list) else value
            for name, value in vars(self).items()
        }


class Descent:
    """One run from some weights.

    Attributes:
        point: where it is.
        trace: how it came there.
    """

    def __init__(self, loss: Loss, w: Tensor, rules: Rules) -> None:
        self.trace = Trace()
        self._loss, self._rules, self._newton = loss, rules, False
        self._started = time.perf_counter()
        self.point = loss.at(w)
        self._adam = Adam(w)

    def run(self) -> None:
        """All steps."""
        for step in range(self._rules.max_steps + 1):
            self._note()
            if self.trace.ended_by_gradient or step == self._rules.max_steps:
                self.trace.modes += "."
                return
            self.point = self._newton_step(step) or self._adam_step(step)

    def _newton_step(self, step: int) -> Point | None:
        """The next point by Newton's method, or None where it is Adam's turn."""
        first = self._rules.first_step
        if first is None or not (self._newton or step % STEPS_PER_CHECK == 0):
            return None
        spectrum = self.point.spectrum()
        self.trace.checks.append(step)
        self.trace.eigenvalue.append(spectrum.smallest)
        self.trace.iterations.append(spectrum.iterations)
        self.trace.residual.append(spectrum.residual)
        self.trace.check_seconds.append(spectrum.seconds)
        sys.stderr.write(
            f"step {step}, {self.trace.seconds[-1]:.1f} s: loss {self.point.loss:.5f}, "
            f"gradient {self.point.gradient_norm:.2e}, eigenvalue {spectrum.smallest:.4f}\n"
        )
        found = None
        if spectrum.smallest >= LEAST_EIGENVALUE:
            if not self._newton:
                self.trace.escapes.append(step)
            self._newton = True
            found = self._search(spectrum, first)
        if found is None and self._newton:
            self.trace.returns.append(step)
            self._newton, self._adam = False, Adam(self.point.w)
        return found

    def _search(self, spectrum: Spectrum, first: float) -> Point | None:
        """The first point along Newton's direction that Armijo's rule accepts."""
        here = self.point
        direction = spectrum.newton_direction(here.gradient)
        slope = float((direction * here.gradient).sum())
        rounding = self._loss.rounding * abs(here.loss)
        for length in (first / 2**halved for halved in range(HALVINGS + 1)):
            w, less = here.w + length * direction, -ARMIJO * length * slope
            # Up to rounding, or no step would be short enough near the end; where rounding hides
            # what a step gains, one that is longer than Newton's own leads away.
            if length > LONGEST_UNSEEN and less < rounding:
                continue
            limit = here.loss - less + rounding
            found = self._loss.at_most(limit, w, near=here)
            if found is not None:
                self.trace.modes += "n"
                self.trace.lengths.append(length)
                return found
        return None

    def _adam_step(self, step: int) -> Point:
        self.trace.modes += "a"
        checked = (step + 1) % STEPS_PER_CHECK == 0
        exact = checked or self.point.gradient_norm <= LARGE_GRADIENT
        return self._loss.at(
            self._adam.step(self.point.gradient),
            near=self.point,
            tolerance=None if exact else self._rules.adam_tolerance,
        )

    def _note(self) -> None:
        self.trace.loss.append(self.point.loss)
        self.trace.gradient_norm.append(self.point.gradient_norm)
        worst = max(self.trace.marginal_error, self.point.marginal_error)
        self.trace.marginal_error = worst
        self.trace.seconds.append(time.perf_counter() - self._started)


class Adam:
    """Adam's method on weights whose gradient somebody else computes."""

    def __init__(self, w: Tensor) -> None:
        self._w = w.clone().requires_grad_()
        self._adam = torch.optim.Adam([self._w], lr=LEARNING_RATE)

    def step(self, gradient: Tensor) -> Tensor:
        """The weights after a step."""
        self._w.grad = gradient.clone()
        self._adam.step()
        return self._w.detach().clone()


def _short(number: float) -> float:
    return float(f"{number:.6g}") if isinstance(number, float) else number
