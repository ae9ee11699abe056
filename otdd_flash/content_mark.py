"""Whether samples or tensors still hold what they held: a user may change them in place.

Nothing is copied, as datasets may fill the memory. In place of that their content is marked when it
is used, and compared before anything is said of it later.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.real_numbers import in_one_row

if TYPE_CHECKING:
    from otdd_flash.samples import LabeledSamples

# Bytes of rows that a thread takes at once.
BLOCK_BYTES = 1 << 24

Mark = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Unchanged:
    """Samples, and what marked their content.

    Attributes:
        sides: the samples.
        marks: of each.
    """

    sides: tuple[LabeledSamples, ...]
    marks: tuple[Mark, ...]

    @classmethod
    def of(cls, *sides: LabeledSamples) -> Unchanged:
        return cls(sides, tuple(mark_of(side) for side in sides))

    def check(self) -> None:
        """Refuse samples whose memory holds something else now.

        Raises:
            InputError: the memory has changed.
        """
        for side, mark in zip(self.sides, self.marks, strict=True):
            if mark_of(side) != mark:
                raise InputError(
                    f"{side.name} was changed in place after this result was computed, which "
                    "shares its memory; compute results of copies (x.copy(), x.clone()), or use "
                    "and save them before the change"
                )


def mark_of(samples: LabeledSamples) -> Mark:
    """What changes with the content of features, labels and weights, as `mark_of_tensors`."""
    return mark_of_tensors(samples.features, samples.labels, samples.weights)


def mark_of_tensors(*parts: Tensor | None) -> Mark:
    """What changes with the content of tensors, at the speed of memory.

    On the CPU, where arrays of other libraries may share it, a checksum; on a GPU torch's count of
    the changes, which inference tensors lack. Files are watched by their features.
    """
    return tuple(_mark(part) for part in parts if part is not None)


def _mark(part: Tensor) -> int:
    if isinstance(part, FileFeatures):
        return 0
    if part.device.type != "cpu":
        return 0 if part.is_inference() else part._version
    rows = part.detach() if part.requires_grad else part
    if rows.nbytes <= BLOCK_BYTES:
        return _checksum(rows)
    blocks = torch.split(rows, max(1, BLOCK_BYTES * len(rows) // rows.nbytes))
    # Checksums let other threads run.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return hash(tuple(threads.map(_checksum, blocks)))


def _checksum(block: Tensor) -> int:
    # As bytes, as NumPy lacks bfloat16.
    return zlib.crc32(in_one_row(block).view(torch.uint8).numpy().data)
