"""Datasets that are to be compared: checked, moved to the device and seen by the cost, once.

`check_comparable` is about the datasets as they come, `Request.prepare` about what of them is kept.
Class distances, operators, solves and results read the points from here. The ground cost is applied
to them here and nowhere below: operators and solvers know squared distances of the points seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from otdd_flash.devices import check_one_device, resolve_device
from otdd_flash.dimensions import check_same_dimension
from otdd_flash.distributed.ranks import ranks_of
from otdd_flash.errors import InputError
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.operators.build import (
    ComputeOptions,
    CostInputs,
    forget_cloud,
    operator_bytes,
    points_of,
)
from otdd_flash.operators.float64_rows import Points
from otdd_flash.operators.footprint import CostSize
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.host_points import Streaming
from otdd_flash.operators.memory import (
    UNASKED,
    check_memory,
    free_memory,
    stated_budget,
    within_memory,
)
from otdd_flash.samples import LabeledSamples, check_squares

# Of free memory, what streamed points may take on the device, and their packed form on the host.
STREAMED_SHARE, HELD_SHARE = 0.6, 0.5

# Places of two datasets, the rows' and the columns'.
Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Request:
    """K datasets and the cost between them, on the device; `prepare` makes one.

    Attributes:
        given: the datasets, moved to the device.
        seen: the same as the ground cost sees them.
        cost: what it compares and its weights.
        compute: how passes run.
        needed: bytes that the largest operator takes at the least, with those that were moved.
        streaming: where passes run, of points that stay where they are; labels and weights do too.
    """

    given: tuple[LabeledSamples, ...]
    seen: tuple[LabeledSamples, ...]
    cost: GroundCost
    compute: ComputeOptions
    needed: int
    streaming: Streaming | None = None

    @classmethod
    def prepare(
        cls,
        datasets: Sequence[LabeledSamples],
        cost: GroundCost,
        compute: ComputeOptions,
        *,
        pairs: Iterable[Pair] | None = None,
        seen: bool = False,
        resident: bool = False,
    ) -> Request:
        """Check what a comparison takes, then move the datasets.

        Args:
            datasets: that `check_comparable` lets pass; one object may stand at several places.
            cost: what it compares and its weights.
            compute: where and how passes run.
            pairs: places of the datasets that operators will be made of; by default every two, and
                each with itself.
            seen: the datasets are as the ground cost sees them already.
            resident: all points are needed on the device. Otherwise, where it does not hold them,
                they stay where they are and are streamed.

        Raises:
            InputError: there is no such device, the backend cannot run on it or in the precision,
                the memory is short, or the ground cost is not defined for a point.
        """
        device = resolve_device(compute.device)
        _check_group(compute, device)
        if pairs is None:
            places = range(len(datasets))
            pairs = (*combinations(places, 2), *zip(places, places, strict=True))
        pairs = list(pairs)
        streaming = None if resident else _streaming(datasets, pairs, compute, device)
        if streaming is not None:
            _check_streamed(datasets, cost, compute, seen=seen)
            sides = tuple(datasets)
            return cls(sides, sides, cost, compute, streaming.room, streaming)
        needed = check_resources(datasets, pairs, compute, device)
        size = cost_size(datasets[0], datasets[-1])
        with within_memory(size, needed, device, compute.dtype):
            given, points = _moved(datasets, cost, device, seen=seen)
        return cls(given, points, cost, compute, needed)

    @property
    def device(self) -> torch.device:
        streaming = self.streaming
        return self.given[0].features.device if streaming is None else streaming.device

    @property
    def home(self) -> torch.device:
        """Where the points of the last dataset are when they are not used."""
        return self.given[-1].features.device

    def of(self, *places: int) -> Request:
        """The request of some of the datasets, which the device may hold where it holds not all."""
        if self.streaming is not None:
            some = [self.given[place] for place in places]
            found = Request.prepare(some, self.cost, self.compute, pairs=((0, len(some) - 1),))
            if found.streaming is None:
                return found
            return replace(found, streaming=replace(found.streaming, tally=self.streaming.tally))
        given, seen = (tuple(each[k] for k in places) for each in (self.given, self.seen))
        return replace(self, given=given, seen=seen)

    def at(self, *seen: LabeledSamples) -> Request:
        """The request of other points, no more of them, seen by the cost.

        They are on the device, or some where the datasets stream.
        """
        return replace(self, given=seen, seen=seen)

    def points(self, place: int) -> Points:
        """A dataset's points as they were given, on the device or on their way there."""
        return points_of(self.given[place], self.streaming)

    def see(self, samples: LabeledSamples) -> LabeledSamples:
        """Other samples, moved and seen as the datasets are."""
        if self.streaming is not None:
            return samples
        return self.cost.seen(samples.to(self.device))

    def inputs(self, pair: Pair, class_distances: Tensor) -> CostInputs:
        """What the cost between two of the datasets is made of, with their block of W."""
        source, target = (self.seen[place] for place in pair)
        return CostInputs(source, target, class_distances, self.cost, self.compute, self.streaming)

    def within_memory(self) -> within_memory:
        """Return a `with` block for work on the first and the last dataset, see `within_memory`."""
        size = cost_size(self.seen[0], self.seen[-1])
        return within_memory(size, self.needed, self.device, self.compute.dtype)


