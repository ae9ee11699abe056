"""The evaluation of a flow's particles: the objective, its gradient, and checks that they are sane.

`Evaluator` computes S_epsilon and functionals at the current points and returns the velocities of
all variables; `flows.loop` calls it. A step may use a minibatch of the points or points displaced
by noise, and its value is then an estimate. Start and end of a flow are evaluated on all points.

Random draws depend only on the seed, the step and their purpose, so that a resumed flow repeats
them. Points that run away raise `Overshot`, which `flows.loop` turns into advice.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import InputError, UserCodeError
from otdd_flash.flows.divergence import Batch, FlowSetting
from otdd_flash.flows.flow import LoopOptions
from otdd_flash.flows.functionals import value_and_velocity
from otdd_flash.flows.history import StepRecord
from otdd_flash.flows.modes import Evaluation, Mode
from otdd_flash.flows.stepping import Draw, generator, normal_like
from otdd_flash.samples import all_finite, largest_entry
from otdd_flash.solver.divergence import Divergence

# Steps overshoot if the mean cost is this many times that of the start. A converging flow ends at
# about twice the start at most, if particles began as one point and spread over the target.
DIVERGED = 10.0
# Mean costs below this share of the target's mean squared norm count as 0.
RESOLUTION = 1e-6

# The name of the mean cost in messages, and the message for points that overflowed.
MEAN_COST = "the mean cost"
NOT_FINITE = "particles have values that are not finite"


class Overshot(InputError):
    """Particles ran away: step size, noise or functionals are too large."""


class Found(NamedTuple):
    """The result of an evaluation, with the features (n, d) at which it was made."""

    record: StepRecord
    velocities: dict[str, Tensor]
    features: Tensor
    divergence: Divergence
    batch: Batch | None


class Evaluator:
    """Evaluates the particles of a flow.

    Args:
        setting: the problem.
        mode: the mode of the flow, at its start.
        options: of the loop.
    """

    def __init__(self, setting: FlowSetting, mode: Mode, options: LoopOptions) -> None:
        self._setting, self._mode, self._options = setting, mode, options
        self._space = options.flow.space
        # The mean cost at the start: the scale on which particles count as run away.
        self._mean_cost = setting.mean_cost(setting.source.features, mode.class_distances)
        # Clouds that start at distance 0 move only by rounding, so the limit must not be 0.
        resolved = RESOLUTION * setting.request.cost.squared.lambda_x * setting.target_square
        self._far = max(DIVERGED * self._mean_cost, resolved)
        sides = (setting.source, setting.target)
        self._massive = tuple(side.masses.nonzero().squeeze(1) for side in sides)
        # The rows of each side that a step uses; None if these are all.
        self._size = options.flow.stepping.minibatch
        if self._size is not None and all(self._size >= len(rows) for rows in self._massive):
            self._size = None

    @property
    def estimates(self) -> bool:
        """Whether steps use a minibatch or displaced points instead of all points."""
        return self._size is not None or self._options.flow.stepping.noise > 0

    def __call__(self, points: Tensor, step: int, *, whole: bool = False) -> Found:
        """Evaluate the objective at points (n, p), and the velocities along which it grows.

        Args:
            points: the particles after `step` steps.
            step: k >= 0, which determines the random draws.
            whole: use all points without noise, and current class distances.

        Raises:
            Overshot: a value is not finite, or particles have run away.
            InputError: no solve is possible.
        """
        options, mode = self._options, self._mode
        noise, given = 0.0 if whole else options.flow.stepping.noise, points
        if noise > 0:
            points = points + noise * normal_like(points, self._draw(step, Draw.PERTURBATION))
        features = self._space.features(points)
        cost = self._setting.mean_cost(features, mode.class_distances)
        if not math.isfinite(cost):
            # The sum may overflow for finite points that are far away.
            self._check_finite(given, features)
        self._check_nearness(cost, *([f"moved by flow.noise={noise:g}"] if noise else []))
        if step > 0 and (whole or self.measured_at(step)):
            mode.measure(features)
        batch = None if whole else self._batch(step)
        solved, by_features, by_variables = self._solved(features, batch, cost)
        velocity = self._space.pull_back(points, by_features)
        values: dict[str, float] = {}
        if options.functionals:
            values, extra = self._functionals(points)
            velocity = velocity + (extra if batch is None else batch.only(extra))
        finite = math.isfinite(solved.value + sum(values.values()))
        # One transfer to the CPU for both.
        largest, norm = torch.stack((largest_entry(velocity), self._norm(velocity, batch))).tolist()
        if not finite or not math.isfinite(largest):
            raise Overshot("the objective or its gradient is not finite")
        self._check_nearness(solved.value)
        record = self._record(step, solved, values, norm, batch, noise)
        return Found(record, {"points": velocity, **by_variables}, features, solved, batch)

    def measured_at(self, step: int) -> bool:
        """Return whether the flow recomputes class distances after `step` steps."""
        return step % self._options.flow.refresh == 0

    def expected_seconds(self, points: Tensor, step: int) -> float:
        """Estimate the seconds that class distances take for the rest of a flow, points (n, p)."""
        features = self._space.features(points)
        whole = part = self._mode.expected_seconds(features)
        if self.estimates:
            part = self._mode.expected_seconds(features, self._batch(step))
        return part * (self._options.flow.steps - step) + whole * (1 + self.estimates)

    def check_box(self, points: Tensor) -> None:
        """Refuse a box that excludes the particles (n, p) of the start.

        Raises:
            InputError: clamping to the box alone moves them as far as steps that overshoot.
        """
        box = self._options.flow.stepping.box
        if box is None or self._options.functionals:
            return
        inside = points.clamp(*box)
        if torch.equal(inside, points):
            return
        cost = self._mean_cost_of(inside)
        if bool((inside != points).all()) or not cost <= self._far:
            raise InputError(
                f"flow.box=[{box[0]:g}, {box[1]:g}] leaves out the particles, whose coordinates "
                f"lie in [{float(points.min()):.4g}, {float(points.max()):.4g}]: it takes them to "
                f"a mean cost of {cost:.4g} from the target, and they are at "
                f"{self._mean_cost:.4g}; give a box that holds both datasets, or flow.box=null"
            )

    def check_reach(self, points: Tensor) -> None:
        """Refuse points (n, p) that a step has led far out of the box, before they are clamped.

        Raises:
            Overshot: under the same condition as without a box.
        """
        box = self._options.flow.stepping.box
        assert box is not None
        width = box[1] - box[0]
        # Within a box's width around the box nothing has run away; features may be expensive.
        if bool(((points > box[0] - width) & (points < box[1] + width)).all()):
            return
        how = f"that a step took out of flow.box=[{box[0]:g}, {box[1]:g}]"
        self._check_nearness(self._mean_cost_of(points), how)

    def beginning(self, points: Tensor) -> dict[str, float]:
        """Return numbers that distinguish user functions, of which settings know only the names.

        Args:
            points: (n, p), the particles at the start.

        Returns:
            The mean cost of the start, which depends on the space of the particles, and the value
            of each functional there.
        """
        source = self._setting.source
        named = self._options.functionals
        values, _ = value_and_velocity(named, points, source.labels, source.masses)
        found = {f"functional {name}": value for name, value in values.items()}
        return {MEAN_COST: self._mean_cost, **found}

    def _check_finite(self, points: Tensor, features: Tensor) -> None:
        if not all_finite(points):
            raise Overshot(NOT_FINITE)
        if features is not points and not all_finite(features):
            raise Overshot("particles have features that are not finite")

    def _mean_cost_of(self, points: Tensor) -> float:
        return self._setting.mean_cost(self._space.features(points), self._mode.class_distances)

    def _solved(self, features: Tensor, batch: Batch | None, cost: float) -> Evaluation:
        try:
            return self._mode.evaluate(features, batch)
        except InputError as error:
            # If particles are far away, the steps are to blame for an impossible solve.
            if not cost <= self._far:
                raise Overshot(str(error)) from error
            raise

    def _functionals(self, points: Tensor) -> tuple[dict[str, float], Tensor]:
        masses, labels = self._setting.masses, self._mode.labels()
        try:
            return value_and_velocity(self._options.functionals, points, labels, masses)
        except UserCodeError:
            raise
        except InputError as error:
            # At the start a functional's error is its own; later the points have gone too far.
            raise Overshot(str(error)) from error

    def _check_nearness(self, cost: float, *how: str) -> None:
        """Refuse a cost far above that of the start, unless functionals may lead that far.

        `how` describes what moved the particles there.
        """
        if not self._options.functionals and not cost <= self._far:
            raise Overshot(
                f"{' '.join(['particles', *how])} are at a mean cost of {cost:.4g} from the "
                f"target, and began at {self._mean_cost:.4g}"
            )

    def _record(
        self,
        step: int,
        solved: Divergence,
        values: dict[str, float],
        gradient_norm: float,
        batch: Batch | None,
        noise: float,
    ) -> StepRecord:
        whole = batch is None and noise == 0
        seen = len(self._setting.source) if batch is None else len(batch.particles)
        return StepRecord(
            step=step,
            objective=solved.value + sum(values.values()) if whole else None,
            divergence=solved.value if whole else None,
            lower=solved.bounds[0] if whole else None,
            upper=solved.bounds[1] if whole else None,
            functionals=values,
            gradient_norm=gradient_norm,
            step_size=self._options.flow.stepping.step_size_at(step, self._options.flow.steps),
            iterations=solved.xy.iterations,
            marginal_error=solved.marginal_error,
            tolerance=solved.tolerance,
            converged=solved.converged,
            stopped_by=solved.stopped_by,
            seconds=0.0,
            estimate=None if whole else solved.value,
            estimated_on=None if whole else seen,
            bound_width=solved.bound_width if math.isfinite(solved.bound_width) else None,
        )

    def _norm(self, velocity: Tensor, batch: Batch | None) -> Tensor:
        """Return (sum_i a_i |v_i|^2)^1/2 over the particles that a step uses."""
        masses = self._setting.masses
        if batch is not None:
            masses, velocity = masses[batch.particles], velocity[batch.particles]
            masses = masses / masses.sum()
        speeds: Tensor = torch.linalg.vector_norm(velocity, dim=1)
        return (masses @ speeds.double().square()).sqrt()

    def _batch(self, step: int) -> Batch | None:
        """Return the rows that a step uses; None for all of them."""
        if self._size is None:
            return None
        draw = self._draw(step, Draw.MINIBATCH)
        return Batch(*(_some(rows, self._size, draw) for rows in self._massive))

    def _draw(self, step: int, purpose: Draw) -> torch.Generator:
        return generator(self._options.flow.seed, step, purpose)


def _some(rows: Tensor, size: int, draw: torch.Generator) -> Tensor:
    """Return `size` of the rows, or all if there are fewer, in their order."""
    chosen = torch.randperm(len(rows), generator=draw)[:size].sort().values
    return rows[chosen.to(rows.device)]
