"""Fingerprints of datasets, which identify content, and marks, which reveal a change in place.

    rows = sum_i SHA-256(i, features_i, label_i, weight_i)  mod 2^256
    fingerprint = SHA-256(version, n, d, whether labels and weights exist, class names, rows)

Targets (numbers as labels), if there are any, enter both. A row's digest contains its number in the
whole dataset, so the order of rows counts. Sums can be added up from blocks of any size, from files
read piece by piece and from processes that hold some rows each.

Of features the values alone count, not their type (`samples` gives labels and weights one type): a
row whose features are all float32 numbers is digested in float32, any other in float64, and -0 as
0. A solve at another precision has the same fingerprint, so cache keys of computed results need the
precision as well.

Users may change tensors in place, and datasets may fill the memory, so nothing is copied:
`Unchanged` marks content when a result is computed, and compares the mark again whenever the result
is asked for something that reads the content.

`remembered` is a cache of results by tensor or samples, for as long as these live and have the same
mark. A flow reads it at every step: while the points move, the target stays as it is, and so do the
labels of the particles, their order in blocks and the ranks that own them. Within a step, several
costs read the same particles.

`samples` uses `fingerprint` and a mark; `otdd`, `result`, `gromov.distance`, `flows.run` and
`flows.result` use `Unchanged`; `operators.comparison`, `derivatives.autograd`, `operators.sharing`
and `distributed.ranks` use marks; `cost.points` and operators use `remembered`;
`extractors.feature_store` uses `digest_of_rows`. A change of what `fingerprint` digests must raise
VERSION, because saved results hold fingerprints, and studies (`study.setup`) and checkpoints
(`flows.checkpoint`) compare them. `ranking.index.digest_of` digests the same content, so it must
then change too. VERSION is no part of `digest_of_rows`, whose value must stay: every feature file
written before would look damaged (`extractors.feature_store`).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from otdd_flash.errors import InputError
from otdd_flash.features.file_features import FileFeatures, row_blocks
from otdd_flash.real_numbers import in_one_row

if TYPE_CHECKING:
    from otdd_flash.samples import LabeledSamples

T = TypeVar("T")

# Modulus of the sums of digests.
MODULUS = 1 << 256

# Version of the digest: fingerprints of other versions cannot be compared.
VERSION = 2


def fingerprint(
    features: Tensor,
    labels: Tensor | None,
    weights: Tensor | None,
    class_names: Sequence[str],
    targets: Tensor | None = None,
) -> str:
    """Return the fingerprint of samples, in row order.

    Args:
        features: (n, d), on any device or in a file.
        labels: (n,) class indices, or None.
        weights: (n,) masses, or None.
        class_names: names of the classes.
        targets: (n, q) numbers, or None.
    """
    total, parts = 0, (labels, weights, targets)
    for rows in row_blocks(len(features), features.shape[1] * features.element_size()):
        values = _read(features, rows)
        values = values if values.dtype == torch.float64 else values.to(torch.float32)
        others = [part[rows].cpu().numpy() for part in parts if part is not None]
        columns = [np.arange(rows.start, rows.stop), values.numpy(), *others]
        narrow = np.ones(len(values), np.bool_)
        if values.dtype == torch.float64:
            narrow = (values.to(torch.float32) == values).all(1).numpy()
        for chosen, kind in ((narrow, "<f4"), (~narrow, "<f8")):
            # Rows of one kind, which is the usual case, are not copied.
            some = columns if chosen.all() else [column[chosen] for column in columns]
            total += _sum_of_values(some, kind)
    # Without targets it is the header of versions that had none.
    there = [part is not None for part in (parts if targets is not None else parts[:2])]
    header = repr((VERSION, tuple(features.shape), there, list(class_names))).encode()
    return hashlib.sha256(header + (total % MODULUS).to_bytes(32, "little")).hexdigest()


def digest_of_rows(features: Tensor, *, first: int = 0) -> int:
    """Sum the digests of rows, modulo 2^256; sums of parts can be added.

    Rows are digested in their stored type, as a feature file is of one type.

    Args:
        features: (n, d).
        first: number of the first row in the whole matrix.
    """
    total = 0
    for rows in row_blocks(len(features), features.shape[1] * features.element_size()):
        numbers = torch.arange(first + rows.start, first + rows.stop)
        total += _sum_of_digests(
            np.concatenate([_bytes(numbers), _bytes(_read(features, rows))], 1)
        )
    return total % MODULUS


def _sum_of_values(columns: Sequence[NDArray[Any]], dtype: str) -> int:
    """Sum the digests of rows: numbers (k,), features (k, d) in a type, and the other parts."""
    numbers, values, *others = columns
    kinds: list[Any] = [(dtype, values.shape[1:])]
    kinds += [(other.dtype.newbyteorder("<"), other.shape[1:]) for other in others]
    places = [f"{place}" for place in range(len(columns))]
    content = np.empty(len(numbers), list(zip(places, ["<i8", *kinds], strict=True)))
    # Column 1 is the features; in them -0 becomes 0.
    np.add(values, 0, out=content["1"], casting="same_kind")
    for place, column in zip(places, columns, strict=True):
        if place != "1":
            content[place] = column
    return _sum_of_digests(content.view(np.uint8).reshape(len(content), content.itemsize))


def _sum_of_digests(content: NDArray[np.uint8]) -> int:
    return sum(int.from_bytes(hashlib.sha256(row).digest(), "little") for row in content)


def _read(features: Tensor, rows: slice) -> Tensor:
    if not isinstance(features, FileFeatures):
        return features[rows].detach().cpu()
    return features.file.rows(rows)


def _bytes(part: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of each row, (k, bytes)."""
    found: NDArray[np.uint8] = in_one_row(part).view(len(part), -1).view(torch.uint8).numpy()
    return found


