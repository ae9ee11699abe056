"""The Optimal Transport Dataset Distance between two labelled datasets.

    S_epsilon(source, target) with C_ij = lambda_x ||x_i - y_j||^2 + lambda_y W[l_i, l_j]

after Alvarez-Melis & Fusi 2020, Geometric dataset distances via optimal transport, debiased as in
Feydy et al. 2019, Interpolating between optimal transport and MMD using Sinkhorn divergences.

`dataset_distance` is the whole path: check datasets and options, move both to the device, measure
class distances, settle epsilon, solve the terms, return a `DistanceResult`. With `ground="gromov"`
`gromov.distance` goes on after the first checks. `commands.compare`, `sampling.comparison` and
`integrations.torchmetrics` call it, and users. `pairwise` calls `ground_cost`, `prepared` and
`refuse_starts`, `commands.compare` the last; `commands.settings` reads LAMBDA_Y. What can be
refused without class distances must be refused before these are measured, which may take long.

`takes_shards`, which decorates it, stands before it: on several processes, each of which holds a
shard of source and target, it joins the shards in the order of the ranks (the numbers of the
processes in their group), and rank 0 leads the computation, so that the result is that of one
process with all rows (`tests/ranks/test_shared_distance.py`). All ranks must run the same
collectives, as a rank that misses one leaves the others waiting. Checks of a rank's own input
therefore run inside `ranks.together`, which raises the error of one rank on all of them.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce, wraps
from hashlib import sha256
from typing import Any, ParamSpec, TypeVar

import torch

from otdd_flash.arguments import Count, DatasetGround, NotNegative, Progress, takes
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.distributed.exchange import ALONE
from otdd_flash.distributed.ranks import Ranks, check_versions, ranks_of
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.fingerprint import Unchanged
from otdd_flash.gromov.distance import gromov_distance, gromov_options
from otdd_flash.gromov.starts import STARTS
from otdd_flash.labels import (
    ClassDistances,
    Given,
    LabelMetric,
    Labels,
    drop_small_classes,
    measure_classes,
    metric_of,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.by_ranks import measured_by_ranks
from otdd_flash.labels.metrics import refuse_table, scale_of, with_numbers
from otdd_flash.operators.comparison import Comparison, check_comparable
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LEAST_MASS, MOST_MASS, NO_MASS, LabeledSamples, check_squares
from otdd_flash.solver.divergence import report_convergence
from otdd_flash.solver.penalties import Unbalanced, refuse_unbalanced, resolve_constraints
from otdd_flash.solver.schedules import Schedule, schedule_of
from otdd_flash.solver.solving import solve
from otdd_flash.solver.term import SolverProgress, epsilon_of_datasets, resolve_epsilon

P = ParamSpec("P")
T = TypeVar("T")


def takes_shards(function: Callable[P, T]) -> Callable[P, T]:
    """Let the distance be called by all processes of `compute.group`, each with shards of both.

    Rank 0 then computes as one process would, leading the others, and all return its result.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            # The call fails again, in the function, whose error names it.
            return function(*args, **kwargs)
        compute = ComputeOptions.of(bound.arguments.get("compute"))
        # One process, or a call inside `otdd.led`: there `group` is a `Ranks`, and the datasets are
        # whole.
        if compute.group is None or isinstance(compute.group, Ranks):
            return function(*args, **kwargs)
        ranks = ranks_of(compute.group)
        settings = {**bound.arguments, "compute": compute}
        given = {name: settings.pop(name) for name in ("source", "target")}
        bound.arguments |= _whole_datasets(ranks, given, settings)
        bound.arguments["compute"] = replace(compute, group=ranks)
        # Rank 0 calls the function; the others serve its passes and get a copy of the result.
        return ranks.led(lambda: function(*bound.args, **bound.kwargs))

    return called


# The weight of class distances where none is given.
LAMBDA_Y = 0.5


