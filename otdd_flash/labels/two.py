"""Class-to-class distances W of two datasets."""

from __future__ import annotations

import os

from otdd_flash.errors import InputError
from otdd_flash.labels.many import class_names, measure_all
from otdd_flash.labels.metrics import Given, LabelMetric, NoLabels
from otdd_flash.labels.pairs import Progress
from otdd_flash.labels.table import ClassDistances
from otdd_flash.samples import HOW_TO_LABEL, LabeledSamples
from otdd_flash.shown import listing


def measure_classes(
    source: LabeledSamples,
    target: LabeledSamples,
    metric: LabelMetric,
    *,
    statistics: tuple[LabeledSamples, LabeledSamples] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ClassDistances:
    """Distances between all classes of two datasets.

    Args:
        source: the dataset whose classes are the table's first Vx.
        target: the dataset whose classes are its last Vy.
        metric: how to measure.
        statistics: take the points of the classes from these (source, target) instead, such as the
            whole datasets of which `source` and `target` are subsets; classes are matched by name.
        cache_dir: keep distances in a database in this folder, by the classes' content, and do not
            measure again what it holds; None keeps none.
        progress: called with the number of class pairs done and their total.

    Returns:
        Squared distances with the datasets' class names; symmetric, the diagonals zero.

    Raises:
        InputError: labels are missing, a class is too small or too large for the method, or the
            given table is about other classes.
    """
    if isinstance(metric, NoLabels):
        statistics = None
    else:
        for samples in (source, target):
            if samples.labels is None:
                raise InputError(f"{samples.name} has no labels; {HOW_TO_LABEL}")
    if isinstance(metric, Given):
        return metric.read().named_for(class_names(source), class_names(target))
    if statistics is not None:
        source, target = (
            _matched(whole, samples)
            for whole, samples in zip(statistics, (source, target), strict=True)
        )
    joint = measure_all([source, target], metric, cache_dir=cache_dir, progress=progress)
    return joint.between(0, 1)


def _matched(whole: LabeledSamples, samples: LabeledSamples) -> LabeledSamples:
    """`whole` with the classes of `samples` only, in their order."""
    if whole.labels is None:
        raise InputError(f"{whole.name} has no labels; {HOW_TO_LABEL}")
    if whole.class_names == samples.class_names:
        return whole
    missing = [name for name in samples.class_names if name not in whole.class_names]
    if missing:
        raise InputError(
            f"class statistics come from {whole.name}, which has no class {', '.join(missing)} of "
            f"{samples.name} (it has: {listing(whole.class_names)})"
        )
    return whole.keep_classes([whole.class_names.index(name) for name in samples.class_names])
