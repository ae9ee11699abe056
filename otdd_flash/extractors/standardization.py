"""Standardised features: one mean and one deviation per feature for both datasets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from otdd_flash.arguments.datasets import STANDARDIZE
from otdd_flash.checks import takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.dimensions import check_same_dimension
from otdd_flash.eager import computes
from otdd_flash.samples import LabeledSamples

ROWS_AT_ONCE = 4096

# Of features above this, squares are taken in units of the largest.
HUGE = 1e100


@computes
@takes(STANDARDIZE)
def standardize(source: Samples, target: Samples) -> tuple[LabeledSamples, LabeledSamples]:
    """Shift and scale every feature to mean 0 and deviation 1 over the n + m rows of both sides.

    The moments are those of all rows alike, whatever their weights. Features that are constant over
    both sides are left alone.

    Raises:
        InputError: the sides differ in dimension.
    """
    source, target = as_samples(source, "source"), as_samples(target, "target")
    check_same_dimension(source, target)
    count = len(source) + len(target)
    unit = _unit(source, target)
    mean = torch.stack([(rows / unit).sum(0) for rows in _rows(source, target)]).sum(0) / count
    squares = torch.stack(
        [(rows / unit - mean).square().sum(0) for rows in _rows(source, target)]
    ).sum(0)
    constant = _constant(source.features, target.features.to(source.features.device))
    mean[constant] = 0.0
    unit[constant] = 1.0
    deviation = (squares / count).sqrt()
    deviation[constant] = 1.0
    return _scaled(source, unit, mean, deviation), _scaled(target, unit, mean, deviation)


def _rows(*sides: LabeledSamples) -> Iterator[Tensor]:
    """Blocks of rows in float64: sums over 60,000 rows lose digits in float32."""
    device = sides[0].features.device
    for side in sides:
        for block in torch.split(side.features, ROWS_AT_ONCE):
            yield block.to(device, torch.float64)


def _unit(*sides: LabeledSamples) -> Tensor:
    """What to divide features by (d,) so that their squares do not overflow: 1 for all but huge."""
    device = sides[0].features.device
    largest = torch.stack([side.features.abs().amax(0).to(device) for side in sides]).amax(0)
    return torch.where(largest > HUGE, largest.double(), 1.0)


def _constant(x: Tensor, y: Tensor) -> Tensor:
    """Which features hold one value only (d,); exact, where a computed deviation is not."""
    (low_x, high_x), (low_y, high_y) = torch.aminmax(x, dim=0), torch.aminmax(y, dim=0)
    return torch.minimum(low_x, low_y) == torch.maximum(high_x, high_y)


def _scaled(side: LabeledSamples, unit: Tensor, mean: Tensor, deviation: Tensor) -> LabeledSamples:
    features = torch.empty_like(side.features)
    unit, mean, deviation = (part.to(features.device) for part in (unit, mean, deviation))
    for block, given in zip(
        torch.split(features, ROWS_AT_ONCE),
        torch.split(side.features, ROWS_AT_ONCE),
        strict=True,
    ):
        block.copy_((given.double() / unit - mean) / deviation)
    return replace(side, features=features)
