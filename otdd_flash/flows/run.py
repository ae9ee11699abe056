"""`gradient_flow`, the entry point of flows: it moves a labelled dataset towards another.

    dx_i / dt = -(1 / a_i) dF / dx_i,      F = S_epsilon(x, target) + sum_k w_k F_k(x)

after Alvarez-Melis and Fusi 2021, Dataset Dynamics via Gradient Flows in Probability Space.

The function reads and checks both datasets, computes class distances and epsilon at the start,
makes the loop or resumes it, and gathers the result. A thread copies both sides from a GPU to the
CPU while the steps run. Users, `commands.adapt` and `integrations.sklearn` call it. The settings
are complete before the loop starts, because a checkpoint holds them and is refused if they differ.

`Loop` owns the state of a running flow: it evaluates the particles, tests whether to stop, writes
checkpoints and takes steps. If no evaluation is possible after a step, it restores and saves the
last good state before it raises. All that later steps depend on must be in `state` or in the rows
of `flows.stepping`, so that a resumed flow takes the same steps. On several ranks only rank 0 runs
this loop, and the others follow its orders.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import Count, Positive, takes
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.data.subset import stratified_rows
from otdd_flash.devices import resolve_device
from otdd_flash.distributed.ranks import Copied
from otdd_flash.eager import computes
from otdd_flash.errors import InputError, LostRankError, NotConvergedWarning, prefixed, warn
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.fingerprint import Unchanged
from otdd_flash.flows.flow import MODES, STREAMING_MODES, Callbacks, Flow
from otdd_flash.flows.functionals import build_functionals, noise_temperature
from otdd_flash.flows.modes import Mode
from otdd_flash.flows.objective import (
    MEAN_COST,
    NOT_FINITE,
    Evaluator,
    FlowSetting,
    Found,
    Overshot,
)
from otdd_flash.flows.result import FlowResult, Moment, Recorder, StepRecord
from otdd_flash.flows.space import DirectionSpace, FeatureSpace
from otdd_flash.flows.stepping import Draw, Stepper, generator
from otdd_flash.labels import (
    Labels,
    drop_small_classes,
    measure_classes,
    metric_of,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.by_ranks import measured_by_ranks
from otdd_flash.labels.metrics import scale_of, with_numbers
from otdd_flash.operators.comparison import Comparison, check_comparable
from otdd_flash.samples import LabeledSamples, all_finite, displaced
from otdd_flash.solver.penalties import refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules import Converged, Schedule
from otdd_flash.solver.shortfall import joint_shortfall
from otdd_flash.solver.term import epsilon_of_datasets, refuse_both, resolve_epsilon

logger = logging.getLogger(__name__)

# How many particles the trajectory follows, and at how many moments at most it stores them: a few
# megabytes for a flow of any size.
FOLLOWED, MOMENTS = 200, 32
# Keywords that users may expect of `gradient_flow`, and where they belong.
ELSEWHERE = {
    **{each.name: f"flow=otdd.Flow({each.name}=...)" for each in fields(Flow)},
    **{each.name: f"callbacks=otdd.Callbacks({each.name}=...)" for each in fields(Callbacks)},
    **{key: f"cost=otdd.GroundCost({key}=...)" for key in ("lambda_x", "lambda_y")},
    "class_distances": "labels=otdd.labels.Given(table)",
}


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@torch.enable_grad()
@takes(elsewhere=ELSEWHERE)
def gradient_flow(
    source: Samples,
    target: Samples,
    flow: Flow | None = None,
    *,
    epsilon: Positive | None = None,
    epsilon_relative: Positive | None = None,
    labels: Labels = "gaussian",
    min_class_size: Count | None = None,
    cost: GroundCost | None = None,
    unbalanced: Positive | None = None,
    unbalanced_relative: Positive | None = None,
    solver: Schedule | None = None,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    callbacks: Callbacks | None = None,
) -> FlowResult:
    """Move a labelled dataset towards another, along the gradient of their distance.

    Args:
        source: n points, which the flow copies, as samples, as arrays (features, labels) or as any
            dataset of vectors that `otdd.embed` accepts.
        target: m points in the same space.
        flow: what moves and how, `otdd.Flow()` by default.
        epsilon: entropic regularisation, in units of the cost.
        epsilon_relative: epsilon as a multiple of the mean cost at the start; instead of
            `epsilon`. If neither is given, epsilon is 0.01 of that mean.
        labels: the metric between classes: a name such as "gaussian", a metric such
            as `otdd.labels.Gaussian(diagonal=True)`, or a function f(x, y) of the points of two
            classes, which in mode `features` is called again whenever particles have moved.
            Distances of a table, `otdd.labels.Given(table)`, stay fixed.
        min_class_size: drop classes with fewer samples, with a notice.
        cost: the ground cost and its weights, by default half the squared distances
            between features and between classes.
        unbalanced: rho, the price of mass that is not matched, in units of the cost. Particles
            that have no counterpart are not drawn to the target, but the self term pushes them
            apart, until they are several sqrt(epsilon) from one another; leave them out to keep
            them, by `DistanceResult.unmatched().source_rows`.
        unbalanced_relative: the same as a multiple of the mean cost at the start.
        solver: how a step is solved and when it stops, `otdd.Converged()` by default.
        compute: `otdd.ComputeOptions`, or only a device.
        cache_dir: the cache of class distances of the start; None uses none.
        callbacks: functions called with steps and solves, and asked whether to stop.

    Returns:
        The adapted dataset, in the space of `source`, with the records of the flow.

    Raises:
        InputError: the request cannot be met, or particles ran away because step size, noise or
            functionals are too large; the message says what to change.
        ConvergenceError: `solver.require_convergence` is set and a solve stopped early.

    Warns:
        NotConvergedWarning: a solve stopped before its tolerance.
    """
    started = time.perf_counter()
    refuse_both(epsilon, epsilon_relative)
    source, target = as_samples(source, "source"), as_samples(target, "target")
    flow, callbacks = flow or Flow(), callbacks or Callbacks()
    compute, solver = ComputeOptions.of(compute), solver or Converged()
    metric, (source, target) = with_numbers(metric_of(labels), (source, target))
    cost = cost or GroundCost()
    cost.check_labels(metric.name)
    refuse_unbalanced(unbalanced, unbalanced_relative, solver, debias=True, ground=cost.ground)
    if cost.ground == "cosine":
        flow = replace(flow, space=DirectionSpace(flow.space, cost))
    check_comparable(source, target)
    device = resolve_device(compute.device)
    points = drop_small_classes(source, min_class_size).to(device)
    if isinstance(points.features, FileFeatures):
        # Particles move in memory, and in a larger type than the half type of some files.
        points = replace(points, features=points.points_of(slice(None)))
    goal = drop_small_classes(target, min_class_size)
    # The target may stay on the CPU or in its file if its points are used only in passes.
    in_features = isinstance(flow.space, FeatureSpace)
    streams = in_features and flow.mode in STREAMING_MODES
    if not streams:
        goal = goal.to(device)
    notice_single_samples((points, goal), metric)
    unchanged = Unchanged.of(points, goal)
    sides = (replace(side, features=flow.space.features(side.features)) for side in (points, goal))
    comparison = Comparison.prepare(
        tuple(sides),
        cost,
        compute,
        transformed=True,
        resident=not streams,
        target_scale=scale_of(metric),
    )
    # Class distances are computed where the target is: on the device, or on the CPU if the target
    # stays there to be streamed.
    start, end = comparison.given[0].to(comparison.home), comparison.given[1]
    metric = settled_metric(metric, epsilon, (start, end), comparison.streaming)
    shared = metric if compute.group is None else measured_by_ranks(metric, compute.group)
    told = callbacks.class_progress
    table = measure_classes(start, end, shared, cache_dir=cache_dir, progress=told)
    mean = comparison.with_classes(table.full).mean_cost()
    key, given, used = resolve_epsilon(epsilon, epsilon_relative, lambda: mean)
    # The advice to standardise features is left out (infinite `scale`) where points move in another
    # space than that of their features. An error about epsilon, here or in a step, names the
    # setting that the user gave.
    scale = cost.standardized(points.dim) if in_features else math.inf
    named = partial(epsilon_of_datasets, key, given, used, lambda: mean, scale)
    with named():
        comparison = comparison.at(used)
    constraints = resolve_constraints(unbalanced, unbalanced_relative, lambda: mean)
    comparison = replace(comparison, constraints=constraints)
    functionals = build_functionals(flow.functionals, points)
    setting = FlowSetting(comparison, metric, solver, flow, functionals, callbacks)
    settings = setting.settings(points, goal, table)
    loop = Loop(points, setting, MODES[flow.mode](setting, table), settings)
    checkpoints = flow.checkpoints
    with ThreadPoolExecutor(1) as beside:
        issued = None
        if device.type == "cuda":
            issued = torch.cuda.current_stream(device).record_event()
        coming = beside.submit(on_host, points, goal, issued)
        with nullcontext() if checkpoints is None else checkpoints.held(), named():
            if checkpoints is not None and checkpoints.resume:
                loop.restore(checkpoints.load(settings, device))
            prepared = time.perf_counter()
            ended: Future[Tensor] | None = None

            def depart() -> None:
                nonlocal ended
                moved = None if issued is None else torch.cuda.current_stream(device).record_event()
                ended = beside.submit(particles_on_host, coming, loop.points, moved)

            loop.run(depart)
        if ended is None:
            depart()
        assert ended is not None
        (began, aim, _), features = coming.result(), ended.result()
    classes = None if began.labels is None else loop.mode.labels()
    # The particles of the end have been evaluated, so that they are finite.
    samples = displaced(began, features, subset_hash=began.subset_hash)
    if classes is not setting.source.labels:
        samples = replace(samples, labels=classes)
    result = FlowResult(
        source=began,
        target=aim,
        samples=samples,
        before=loop.before,
        history=tuple(loop.history),
        trajectory=loop.recorder.trajectory(loop.step, loop.points, classes),
        class_distances=loop.mode.class_distances,
        settings=settings,
        moments=tuple(loop.moments),
        compute=compute.alone,
        ran_on=loop.ran_on,
        stopped_by=loop.stopped_by,
        seconds={"prepare": prepared - started, "flow": time.perf_counter() - prepared},
        unchanged=unchanged,
        mean_cost=mean,
    )
    report_convergence(result.evaluations, solver, compute)
    report_growth(result, setting)
    return result


def on_host(
    points: LabeledSamples, goal: LabeledSamples, issued: torch.cuda.Event | None
) -> tuple[LabeledSamples, LabeledSamples, Tensor | None]:
    """Copy both sides to the CPU, in a thread beside the steps.

    Args:
        points: the particles at the start, which no step changes.
        goal: the target.
        issued: an event after the work that put both on a GPU; None on a CPU.

    Returns:
        Both sides, and (n, p) memory for the particles at the end; None if they are on the CPU.
    """
    if issued is None:
        return points.to("cpu"), goal.to("cpu"), None
    stream = torch.cuda.Stream(points.features.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(issued)
        began, aim = points.to("cpu"), goal.to("cpu")
    # A copy rather than `empty`, so that the memory is really allocated here, beside the steps.
    return began, aim, began.features.detach().clone()


def particles_on_host(
    coming: Future[tuple[LabeledSamples, LabeledSamples, Tensor | None]],
    points: Tensor,
    moved: torch.cuda.Event | None,
) -> Tensor:
    """Copy the particles of the end to the CPU, in a thread beside their evaluation.

    Args:
        coming: what `on_host` returns, the memory for the copy with it.
        points: (n, p) the particles, which move no more.
        moved: an event after their last step; None on a CPU.
    """
    _, _, room = coming.result()
    if room is None or moved is None:
        return points
    stream = torch.cuda.Stream(points.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(moved)
        return room.copy_(points)


def _followed(points: LabeledSamples, seed: int) -> Tensor:
    """Return the indices (k,) of the particles in the trajectory: all classes in proportion."""
    count = len(points)
    if count <= FOLLOWED:
        return torch.arange(count)
    draw = np.random.default_rng(seed)
    if points.labels is None or points.class_total > FOLLOWED:
        return torch.from_numpy(np.sort(draw.permutation(count)[:FOLLOWED]))
    return torch.from_numpy(stratified_rows(points.labels.cpu().numpy(), FOLLOWED, draw))


def report_growth(result: FlowResult, setting: FlowSetting) -> None:
    """Warn if a flow without functionals ended farther from its target than it began."""
    before, after = result.before, result.after
    assert before.upper is not None
    assert after.lower is not None
    if not setting.functionals and after.lower > before.upper:
        box = setting.flow.stepping.box
        logger.warning(
            "the flow ended farther from its target than it began, at %.5g after %.5g; lower %s%s",
            after.divergence,
            before.divergence,
            setting.movers,
            "" if box is None else f", or widen flow.box=[{box[0]:g}, {box[1]:g}]",
        )


def report_convergence(
    evaluations: Sequence[StepRecord], solver: Schedule, compute: ComputeOptions
) -> None:
    """Warn of evaluations that stopped before their goal."""
    late = dict(enumerate(record for record in evaluations if not record.converged))
    if late:
        message = joint_shortfall(
            late,
            solver,
            lambda some: f"{len(some)} of {len(evaluations)} evaluations",
            compute.dtype,
        )
        warn(message, NotConvergedWarning)


# Longer waits, in seconds, are announced.
LONG = 1.0
# The relative difference that another device may cause in a number of the start.
ROUNDING = 1e-3


class Loop:
    """A running flow.

    Args:
        start: the particles at the start, in the space in which they move; not modified.
        setting: the problem.
        mode: what moves.
        settings: the settings stored in checkpoints.

    Attributes:
        points: (n, p) the current particles.
        step: the number of steps taken.
        history: a record of each step, and of the end.
        moments: the state of each step, if these are kept.
        recorder: stores the trajectory.
        stopped_by: why the loop ended.
        ran_on: the device and backend of the last solve.
    """

    def __init__(
        self, start: LabeledSamples, setting: FlowSetting, mode: Mode, settings: Mapping[str, Any]
    ) -> None:
        self.points, self.mode, self._first_points = start.features.clone(), mode, start.features
        self.step, self.stopped_by, self.ran_on = 0, "steps", ""
        self.history: list[StepRecord] = []
        self.moments: list[Moment] = []
        self._flow, self._setting, self._settings = setting.flow, setting, settings
        self.recorder = Recorder(_followed(start, self._flow.seed), MOMENTS)
        self._evaluator = Evaluator(setting, mode)
        # The start is evaluated separately only if the first step does not use all points.
        self._start: StepRecord | None = None
        # The step of the last checkpoint.
        self._saved: int | None = None
        # If points are features, the evaluation itself checks that they are finite.
        in_features = isinstance(self._flow.space, FeatureSpace)
        self._unchecked = [*mode.variables.values(), *([] if in_features else [self.points])]
        ranks = setting.ranks
        if ranks is not None:
            # Tensors that do not change are sent to the ranks once.
            for fixed in (setting.source.labels, setting.source.weights):
                if fixed is not None:
                    Copied(ranks, fixed, self, given=True)
        self._stepper = Stepper(
            {"points": self.points, **mode.variables},
            self._flow.stepping,
            self._flow.steps,
            noise_temperature(setting.functionals),
            self._evaluator.check_reach,
            ranks,
        )

    def run(self, at_end: Callable[[], None]) -> None:
        """Run to the end of the flow.

        Args:
            at_end: called before the evaluation of the end if it is known to be that: the
                particles move no more.

        Raises:
            InputError: the box excludes the particles; or no evaluation is possible after a
                step, and the loop has returned to the last good state and saved it.
        """
        self._evaluator.check_box(self.points)
        self._say_how_long()
        started = time.perf_counter()
        if self._evaluator.estimates and self._start is None:
            record = self._evaluator(self.points, 0, whole=True).record
            seconds = time.perf_counter() - started
            self._start = replace(record, step_size=0.0, seconds=seconds)
        good: dict[str, Any] | None = None
        while True:
            started = time.perf_counter()
            if self.recorder.wants(self.step):
                self.recorder.keep(self.step, self.points, self.mode.labels())
            state = self.state()
            if self.step >= self._flow.steps:
                at_end()
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
            checkpoints = self._flow.checkpoints
            if checkpoints is not None and self.step % checkpoints.every == 0:
                self._save(self.state())

    @property
    def before(self) -> StepRecord:
        """The record of the start, evaluated on all points."""
        return self.history[0] if self._start is None else self._start

    def state(self) -> dict[str, Any]:
        """Return all that the rest of the flow depends on, except the stepper's variables."""
        return {
            "step": self.step,
            "mode": self.mode.state(),
            "recorder": self.recorder.state(),
            "history": tuple(self.history),
            "moments": tuple(self.moments),
            "start": self._start,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state: that of `state`, and rows.

        Raises:
            InputError: the objective is not that of the run that stored the state, or that run has
                taken more steps than this one is to take.
        """
        then = state["beginning"]
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
        self._stepper.restore(state["rows"], state["optimizer"])
        self._restore(state)
        checkpoints, steps = self._flow.checkpoints, self._flow.steps
        if checkpoints is not None and self.step > steps:
            raise InputError(
                f"the run in {checkpoints.folder} has taken {self.step} steps already; give a "
                f"flow.steps of that or more, got {steps}"
            )

    @cached_property
    def _beginning(self) -> dict[str, float]:
        return self._evaluator.beginning(self._first_points)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step, self._start = state["step"], state["start"]
        self.mode.restore(state["mode"])
        self.recorder.restore(state["recorder"])
        self.history, self.moments = list(state["history"]), list(state["moments"])

    def _evaluate(self) -> tuple[Found, str | None]:
        """Return the evaluation for the next step, or that of the end and why it is the end."""
        if self._unchecked and not all_finite(*self._unchecked):
            raise Overshot(NOT_FINITE)
        last = self.step >= self._flow.steps
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
                self._flow.steps - self.step,
                timedelta(seconds=round(seconds)),
            )

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
            if not isinstance(error, Overshot):
                raise prefixed(where, error) from error
            advice, checkpoints = (
                f"lower {self._setting.movers} and start again",
                self._flow.checkpoints,
            )
            if checkpoints is not None:
                advice += (
                    f", or go on from before that step, which {checkpoints.folder} holds, by "
                    "flow.resume=true with a lower flow.step_size"
                )
            raise InputError(f"{where}: {error}; {advice}") from error

    def _reason_to_stop(self, record: StepRecord) -> str | None:
        stop, tolerance = self._setting.callbacks.stop, self._flow.tolerance
        if stop is not None and stop():
            return "interrupted"
        if tolerance is not None and self.history:
            change = abs(record.seen - self.history[-1].seen)
            if change <= tolerance * abs(self.history[0].seen):
                return "tolerance"
        return None

    def _take_step(self, found: Found) -> None:
        solved = found.divergence
        if self._flow.keep_moments:
            assert solved.xx is not None
            moment = Moment(
                found.record.step_size,
                found.features.cpu().clone(),
                self.mode.class_distances.full,
                solved.xy.g.cpu(),
                solved.xx.f.cpu(),
            )
            self.moments.append(moment)
        draw = generator(self._flow.seed, self.step, Draw.LANGEVIN)
        self._stepper.step(found.velocities, self.step, draw, found.batch)
        self.step += 1

    def _tell(self, record: StepRecord, started: float) -> None:
        record = replace(record, seconds=time.perf_counter() - started)
        self.history.append(record)
        if self._setting.callbacks.progress is not None:
            self._setting.callbacks.progress(record)

    def _save(self, state: Mapping[str, Any], may_change: Sequence[str] = ()) -> None:
        if self._flow.checkpoints is not None:
            others = {"optimizer": self._stepper.others(), "beginning": self._beginning}
            self._flow.checkpoints.save(
                {**state, **others}, self._settings, may_change, self._stepper.write
            )
            self._saved = self.step
