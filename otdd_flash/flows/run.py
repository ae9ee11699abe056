"""The gradient flow of the dataset distance: from two datasets to an adapted one.

dx_i / dt = -(1 / a_i) dF / dx_i,      F = S_epsilon(x, target) + sum_k w_k F_k(x)

after Alvarez-Melis and Fusi 2021, Dataset Dynamics via Gradient Flows in Probability Space.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash import arguments
from otdd_flash.checks import takes
from otdd_flash.data.subset import stratified_rows
from otdd_flash.devices import check_one_device, resolve_device
from otdd_flash.dimensions import check_same_dimension
from otdd_flash.errors import InputError
from otdd_flash.flows.checkpoint import Checkpoints
from otdd_flash.flows.functionals import WeightedFunctional, build_functionals
from otdd_flash.flows.history import Recorder, StepRecord
from otdd_flash.flows.loop import Loop
from otdd_flash.flows.loop_options import LoopOptions
from otdd_flash.flows.modes import build_mode, check_mode
from otdd_flash.flows.result import FlowResult
from otdd_flash.flows.setting import FlowSetting
from otdd_flash.flows.settings_kept import data_settings, flow_settings
from otdd_flash.flows.shortcomings import report_convergence, report_growth
from otdd_flash.flows.space import FeatureSpace, Space
from otdd_flash.flows.stepping import Stepping
from otdd_flash.labels import (
    ClassDistances,
    LabelMetric,
    drop_small_classes,
    measure_classes,
    notice_single_samples,
)
from otdd_flash.labels.pairs import Progress as PairProgress
from otdd_flash.operators.build import Compute, ComputeOptions, GroundCost, relative_epsilon
from otdd_flash.samples import LabeledSamples, Samples, check_squares
from otdd_flash.solver.options import Progress, SolverOptions

# Particles to follow and moments to keep of them: megabytes, whatever the flow's size.
FOLLOWED, MOMENTS = 200, 32


@takes(arguments.GRADIENT_FLOW)
def gradient_flow(
    source: Samples,
    target: Samples,
    *,
    steps: int = 20,
    mode: str = "features",
    stepping: Stepping | None = None,
    functionals: Sequence[Mapping[str, Any] | WeightedFunctional] = (),
    space: Space | None = None,
    refresh: int = 1,
    tolerance: float | None = None,
    epsilon: float = 0.1,
    epsilon_relative: float | None = None,
    labels: str | LabelMetric = "gaussian",
    class_distances: ClassDistances | None = None,
    min_class_size: int | None = None,
    lambda_x: float = 0.5,
    lambda_y: float = 0.5,
    solver: SolverOptions | None = None,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    checkpoints: Checkpoints | None = None,
    seed: int = 0,
    keep_moments: bool = False,
    progress: Callable[[StepRecord], None] | None = None,
    solver_progress: Progress | None = None,
    class_progress: PairProgress | None = None,
    stop: Callable[[], bool] | None = None,
) -> FlowResult:
    """Move a labelled dataset towards another.

    Args:
        source: n points, which the flow copies, as samples or as arrays (features, labels).
        target: m points in the same space.
        steps: to take.
        mode: what moves: `features`, `attached`, `joint` or `augmented`; `otdd_flash.flows.modes`
            gives the equations.
        stepping: step size, optimiser, schedule, box, noise and minibatches.
        functionals: weighted terms beside the divergence, such as {"name": "norm", "weight": 0.1};
            `build_functionals` tells what there is.
        space: from points to the features that transport sees, of both sides; by default the points
            are the features.
        refresh: steps between two measurements of class distances (mode `features`).
        tolerance: stop once a step changes the objective by less than this share of its first
            value; None takes all steps.
        epsilon: entropic regularisation, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost at the start; replaces `epsilon`.
        labels: how distances between classes are measured, a method's name or a `LabelMetric`.
        class_distances: a table to use instead, which then stays as it is.
        min_class_size: drop classes with fewer samples, with a notice.
        lambda_x: weight of the squared distance between features.
        lambda_y: weight of the squared distance between classes.
        solver: when the solve of a step stops.
        compute: where and how passes run, or only the device.
        cache_dir: where class distances of the start are looked up and kept; None: nowhere.
        checkpoints: where to keep the state, and whether to go on from it.
        seed: of every random draw.
        keep_moments: keep what every step saw, so that the result carries the flow over to new
            points by its entropic map; n (d + 2) + m numbers a step.
        progress: called with the record of every step, and of the end.
        solver_progress: called as solver_progress(term, iteration, marginal error).
        class_progress: called as class_progress(pairs of classes measured, their total).
        stop: asked before every step whether to end here.

    Returns:
        The adapted dataset, in the space of `source`, and how it came about.

    Raises:
        InputError: what was asked for cannot be met, or a step overshot: the message says what to
            change.
        ConvergenceError: `solver.require_convergence` is set and a solve stopped early.

    Warns:
        NotConvergedWarning: a solve stopped before its tolerance.
    """
    started = time.perf_counter()
    source, target = LabeledSamples.of(source, "source"), LabeledSamples.of(target, "target")
    compute, solver = ComputeOptions.of(compute), solver or SolverOptions()
    stepping, space = stepping or Stepping(), space or FeatureSpace()
    cost = GroundCost(lambda_x, lambda_y)
    metric = LabelMetric.of(labels)
    if class_distances is not None:
        metric = replace(metric, method="given", given=class_distances)
    _check_numbers(steps, refresh, tolerance)
    check_mode(mode)
    check_same_dimension(source, target)
    check_one_device(source.features.device, target.features.device)
    check_squares(source, target)
    device = resolve_device(compute.device)
    points = drop_small_classes(source, min_class_size).to(device)
    goal = drop_small_classes(target, min_class_size).to(device)
    notice_single_samples((points, goal), metric)
    start, end = (replace(side, features=space.features(side.features)) for side in (points, goal))
    table = measure_classes(
        start, end, metric, device=device, cache_dir=cache_dir, progress=class_progress
    )
    if epsilon_relative is not None:
        epsilon = relative_epsilon(epsilon_relative, start, end, table.xy, cost, device)
    setting = FlowSetting(
        start,
        end,
        metric,
        epsilon,
        cost,
        solver,
        compute,
        device,
        refresh,
        solver_progress,
        class_progress,
    )
    terms = _built(functionals, points)
    settings = {
        **data_settings(points, goal, setting, table),
        **flow_settings(mode, stepping, functionals, steps, refresh, space),
        "flow.keep_moments": keep_moments,
        "seed": seed,
    }
    recorder = Recorder(_followed(points, seed), MOMENTS)
    options = LoopOptions(
        steps=steps,
        stepping=stepping,
        functionals=terms,
        tolerance=tolerance,
        seed=seed,
        checkpoints=checkpoints,
        settings=settings,
        keep_moments=keep_moments,
        progress=progress,
        stop=stop,
    )
    loop = Loop(
        points.features,
        setting,
        build_mode(mode, setting, table),
        space,
        setting.mean_cost(start.features, table),
        recorder,
        options,
    )
    if checkpoints is not None and checkpoints.resume:
        _go_on(loop, checkpoints, settings, device, steps)
    prepared = time.perf_counter()
    loop.run()
    report_convergence(loop.evaluations, solver, compute)
    report_growth(loop.before, loop.history[-1], options)
    return FlowResult(
        points.to("cpu"),
        goal.to("cpu"),
        _moved(points, loop),
        loop.before,
        tuple(loop.history),
        loop.trajectory(),
        loop.mode.class_distances,
        settings,
        tuple(loop.moments),
        compute,
        loop.ran_on,
        loop.stopped_by,
        {"prepare": prepared - started, "flow": time.perf_counter() - prepared},
    )


def _go_on(
    loop: Loop,
    checkpoints: Checkpoints,
    settings: Mapping[str, Any],
    device: torch.device,
    steps: int,
) -> None:
    """Take a loop to where its last run was."""
    loop.restore(checkpoints.load(settings, device))
    if loop.step > steps:
        raise InputError(
            f"the run in {checkpoints.folder} has taken {loop.step} steps already; give a "
            f"flow.steps of that or more, got {steps}"
        )


def _moved(points: LabeledSamples, loop: Loop) -> LabeledSamples:
    """The particles where the loop has them, on the CPU."""
    labels = None if points.labels is None else loop.labels()
    return replace(points.to("cpu"), features=loop.points.cpu(), labels=labels)


def _check_numbers(steps: int, refresh: int, tolerance: float | None) -> None:
    if steps < 1:
        raise InputError(f"flow.steps must be positive, got {steps}")
    if refresh < 1:
        raise InputError(f"flow.refresh must be positive, got {refresh}; 1 measures at every step")
    if tolerance is not None and not 0 < tolerance < 1:
        raise InputError(
            f"flow.tolerance must lie in (0, 1), a share of the first objective, got {tolerance}"
        )


def _built(
    functionals: Sequence[Mapping[str, Any] | WeightedFunctional], start: LabeledSamples
) -> tuple[WeightedFunctional, ...]:
    """Terms as they are, and those that configurations describe."""
    described = [part for part in functionals if not isinstance(part, WeightedFunctional)]
    ready = [part for part in functionals if isinstance(part, WeightedFunctional)]
    return (*build_functionals(described, start), *ready)


def _followed(points: LabeledSamples, seed: int) -> Tensor:
    """Which particles the trajectory follows (k,): all classes in proportion."""
    count = len(points)
    if count <= FOLLOWED:
        return torch.arange(count)
    draw = np.random.default_rng(seed)
    if points.labels is None or points.class_total > FOLLOWED:
        return torch.from_numpy(np.sort(draw.permutation(count)[:FOLLOWED]))
    return torch.from_numpy(stratified_rows(points.labels.cpu().numpy(), FOLLOWED, draw))
