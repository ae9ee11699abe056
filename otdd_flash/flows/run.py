"""`gradient_flow`, the entry point of flows: it moves a labelled dataset towards another.

    dx_i / dt = -(1 / a_i) dF / dx_i,      F = S_epsilon(x, target) + sum_k w_k F_k(x)

after Alvarez-Melis and Fusi 2021, Dataset Dynamics via Gradient Flows in Probability Space.

The function reads and checks both datasets, computes class distances and epsilon at the start,
makes the loop or resumes it, and gathers the result. A thread copies both sides from a GPU to the
CPU while the steps run. Users, `commands.adapt` and `integrations.sklearn` call it. The settings
are complete before the loop starts, because a checkpoint holds them and is refused if they differ.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import Count, Positive, takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.data.subset import stratified_rows
from otdd_flash.devices import resolve_device
from otdd_flash.eager import computes
from otdd_flash.errors import InputError, NotConvergedWarning, warn
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.fingerprint import Unchanged
from otdd_flash.flows.checkpoint import Checkpoints
from otdd_flash.flows.divergence import FlowSetting
from otdd_flash.flows.flow import Callbacks, Flow, LoopOptions
from otdd_flash.flows.functionals import build_functionals
from otdd_flash.flows.history import Recorder, StepRecord
from otdd_flash.flows.loop import Loop
from otdd_flash.flows.modes import STREAMING_MODES, build_mode
from otdd_flash.flows.result import FlowResult
from otdd_flash.flows.space import DirectionSpace, FeatureSpace
from otdd_flash.labels import (
    Labels,
    drop_small_classes,
    measure_classes,
    metric_of,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.by_ranks import measured_by_ranks
from otdd_flash.operators.build import Compute, ComputeOptions, mean_cost
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.request import Request, check_comparable
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import SIDES
from otdd_flash.solver.schedules.base import Schedule
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.shortfall import joint_shortfall
from otdd_flash.solver.term.epsilon import epsilon_of_datasets, refuse_both, settled_epsilon

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
    solver: Schedule | None = None,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    callbacks: Callbacks | None = None,
) -> FlowResult:
    """Move a labelled dataset towards another.

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
        solver: how a step is solved and when it stops, `otdd.Converged()` by default.
        compute: where and how passes run, or only the device.
        cache_dir: the cache of class distances of the start; None uses none.
        callbacks: functions called with steps and solves, and to ask whether to stop.

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
    cost, metric = cost or GroundCost(), metric_of(labels)
    cost.check_labels(metric.name)
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
    streams = isinstance(flow.space, FeatureSpace) and flow.mode in STREAMING_MODES
    if not streams:
        goal = goal.to(device)
    notice_single_samples((points, goal), metric)
    unchanged = Unchanged.of(points, goal)
    sides = (replace(side, features=flow.space.features(side.features)) for side in (points, goal))
    request = Request.prepare(tuple(sides), cost, compute, seen=True, resident=not streams)
    # Class distances are computed where the target is: on the device, or on the CPU if the target
    # stays there to be streamed.
    start, end = request.given[0].to(request.home), request.given[1]
    told = callbacks.class_progress
    metric = settled_metric(metric, epsilon, (start, end), request.streaming)
    shared = measured_by_ranks(metric, compute.group)
    table = measure_classes(start, end, shared, cache_dir=cache_dir, progress=told)
    mean = mean_cost(request.inputs(SIDES["xy"], table.xy))
    key, given, used = settled_epsilon(epsilon, epsilon_relative, lambda: mean)
    # The advice to standardise features is left out (infinite `scale`) where points move in another
    # space than that of their features.
    in_features = isinstance(flow.space, FeatureSpace)
    scale = cost.standardized(points.dim) if in_features else math.inf
    setting = FlowSetting(request, metric, used, solver, callbacks.solver_progress, told)
    settings = {**setting.settings(points, goal, table), **flow.settings}
    options = LoopOptions(flow, build_functionals(flow.functionals, points), settings, callbacks)
    loop = Loop(
        points.features,
        setting,
        build_mode(flow.mode, setting, table),
        Recorder(_followed(points, flow.seed), MOMENTS),
        options,
    )
    checkpoints = flow.checkpoints
    if checkpoints is not None and checkpoints.resume:
        _go_on(loop, checkpoints, options, device)
    prepared = time.perf_counter()
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(on_host, points, goal, ready(device))
        # An error about epsilon in a step names the setting that the user gave.
        named = epsilon_of_datasets(key, given, used, lambda: mean, scale)
        with nullcontext() if checkpoints is None else checkpoints.held(), named:
            loop.run()
    began, aim, room = coming.result()
    result = FlowResult(
        began,
        aim,
        _moved(began, loop, room),
        loop.before,
        tuple(loop.history),
        loop.trajectory(),
        loop.mode.class_distances,
        settings,
        tuple(loop.moments),
        compute.alone,
        loop.ran_on,
        loop.stopped_by,
        {"prepare": prepared - started, "flow": time.perf_counter() - prepared},
        unchanged=unchanged,
        mean_cost=mean,
    )
    report_convergence(result.evaluations, solver, compute)
    report_growth(result, options)
    return result


