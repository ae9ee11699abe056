"""The classes of datasets as weighted point clouds, lists of pairs of them, and measured distances.

`split_classes` and `pool` cut datasets into `ClassCloud`s; `merge_identical` keeps one of every set
of equal classes and orders them. `all_pairs` and `equal_chunks` make and cut lists of pairs,
`PairDistances` holds what was measured, and `symmetric_table` fills a table. The modules of
`labels` that measure, `contributions`, `flows.modes`, `flows.joint_modes`, `gromov.distance`,
`ranking.bounds`, `sliced`, `study.study` and `study.measures.distances` call this module.

A change must keep the order of `merge_identical` a function of content alone: the direction in
which a pair is measured, and so its last bits, follow from it, and distances are cached. In
`all_pairs` the larger index comes first, and pairs are measured in that direction.
`ClassCloud.fingerprint` is a key of the pair cache, so after a change of it no cached distance is
found any more. `labels.by_ranks` sends no list that `is_complete` finds equal to `all_pairs`,
because each rank can make it.

Matrix libraries choose an algorithm, and with it the order of a sum, by the shape of the whole
batch. So every chunk of `equal_chunks` has the same shape, the last one padded with copies of its
first pair, and a pair's number does not depend on the other pairs.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.files.tensor_file import content_hash
from otdd_flash.samples import LabeledSamples, check_same_dimension, needs_classes

# Two datasets normalise equal weights to numbers that differ in their last digits, by no more than
# this relative to each other. A larger difference may change a distance visibly.
SAME_WEIGHTS = 2.0**-40

# Coordinates of classes of one size that are stacked, for few kernel launches.
TOGETHER = 1 << 22


@dataclass(frozen=True, eq=False)
class ClassCloud:
    """The points of one class.

    Args:
        name: the class in messages: its name and its dataset's.
        points: (n, d), n >= 1, only points of positive weight.
        weights: (n,) float64, positive, summing to 1; None if all points weigh the same.
        several: whether points may have other labels as well, and count here as a part.
    """

    name: str
    points: Tensor
    weights: Tensor | None
    several: bool = False

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
        """Minimum and maximum of every feature: equal for equal content, and rarely otherwise."""
        (found,) = _outlines([self])
        return found

    @cached_property
    def content(self) -> bytes:
        """A digest of the points and, to float32, of the weights, in any order of the rows."""
        digests, weights = self._in_order
        if self.weights is not None:
            rounded = weights.astype(np.float32)
            digests = [key + w.tobytes() for key, w in zip(digests, rounded, strict=True)]
        return hashlib.blake2b(b"".join(digests)).digest()

    @property
    def ordered_weights(self) -> NDArray[np.float64]:
        """The masses (n,), in an order of the points that depends on content alone."""
        return self._in_order[1]

    @cached_property
    def _in_order(self) -> tuple[list[bytes], NDArray[np.float64]]:
        """The sorted digests of the points, the same in any precision, and their masses (n,)."""
        rows = self.points.detach().to("cpu", torch.float64).add(0.0).numpy()
        digests = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
        pairs = sorted(zip(digests, self.masses.tolist(), strict=True))
        return [digest for digest, _ in pairs], np.array([mass for _, mass in pairs])

    @cached_property
    def fingerprint(self) -> bytes:
        """A digest of points and weights in their order and precision.

        Any method computes the same bits from two classes of equal fingerprint.
        """
        parts = {"points": self.points}
        if self.weights is not None:
            parts["weights"] = self.weights
        return bytes.fromhex(content_hash(parts))


def split_classes(samples: LabeledSamples) -> list[ClassCloud]:
    """Return one cloud per label of `samples`, in that order, without zero-weight points.

    Of rows with several labels it is the cloud of those that have the label, each with the part of
    its mass that the label is of it.

    Raises:
        InputError: there are no labels, or a class has no point of positive weight.
    """
    if samples.labels is None:
        raise needs_classes(samples)
    clouds = []
    for class_name, (rows, weights) in zip(samples.label_names, _rows_of(samples), strict=True):
        name = f"{class_name!r} of {samples.name}"
        if weights is not None:
            rows, weights = rows[weights > 0], weights[weights > 0]
        if len(rows) == 0:
            raise InputError(
                f"class {name} has no sample of positive weight, so it has no distance to other "
                "classes; min_class_size=1 drops it"
            )
        several = samples.label_sets is not None
        clouds.append(ClassCloud(name, samples.points_of(rows), _normalised(weights), several))
    return clouds


def _rows_of(samples: LabeledSamples) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the rows of each label and their weights; None if all rows weigh the same."""
    assert samples.labels is not None
    given = samples.weights
    if (sets := samples.label_sets) is None:
        order = torch.argsort(samples.labels, stable=True)
        for rows in torch.split(order, samples.class_counts.tolist()):
            yield rows, None if given is None else given[rows]
        return
    shares = sets.shares.to(samples.labels.device)
    for label in range(len(sets.names)):
        of_rows = shares[:, label][samples.labels]
        rows = of_rows.nonzero().squeeze(1)
        yield rows, of_rows[rows] if given is None else of_rows[rows] * given[rows]


