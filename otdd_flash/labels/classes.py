"""The classes of one or several datasets as weighted point clouds, pooled into one list."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.dimensions import check_same_dimension
from otdd_flash.errors import InputError
from otdd_flash.files.tensor_file import content_hash
from otdd_flash.samples import HOW_TO_LABEL, LabeledSamples

# Two datasets normalise the same weights to numbers that differ in their last digits: relative to
# each other by no more than this. Distances may be as small as what larger differences move.
SAME_WEIGHTS = 2.0**-40

# Coordinates of classes of one size that are copied side by side, for few launches.
TOGETHER = 1 << 22


@dataclass(frozen=True, eq=False)
class ClassCloud:
    """The points of one class.

    Args:
        name: how messages call the class: its name and its dataset's.
        points: (n, d), n >= 1, only points of positive weight.
        weights: (n,) float64, positive, summing to 1; None where all points weigh the same.
    """

    name: str
    points: Tensor
    weights: Tensor | None

    def __len__(self) -> int:
        return self.points.shape[0]

    @property
    def masses(self) -> Tensor:
        """The weights (n,), float64, summing to 1."""
        if self.weights is not None:
            return self.weights
        size = len(self)
        return torch.full((size,), 1.0 / size, dtype=torch.float64, device=self.points.device)

    @cached_property
    def outline(self) -> bytes:
        """The extremes of every feature: equal for equal content, and hardly ever otherwise."""
        (found,) = _outlines([self])
        return found

    @cached_property
    def content(self) -> bytes:
        """Equal for classes of the same points and nearly the same weights, in any order."""
        digests, weights = self._in_order
        if self.weights is not None:
            rounded = weights.astype(np.float32)
            digests = [key + w.tobytes() for key, w in zip(digests, rounded, strict=True)]
        return hashlib.blake2b(b"".join(digests)).digest()

    @property
    def ordered_weights(self) -> NDArray[np.float64]:
        """The masses (n,) in an order of the points that content alone decides."""
        return self._in_order[1]

    @cached_property
    def _in_order(self) -> tuple[list[bytes], NDArray[np.float64]]:
        """Digests of the points in any precision, sorted, and their masses (n,)."""
        rows = self.points.detach().to("cpu", torch.float64).add(0.0).numpy()
        digests = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
        pairs = sorted(zip(digests, self.masses.tolist(), strict=True))
        return [digest for digest, _ in pairs], np.array([mass for _, mass in pairs])

    @cached_property
    def fingerprint(self) -> bytes:
        """Equal for classes of the same points and weights in the same order and precision.

        What a method computes from two such classes is the same to the last bit.
        """
        parts = {"points": self.points}
        if self.weights is not None:
            parts["weights"] = self.weights
        return bytes.fromhex(content_hash(parts))


def split_classes(samples: LabeledSamples) -> list[ClassCloud]:
    """One cloud per class name of `samples`, in that order; zero-weight points are left out.

    Raises:
        InputError: there are no labels, or a class has no point of positive weight.
    """
    if samples.labels is None:
        raise InputError(f"{samples.name} has no labels; {HOW_TO_LABEL}")
    order = torch.argsort(samples.labels, stable=True)
    rows_by_class = torch.split(order, samples.class_counts.tolist())
    clouds = []
    for class_name, rows in zip(samples.class_names, rows_by_class, strict=True):
        name = f"{class_name!r} of {samples.name}"
        weights = None if samples.weights is None else samples.weights[rows]
        if weights is not None:
            rows, weights = rows[weights > 0], weights[weights > 0]
        if len(rows) == 0:
            raise InputError(
                f"class {name} has no sample of positive weight, so it has no distance to other "
                "classes; min_class_size=1 drops it"
            )
        clouds.append(ClassCloud(name, samples.points_of(rows), _normalised(weights)))
    return clouds


def pool(datasets: Sequence[LabeledSamples]) -> tuple[list[ClassCloud], tuple[int, ...]]:
    """The classes of all datasets in one list, and where each dataset's begin (with the end last).

    Raises:
        InputError: as `split_classes`, or the feature dimensions differ.
    """
    for other in datasets[1:]:
        check_same_dimension(datasets[0], other)
    clouds: list[ClassCloud] = []
    offsets = [0]
    for samples in datasets:
        clouds += split_classes(samples)
        offsets.append(len(clouds))
    return clouds, tuple(offsets)


def masses_of(clouds: Sequence[ClassCloud]) -> tuple[Tensor, ...]:
    """`ClassCloud.masses` of every class, parts of one tensor: few launches for many classes."""
    device, sizes = clouds[0].points.device, [len(cloud) for cloud in clouds]
    shares = torch.tensor([1.0 / size for size in sizes], dtype=torch.float64).to(device)
    counts = torch.tensor(sizes).to(device)
    equal = torch.repeat_interleave(shares, counts, output_size=sum(sizes))
    return tuple(
        part if cloud.weights is None else cloud.weights
        for cloud, part in zip(clouds, torch.split(equal, sizes), strict=True)
    )


def merge_identical(clouds: Sequence[ClassCloud]) -> tuple[list[ClassCloud], list[int]]:
    """Keep one of every set of classes with equal content, in an order that content alone decides.

    Thus any two classes have the same order in every list that holds both, and what is measured
    from one to the other is measured in the same direction, to the same last bit.

    Returns:
        The distinct classes, the smallest first, and for every class the index of its
        representative among them.
    """
    # Each part of a key is read only where those before it leave a doubt: hashing reads every byte,
    # in any order of the rows it takes seconds, and few classes have a double.
    keys: list[tuple[Any, ...]] = [(len(cloud),) for cloud in clouds]
    counts = Counter(keys)
    alike = [
        cloud
        for key, cloud in zip(keys, clouds, strict=True)
        if counts[key] > 1 and "outline" not in cloud.__dict__
    ]
    for cloud, outline in zip(alike, _outlines(alike), strict=True):
        # Where the property keeps it.
        cloud.__dict__["outline"] = outline
    keys = [
        (*key, cloud.outline) if counts[key] > 1 else key
        for key, cloud in zip(keys, clouds, strict=True)
    ]
    counts = Counter(keys)
    seen = {
        (key, cloud.fingerprint) for key, cloud in zip(keys, clouds, strict=True) if counts[key] > 1
    }
    variants = Counter(key for key, _ in seen)
    keys = [
        (*key, cloud.content) if variants[key] > 1 else key
        for key, cloud in zip(keys, clouds, strict=True)
    ]
    keys = _told_apart_by_weights(keys, clouds)
    order = sorted(set(keys))
    place = {key: index for index, key in enumerate(order)}
    first = dict(zip(reversed(keys), reversed(clouds), strict=True))
    return [first[key] for key in order], [place[key] for key in keys]


def _outlines(clouds: Sequence[ClassCloud]) -> list[bytes]:
    """`ClassCloud.outline` of many classes: those of one size together, one wait for a device."""
    if not clouds:
        return []
    alike: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    for place, cloud in enumerate(clouds):
        alike[len(cloud), cloud.points.dtype].append(place)
    order, extremes = [], []
    for members in alike.values():
        together = max(1, TOGETHER // max(1, clouds[members[0]].points.numel()))
        for first in range(0, len(members), together):
            some = members[first : first + together]
            parts = [clouds[place].points.detach() for place in some]
            # A large class is not copied.
            points = torch.stack(parts) if len(parts) > 1 else parts[0][None]
            extremes.append(torch.stack((points.amin(1), points.amax(1)), 1).double())
            order += some
    # Adding 0 turns -0 into 0, which compares equal but has other bytes.
    known = torch.cat(extremes).cpu().add(0.0).numpy()
    return [row.tobytes() for _, row in sorted(zip(order, known, strict=True), key=itemgetter(0))]


def _told_apart_by_weights(
    keys: Sequence[tuple[Any, ...]], clouds: Sequence[ClassCloud]
) -> list[tuple[Any, ...]]:
    """Keys that differ where classes of the same points have weights that differ beyond rounding.

    They get the number of their weights among all that share the key, in the order of the weights.
    """
    sharing: dict[tuple[Any, ...], list[int]] = {}
    for place, (key, cloud) in enumerate(zip(keys, clouds, strict=True)):
        # Size, outline and content: classes whose shorter keys agree are one to the last bit.
        if len(key) == 3 and cloud.weights is not None:
            sharing.setdefault(key, []).append(place)
    found = list(keys)
    for key, places in sharing.items():
        known: list[NDArray[np.float64]] = []
        for place in sorted(places, key=lambda p: clouds[p].ordered_weights.tolist()):
            own = clouds[place].ordered_weights
            alike = (k for k, w in enumerate(known) if np.allclose(own, w, SAME_WEIGHTS, 0))
            number = next(alike, len(known))
            if number == len(known):
                known.append(own)
            found[place] = (*key, number)
    return found


def _normalised(weights: Tensor | None) -> Tensor | None:
    """Weights that sum to 1 within the class, or None where all are equal."""
    if weights is None or bool((weights == weights[0]).all()):
        return None
    return weights / weights.sum()
