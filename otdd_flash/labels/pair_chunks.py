"""Lists of class pairs cut into chunks of bounded memory and of one size.

Matrix libraries choose an algorithm, and with it the order of a sum, by the shape of the whole
batch. Every chunk of one kind has the same shape, the last one filled up with copies of its first
pair, so that a pair's number does not depend on the other pairs of the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud

# Float64 numbers in a chunk: 8 MiB stay near a core's cache, and 512 MiB keep a GPU busy.
CPU_ENTRIES = 2**20
GPU_ENTRIES = 2**26
# More pairs fill no GPU better, and each chunk is computed whole.
MAX_PAIRS = 4096


def chunk_size(entries: int, device: torch.device) -> int:
    """How many pairs of `entries` float64 numbers each make a chunk."""
    budget = CPU_ENTRIES if device.type == "cpu" else GPU_ENTRIES
    return min(MAX_PAIRS, max(1, budget // max(1, entries)))


def equal_chunks(pairs: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Cut (P, 2) into chunks (size, 2), each with the number of its rows that count."""
    for start in range(0, len(pairs), size):
        chunk = pairs[start : start + size]
        missing = size - len(chunk)
        yield len(chunk), torch.cat((chunk, chunk[:1].expand(missing, 2))) if missing else chunk


def used_classes(
    clouds: Sequence[ClassCloud], pairs: Tensor
) -> tuple[Sequence[ClassCloud], Tensor]:
    """The classes that occur in `pairs`, and the pairs as indices of these, where points are."""
    # Moved first: a GPU orders and gathers millions of pairs in no time.
    pairs = pairs.to(clouds[0].points.device)
    used, places = named_classes(clouds, pairs)
    return used, places[pairs]


def named_classes(
    clouds: Sequence[ClassCloud], pairs: Tensor
) -> tuple[Sequence[ClassCloud], Tensor]:
    """The classes that occur in `pairs`, and for all V classes the place (V,) there, if any."""
    # Millions of pairs name few classes, and are not sorted for it.
    seen = torch.zeros(len(clouds), dtype=torch.bool, device=pairs.device)
    seen[pairs] = True
    places = seen.cumsum(0) - 1
    return [clouds[index] for index in seen.nonzero().squeeze(1).tolist()], places
