"""Numbers in place of classes: each row's targets, and the scale by which they are divided.

`labels="continuous"` compares rows by lambda_y ||(t_i - s_j) / scale||^2. `with_numbers` finds the
targets and one scale of all datasets, and puts it into the metric. `otdd`, `pairwise`, `flows.run`,
`mixing.sources`, `ranking.index`, `sampling.comparison` and `study.study` call it for every metric,
before anything is measured, and give the scale (`scale_of`) to their `Comparison`, whose labels
`operators.label_costs` embeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from otdd_flash.errors import InputError, placed
from otdd_flash.label_sets import named_numbers
from otdd_flash.labels.metrics import Continuous
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import display


def with_numbers(
    metric: LabelMetric,
    datasets: Sequence[LabeledSamples],
    statistics: Sequence[LabeledSamples] | None = None,
) -> tuple[LabelMetric, list[LabeledSamples]]:
    """Return metric and datasets, for `continuous` with their scale and with numbers.

    Args:
        metric: any metric; with others than `continuous` all is returned as it is.
        datasets: those that are compared. Classes whose names are numbers stand for these.
        statistics: datasets whose scale is taken instead, of which `datasets` are parts.

    Raises:
        InputError: a dataset has no numbers, they have different columns, a column is constant, or
            a scale is not one positive number a column.
    """
    if not isinstance(metric, Continuous):
        return metric, list(datasets)
    found = [numbered(samples) for samples in datasets]
    wide = {targets_of(samples).shape[1] for samples in found}
    if len(wide) > 1:
        raise InputError(
            f"targets of the datasets have {' and '.join(map(str, sorted(wide)))} columns, and are "
            "compared column by column; give the same to all"
        )
    (count,) = wide
    scale = (1.0,) * count if metric.scale is None else metric.scale
    if isinstance(scale, str):
        scale = _pooled(found if statistics is None else [*map(numbered, statistics)])
    assert isinstance(scale, tuple)
    if len(scale) != count:
        raise InputError(f"labels.scale has {len(scale)} numbers for {count} columns of targets")
    return Continuous(scale), found


def scale_of(metric: LabelMetric | None) -> tuple[float, ...] | None:
    """Return the scale (q,) of numbers that `with_numbers` has put into a metric; else None."""
    if not isinstance(metric, Continuous):
        return None
    assert isinstance(metric.scale, tuple)
    return metric.scale


def refuse_table(metric: LabelMetric, class_distances: object) -> None:
    """Raise an `InputError` if a table of class distances is given beside numbers."""
    if class_distances is not None and isinstance(metric, Continuous):
        raise InputError(
            "labels=continuous compares numbers and takes no class_distances=; leave one out"
        )


def targets_of(samples: LabeledSamples) -> Tensor:
    """Return the targets (n, q) of samples that have some."""
    assert samples.targets is not None
    return samples.targets


def numbered(samples: LabeledSamples) -> LabeledSamples:
    """Return samples with targets and without classes."""
    if samples.targets is not None:
        return replace(samples, labels=None)
    said = "no labels" if samples.labels is None else "several labels a row"
    if samples.labels is not None and samples.label_sets is None:
        said = f"classes that are none, such as {display(repr(samples.class_names[-1]))}"
        with placed(samples.name):
            values = named_numbers(samples.class_names)
        if values is not None:
            targets = torch.from_numpy(values).to(samples.labels.device)[samples.labels]
            return replace(samples, labels=None, targets=targets)
    raise InputError(
        f"labels=continuous compares numbers, and {samples.name} has {said}; give one number or "
        "more for each row, as labels or as targets="
    )


def _pooled(datasets: Sequence[LabeledSamples]) -> tuple[float, ...]:
    """Return the standard deviation of each column over the pooled rows of all datasets.

    A dataset weighs as much as it has rows; within it, rows weigh by their masses.
    """
    masses = torch.cat([samples.masses.cpu() * len(samples) for samples in datasets])
    masses = masses / masses.sum()
    rows = torch.cat([targets_of(samples).cpu() for samples in datasets])
    # Squares of very large numbers would overflow, and those of very small ones underflow.
    largest = rows.abs().amax(0)
    rows = rows / torch.where(largest > 0, largest, 1.0)
    # Relative to one of them: a constant column has the deviation 0 however sums are rounded.
    rows = rows - rows[0]
    found = (masses @ (rows - masses @ rows).square()).sqrt() * largest
    for place, value in enumerate(found.tolist()):
        if not value > 0:
            raise InputError(
                f"column {place} of the targets is constant, so that it has no scale; leave it "
                "out, or set labels.scale=null, which keeps units"
            )
    return tuple(found.tolist())
