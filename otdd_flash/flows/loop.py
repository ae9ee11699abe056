"""The loop of a flow: evaluate, record, step, until the end.

`Loop` owns the state of a running flow. It evaluates the particles, tests whether to stop, writes
checkpoints and takes steps. If no evaluation is possible after a step, it restores and saves the
last good state before it raises. `flows.run` makes one loop, restores it from a checkpoint and
reads its history afterwards.

All that later steps depend on must be in `state` or in the rows of `flows.stepping`, so that a
resumed flow takes the same steps. On several ranks only rank 0 runs this loop, and the others
follow its orders.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any

from torch import Tensor

from otdd_flash.distributed.copies import Copied
from otdd_flash.distributed.ranks import ranks_of
from otdd_flash.errors import InputError, LostRankError, prefixed
from otdd_flash.flows.divergence import FlowSetting
from otdd_flash.flows.evaluation import MEAN_COST, NOT_FINITE, Evaluator, Found, Overshot
from otdd_flash.flows.flow import LoopOptions
from otdd_flash.flows.functionals import noise_temperature
from otdd_flash.flows.history import Moment, Recorder, StepRecord, Trajectory
from otdd_flash.flows.modes import Mode
from otdd_flash.flows.space import FeatureSpace
from otdd_flash.flows.stepping import Draw, Stepper, generator
from otdd_flash.samples import all_finite

logger = logging.getLogger(__name__)

# Longer waits, in seconds, are announced.
LONG = 1.0
# The relative difference that another device may cause in a number of the start.
ROUNDING = 1e-3


class Loop:
    """A running flow.

    Args:
        points: (n, p) the particles at the start, in the space in which they move; not modified.
        setting: the problem.
        mode: what moves.
        recorder: stores the trajectory.
        options: the other options.

    Attributes:
        points: (n, p) the current particles.
        step: the number of steps taken.
        history: a record of each step, and of the end.
        moments: the state of each step, if these are kept.
        stopped_by: why the loop ended.
        ran_on: the device and backend of the last solve.
    """

    def __init__(
        self,
        points: Tensor,
        setting: FlowSetting,
        mode: Mode,
        recorder: Recorder,
        options: LoopOptions,
    ) -> None:
        self.points, self.mode, self._first_points = points.clone(), mode, points
        self.step, self.stopped_by, self.ran_on = 0, "steps", ""
        self.history: list[StepRecord] = []
        self.moments: list[Moment] = []
        self._recorder, self._options = recorder, options
        self._evaluator = Evaluator(setting, mode, options)
        # The start is evaluated separately only if the first step does not use all points.
        self._start: StepRecord | None = None
        self._labels: tuple[int, Tensor | None] | None = None
        # The step of the last checkpoint.
        self._saved: int | None = None
        self._variables = {"points": self.points, **mode.variables}
        # If points are features, the evaluation itself checks that they are finite.
        told = isinstance(options.flow.space, FeatureSpace)
        self._untold = [*mode.variables.values(), *([] if told else [self.points])]
        temperature = noise_temperature(options.functionals)
        ranks = ranks_of(setting.request.compute.group)
        if ranks is not None:
            # Tensors that do not change are sent to the ranks once.
            for fixed in (setting.source.labels, setting.source.weights):
                if fixed is not None:
                    Copied(ranks, fixed, self, given=True)
        self._stepper = Stepper(
            self._variables,
            options.flow.stepping,
            options.flow.steps,
            temperature,
            self._evaluator.check_reach,
            ranks,
        )

    def run(self) -> None:
        """Run to the end of the flow.

        Raises:
            InputError: the box excludes the particles; or no evaluation is possible after a
                step, and the loop has returned to the last good state and saved it.
        """
        self._evaluator.check_box(self.points)
        self._say_how_long()
        if self._evaluator.estimates and self._start is None:
            self._start = self._evaluate_start()
        good: dict[str, Any] | None = None
        while True:
            started = time.perf_counter()
            if self._recorder.wants(self.step):
                self._recorder.keep(self.step, self.points, self.labels())
            state = self.state()
            with self._going_back_to(good):
                found, stopped_by = self._evaluate()
            self.ran_on = f"{found.divergence.xy.f.device}, {found.divergence.backend}"
            if stopped_by is not None:
                self.stopped_by = stopped_by
                self._tell(replace(found.record, step_size=0.0), started)
                if self._saved != self.step:
                    self._save(state)
                return
            good = state
            with self._going_back_to(good):
                self._take_step(found)
            self._tell(found.record, started)
            # Free the memory for the next evaluation.
            del found
            checkpoints = self._options.flow.checkpoints
            if checkpoints is not None and self.step % checkpoints.every == 0:
                self._save(self.state())

    @property
    def before(self) -> StepRecord:
        """The record of the start, evaluated on all points."""
        return self.history[0] if self._start is None else self._start

    def trajectory(self) -> Trajectory:
        """Return the positions of the followed particles until now."""
        return self._recorder.trajectory(self.step, self.points, self.labels())

    def labels(self) -> Tensor | None:
        """Return the particles' current class indices (n,), which may take a mode long."""
        if self._labels is None or self._labels[0] != self.step:
            self._labels = (self.step, self.mode.labels())
        return self._labels[1]

    def state(self) -> dict[str, Any]:
        """Return all that the rest of the flow depends on, except the stepper's variables."""
        return {
            "step": self.step,
            "mode": self.mode.state(),
            "recorder": self._recorder.state(),
            "history": tuple(self.history),
            "moments": tuple(self.moments),
            "start": self._start,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state: that of `state`, and rows.

        Raises:
            InputError: the objective is not that of the run that stored the state.
        """
        self._check_beginning(state["beginning"])
        self._stepper.restore(state["rows"], state["optimizer"])
        self._restore(state)

    @cached_property
    def _beginning(self) -> dict[str, float]:
        return self._evaluator.beginning(self._first_points)

    def _check_beginning(self, then: Mapping[str, float]) -> None:
        for what, now in self._beginning.items():
            # A number near 0 is a sum of larger ones, so its rounding is relative to these.
            size = max(abs(then[what]), ROUNDING * then[MEAN_COST])
            if not abs(now - then[what]) <= ROUNDING * size:
                raise InputError(
                    f"flow.resume=true, but {what} at the start was {then[what]:.6g} in the run "
                    f"that wrote the checkpoint and is {now:.6g} now: a function or a network of "
                    "yours computes something else; set it as it was, or start again without "
                    "flow.resume"
                )

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step, self._labels, self._start = state["step"], None, state["start"]
        self.mode.restore(state["mode"])
        self._recorder.restore(state["recorder"])
        self.history, self.moments = list(state["history"]), list(state["moments"])

    def _evaluate(self) -> tuple[Found, str | None]:
        """Return the evaluation for the next step, or that of the end and why it is the end."""
        self._check_finite()
        last = self.step >= self._options.flow.steps
        found = self._evaluator(self.points, self.step, whole=last)
        stopped_by = "steps" if last else self._reason_to_stop(found.record)
        seen_whole = last or (
            not self._evaluator.estimates and self._evaluator.measured_at(self.step)
        )
        if stopped_by is not None and not seen_whole:
            found = self._evaluator(self.points, self.step, whole=True)
        return found, stopped_by

    def _say_how_long(self) -> None:
        seconds = self._evaluator.expected_seconds(self.points, self.step)
        if seconds > LONG:
            logger.warning(
                "steps to come, %d, will take about %s: with full covariances every particle is "
                "compared with those around it by a Gaussian of its own; labels.diagonal=true is a "
                "fraction of that",
                self._options.flow.steps - self.step,
                timedelta(seconds=round(seconds)),
            )

    def _evaluate_start(self) -> StepRecord:
        started = time.perf_counter()
        record = self._evaluator(self.points, 0, whole=True).record
        return replace(record, step_size=0.0, seconds=time.perf_counter() - started)

    def _check_finite(self) -> None:
        if self._untold and not all_finite(*self._untold):
            raise Overshot(NOT_FINITE)

    @contextmanager
    def _going_back_to(self, good: dict[str, Any] | None) -> Iterator[None]:
        """If no evaluation is possible, restore and save the last good state, and raise."""
        try:
            yield
        except InputError as error:
            if good is None:
                raise
            # Ranks that are stuck in a pass cannot write: the last checkpoint remains.
            with suppress(LostRankError):
                # Variables return to their values before the last step.
                self._stepper.undo()
                self._restore(good)
                self._save(good, may_change=("flow.step_size",))
            where = f"the flow cannot go on after step {self.step}"
            if isinstance(error, Overshot):
                raise InputError(f"{where}: {error}; {self._options.what_to_lower}") from error
            raise prefixed(where, error) from error

    def _reason_to_stop(self, record: StepRecord) -> str | None:
        options = self._options
        if options.callbacks.stop is not None and options.callbacks.stop():
            return "interrupted"
        if options.flow.tolerance is not None and self.history:
            change = abs(record.seen - self.history[-1].seen)
            if change <= options.flow.tolerance * abs(self.history[0].seen):
                return "tolerance"
        return None

    def _take_step(self, found: Found) -> None:
        if self._options.flow.keep_moments:
            self._keep_moment(found)
        draw = generator(self._options.flow.seed, self.step, Draw.LANGEVIN)
        self._stepper.step(found.velocities, self.step, draw, found.batch)
        self.step += 1

    def _tell(self, record: StepRecord, started: float) -> None:
        record = replace(record, seconds=time.perf_counter() - started)
        self.history.append(record)
        if self._options.callbacks.progress is not None:
            self._options.callbacks.progress(record)

    def _keep_moment(self, found: Found) -> None:
        solved = found.divergence
        assert solved.xx is not None
        self.moments.append(
            Moment(
                found.record.step_size,
                found.features.cpu().clone(),
                self.mode.class_distances.full,
                solved.xy.g.cpu(),
                solved.xx.f.cpu(),
            )
        )

    def _save(self, state: Mapping[str, Any], may_change: Sequence[str] = ()) -> None:
        if self._options.flow.checkpoints is not None:
            stepper, settings = self._stepper, self._options.settings
            whole = {**state, "optimizer": stepper.others(), "beginning": self._beginning}
            self._options.flow.checkpoints.save(whole, settings, may_change, stepper.write)
            self._saved = self.step