def pool(datasets: Sequence[LabeledSamples]) -> tuple[list[ClassCloud], tuple[int, ...]]:
    """Return the classes of all datasets in one list, and the offsets (K + 1,) of each dataset's.

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
    """Return `ClassCloud.masses` of every class, from one tensor: few launches for many classes."""
    device, sizes = clouds[0].points.device, [len(cloud) for cloud in clouds]
    shares = torch.tensor([1.0 / size for size in sizes], dtype=torch.float64).to(device)
    counts = torch.tensor(sizes).to(device)
    equal = torch.repeat_interleave(shares, counts, output_size=sum(sizes))
    return tuple(
        part if cloud.weights is None else cloud.weights
        for cloud, part in zip(clouds, torch.split(equal, sizes), strict=True)
    )


def merge_identical(clouds: Sequence[ClassCloud]) -> tuple[list[ClassCloud], list[int]]:
    """Keep one of every set of classes with equal content, in an order set by content alone.

    So any two classes have the same order in every list that holds both. Their distance is measured
    in the same direction, with the same last bits.

    Returns:
        The distinct classes, the smallest first, and for every class the index of its
        representative among them.
    """
    # Each part of a key is computed only for classes whose earlier parts agree. Hashing reads every
    # byte, a digest without the order of rows takes seconds, and few classes have a duplicate.
    keys: list[tuple[Any, ...]] = [(len(cloud),) for cloud in clouds]
    counts = Counter(keys)
    alike = [
        cloud
        for key, cloud in zip(keys, clouds, strict=True)
        if counts[key] > 1 and "outline" not in cloud.__dict__
    ]
    for cloud, outline in zip(alike, _outlines(alike), strict=True):
        # The entry of the cached property.
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
    """Compute `ClassCloud.outline` of many classes, stacked by size, with one transfer."""
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
            # Stacking would copy a large class.
            points = torch.stack(parts) if len(parts) > 1 else parts[0][None]
            extremes.append(torch.stack((points.amin(1), points.amax(1)), 1).double())
            order += some
    # Adding 0 turns -0 into 0, which compares equal but has other bytes.
    known = torch.cat(extremes).cpu().add(0.0).numpy()
    return [row.tobytes() for _, row in sorted(zip(order, known, strict=True), key=itemgetter(0))]


def _told_apart_by_weights(
    keys: Sequence[tuple[Any, ...]], clouds: Sequence[ClassCloud]
) -> list[tuple[Any, ...]]:
    """Extend the keys of classes with the same points whose weights differ beyond rounding.

    Such a key is extended by the rank of its weights among all classes that share the key.
    """
    sharing: dict[tuple[Any, ...], list[int]] = {}
    for place, (key, cloud) in enumerate(zip(keys, clouds, strict=True)):
        # A key of size, outline and content. Classes with shorter keys that agree are equal to the
        # last bit.
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
    """Scale weights to sum 1 within the class; return None if all are equal."""
    if weights is None or bool((weights == weights[0]).all()):
        return None
    return weights / weights.sum()


class PairDistances(NamedTuple):
    """Squared distances of P pairs of classes, float64, on the device of the classes' points.

    Attributes:
        values: (P,) the distances.
        lower: (P,) lower bounds, which hold however far an iterative method came; for other
            methods the values themselves.
        upper: (P,) upper bounds.
    """

    values: Tensor
    lower: Tensor
    upper: Tensor

    @classmethod
    def exactly(cls, values: Tensor) -> PairDistances:
        """Return distances whose bounds are the values themselves."""
        values = values.to(torch.float64)
        return cls(values, values, values)


def all_pairs(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return every unordered pair of `count` classes, (P, 2) int64, the larger index first."""
    return torch.tril_indices(count, count, offset=-1, device=device).T.contiguous()


