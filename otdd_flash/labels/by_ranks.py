"""A metric whose pairs are measured by several ranks, each a share of them.

`measured_by_ranks` wraps a metric; `otdd`, `pairwise`, `mixing.sources` and `flows.run` call it.
The classes are sent to the ranks once. Each of R ranks selects its share of the pairs itself: it
sorts them by size, the largest first, and takes every R-th one from its own rank on. If all pairs
of the classes are wanted, their list is not sent.

A change must keep values and recipes those of the wrapped metric, so that cached distances stay
valid. All ranks must run the same collectives in the same order, even if one of them fails, because
a rank that waits in another collective waits for ever.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from otdd_flash.arguments import Progress
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import NotConvergedWarning, warn
from otdd_flash.labels.metrics.base import LabelMetric, Measured
from otdd_flash.labels.pairs import ClassCloud, PairDistances, all_pairs, is_complete


def measured_by_ranks(metric: LabelMetric, ranks: object) -> LabelMetric:
    """Return the metric, measured by all ranks if there are any and it has a recipe.

    Those without a recipe measure in this process: `none` and `given` measure nothing, means,
    bounds and diagonal covariances are cheap, and of a user's function nothing is known. `tree` has
    none either, whatever metric is added to it.

    Args:
        metric: how to measure.
        ranks: `ComputeOptions.group` of a call on several processes, which is a `Ranks`.
    """
    if isinstance(ranks, Ranks) and metric.recipe(torch.device("cpu")) is not None:
        return _MeasuredByRanks(metric, ranks)
    return metric


@dataclass(frozen=True)
class _MeasuredByRanks(LabelMetric):
    """A metric of which every rank measures an equal share of the pairs."""

    name: ClassVar[str] = "by_ranks"

    metric: LabelMetric
    ranks: Ranks
    _sent: dict[int, tuple[Sequence[ClassCloud], int]] = field(default_factory=dict, repr=False)

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        ranks, number = self.ranks, self._number(clouds)
        ranks.report_to(progress, len(pairs))
        # A GPU compares, sorts and sends in a moment what takes a core seconds.
        pairs = pairs.to(clouds[0].points.device)
        listed = None if is_complete(pairs, len(clouds)) else pairs
        numbers, late = ranks.order(_measure, number, self.metric, listed)
        for message in late:
            warn(message, NotConvergedWarning)
        return PairDistances(*numbers)

    def in_parts(self, clouds: Sequence[ClassCloud], pairs: Tensor) -> Measured | None:
        """Measure in this process: a metric that yields its parts uses all cores already."""
        return self.metric.in_parts(clouds, pairs)

    def recipe(self, device: torch.device) -> str | None:
        """Return the wrapped metric's recipe: ranks change no value."""
        return self.metric.recipe(device)

    @property
    def single_samples_are_points(self) -> bool:
        return self.metric.single_samples_are_points

    def _number(self, clouds: Sequence[ClassCloud]) -> int:
        """Return the number under which ranks hold the classes; send them when first asked for."""
        if id(clouds) not in self._sent:
            number = self.ranks.number()
            sizes = [len(cloud) for cloud in clouds]
            points = torch.cat([cloud.points for cloud in clouds])
            weights = [None if cloud.weights is None else cloud.weights.cpu() for cloud in clouds]
            names = [cloud.name for cloud in clouds]
            self.ranks.order(_hold_classes, number, points, sizes, weights, names)
            # Ranks forget them with the next order (`Ranks.drop`): a finaliser may not communicate.
            weakref.finalize(self, self.ranks.drop, number)
            # Keep a reference, so that no other list gets the same id.
            self._sent[id(clouds)] = clouds, number
        return self._sent[id(clouds)][1]


def _hold_classes(
    ranks: Ranks,
    number: int,
    points: Tensor,
    sizes: list[int],
    weights: list[Tensor | None],
    names: list[str],
) -> None:
    ranks.held[number] = [
        ClassCloud(name, part, None if mass is None else mass.to(part.device))
        for name, part, mass in zip(names, torch.split(points, sizes), weights, strict=True)
    ]


def _measure(
    ranks: Ranks, number: int, metric: LabelMetric, listed: Tensor | None
) -> tuple[Tensor, list[str]]:
    """Measure this rank's share of the pairs and all-gather the table; run by every rank.

    Args:
        ranks: the group.
        number: the number under which the classes are held.
        metric: how to measure.
        listed: (P, 2) pairs; None for all pairs of the classes.

    Returns:
        Values, lower and upper bounds (3, P) on the points' device, and the warnings of unconverged
        solves.
    """
    clouds: Sequence[ClassCloud] = ranks.held[number]
    device = clouds[0].points.device
    pairs = all_pairs(len(clouds), device) if listed is None else listed
    sizes = torch.tensor([len(cloud) for cloud in clouds], device=device)
    # Stable, so that every rank cuts the same shares.
    order = torch.argsort(sizes[pairs].prod(1), descending=True, stable=True)
    own, count = pairs[order[ranks.rank :: ranks.size]], len(pairs)
    # Free the memory for the solves.
    del pairs
    none = torch.empty(0, dtype=torch.float64, device=device)

    def measured() -> tuple[PairDistances, list[str]]:
        if not len(own):
            return PairDistances(none, none, none), []
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", NotConvergedWarning)
            found = metric.measure(clouds, own, ranks.progress)
        return found, [str(each.message) for each in said]

    found, late = ranks.together(measured)
    numbers = torch.zeros((3, -(-count // ranks.size)), dtype=torch.float64, device=device)
    for row, part in zip(numbers, found, strict=True):
        row[: len(own)] = part
    together = numbers.new_empty((3, count))
    for rank, theirs in enumerate(ranks.all_gathered(numbers)):
        places = order[rank :: ranks.size]
        together[:, places] = theirs[:, : len(places)]
    return together, [message for said in ranks.all_gathered_objects(late) for message in said]
