"""Linear maps fitted on both sides of a comparison: standardised features and PCA.

`otdd_flash.extractors` exports `standardize` and `reduce_pca`; `commands.sides` and
`commands.study` call them after `embed`. Both sides must get the same map, fitted on all n + m rows
alike, or their distance would have no meaning. Sums are taken in float64, because float32 loses
digits over many rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from otdd_flash.arguments import Seed, count, takes
from otdd_flash.checks import called
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples, check_same_dimension, check_squares

ROWS_AT_ONCE = 4096

# Squares of features above this are taken in units of the largest.
HUGE = 1e100


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes()
def standardize(source: Samples, target: Samples) -> tuple[LabeledSamples, LabeledSamples]:
    """Shift and scale every feature to mean 0 and deviation 1 over the n + m rows of both sides.

    The moments are those of all rows alike, whatever their weights. Features that are constant over
    both sides are left unchanged.

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
    """Yield blocks of rows in float64: sums over 60,000 rows lose digits in float32."""
    device = sides[0].features.device
    for side in sides:
        for block in torch.split(side.features, ROWS_AT_ONCE):
            yield block.to(device, torch.float64)


def _unit(*sides: LabeledSamples) -> Tensor:
    """Return a divisor of features (d,) that keeps squares finite: 1 except for huge features."""
    device = sides[0].features.device
    largest = torch.stack([side.features.abs().amax(0).to(device) for side in sides]).amax(0)
    return torch.where(largest > HUGE, largest.double(), 1.0)


def _constant(x: Tensor, y: Tensor) -> Tensor:
    """Return which features (d,) hold one value only; exact, unlike a computed deviation."""
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


@computes
@takes(k=called("extractor.pca", count))
def reduce_pca(
    source: Samples, target: Samples, k: int, seed: Seed
) -> tuple[LabeledSamples, LabeledSamples]:
    """Project on the first k principal components, fitted on the n + m rows of both sides alike.

    Args:
        source: n samples with d features.
        target: m samples with d features.
        k: number of components, at most min(n + m, d).
        seed: seed of scikit-learn's randomised solver, which it chooses for large inputs.

    Raises:
        InputError: the sides differ in dimension, or k is not in [1, min(n + m, d)].
    """
    source, target = as_samples(source, "source"), as_samples(target, "target")
    check_same_dimension(source, target)
    check_squares(source, target)
    most = min(len(source) + len(target), source.dim)
    if k > most:
        raise InputError(
            f"extractor.pca must be an integer from 1 to {most}, the smaller of the number of rows "
            f"and the feature dimension {source.dim}, got {k}"
        )
    from sklearn.decomposition import PCA

    x, y = source.features.cpu(), target.features.cpu()
    fitted = PCA(n_components=k, random_state=seed).fit(torch.cat([x, y]).numpy())

    def project(side: LabeledSamples) -> LabeledSamples:
        features = torch.from_numpy(fitted.transform(side.features.cpu().numpy()))
        return replace(side, features=features.to(side.features), feature_names=None)

    return project(source), project(target)
