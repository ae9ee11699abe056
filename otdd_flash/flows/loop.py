"""The loop of a flow: evaluate, record, step, until done."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.flows.divergence import Batch
from otdd_flash.flows.functionals import noise_temperature, value_and_velocity
from otdd_flash.flows.history import Moment, Recorder, StepRecord, Trajectory
from otdd_flash.flows.loop_options import LoopOptions
from otdd_flash.flows.modes import Mode
from otdd_flash.flows.setting import FlowSetting
from otdd_flash.flows.space import Space
from otdd_flash.flows.stepping import Stepper, generator, normal_like
from otdd_flash.solver.divergence import Divergence

# A mean cost of this many times that of the start: steps overshoot. A flow on its way down ends at
# about twice it at most: that of particles which began as one point and spread over the target.
DIVERGED = 10.0

# What random numbers are for.
PERTURBATION, LANGEVIN, MINIBATCH = range(3)

# Parts of a state whose tensors a step overwrites.
IN_PLACE = ("variables", "optimizer")


class _Here(NamedTuple):
    """What an evaluation found, with the features (n, d) it was made at."""

    record: StepRecord
    velocities: dict[str, Tensor]
    features: Tensor
    divergence: Divergence
    batch: Batch | None


class Loop:
    """A flow under way.

    Args:
        points: (n, p) the particles at the start, in the space in which they move; kept as it is.
        setting: the problem.
        mode: what moves.
        space: from points to features.
        mean_cost: of the start, the scale on which particles count as run away.
        recorder: keeps the trajectory.
        options: the rest.

    Attributes:
        points: (n, p) where the particles are.
        step: steps taken.
        history: a record of each, and of the end.
        moments: what every step saw, where that is kept.
        stopped_by: why the loop ended.
        ran_on: the device of the last solve, and the way its passes ran.
    """

    def __init__(
        self,
        points: Tensor,
        setting: FlowSetting,
        mode: Mode,
        space: Space,
        mean_cost: float,
        recorder: Recorder,
        options: LoopOptions,
    ) -> None:
        self.points, self.mode = points.clone(), mode
        self.step, self.stopped_by, self.ran_on = 0, "steps", ""
        self.history: list[StepRecord] = []
        self.moments: list[Moment] = []
        self._setting, self._space, self._options = setting, space, options
        self._recorder = recorder
        self._mean_cost = mean_cost
        self._variables = {"points": self.points, **mode.variables}
        temperature = noise_temperature(options.functionals)
        self._stepper = Stepper(self._variables, options.stepping, options.steps, temperature)

    def run(self) -> None:
        """Go on to the end.

        Raises:
            InputError: no evaluation is possible where a step has led; the loop is back at the last
                good state, and that is saved.
        """
        good: dict[str, Any] | None = None
        while True:
            started = time.perf_counter()
            if self._recorder.wants(self.step):
                self._recorder.keep(self.step, self.points, self.mode.labels())
            before = self.state()
            try:
                here = self._evaluate()
            except InputError as error:
                if good is None:
                    raise
                self.restore(good)
                self._save(good, may_change=("flow.step_size",))
                raise InputError(
                    f"the flow cannot go on after step {self.step}: {error}; "
                    f"{self._options.what_to_lower}"
                ) from error
            self.ran_on = f"{here.divergence.xy.f.device}, {here.divergence.backend}"
            stopped_by = self._reason_to_stop(here.record)
            if stopped_by is not None:
                self.stopped_by = stopped_by
                self._tell(replace(here.record, step_size=0.0), started)
                self._save(before)
                return
            # On the CPU, where it is in nobody's way: a step overwrites these tensors.
            good = {**before, **_copied({key: before[key] for key in IN_PLACE}, good)}
            self._take_step(here)
            self._tell(here.record, started)
            # The next evaluation needs the memory.
            del here
            checkpoints = self._options.checkpoints
            if checkpoints is not None and self.step % checkpoints.every == 0:
                self._save(self.state())

    def trajectory(self) -> Trajectory:
        """Where the followed particles have been, up to now."""
        return self._recorder.trajectory(self.step, self.points, self.mode.labels())

    def state(self) -> dict[str, Any]:
        """All that the rest of the flow depends on; tensors are the loop's own."""
        return {
            "step": self.step,
            "variables": dict(self._variables),
            "optimizer": self._stepper.state(),
            "mode": self.mode.state(),
            "recorder": self._recorder.state(),
            "history": tuple(self.history),
            "moments": tuple(self.moments),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.step = state["step"]
        for name, tensor in self._variables.items():
            tensor.copy_(state["variables"][name])
        self._stepper.restore(state["optimizer"])
        self.mode.restore(state["mode"])
        self._recorder.restore(state["recorder"])
        self.history, self.moments = list(state["history"]), list(state["moments"])

    def _evaluate(self) -> _Here:
        """The objective and what makes it fall, where the particles are.

        Raises:
            InputError: something is not finite, particles have run away, or no solve is possible.
        """
        options, setting = self._options, self._setting
        if not all(bool(torch.isfinite(part).all()) for part in self._variables.values()):
            raise InputError("particles have values that are not finite")
        points = self.points
        if options.stepping.noise > 0:
            noise = normal_like(points, self._draw(PERTURBATION))
            points = points + options.stepping.noise * noise
        features = self._space.features(points)
        if not bool(torch.isfinite(features).all()):
            raise InputError("particles have features that are not finite")
        self._check_nearness(setting.mean_cost(features, self.mode.class_distances))
        batch = self._batch()
        solved, by_features, by_variables = self.mode.evaluate(features, self.step, batch)
        velocity = self._space.pull_back(points, by_features)
        values: dict[str, float] = {}
        if options.functionals:
            masses, labels = setting.source.masses, self.mode.labels()
            values, extra = value_and_velocity(options.functionals, points, labels, masses)
            velocity = velocity + (extra if batch is None else batch.only(extra))
        objective = solved.value + sum(values.values())
        if not math.isfinite(objective) or not bool(torch.isfinite(velocity).all()):
            raise InputError("the objective or its gradient is not finite")
        self._check_nearness(solved.value)
        record = self._record(objective, solved, values, velocity)
        return _Here(record, {"points": velocity, **by_variables}, features, solved, batch)

    def _check_nearness(self, cost: float) -> None:
        """Refuse a cost far above that of the start; functionals may well lead that far."""
        if not self._options.functionals and not cost <= DIVERGED * self._mean_cost:
            noise = self._options.stepping.noise
            raise InputError(
                f"particles{f' moved by flow.noise={noise:g}' if noise else ''} are at a mean cost "
                f"of {cost:.4g} from the target, and began at {self._mean_cost:.4g}"
            )

    def _record(
        self, objective: float, solved: Divergence, values: dict[str, float], velocity: Tensor
    ) -> StepRecord:
        options, masses = self._options, self._setting.source.masses
        speeds = torch.linalg.vector_norm(velocity, dim=1).double().square()
        return StepRecord(
            step=self.step,
            objective=objective,
            divergence=solved.value,
            lower=solved.bounds[0],
            upper=solved.bounds[1],
            functionals=values,
            gradient_norm=float((masses @ speeds).sqrt()),
            step_size=options.stepping.step_size_at(self.step, options.steps),
            iterations=solved.xy.iterations,
            marginal_error=solved.marginal_error,
            tolerance=solved.tolerance,
            converged=solved.converged,
            stopped_by=solved.stopped_by,
            seconds=0.0,
        )

    def _reason_to_stop(self, record: StepRecord) -> str | None:
        options = self._options
        if self.step >= options.steps:
            return "steps"
        if options.stop is not None and options.stop():
            return "interrupted"
        if options.tolerance is not None and self.history:
            change = abs(record.objective - self.history[-1].objective)
            if change <= options.tolerance * abs(self.history[0].objective):
                return "tolerance"
        return None

    def _take_step(self, here: _Here) -> None:
        if self._options.keep_moments:
            self._keep_moment(here)
        self._stepper.step(here.velocities, self.step, self._draw(LANGEVIN), here.batch)
        self.step += 1

    def _tell(self, record: StepRecord, started: float) -> None:
        record = replace(record, seconds=time.perf_counter() - started)
        self.history.append(record)
        if self._options.progress is not None:
            self._options.progress(record)

    def _keep_moment(self, here: _Here) -> None:
        solved = here.divergence
        assert solved.xx is not None
        self.moments.append(
            Moment(
                here.record.step_size,
                here.features.cpu().clone(),
                self.mode.class_distances.full,
                solved.xy.g.cpu(),
                solved.xx.f.cpu(),
            )
        )

    def _save(self, state: Mapping[str, Any], may_change: Sequence[str] = ()) -> None:
        if self._options.checkpoints is not None:
            self._options.checkpoints.save(state, self._options.settings, may_change)

    def _batch(self) -> Batch | None:
        size = self._options.stepping.minibatch
        if size is None:
            return None
        draw, sides = self._draw(MINIBATCH), (self._setting.source, self._setting.target)
        massive = (side.masses.nonzero().squeeze(1) for side in sides)
        return Batch(*(_some(rows, size, draw) for rows in massive))

    def _draw(self, purpose: int) -> torch.Generator:
        return generator(self._options.seed, self.step, purpose)


def _some(rows: Tensor, size: int, draw: torch.Generator) -> Tensor:
    """`size` of the rows, or all if there are fewer, in their order."""
    chosen = torch.randperm(len(rows), generator=draw)[:size].sort().values
    return rows[chosen.to(rows.device)]


def _copied(state: Any, into: Any = None) -> Any:
    """A nest of containers with CPU copies of its tensors.

    Args:
        state: the nest.
        into: an earlier copy, whose memory is used again where it fits: memory that a GPU can
            write to at full speed takes long to get.
    """
    match state:
        case Tensor():
            fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (
                state.shape,
                state.dtype,
            )
            if not fits:
                into = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
            return into.copy_(state.detach())
        case dict():
            known = into if isinstance(into, dict) else {}
            return {key: _copied(part, known.get(key)) for key, part in state.items()}
    return state
