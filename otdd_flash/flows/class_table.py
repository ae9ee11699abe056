"""W between the classes of moving particles and those of a fixed target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.labels import ClassDistances, LabelMetric
from otdd_flash.labels.classes import ClassCloud, merge_identical, pool
from otdd_flash.labels.gaussian import diagonal_gaussian_table, gaussian_table
from otdd_flash.labels.measuring import measure_pairs
from otdd_flash.labels.methods import class_names
from otdd_flash.labels.moment_distances import mean_table
from otdd_flash.labels.pairs import all_pairs, symmetric_table
from otdd_flash.samples import LabeledSamples

# Methods whose table has nothing to do with where the points are.
FIXED_METHODS = ("none", "given")


def remeasured(
    particles: LabeledSamples, target: LabeledSamples, metric: LabelMetric, before: ClassDistances
) -> ClassDistances:
    """The distances of moved classes; those within the target stay as they are in `before`."""
    if metric.method in FIXED_METHODS:
        return before
    clouds, offsets = pool([particles, target])
    distinct, index = merge_identical(clouds)
    moved = torch.zeros(len(distinct), dtype=torch.bool)
    moved[index[: offsets[1]]] = True
    pairs = all_pairs(len(distinct))
    pairs = pairs[moved[pairs].any(1)]
    values = measure_pairs(distinct, pairs, metric).values
    full = symmetric_table(values, pairs, len(distinct))[index][:, index]
    full[offsets[1] :, offsets[1] :] = before.yy
    return ClassDistances.from_full(full, offsets[1], class_names(particles), class_names(target))


def differentiable_table(
    particles: LabeledSamples, target: LabeledSamples, metric: LabelMetric, within_target: Tensor
) -> Tensor:
    """W (V_x + V_y, V_x + V_y) for autograd by the particles' features.

    Args:
        particles: n points whose features may require a gradient.
        target: the fixed side.
        metric: `gaussian` or `means`.
        within_target: the block (V_y, V_y).
    """
    clouds, (_, own, total) = pool([particles, target])
    pairs = all_pairs(total)
    pairs = pairs[(pairs < own).any(1)]
    full = symmetric_table(_pair_table(clouds, pairs, metric), pairs, total)
    fixed = torch.zeros_like(full)
    fixed[own:, own:] = within_target.to(full)
    return full + fixed


def _pair_table(clouds: Sequence[ClassCloud], pairs: Tensor, metric: LabelMetric) -> Tensor:
    if metric.method == "means":
        return mean_table(clouds, pairs)
    table = diagonal_gaussian_table if metric.diagonal else gaussian_table
    return table(clouds, pairs, metric.unbiased)