# Bytes of rows that one thread processes at once.
THREAD_BYTES = 1 << 24

Mark = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Unchanged:
    """Samples with marks of their content.

    Attributes:
        sides: the samples.
        marks: one for each.
    """

    sides: tuple[LabeledSamples, ...]
    marks: tuple[Mark, ...]

    @classmethod
    def of(cls, *sides: LabeledSamples) -> Unchanged:
        return cls(sides, tuple(mark_of(side) for side in sides))

    def check(self) -> None:
        """Refuse samples whose memory has changed.

        Raises:
            InputError: the content of a side differs from its mark.
        """
        for side, mark in zip(self.sides, self.marks, strict=True):
            if mark_of(side) != mark:
                raise InputError(
                    f"{side.name} was changed in place after this result was computed, which "
                    "shares its memory; compute results of copies (x.copy(), x.clone()), or use "
                    "and save them before the change"
                )


def mark_of(samples: LabeledSamples) -> Mark:
    """Return the mark of features, labels, weights and targets; see `mark_of_tensors`."""
    return mark_of_tensors(samples.features, samples.labels, samples.weights, samples.targets)


def mark_of_tensors(*parts: Tensor | None) -> Mark:
    """Return numbers that change with the content of tensors, at the speed of memory.

    On the CPU, where arrays of other libraries may share the memory, a mark is a checksum. On a GPU
    it is torch's count of in-place changes, which inference tensors lack, so a change of those is
    not noticed. Features in files are checked by their own class.
    """
    return tuple(_mark(part) for part in parts if part is not None)


def _mark(part: Tensor) -> int:
    if isinstance(part, FileFeatures):
        return 0
    if part.device.type != "cpu":
        return 0 if part.is_inference() else part._version
    rows = part.detach() if part.requires_grad else part
    if rows.nbytes <= THREAD_BYTES:
        return _checksum(rows)
    blocks = torch.split(rows, max(1, THREAD_BYTES * len(rows) // rows.nbytes))
    # Checksums release the interpreter lock.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return hash(tuple(threads.map(_checksum, blocks)))


def _checksum(block: Tensor) -> int:
    # As bytes: NumPy lacks bfloat16.
    return zlib.crc32(in_one_row(block).view(torch.uint8).numpy().data)


# Results by tensor or samples and by name, each with the mark of the content it is of.
_KEPT: MutableMapping[Tensor | LabeledSamples, dict[Hashable, tuple[Mark, Any]]]
_KEPT = WeakIdKeyDictionary()


def remembered(of: Tensor | LabeledSamples, name: Hashable, find: Callable[[], T]) -> T:
    """Return the cached result of `find` under this name, while `of` is unchanged.

    The result must not hold the tensor, or the samples, which would then never be freed.
    """
    parts = (of,) if isinstance(of, Tensor) else (of.features, of.labels, of.weights)
    if any(part is not None and part.is_inference() for part in parts):
        # Nothing tells whether it has changed.
        return find()
    kept = _KEPT.setdefault(of, {})
    mark = mark_of_tensors(*parts)
    if name not in kept or kept[name][0] != mark:
        kept[name] = mark, find()
    found: T = kept[name][1]
    return found


def forget(of: LabeledSamples, name: Hashable) -> None:
    """Drop a cached result, where not every change of the samples can be detected.

    On a GPU torch counts its own changes, and neither those through `x.data`, of fused optimisers
    and of replayed CUDA graphs, nor those of other libraries. On a CPU the content is marked.
    """
    _KEPT.get(of, {}).pop(name, None)
