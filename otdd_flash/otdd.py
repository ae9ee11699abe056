"""The Optimal Transport Dataset Distance between two labelled datasets.

    S_epsilon(source, target) with C_ij = lambda_x ||x_i - y_j||^2 + lambda_y W[l_i, l_j]

after Alvarez-Melis & Fusi 2020, Geometric dataset distances via optimal transport, debiased as in
Feydy et al. 2019, Interpolating between optimal transport and MMD using Sinkhorn divergences.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace

from otdd_flash import arguments
from otdd_flash.checks import takes
from otdd_flash.devices import check_one_device, resolve_device
from otdd_flash.dimensions import check_same_dimension
from otdd_flash.labels import (
    ClassDistances,
    LabelMetric,
    drop_small_classes,
    measure_classes,
    notice_single_samples,
)
from otdd_flash.labels.pairs import Progress as PairProgress
from otdd_flash.operators.build import (
    Compute,
    ComputeOptions,
    GroundCost,
    check_resources,
    relative_epsilon,
)
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LabeledSamples, Samples, check_squares
from otdd_flash.solver.divergence import report_convergence
from otdd_flash.solver.epsilon import epsilon_given_as
from otdd_flash.solver.options import Progress, SolverOptions
from otdd_flash.solver.problem import Problem

logger = logging.getLogger(__name__)


@takes(arguments.DATASET_DISTANCE)
def dataset_distance(
    source: Samples,
    target: Samples,
    *,
    epsilon: float = 0.1,
    epsilon_relative: float | None = None,
    labels: str | LabelMetric = "gaussian",
    class_distances: ClassDistances | None = None,
    class_statistics: tuple[LabeledSamples, LabeledSamples] | None = None,
    min_class_size: int | None = None,
    lambda_x: float = 0.5,
    lambda_y: float = 0.5,
    debias: bool = True,
    solver: SolverOptions | None = None,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    class_progress: PairProgress | None = None,
    progress: Progress | None = None,
) -> DistanceResult:
    """Compare two labelled datasets by optimal transport.

    Args:
        source: n labelled points, as samples or as arrays (features, labels); without labels only
            `labels="none"` applies.
        target: m labelled points of the same dimension.
        epsilon: entropic regularisation, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost; replaces `epsilon`.
        labels: how distances between classes are measured, a method's name or a `LabelMetric`.
        class_distances: a table to use instead of measuring one.
        class_statistics: measure class distances on these datasets, of which `source` and `target`
            are subsets.
        min_class_size: drop classes with fewer samples, with a notice.
        lambda_x: weight of the squared distance between features.
        lambda_y: weight of the squared distance between classes.
        debias: subtract half of both self terms; without, OT_epsilon itself is the value.
        solver: when to stop.
        compute: where and how passes run, or only the device.
        cache_dir: keep distances between classes in a database in this folder, by the classes'
            content, and do not measure again what it holds; None keeps none.
        class_progress: called as class_progress(pairs of classes measured, their total).
        progress: called as progress(term, iteration, marginal error).

    Returns:
        The distance with bounds, plan and class distances. Equal datasets are at distance 0.

    Raises:
        InputError: what was asked for cannot be met; the message says what to change.
        ConvergenceError: `solver.require_convergence` is set and a term stopped early.
    """
    source, target = LabeledSamples.of(source, "source"), LabeledSamples.of(target, "target")
    cost, compute = GroundCost(lambda_x, lambda_y), ComputeOptions.of(compute)
    options, metric = solver or SolverOptions(), LabelMetric.of(labels)
    if class_distances is not None:
        metric = replace(metric, method="given", given=class_distances)
    check_same_dimension(source, target)
    check_one_device(source.features.device, target.features.device)
    check_squares(source, target, *(class_statistics or ()))
    source = drop_small_classes(source, min_class_size)
    target = drop_small_classes(target, min_class_size)
    notice_single_samples((source, target), metric)
    # Before class distances, which can take longer than all else.
    device = resolve_device(compute.device)
    check_resources(source, target, compute, device)

    started = time.perf_counter()
    table = measure_classes(
        source,
        target,
        metric,
        statistics=class_statistics,
        device=device,
        cache_dir=cache_dir,
        progress=class_progress,
    )
    measured = time.perf_counter()
    given = ("epsilon", epsilon)
    if epsilon_relative is not None:
        given = ("epsilon_relative", epsilon_relative)
        epsilon = relative_epsilon(epsilon_relative, source, target, table.xy, cost, device)
    with epsilon_given_as(*given, epsilon):
        problem = Problem(source, target, epsilon, table.full, cost, compute)
        divergence = problem.solve(options, debias=debias, progress=progress)
    report_convergence(divergence, options)
    seconds = {
        "class_distances": measured - started,
        "solve": time.perf_counter() - measured,
    }
    return DistanceResult(
        source, target, table, divergence, cost, compute, method=metric.method, seconds=seconds
    )