# `computes` keeps PyTorch's surrounding modes (autocast, inference, compilation) out,
# `takes_shards` joins the shards of several processes, and `takes` checks arguments by their
# annotations.
@computes
@takes_shards
@takes()
def dataset_distance(
    source: Samples,
    target: Samples,
    *,
    epsilon: NotNegative | None = None,
    epsilon_relative: NotNegative | None = None,
    labels: Labels = "gaussian",
    class_distances: ClassDistances | None = None,
    class_statistics: tuple[LabeledSamples, LabeledSamples] | None = None,
    min_class_size: Count | None = None,
    lambda_x: NotNegative = 0.5,
    lambda_y: NotNegative | None = None,
    ground: DatasetGround = "sqeuclidean",
    starts: Count | None = None,
    debias: bool = True,
    unbalanced: Unbalanced | None = None,
    unbalanced_relative: Unbalanced | None = None,
    solver: Schedule | None = None,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    class_progress: Progress | None = None,
    progress: SolverProgress | None = None,
) -> DistanceResult:
    """Compute the Optimal Transport Dataset Distance between two labelled datasets.

    Args:
        source: n labelled points, as samples, as arrays (features, labels) or as any dataset of
            vectors that `otdd.embed` takes; without labels only `labels="none"` applies.
        target: m labelled points of the same dimension, or with `ground="gromov"` of any.
        epsilon: entropic regularisation, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost, instead of `epsilon`. With
            `ground="inner"`, whose costs may have any sign, the mean is that of
            lambda_x ||x|| ||y|| + lambda_y W. Neither given means 0.01 of the mean cost; 0 is the
            unregularised cost, by `otdd.Exact()`.
        labels: how distances between classes are measured, a name such as "gaussian", a metric such
            as `otdd.labels.Gaussian(diagonal=True)`, or a function f(x, y) of the points (n, d) and
            (m, d) of two classes that returns their squared distance.
        class_distances: a table to use instead of measuring one.
        class_statistics: (source, target) datasets on which class distances are measured instead,
            of which `source` and `target` are subsets.
        min_class_size: drop classes with fewer samples, with a notice.
        lambda_x: weight of the squared distance between features, or of the `ground` cost.
        lambda_y: weight of the squared distance between classes, 0.5 by default; required with
            `ground="gromov"` unless `labels="none"`.
        ground: the cost between features: `sqeuclidean`, ||x - y||^2; `cosine`, 1 - <x, y> / (||x||
            ||y||), with class distances between features of length 1; `inner`, -<x, y>, with a
            class table of yours or `labels="none"`. `gromov` compares distances within each
            dataset (docs/gromov.md): lambda_x weighs the Gromov-Wasserstein energy, whose mean
            over independent pairs is the mean cost; `debias` must be false.
        starts: the number of starts with `ground="gromov"`, 4 by default; the best one is kept.
        debias: subtract half of both self terms, OT_epsilon of each dataset with itself. False: the
            value is OT_epsilon itself.
        unbalanced: rho, the price of mass that is not matched, in units of the cost: marginals are
            not exact, but cost rho KL(P 1 | a) + rho KL(P^T 1 | b). Two numbers [rho_x, rho_y],
            None for an exact side, need `debias=False`.
        unbalanced_relative: the same as multiples of the mean cost.
        solver: how to solve and when to stop, `otdd.Converged()` by default.
        compute: `otdd.ComputeOptions`, or only a device.
        cache_dir: folder of a database of measured class distances, keyed by the content of the
            classes; known distances are read from it. None: no cache.
        class_progress: called as class_progress(pairs of classes measured, their total).
        progress: called as progress(term, iteration, marginal error).

    Returns:
        The distance with bounds on the solver's error, plan and class distances. With `debias`,
        equal datasets are at distance 0.

    Raises:
        InputError: the request cannot be met; the message says what to change.
        ConvergenceError: `solver.require_convergence` is set and a term stopped early.
    """
    source, target = as_samples(source, "source"), as_samples(target, "target")
    cost, compute = ground_cost(lambda_x, lambda_y, ground), ComputeOptions.of(compute)
    metric = metric_of(labels)
    refuse_table(metric, class_distances)
    metric, (source, target) = with_numbers(metric, (source, target), class_statistics)
    options, epsilon, epsilon_relative = schedule_of(solver, epsilon, epsilon_relative)
    if class_distances is not None:
        metric = Given(class_distances)
    if ground == "gromov":
        relaxed = unbalanced if unbalanced_relative is None else unbalanced_relative
        options = gromov_options(
            metric, lambda_x, lambda_y, options, compute, debias=debias, unbalanced=relaxed
        )
        return gromov_distance(
            (source, target),
            cost,
            metric,
            options,
            compute,
            epsilon=epsilon,
            epsilon_relative=epsilon_relative,
            starts=starts or STARTS,
            statistics=class_statistics,
            min_class_size=min_class_size,
            progress=progress,
        )
    refuse_starts(starts)
    refuse_unbalanced(unbalanced, unbalanced_relative, options, debias=debias, ground=ground)
    check_squares(*(class_statistics or ()))
    (source, target), comparison = prepared(
        (source, target), cost, compute, metric, min_class_size, debias=debias
    )
    # Marked before the work: the result shares the memory of both datasets, and refuses questions
    # after a change in place.
    unchanged = Unchanged.of(source, target)

    # The result reports how ranks shared the work from here on.
    ranks, started = compute.group, time.perf_counter()
    before = ranks.sharing_from_here() if isinstance(ranks, Ranks) else ALONE
    if class_statistics is not None:
        one, other = class_statistics
        # Moved to the device and transformed as the ground cost takes points, as both datasets are.
        class_statistics = comparison.transform(one), comparison.transform(other)
    x, y = comparison.transformed
    # Only a Sinkhorn metric without an epsilon of its own changes: it gets one here.
    metric = settled_metric(metric, epsilon, class_statistics or (x, y), comparison.streaming)
    # Points that are streamed are in the memory of this process alone, which then measures without
    # the other ranks.
    measuring = ranks if comparison.streaming is None else None
    table = measure_classes(
        x,
        y,
        measured_by_ranks(metric, measuring),
        statistics=class_statistics,
        cache_dir=cache_dir,
        progress=class_progress,
    )
    measured = time.perf_counter()
    comparison = comparison.with_classes(table.full)
    mean, scale = comparison.mean_cost, cost.standardized(source.dim)
    name, given, used = resolve_epsilon(epsilon, epsilon_relative, mean)
    with epsilon_of_datasets(name, given, used, mean, scale):
        constraints = resolve_constraints(unbalanced, unbalanced_relative, mean)
        comparison = replace(comparison.at(used), constraints=constraints)
        divergence = solve(comparison, options, progress=progress)
    report_convergence(divergence, options)
    seconds = {
        "class_distances": measured - started,
        "solve": time.perf_counter() - measured,
    }
    streaming = comparison.streaming
    return DistanceResult(
        source,
        target,
        table,
        divergence,
        cost,
        # A result keeps no group: it answers in one process.
        compute.alone,
        method=metric.name,
        labels_epsilon=getattr(metric, "epsilon", None),
        target_scale=scale_of(metric),
        seconds=seconds,
        comparison=replace(comparison, compute=compute.alone),
        shared=ranks.shared_since(before) if isinstance(ranks, Ranks) else ALONE,
        streamed=None if streaming is None else streaming.tally.summary(seconds["solve"]),
        unchanged=unchanged,
        required=options.require_convergence,
        constraints=constraints,
    )


