"""Drop the classes that hold too few samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.labels.metrics import LabelMetric
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import display

# How many classes a notice names.
SHOWN = 8


def notice_single_samples(datasets: Sequence[LabeledSamples], metric: LabelMetric) -> None:
    """Say which classes of one sample count as points although the metric takes covariances.

    Warns:
        DataNotice: once for all of them.
    """
    if not metric.single_samples_are_points:
        return
    single = []
    for samples in datasets:
        if samples.labels is None:
            continue
        weighed = samples.labels[samples.masses > 0]
        counted = torch.bincount(weighed, minlength=len(samples.class_names)).tolist()
        names = zip(samples.class_names, counted, strict=True)
        single += [
            f"{display(repr(name))} of {display(samples.name)}"
            for name, count in names
            if count == 1
        ]
    if single:
        shown = ", ".join(single[:SHOWN]) + f" and {len(single) - SHOWN} more" * (
            len(single) > SHOWN
        )
        warn(
            f"classes of one sample are points, with covariance 0: {shown}; min_class_size=2 drops "
            "them",
            DataNotice,
        )


def drop_small_classes(samples: LabeledSamples, minimum: int | None) -> LabeledSamples:
    """Keep the classes with at least `minimum` samples of positive weight (None: at least one).

    Classes without any sample go silently, others with a `DataNotice` that names them. Unlabelled
    samples are returned as they are.

    Raises:
        InputError: `minimum` is below 1, or no class is left.
    """
    if minimum is not None and minimum < 1:
        raise InputError(f"min_class_size must be at least 1, got {minimum}")
    if samples.labels is None:
        return samples
    needed = minimum or 1
    count = len(samples.class_names)
    present = samples.class_counts.tolist()
    counted = torch.bincount(samples.labels[samples.masses > 0], minlength=count).tolist()
    keep = [c for c in range(count) if counted[c] >= needed]
    dropped = [c for c in range(count) if present[c] > 0 and counted[c] < needed]
    listing = ", ".join(f"{display(samples.class_names[c])} ({counted[c]})" for c in dropped)
    if not keep:
        raise InputError(
            f"min_class_size={needed} leaves no class of {samples.name}: all have fewer samples of "
            f"positive weight, {listing}; lower it, or take more samples"
        )
    if dropped:
        warn(
            f"dropped classes of {samples.name} with fewer than {needed} samples of positive "
            f"weight: {listing}",
            DataNotice,
        )
    return samples if len(keep) == count else samples.keep_classes(keep)
