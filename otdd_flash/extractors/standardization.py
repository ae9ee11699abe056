"""Standardised features: one mean and one deviation per feature for both datasets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from otdd_flash.extractors.dimensions import check_same_dimension
from otdd_flash.samples import LabeledSamples

ROWS_AT_ONCE = 4096


def standardize(
    source: LabeledSamples, target: LabeledSamples
) -> tuple[LabeledSamples, LabeledSamples]:
    """Shift and scale every feature to mean 0 and deviation 1 over the n + m rows of both sides.

    The moments are those of all rows alike, whatever their weights. Features that are constant over
    both sides are left alone.

    Raises:
        InputError: the sides differ in dimension.
    """
    check_same_dimension(source, target)
    count = len(source) + len(target)
    mean = torch.stack([rows.sum(0) for rows in _rows(source, target)]).sum(0) / count
    squares = torch.stack([(rows - mean).square().sum(0) for rows in _rows(source, target)]).sum(0)
    constant = _constant(source.features, target.features.to(source.features.device))
    mean[constant] = 0.0
    deviation = (squares / count).sqrt()
    deviation[constant] = 1.0
    return _scaled(source, mean, deviation), _scaled(target, mean, deviation)


def _rows(*sides: LabeledSamples) -> Iterator[Tensor]:
    """Blocks of rows in float64: sums over 60,000 rows lose digits in float32."""
    device = sides[0].features.device
    for side in sides:
        for block in torch.split(side.features, ROWS_AT_ONCE):
            yield block.to(device, torch.float64)


def _constant(x: Tensor, y: Tensor) -> Tensor:
    """Which features hold one value only (d,); exact, where a computed deviation is not."""
    (low_x, high_x), (low_y, high_y) = torch.aminmax(x, dim=0), torch.aminmax(y, dim=0)
    return torch.minimum(low_x, low_y) == torch.maximum(high_x, high_y)


def _scaled(side: LabeledSamples, mean: Tensor, deviation: Tensor) -> LabeledSamples:
    features = torch.empty_like(side.features)
    mean, deviation = mean.to(features.device), deviation.to(features.device)
    for block, given in zip(
        torch.split(features, ROWS_AT_ONCE),
        torch.split(side.features, ROWS_AT_ONCE),
        strict=True,
    ):
        block.copy_((given.double() - mean) / deviation)
    return replace(side, features=features)