def is_complete(pairs: Tensor, count: int) -> bool:
    """Return whether pairs (P, 2) equal `all_pairs` of `count` classes."""
    there_are = count * (count - 1) // 2
    return len(pairs) == there_are and torch.equal(pairs, all_pairs(count, pairs.device))


def symmetric_table(values: Tensor, pairs: Tensor, count: int) -> Tensor:
    """Fill a symmetric table, zero on the diagonal, from values (P,) of pairs (P, 2).

    The table (`count`, `count`) is on the values' device and differentiable in them; pairs that are
    not listed are 0.
    """
    one, two = pairs.to(values.device).unbind(1)
    table = values.new_zeros(count, count)
    return table.index_put_((one, two), values).index_put_((two, one), values)


# Float64 numbers in a chunk: 8 MiB fit a core's cache, and 512 MiB keep a GPU busy.
CPU_ENTRIES = 2**20
GPU_ENTRIES = 2**26
# More pairs use a GPU no better, and every chunk is computed in full.
MAX_PAIRS = 4096


def chunk_size(entries: int, device: torch.device) -> int:
    """Return how many pairs of `entries` float64 numbers each make a chunk."""
    budget = CPU_ENTRIES if device.type == "cpu" else GPU_ENTRIES
    return min(MAX_PAIRS, max(1, budget // max(1, entries)))


def equal_chunks(pairs: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Cut pairs (P, 2) into chunks (size, 2); yield each with its number of real rows."""
    for start in range(0, len(pairs), size):
        chunk = pairs[start : start + size]
        missing = size - len(chunk)
        yield len(chunk), torch.cat((chunk, chunk[:1].expand(missing, 2))) if missing else chunk


def used_classes(
    clouds: Sequence[ClassCloud], pairs: Tensor
) -> tuple[Sequence[ClassCloud], Tensor]:
    """Return the classes that occur in `pairs`, and the pairs as indices of these."""
    # The pairs are moved first, as a GPU indexes millions of them at once.
    pairs = pairs.to(clouds[0].points.device)
    used, places = named_classes(clouds, pairs)
    return used, places[pairs]


def named_classes(
    clouds: Sequence[ClassCloud], pairs: Tensor
) -> tuple[Sequence[ClassCloud], Tensor]:
    """Return the classes that occur in `pairs`, and (V,) the index of each class among them.

    The index of a class that does not occur has no meaning.
    """
    # Classes are marked, not sorted, as millions of pairs contain few of them.
    seen = torch.zeros(len(clouds), dtype=torch.bool, device=pairs.device)
    seen[pairs] = True
    places = seen.cumsum(0) - 1
    return [clouds[index] for index in seen.nonzero().squeeze(1).tolist()], places
