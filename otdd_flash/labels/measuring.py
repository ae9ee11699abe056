"""Distances of a list of pairs of classes: known ones from the cache, the others by the metric.

`labels.many` and `flows.modes.feature_driven` call `measure_pairs`. It reads the cache, measures
the missing pairs in parts and writes them at intervals, so that a killed run loses little.

A change must keep the numbers the same to the last bit with and without a cache, so that a cache
changes no result. It must write no distance of a solve that did not converge, because a later run
would read it without the warning.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import NotConvergedWarning
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.metrics import LabelMetric
from otdd_flash.labels.pair_cache import PairCache
from otdd_flash.labels.pairs import PairDistances, Progress
from otdd_flash.plugins import blamed_on

# A metric prepares all classes of a part before its first pair. With so many pairs per class, parts
# take some 5% longer than one run over all pairs, and a killed run loses one part. A GPU takes
# seconds for whole tables and measures them in one part.
PAIRS_PER_CLASS = 4
# A write takes some milliseconds; exact distances may come at hundreds per second.
SECONDS_BETWEEN_WRITES = 1.0


class Part(NamedTuple):
    """Measured distances of some of a list of pairs.

    Attributes:
        positions: (k,) int64, the pairs' indices in the list.
        distances: the distances of those pairs.
        converged: whether all of them reached the metric's tolerance.
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
    """Measure the distances of pairs of classes, reading from and writing to the cache.

    The numbers are the same with and without a cache, to the last bit.

    Args:
        clouds: V classes, in the order of `merge_identical`.
        pairs: (P, 2) int64, indices of two different classes, the larger first, on any device.
        metric: how to measure; any metric but `Given`.
        cache_dir: folder of the cache, used for metrics that have a recipe; None: no cache.
        progress: called with the number of pairs done and their total.

    Returns:
        P distances with bounds, on the points' device.

    Raises:
        InputError: a class is too small or too large for the method.

    Warns:
        NotConvergedWarning: a solve stopped before the tolerance.
    """
    pairs = pairs.to(clouds[0].points.device)
    recipe = metric.recipe(pairs.device) if len(pairs) else None
    cache = PairCache(cache_dir if recipe is not None else None)
    if recipe is None or not cache.active:
        everything = torch.arange(len(pairs), device=pairs.device)
        parts = _measured(clouds, pairs, everything, metric, len(pairs), progress)
        return _joined(parts, pairs)
    classes = [cloud.fingerprint for cloud in clouds]
    known, found = cache.find(recipe, classes, pairs)
    unknown = torch.ones(len(pairs), dtype=torch.bool, device=pairs.device)
    unknown[known] = False
    if progress is not None:
        progress(len(known), len(pairs))

    def keep(parts: Sequence[Part]) -> None:
        converged = [part for part in parts if part.converged]
        if converged:
            positions = torch.cat([part.positions for part in converged])
            distances = zip(*(part.distances for part in converged), strict=True)
            cache.keep(recipe, classes, pairs[positions], PairDistances(*map(torch.cat, distances)))

    missing = torch.nonzero(unknown).squeeze(1)
    at_once = len(missing) if pairs.is_cuda else PAIRS_PER_CLASS * len(clouds)
    measured = _measured(clouds, pairs, missing, metric, at_once, progress)
    return _joined(_told(measured, keep), pairs, Part(known, found))


def _told(parts: Parts, keep: Callable[[Sequence[Part]], None]) -> Parts:
    """Yield the parts and pass them to `keep` at intervals; the last ones also after an error."""
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
    """Measure the pairs at some positions of the list, and yield them part by part."""
    done = len(pairs) - len(positions)
    if not len(positions):
        return

    def heard(within: int, _: int) -> None:
        if progress is not None:
            progress(done + within, len(pairs))

    as_they_come = metric.in_parts(clouds, pairs[positions])
    if as_they_come is not None:
        with closing(as_they_come) as parts:
            for run, values in parts:
                yield Part(positions[run], PairDistances.exactly(values))
                heard(len(run), len(positions))
                done += len(run)
        return
    for run in torch.split(positions, max(1, at_once)):
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", NotConvergedWarning)
            with blamed_on(metric, f"labels={metric.name}"):
                distances = metric.measure(clouds, pairs[run], heard)
        for warning in said:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        late = any(issubclass(warning.category, NotConvergedWarning) for warning in said)
        yield Part(run, distances, converged=not late)
        done += len(run)
        heard(0, len(positions))


def _joined(parts: Parts, pairs: Tensor, *known: Part) -> PairDistances:
    """Assemble the distances of all pairs from their parts, on the device of `pairs`."""
    numbers = torch.empty((3, len(pairs)), dtype=torch.float64, device=pairs.device)
    # Closed at once after an interrupt: other processes may be working for the generator.
    with closing(parts):
        for part in chain(known, parts):
            for row, values in zip(numbers, part.distances, strict=True):
                # A metric of another package may return another dtype or device.
                row[part.positions] = values.to(row)
    return PairDistances(*numbers)
