"""The distance between two disjoint halves of one dataset, as the noise floor of a distance.

With few samples the divergence between two samples of one distribution is far from 0. A distance
between datasets is meaningful as far as it exceeds that of their halves at equal sizes.
`otdd_flash.sampling` exports `noise_floor`, which `commands.compare` and `study.measures.distances`
call; `commands.compare` also calls `half_size` of the rows that are `drawable`, before the main
solve. The draws follow from the seed alone, so that a floor can be computed again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from otdd_flash.arguments import Progress, Seed, takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.data.subset import stratified_rows
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.comparison import (
    PER_CLASS,
    SubsetComparison,
    class_labels,
    drawn_classes,
    notice_rare_labels,
    rank_in_class,
)


@dataclass(frozen=True)
class BoundedValue:
    """A distance in units of the cost, with its solver bounds."""

    value: float
    lower: float
    upper: float


@dataclass(frozen=True)
class NoiseFloor:
    """Distances between halves of each dataset, and between both datasets at that size.

    Attributes:
        source: between two halves of the source.
        target: between two halves of the target.
        between: from a half of the source to a half of the target.
        size: rows of every half.
    """

    source: BoundedValue
    target: BoundedValue
    between: BoundedValue
    size: int

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of result.json."""
        return asdict(self)


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes()
def noise_floor(
    source: Samples,
    target: Samples,
    *,
    seed: Seed = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> NoiseFloor:
    """Compare disjoint halves of each dataset, and the datasets at the size of these halves.

    All halves have one size, half of the smaller dataset. The two halves of a dataset have equally
    many rows of every class. Class distances are measured between the halves.

    Args:
        source: samples without repeated rows.
        target: samples without repeated rows.
        seed: seed of the split.
        progress: called as progress(distances computed, their total).
        **settings: keywords of `dataset_distance`, with epsilon and penalties in units of the cost,
            as in the result for the whole datasets. Settings of a cache or of progress have no
            effect.

    Raises:
        InputError: a class has fewer than four samples, or as `dataset_distance`.
        ConvergenceError: `solver.require_convergence` is set and a distance stopped early.

    Warns:
        NotConvergedWarning: a distance stopped before the tolerance.
        DataNotice: rows have several labels, and halves may lack rare ones.
    """
    source, target = as_samples(source, "source"), as_samples(target, "target")
    comparison = SubsetComparison(source, target, settings)
    size = half_size(comparison.source, comparison.target)
    for side in (comparison.source, comparison.target):
        notice_rare_labels(side, size)
    generator = np.random.default_rng(seed)
    x, other_x = two_halves(comparison.source, size, generator)
    y, other_y = two_halves(comparison.target, size, generator)
    distances: list[BoundedValue] = []
    for block, one, other in (("xx", x, other_x), ("yy", y, other_y), ("xy", x, y)):
        result = comparison.distance(one, other, block)
        distances.append(BoundedValue(result.value, *result.bounds))
        if progress is not None:
            progress(len(distances), 3)
    comparison.warn_unconverged(3)
    within_source, within_target, between = distances
    return NoiseFloor(within_source, within_target, between, size)


def half_size(source: LabeledSamples, target: LabeledSamples) -> int:
    """Return the rows of every half: the most that both datasets have for two halves.

    Raises:
        InputError: a class has too few samples, or one dataset too few for the other's classes.
    """
    size = min(most_per_half(source), most_per_half(target))
    for samples, other in ((source, target), (target, source)):
        if size < PER_CLASS * drawn_classes(samples):
            raise InputError(
                f"halves of {size} rows, half of what {other.name} has, cannot hold two of each of "
                f"the {drawn_classes(samples)} classes of {samples.name}; take more samples, or "
                "fewer classes"
            )
    return size


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
    labels = class_labels(samples)[order]
    by_class = order[np.argsort(labels, kind="stable")]
    rank = rank_in_class(np.sort(labels))
    # Ranks 0 and 1, 2 and 3, ... of a class are pairs. A row of even rank has a partner if the next
    # row has a rank above 0: then it is of the same class.
    first = np.flatnonzero(rank % 2 == 0)
    first = first[np.append(rank, 0)[first + 1] > 0]
    pairs = np.stack((by_class[first], by_class[first + 1]), 1)
    kinds = class_labels(samples)[pairs[:, 0]]
    drawn = stratified_rows(kinds, size, generator, at_least=PER_CLASS)
    one, other = (samples.take(torch.from_numpy(np.sort(half))) for half in pairs[drawn].T)
    return one, other


def most_per_half(samples: LabeledSamples) -> int:
    """Return how many rows each of two halves with equal classes can have.

    Raises:
        InputError: a class has fewer than two rows for each half.
    """
    sizes = np.bincount(class_labels(samples))
    short = np.flatnonzero(sizes < 2 * PER_CLASS)
    if short.size:
        name = samples.class_names[short[0]] if samples.class_names else "of all rows"
        raise InputError(
            f"two halves of {samples.name} need {2 * PER_CLASS} samples of every class, and class "
            f"{name} has {sizes[short[0]]}; min_class_size={2 * PER_CLASS} drops such classes"
        )
    return int((sizes // 2).sum())
