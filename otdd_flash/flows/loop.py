"""The loop of a flow: evaluate, record, step, until done."""

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

# Seconds that are announced.
LONG = 1.0
# How far other devices may take a number of the start apart, as a share of it.
ROUNDING = 1e-3


class Loop:
    """A flow under way.

    Args:
        points: (n, p) the particles at the start, in the space in which they move; kept as it is.
        setting: the problem.
        mode: what moves.
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
        recorder: Recorder,
        options: LoopOptions,
    ) -> None:
        self.points, self.mode, self._first_points = points.clone(), mode, points
        self.step, self.stopped_by, self.ran_on = 0, "steps", ""
        self.history: list[StepRecord] = []
        self.moments: list[Moment] = []
        self._recorder, self._options = recorder, options
        self._evaluator = Evaluator(setting, mode, options)
        # Evaluated apart from the first step only where that sees less than the whole.
        self._start: StepRecord | None = None
        self._labels: tuple[int, Tensor | None] | None = None
        # The step of the checkpoint that was written last.
        self._saved: int | None = None
        self._variables = {"points": self.points, **mode.variables}
        # Of points that are features themselves an evaluation says whether they are finite.
        told = isinstance(options.flow.space, FeatureSpace)
        self._untold = [*mode.variables.values(), *([] if told else [self.points])]
        temperature = noise_temperature(options.functionals)
        ranks = ranks_of(setting.request.compute.group)
        if ranks is not None:
            # What stays as it is is sent once.
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
        """Go on to the end.

        Raises:
            InputError: the box leaves out the particles; or no evaluation is possible where a step
                has led, and the loop is back at the last good state, which is saved.
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
            # The next evaluation needs the memory.
            del found
            checkpoints = self._options.flow.checkpoints
            if checkpoints is not None and self.step % checkpoints.every == 0:
                self._save(self.state())

    @property
    def before(self) -> StepRecord:
        """The start, evaluated on the whole."""
        return self.history[0] if self._start is None else self._start

    def trajectory(self) -> Trajectory:
        """Where the followed particles have been, up to now."""
        return self._recorder.trajectory(self.step, self.points, self.labels())

    def labels(self) -> Tensor | None:
        """The particles' class indices (n,) where they are, which a mode may take long to read."""
        if self._labels is None or self._labels[0] != self.step:
            self._labels = (self.step, self.mode.labels())
        return self._labels[1]

    def state(self) -> dict[str, Any]:
        """All that the rest of the flow depends on, but for what moves, which the stepper has."""
        return {
            "step": self.step,
            "mode": self.mode.state(),
            "recorder": self._recorder.state(),
            "history": tuple(self.history),
            "moments": tuple(self.moments),
            "start": self._start,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved: what `state` gave, and rows.

        Raises:
            InputError: what moves the particles is not what moved them then.
        """
        self._check_beginning(state["beginning"])
        self._stepper.restore(state["rows"], state["optimizer"])
        self._restore(state)

    @cached_property
    def _beginning(self) -> dict[str, float]:
        return self._evaluator.beginning(self._first_points)

    def _check_beginning(self, then: Mapping[str, float]) -> None:
        for what, now in self._beginning.items():
            # What is nearly 0 is so by sums of larger numbers.
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
        """What the next step goes by; at the end, that of the whole, and why it is the end."""
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
        """Where no evaluation is possible, restore and save the last good state, and say why."""
        try:
            yield
        except InputError as error:
            if good is None:
                raise
            # Ranks that were left in a pass can be asked for nothing: the last checkpoint stays.
            with suppress(LostRankError):
                # Rows are where they were before the step that led here.
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