def _moved(
    datasets: Sequence[LabeledSamples], cost: GroundCost, device: torch.device, *, seen: bool
) -> tuple[tuple[LabeledSamples, ...], tuple[LabeledSamples, ...]]:
    """Return the datasets on the device, and the same as the ground cost sees them.

    One that stands at several places stays one. If `seen`, they are as the cost sees them already.
    """
    given = {side: side.to(device) for side in dict.fromkeys(datasets)}
    points = {side: one if seen else cost.seen(one) for side, one in given.items()}
    for cloud in points.values():
        forget_cloud(cloud)
    return tuple(given[side] for side in datasets), tuple(points[side] for side in datasets)


def _streaming(
    datasets: Sequence[LabeledSamples],
    pairs: Iterable[Pair],
    compute: ComputeOptions,
    device: torch.device,
) -> Streaming | None:
    """Whether points have to be streamed: they are elsewhere, or in a file, and do not fit."""
    sides = dict.fromkeys(datasets)
    elsewhere = [side for side in sides if side.features.device != device]
    if not elsewhere and not any(isinstance(side.features, FileFeatures) for side in sides):
        return None
    moved = sum(side.features.nbytes for side in elsewhere)
    sizes = (cost_size(datasets[i], datasets[j]) for i, j in pairs)
    needed = moved + max((operator_bytes(size, compute, device) for size in sizes), default=0)
    stated = stated_budget(compute.memory_budget)
    if needed <= max(UNASKED, stated or 0):
        return None
    free = free_memory(device)
    if stated is None and needed <= free:
        return None
    on_host = torch.device("cpu")
    host_room = 0 if device == on_host else int(HELD_SHARE * free_memory(on_host))
    if stated is None:
        return Streaming(device, int(STREAMED_SHARE * free), host_room)
    # A budget is for points that are there already, too.
    there = sum(
        side.features.nbytes
        for side in sides
        if side.features.device == device and not isinstance(side.features, FileFeatures)
    )
    return Streaming(device, max(stated - there, UNASKED), host_room)


def _check_streamed(
    datasets: Sequence[LabeledSamples], cost: GroundCost, compute: ComputeOptions, *, seen: bool
) -> None:
    """Refuse what needs all points on the device, and what other ranks have no way to."""
    in_files = all(isinstance(side.features, FileFeatures) for side in datasets)
    if compute.group is not None and not in_files:
        raise InputError(
            "points that the device does not hold are streamed by the processes of compute.group "
            "from files that each of them reads; give features_file(...), leave out compute.group, "
            "or raise memory_budget"
        )
    if cost.ground == "cosine" and not seen:
        raise InputError(
            "ground=cosine needs all points on the device, which does not hold them; divide the "
            "rows by their lengths before they are stored, and use ground=sqeuclidean with half of "
            "lambda_x"
        )


def _check_group(compute: ComputeOptions, device: torch.device) -> None:
    """Refuse shards where they have not been put together, and what ranks cannot exchange."""
    ranks = ranks_of(compute.group)
    if ranks is None:
        return
    if compute.group is not ranks:
        raise InputError(
            "shards of a compute.group are put together by dataset_distance alone; lead other work "
            "from rank 0 with otdd.led"
        )
    ranks.device_of(device)


def check_comparable(*datasets: LabeledSamples) -> None:
    """Refuse datasets whose points have no distances from each other.

    Raises:
        InputError: they differ in dimension or device, features are not finite, or their squared
            distances overflow.
    """
    for other in datasets[1:]:
        check_same_dimension(datasets[0], other)
        check_one_device(datasets[0].features.device, other.features.device)
    check_squares(*datasets)


def check_resources(
    datasets: Sequence[LabeledSamples],
    pairs: Iterable[Pair],
    compute: ComputeOptions,
    device: torch.device,
) -> int:
    """Refuse operators that the device cannot run, before any work on them.

    Returns:
        The bytes that the largest takes at the least, with those of datasets that have to be moved.

    Raises:
        InputError: the backend cannot run on the device or in the precision, or there is not
            enough memory.
    """
    elsewhere = (side for side in dict.fromkeys(datasets) if side.features.device != device)
    moved = sum(side.features.nbytes for side in elsewhere)
    most = moved
    for i, j in pairs:
        size = cost_size(datasets[i], datasets[j])
        needed = moved + operator_bytes(size, compute, device)
        check_memory(size, needed, device, compute.dtype)
        most = max(most, needed)
    return most


def cost_size(source: LabeledSamples, target: LabeledSamples) -> CostSize:
    """The size of the cost between two clouds."""
    return CostSize(
        len(source), len(target), source.dim, source.class_total, symmetric=source is target
    )
