"""Several sources as one cloud, whose classes stay apart, and its comparison with the target.

`Sources.of` makes the cloud: the rows of all sources, one after the other, so that one solve at the
masses w_k a_ki is that of a mixture. `compared` measures class distances between all classes of
sources and those of the target once, and settles epsilon once: a mixture of other weights has the
same cost. `mixing.mixture` and `mixing.intervals` call them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.checks import refused
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.errors import InputError
from otdd_flash.labels import (
    Given,
    JointClassDistances,
    LabelMetric,
    NoLabels,
    drop_small_classes,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.by_ranks import measured_by_ranks
from otdd_flash.labels.measuring import class_block, measure_all
from otdd_flash.labels.metrics import Continuous, measures_nothing
from otdd_flash.labels.numbers import refuse_table, scale_of, targets_of, with_numbers
from otdd_flash.operators.comparison import Comparison, check_comparable
from otdd_flash.samples import LabeledSamples, needs_classes
from otdd_flash.shown import display
from otdd_flash.solver.term import epsilon_of_datasets, resolve_epsilon

# The most sources of a mixture.
MOST_SOURCES = 200


@dataclass(frozen=True, eq=False)
class Sources:
    """K sources and their rows as one cloud.

    Attributes:
        names: K names, distinct.
        each: the K sources.
        cloud: their n rows, classes numbered through; weights are those of equal shares.
        members: (n,) int64, the source of each row.
        own: (n,) float64, the mass of each row within its source.
    """

    names: tuple[str, ...]
    each: tuple[LabeledSamples, ...]
    cloud: LabeledSamples
    members: Tensor
    own: Tensor

    @classmethod
    def of(cls, names: Sequence[str], each: Sequence[LabeledSamples], *, labelled: bool) -> Sources:
        """Put sources together; without `labelled`, the rows have no classes."""
        sizes = torch.tensor([len(one) for one in each])
        members = torch.repeat_interleave(torch.arange(len(each)), sizes)
        home = each[0].features.device
        own = torch.cat([one.masses for one in each])
        labels, classes, targets = None, tuple[str, ...](), None
        if labelled:
            found, first = list[Tensor](), 0
            for one in each:
                if one.labels is None:
                    raise needs_classes(one)
                found.append(one.labels + first)
                first += one.class_total
                classes += one.class_names
            labels = torch.cat(found)
        elif all(one.targets is not None for one in each):
            targets = torch.cat([targets_of(one) for one in each])
        cloud = LabeledSamples(
            torch.cat([one.points_of(slice(None)) for one in each]),
            labels,
            classes,
            weights=own / len(each),
            name="mixture",
            targets=targets,
        )
        return cls(tuple(names), tuple(each), cloud, members.to(home), own)

    def masses(self, w: NDArray[np.float64]) -> Tensor:
        """Return w_k a_ki (n,) of weights (K,)."""
        of_rows = torch.from_numpy(np.ascontiguousarray(w)).to(self.own.device)[self.members]
        return self.own * of_rows

    def used(self, w: NDArray[np.float64]) -> Tensor:
        """Return which rows are of sources with weight, (n,) bool, of weights (K,)."""
        return torch.from_numpy(w > 0).to(self.members.device)[self.members]

    def sums(self, values: Tensor) -> NDArray[np.float64]:
        """Return sum_i a_ki v_i (K,) of values (n,), on the host."""
        found = torch.zeros(len(self.names), dtype=torch.float64, device=self.own.device)
        # Rows without mass may have any value.
        held = torch.where(self.own > 0, self.own * values.to(self.own.device), 0.0)
        total: NDArray[np.float64] = found.index_add_(0, self.members, held).cpu().numpy()
        return total


def named_sources(
    sources: Sequence[Samples] | Mapping[str, Samples],
) -> tuple[tuple[str, ...], list[LabeledSamples]]:
    """Return distinct names and samples of sources, of which a name may occur several times.

    Raises:
        InputError: there is none, or there are too many, or one cannot be converted.
    """
    if isinstance(sources, Mapping):
        given = [(str(name), one) for name, one in sources.items()]
        each = [replace(as_samples(one, f"sources[{name!r}]"), name=name) for name, one in given]
    elif isinstance(sources, list | tuple | Iterator):
        each = [as_samples(one, f"sources[{place}]") for place, one in enumerate(sources)]
    else:
        raise refused("sources", "be a list of datasets, or datasets by name", sources)
    if not 1 <= len(each) <= MOST_SOURCES:
        raise InputError(f"a mixture has 1 to {MOST_SOURCES} sources, got {len(each)}")
    names: list[str] = []
    for one in each:
        name, repeats = one.name, 1
        while name in names:
            repeats += 1
            name = f"{one.name} ({repeats})"
        names.append(name)
    return tuple(names), each


def compared(
    names: Sequence[str],
    given: Sequence[LabeledSamples],
    *,
    debias: bool,
    metric: LabelMetric,
    cost: GroundCost,
    compute: ComputeOptions,
    epsilon: float | None = None,
    epsilon_relative: float | None = None,
    table: JointClassDistances | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Sources, Comparison]:
    """Check sources and target, measure class distances and settle epsilon.

    Args:
        names: of the K sources.
        given: K sources and the target.
        debias: whether the sources' own class distances are needed.
        metric: how class distances are measured.
        cost: the ground cost.
        compute: where and how passes run.
        epsilon: regularisation, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost at equal weights.
        table: class distances to use instead.
        cache_dir: folder of measured class distances.

    Returns:
        The sources, and their comparison at equal weights.

    Raises:
        InputError: they cannot be compared, or the class distances cannot be measured.
    """
    measured = table is None
    refuse_table(metric, table)
    if isinstance(metric, Given):
        raise measures_nothing()
    metric, sides = with_numbers(metric, given)
    if cost.ground == "inner":
        raise InputError("a mixture takes ground=sqeuclidean or cosine, got inner")
    cost.check_labels(metric.name if measured else "given")
    check_comparable(*sides)
    for one in sides:
        if one.label_sets is not None:
            raise InputError(
                f"{display(one.name)} has several labels a row, and a mixture takes one; choose "
                "one column, or labels=none on rows without labels"
            )
    # Of a class without rows there is nothing to measure.
    sides = [drop_small_classes(one, None) for one in sides]
    if measured:
        notice_single_samples(sides, metric)
    labelled = not (measured and isinstance(metric, NoLabels))
    target = sides[-1]
    if not labelled and not isinstance(metric, Continuous):
        target = replace(target, labels=None)
    if labelled and target.labels is None:
        raise needs_classes(target)
    sources = Sources.of(names, sides[:-1], labelled=labelled)
    comparison = Comparison.prepare(
        (sources.cloud, target), cost, compute, debias=debias, target_scale=scale_of(metric)
    )
    x, y = comparison.transformed
    if table is not None:
        full = table.named_for(sides).full
    elif not labelled:
        full = torch.zeros(2, 2, dtype=torch.float64)
    else:
        metric = settled_metric(metric, epsilon, (x, y), comparison.streaming)
        if compute.group is not None and comparison.streaming is None:
            metric = measured_by_ranks(metric, compute.group)
        full = _table(x, y, metric, cache_dir, debias=debias)
    comparison = comparison.with_classes(full)
    mean, scale = comparison.mean_cost, cost.standardized(target.dim)
    name, said, used = resolve_epsilon(epsilon, epsilon_relative, mean)
    with epsilon_of_datasets(name, said, used, mean, scale):
        return sources, comparison.at(used)


def _table(
    x: LabeledSamples,
    y: LabeledSamples,
    metric: LabelMetric,
    cache_dir: str | os.PathLike[str] | None,
    *,
    debias: bool,
) -> Tensor:
    """Measure class distances (V, V); without self terms, those of sources and target alone."""
    if debias:
        return measure_all((x, y), metric, cache_dir=cache_dir).full
    block = class_block(x, y, metric, cache_dir=cache_dir).values.double()
    zeros = [block.new_zeros(size, size) for size in block.shape]
    return torch.cat((torch.cat((zeros[0], block), 1), torch.cat((block.T, zeros[1]), 1)))


def at_weights(comparison: Comparison, sources: Sources, w: NDArray[np.float64]) -> Comparison:
    """Return the comparison of the mixture of weights w (K,), without rows of unused sources."""
    source, target = comparison.transformed
    home = source.features.device
    masses, used = sources.masses(w), sources.used(w)
    if not used.all():
        source, masses = source.take(used.nonzero().squeeze(1).to(home)), masses[used]
    sides = replace(source, weights=masses.to(home)), target
    return replace(comparison, given=sides, transformed=sides)
