"""Rows drawn without replacement: subsamples, and two halves that share no row."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.data.subset import stratified_rows
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples

# A covariance needs two points.
PER_CLASS = 2

Rows = NDArray[np.int64]


def subsample(samples: LabeledSamples, size: int, generator: np.random.Generator) -> LabeledSamples:
    """Draw `size` rows uniformly without replacement; class proportions vary as in sampling.

    Only where a class would get fewer than two rows (one, if it has no more), rows of it replace
    the last ones drawn.

    Args:
        samples: n rows; n >= size >= `least_rows(samples)`.
        size: rows to draw.
        generator: the only source of randomness.
    """
    return samples.take(subsample_rows(samples, size, generator))


def subsample_rows(samples: LabeledSamples, size: int, generator: np.random.Generator) -> Tensor:
    """The row numbers of `subsample`, ascending."""
    order = generator.permutation(len(samples))
    needed = _rank_in_class(_labels(samples)[order]) < PER_CLASS
    chosen = order[np.argsort(~needed, kind="stable")[:size]]
    return torch.from_numpy(np.sort(chosen))


def least_rows(samples: LabeledSamples) -> int:
    """The fewest rows that hold two of every class, or one of a class that has no more."""
    sizes = np.bincount(_labels(samples))
    return int(np.minimum(sizes, PER_CLASS).sum())


def two_halves(
    samples: LabeledSamples, size: int, generator: np.random.Generator
) -> tuple[LabeledSamples, LabeledSamples]:
    """Draw two disjoint sets of `size` rows each, with equally many rows of every class.

    Rows are paired at random within their class, `size` pairs are drawn in proportion to the
    classes, at least two of each, and each half gets one row of every pair.

    Args:
        samples: rows in at least `size` pairs.
        size: rows of each half; at least two per class.
        generator: the only source of randomness.
    """
    order = generator.permutation(len(samples))
    labels = _labels(samples)[order]
    by_class = order[np.argsort(labels, kind="stable")]
    rank = _rank_in_class(np.sort(labels))
    # The row after an even rank, if it is of the same class, has the odd rank that follows.
    first = np.flatnonzero(rank % 2 == 0)
    first = first[np.append(rank, 0)[first + 1] > 0]
    pairs = np.stack((by_class[first], by_class[first + 1]), 1)
    kinds = _labels(samples)[pairs[:, 0]]
    drawn = stratified_rows(kinds, size, generator, at_least=PER_CLASS)
    one, other = (samples.take(torch.from_numpy(np.sort(half))) for half in pairs[drawn].T)
    return one, other


def most_per_half(samples: LabeledSamples) -> int:
    """How many rows each of two halves with equal classes can have.

    Raises:
        InputError: a class has fewer than two rows for each half.
    """
    sizes = np.bincount(_labels(samples))
    short = np.flatnonzero(sizes < 2 * PER_CLASS)
    if short.size:
        name = samples.class_names[short[0]] if samples.class_names else "of all rows"
        raise InputError(
            f"two halves of {samples.name} need {2 * PER_CLASS} samples of every class, and class "
            f"{name} has {sizes[short[0]]}; min_class_size={2 * PER_CLASS} drops such classes"
        )
    return int((sizes // 2).sum())


def _labels(samples: LabeledSamples) -> Rows:
    if samples.labels is None:
        return np.zeros(len(samples), dtype=np.int64)
    labels: Rows = samples.labels.cpu().numpy()
    return labels


def _rank_in_class(labels: Rows) -> Rows:
    """How many earlier entries equal each entry."""
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rank