def ground_cost(lambda_x: float, lambda_y: float | None, ground: str) -> GroundCost:
    """Return the ground cost, with the default of `lambda_y` where it was not given.

    For `gromov` it is that of linearised problems, and labels without a weight do not count.
    """
    if ground == "gromov":
        # Both may be 0 where `gromov_options` refuses them.
        return GroundCost(lambda_x, lambda_y or (0.0 if lambda_x else 1.0), "inner")
    return GroundCost(lambda_x, LAMBDA_Y if lambda_y is None else lambda_y, ground)


def refuse_starts(starts: int | None) -> None:
    """Raise an `InputError` if starts are given; grounds other than gromov have none."""
    if starts is not None:
        raise InputError("starts are of ground=gromov alone; leave them out")


def prepared(
    datasets: Sequence[LabeledSamples],
    cost: GroundCost,
    compute: ComputeOptions,
    metric: LabelMetric | None,
    min_class_size: int | None,
    *,
    debias: bool = True,
) -> tuple[tuple[LabeledSamples, ...], Comparison]:
    """Check datasets that are to be compared, and move them to the device.

    All is checked here that can be before class distances are measured, which may take longer than
    everything else.

    Args:
        datasets: as they were given.
        cost: the ground cost.
        compute: where and how passes run.
        metric: how class distances are measured; None: they are given.
        min_class_size: classes with fewer samples are dropped, with a notice.
        debias: False if no dataset is compared with itself.

    Returns:
        The datasets without small classes, and their comparison.

    Raises:
        InputError: the ground cost has no class distances of the metric, the datasets cannot be
            compared, or as `Comparison.prepare`.
    """
    cost.check_labels("given" if metric is None else metric.name)
    check_comparable(*datasets)
    sides = tuple(drop_small_classes(samples, min_class_size) for samples in datasets)
    if metric is not None:
        notice_single_samples(sides, metric)
    scale = scale_of(metric)
    return sides, Comparison.prepare(sides, cost, compute, debias=debias, target_scale=scale)


