"""From classes to their distances: what the cache knows, and the rest by the metric's method."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import NotConvergedWarning
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.exact import exact_parts
from otdd_flash.labels.gaussian import diagonal_gaussian_distances, gaussian_distances
from otdd_flash.labels.metric import LabelMetric
from otdd_flash.labels.moment_distances import mean_distances, upper_bound_distances
from otdd_flash.labels.pair_cache import PairCache
from otdd_flash.labels.pairs import PairDistances, Progress
from otdd_flash.labels.sinkhorn_pairs import sinkhorn_distances

# A method prepares all classes of a part before its first pair: with so many pairs per class it
# takes some 5% longer than all at once, and a run that is killed loses one part. A GPU takes
# seconds for whole tables, and has them in one part.
PAIRS_PER_CLASS = 4
# A write takes some milliseconds; exact distances may come by the hundred per second.
SECONDS_BETWEEN_WRITES = 1.0


class Part(NamedTuple):
    """Some of a list of pairs.

    Attributes:
        positions: (k,) int64, which ones.
        distances: of those pairs.
        converged: whether all of them reached the method's tolerance.
    """

    positions: Tensor
    distances: PairDistances
    converged: bool = True


Parts = Generator[Part, None, None]


def measure_pairs(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    metric: LabelMetric,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> PairDistances:
    """Distances of pairs of classes.

    With a cache, what it knows is not measured, and what is measured and has converged is kept as
    soon as it is there. The numbers are the same with and without it, to the last bit.

    Args:
        clouds: V classes, in the order that `merge_identical` gives them.
        pairs: (P, 2) int64, indices of two different classes, the larger first.
        metric: how to measure; any method but `given`.
        cache_dir: where distances that are dear to measure are kept; None keeps none.
        progress: called with the number of pairs done and their total.

    Raises:
        InputError: a class is too small or too large for the method.

    Warns:
        NotConvergedWarning: a solve stopped before the tolerance.
    """
    recipe = _recipe(metric, clouds)
    cache = PairCache(cache_dir if recipe is not None and len(pairs) else None)
    if recipe is None or not cache.active:
        everything = torch.arange(len(pairs))
        parts = _measured(clouds, pairs, everything, metric, len(pairs), progress)
        return _joined(parts, len(pairs))
    classes = [cloud.fingerprint for cloud in clouds]
    known, found = cache.find(recipe, classes, pairs)
    unknown = torch.ones(len(pairs), dtype=torch.bool)
    unknown[known] = False
    if progress is not None:
        progress(len(known), len(pairs))

    def keep(parts: Sequence[Part]) -> None:
        positions, distances = _together([part for part in parts if part.converged])
        cache.keep(recipe, classes, pairs[positions], distances)

    missing = torch.nonzero(unknown).squeeze(1)
    on_gpu = clouds[0].points.device.type == "cuda"
    at_once = len(missing) if on_gpu else PAIRS_PER_CLASS * len(clouds)
    measured = _measured(clouds, pairs, missing, metric, at_once, progress)
    return _joined(_told(measured, keep), len(pairs), Part(known, found))


def _told(parts: Parts, keep: Callable[[Sequence[Part]], None]) -> Parts:
    """The same parts, which `keep` hears of every now and then, and of the last in any case."""
    waiting: list[Part] = []
    kept = time.monotonic()
    with closing(parts):
        try:
            for part in parts:
                waiting.append(part)
                if time.monotonic() >= kept + SECONDS_BETWEEN_WRITES:
                    keep(waiting)
                    waiting, kept = [], time.monotonic()
                yield part
        finally:
            keep(waiting)


def _measured(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    positions: Tensor,
    metric: LabelMetric,
    at_once: int,
    progress: Progress | None,
) -> Parts:
    """The pairs at some positions of the list, in parts as they are measured."""
    done = len(pairs) - len(positions)
    if not len(positions):
        return

    def heard(within: int, _: int) -> None:
        if progress is not None:
            progress(done + within, len(pairs))

    if metric.method == "exact":
        # Needs no preparation: its parts are what one process computes at once.
        with closing(exact_parts(clouds, pairs[positions])) as parts:
            for run, values in parts:
                yield Part(positions[run], PairDistances.exactly(values))
                heard(len(run), len(positions))
                done += len(run)
        return
    for run in torch.split(positions, max(1, at_once)):
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", NotConvergedWarning)
            distances = _measure(metric, clouds, pairs[run], heard)
        for warning in said:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        late = any(issubclass(warning.category, NotConvergedWarning) for warning in said)
        yield Part(run, distances, converged=not late)
        done += len(run)
        heard(0, len(positions))


def _joined(parts: Parts, count: int, *known: Part) -> PairDistances:
    """The distances of a list of pairs, from all of its parts."""
    # Closed at once where one is interrupted: other processes may be at work.
    with closing(parts):
        positions, distances = _together([*known, *parts])
    numbers = torch.empty(3, count, dtype=torch.float64)
    numbers[:, positions] = torch.stack(distances)
    return PairDistances(*numbers)


def _together(parts: Sequence[Part]) -> tuple[Tensor, PairDistances]:
    """Parts as one."""
    none = torch.empty(0)
    positions = torch.cat([none.long(), *(part.positions for part in parts)])
    numbers = (
        torch.cat([none.double(), *(getattr(part.distances, key) for part in parts)])
        for key in PairDistances._fields
    )
    return positions, PairDistances(*numbers)


def _recipe(metric: LabelMetric, clouds: Sequence[ClassCloud]) -> str | None:
    """What a cached distance depends on but for its classes; None where measuring is cheap."""
    # Other devices round otherwise.
    device = clouds[0].points.device.type
    match metric.method:
        case "gaussian" if not metric.diagonal:
            return f"gaussian unbiased={metric.unbiased} on {device}"
        case "sinkhorn":
            return f"sinkhorn epsilon={metric.epsilon!r} tolerance={metric.tolerance!r} on {device}"
        case "exact":
            return "exact"
    return None


def _measure(
    metric: LabelMetric, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress
) -> PairDistances:
    match metric.method:
        case "gaussian" if metric.diagonal:
            return diagonal_gaussian_distances(clouds, pairs, unbiased=metric.unbiased)
        case "gaussian":
            return gaussian_distances(clouds, pairs, unbiased=metric.unbiased, progress=progress)
        case "sinkhorn":
            assert metric.epsilon is not None
            return sinkhorn_distances(
                clouds, pairs, metric.epsilon, metric.tolerance, progress=progress
            )
        case "means":
            return mean_distances(clouds, pairs)
        case "upper_bound":
            return upper_bound_distances(clouds, pairs, unbiased=metric.unbiased)
        case "none":
            return PairDistances.exactly(torch.zeros(len(pairs)))
    raise AssertionError(f"labels={metric.method} does not measure classes")
