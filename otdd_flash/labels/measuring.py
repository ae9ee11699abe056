"""From classes to their distances: what the cache knows, and the rest by the metric."""

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

# A metric prepares all classes of a part before its first pair: with so many pairs per class it
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
    """Distances of pairs of classes.

    With a cache, what it knows is not measured, and what is measured and has converged is kept as
    soon as it is there. The numbers are the same with and without it, to the last bit.

    Args:
        clouds: V classes, in the order that `merge_identical` gives them.
        pairs: (P, 2) int64, indices of two different classes, the larger first, on any device.
        metric: how to measure; any but `Given`.
        cache_dir: where distances that are expensive to measure are kept; None keeps none.
        progress: called with the number of pairs done and their total.

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
    """Yield the parts, handing them to `keep` every now and then, the last in any case."""
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
    """The distances of a list of pairs, where it is, from all of its parts."""
    numbers = torch.empty((3, len(pairs)), dtype=torch.float64, device=pairs.device)
    # Closed at once where one is interrupted: other processes may be at work.
    with closing(parts):
        for part in chain(known, parts):
            for row, values in zip(numbers, part.distances, strict=True):
                # A metric of somebody's may leave them in another type, or on the CPU.
                row[part.positions] = values.to(row)
    return PairDistances(*numbers)