# If there are more names than this, ranks compare a digest, which keeps the error short.
MOST_NAMES = 20

ADVICE = "start every rank in the same way"


def _whole_datasets(
    ranks: Ranks, given: dict[str, Samples], settings: dict[str, Any]
) -> dict[str, LabeledSamples]:
    """Join the shards of all ranks, in the order of the ranks.

    Raises:
        InputError: a part of the samples is refused, or ranks disagree. Every rank raises it.
    """

    def made() -> dict[str, LabeledSamples]:
        return {
            # `as_samples` refuses samples without mass, which one shard of several may be.
            name: side.detached() if isinstance(side, LabeledSamples) else as_samples(side, name)
            for name, side in given.items()
        }

    # The versions of otdd_flash and torch.
    check_versions(ranks)
    # Settings with a function are not compared: its repr has another address in every process.
    said = {key: repr(value) for key, value in settings.items()}
    said = {key: value for key, value in said.items() if " at 0x" not in value}
    ranks.check_same("settings", said, ADVICE)
    sides = ranks.together(made)
    whole: dict[LabeledSamples, LabeledSamples] = {}
    for name, side in sides.items():
        # One object may be both datasets; samples are equal only to themselves.
        whole[side] = whole[side] if side in whole else _whole(ranks, name, side)
    return {name: whole[side] for name, side in sides.items()}


def _whole(ranks: Ranks, name: str, shard: LabeledSamples) -> LabeledSamples:
    def check() -> None:
        # Called for its error: a group of nccl moves no tensors from the CPU.
        ranks.device_of(shard.features.device)
        if not (LEAST_MASS < shard.mass < MOST_MASS or shard.without_mass):
            raise InputError(
                f"{name}: the weights of a shard add up to {shard.mass:.0e} or beyond; bring those "
                "of all shards to another unit"
            )
        if shard.label_sets is not None:
            raise InputError(
                f"{name}: shards of rows with several labels are not put together; give each "
                "process all rows, and lead the work from rank 0 with otdd.led"
            )

    ranks.together(check)
    # A shard without names of features, as of an array, takes those of the others.
    named = [names for names in ranks.all_gathered_objects(shard.feature_names) if names]
    feature_names = shard.feature_names or next(iter(named), None)
    for what, content in (
        ("the number of features", shard.dim),
        ("names of features", _short(feature_names)),
        ("whether there are labels", shard.labels is not None),
        ("whether there are weights", shard.weights is not None),
        ("whether there are numbers", shard.targets is not None),
        ("class names", _short(shard.class_names)),
    ):
        advice = "a shard may lack rows of a class, but names all classes and columns in one order"
        ranks.check_same(f"{what} of {name}", content, advice)
    # Integers became float32 or float64 by the numbers of their own shard; all take the wider type.
    dtypes = ranks.all_gathered_objects(shard.features.dtype)
    features = ranks.concatenated(shard.features.to(reduce(torch.promote_types, dtypes)))
    labels = None if shard.labels is None else ranks.concatenated(shard.labels)
    weights = None
    if shard.weights is not None:
        # Weights of a shard sum to 1. In units of the heaviest shard the sum of all is finite.
        heaviest = max(ranks.all_gathered_objects(shard.mass))
        weights = ranks.concatenated(shard.weights * (shard.mass / heaviest))
        if not weights.any():
            raise InputError(f"{name}: {NO_MASS}, as they are in all shards")
    # `subset_hash` and `mass` describe a shard; the whole is a dataset by itself.
    return replace(
        shard,
        features=features,
        labels=labels,
        weights=weights,
        targets=None if shard.targets is None else ranks.concatenated(shard.targets),
        subset_hash=None,
        mass=1.0,
        feature_names=feature_names,
    )


def _short(names: tuple[str, ...] | None) -> Any:
    """Return names as ranks compare them: a digest if there are many."""
    if names is None or len(names) <= MOST_NAMES:
        return names
    # Names may hold lone surrogates, which UTF-8 alone refuses.
    digest = sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{len(names)} of digest {digest[:16]}"
