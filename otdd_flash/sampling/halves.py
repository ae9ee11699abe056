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

from otdd_flash.arguments import Progress, Seed, takes
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.comparison import (
    PER_CLASS,
    SubsetComparison,
    most_per_half,
    two_halves,
)


@dataclass(frozen=True)
class BoundedValue:
    """A distance in units of the cost, with its solver bounds."""

    value: float
    lower: float
    upper: float


@dataclass(frozen=True)
class NoiseFloor:
    """Distances at one size within each dataset and between both.

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

    All halves have one size, half of the smaller dataset's, and each dataset's two have equally
    many rows of every class. Class distances are measured between the halves.

    Args:
        source: samples of which no row occurs twice.
        target: samples of which no row occurs twice.
        seed: seed of the split.
        progress: called as progress(distances computed, their total).
        **settings: those of `dataset_distance`, with the epsilon of the whole, as its result has
            it. Settings of a cache or of progress have no effect.

    Raises:
        InputError: a class has fewer than four samples, or as `dataset_distance`.
        ConvergenceError: `solver.require_convergence` is set and a distance stopped early.

    Warns:
        NotConvergedWarning: a distance stopped before the tolerance.
    """
    source, target = as_samples(source, "source"), as_samples(target, "target")
    comparison = SubsetComparison(source, target, settings)
    size = half_size(comparison.source, comparison.target)
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
        if size < PER_CLASS * samples.class_total:
            raise InputError(
                f"halves of {size} rows, half of what {other.name} has, cannot hold two of each of "
                f"the {samples.class_total} classes of {samples.name}; take more samples, or fewer "
                "classes"
            )
    return size