def _go_on(
    loop: Loop, checkpoints: Checkpoints, options: LoopOptions, device: torch.device
) -> None:
    """Restore a loop from its last checkpoint."""
    loop.restore(checkpoints.load(options.settings, device))
    if loop.step > options.flow.steps:
        raise InputError(
            f"the run in {checkpoints.folder} has taken {loop.step} steps already; give a "
            f"flow.steps of that or more, got {options.flow.steps}"
        )


def _moved(began: LabeledSamples, loop: Loop, room: Tensor | None) -> LabeledSamples:
    """Return the particles after the last step, on the CPU."""
    features = loop.points if room is None else room.copy_(loop.points)
    labels = None if began.labels is None else loop.labels()
    return replace(began, features=features.cpu(), labels=labels)


def _followed(points: LabeledSamples, seed: int) -> Tensor:
    """Return the indices (k,) of the particles in the trajectory: all classes in proportion."""
    count = len(points)
    if count <= FOLLOWED:
        return torch.arange(count)
    draw = np.random.default_rng(seed)
    if points.labels is None or points.class_total > FOLLOWED:
        return torch.from_numpy(np.sort(draw.permutation(count)[:FOLLOWED]))
    return torch.from_numpy(stratified_rows(points.labels.cpu().numpy(), FOLLOWED, draw))


def report_growth(result: FlowResult, options: LoopOptions) -> None:
    """Warn if a flow without functionals ended farther from its target than it began."""
    before, after = result.before, result.after
    assert before.upper is not None
    assert after.lower is not None
    if not options.functionals and after.lower > before.upper:
        box = options.flow.stepping.box
        logger.warning(
            "the flow ended farther from its target than it began, at %.5g after %.5g; lower %s%s",
            after.divergence,
            before.divergence,
            options.movers,
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


class OnHost(NamedTuple):
    """Both sides on the CPU, for the result.

    Attributes:
        points: the particles at the start.
        goal: the target.
        room: (n, p) memory for the particles at the end; None if they are on the CPU.
    """

    points: LabeledSamples
    goal: LabeledSamples
    room: Tensor | None


def ready(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all work issued to a GPU so far; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def on_host(points: LabeledSamples, goal: LabeledSamples, begin: torch.cuda.Event | None) -> OnHost:
    """Copy both sides to the CPU, in a thread beside the steps.

    Args:
        points: the particles at the start, which no step changes.
        goal: the target.
        begin: an event of `ready`, recorded when both were on the device.
    """
    if begin is None:
        return OnHost(points.to("cpu"), goal.to("cpu"), None)
    stream = torch.cuda.Stream(points.features.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(begin)
        began, aim = points.to("cpu"), goal.to("cpu")
    # A copy rather than `empty`, so that the memory is really allocated here, beside the steps.
    return OnHost(began, aim, began.features.detach().clone())
