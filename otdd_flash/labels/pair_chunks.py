"""Lists of pairs of classes, cut into chunks of bounded memory and of equal size.

Matrix libraries choose an algorithm, and with it the order of a sum, by the shape of the whole
batch. So every chunk of one kind has the same shape, the last one padded with copies of its first
pair, and a pair's number does not depend on the other pairs. `labels.gaussian`, `labels.moments`,
`labels.exact`, `labels.sinkhorn_pairs` and `flows.modes.jointly_driven` call this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud

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
    # Moved first: a GPU indexes millions of pairs at once.
    pairs = pairs.to(clouds[0].points.device)
    used, places = named_classes(clouds, pairs)
    return used, places[pairs]


def named_classes(
    clouds: Sequence[ClassCloud], pairs: Tensor
) -> tuple[Sequence[ClassCloud], Tensor]:
    """Return the classes that occur in `pairs`, and (V,) the index of each class among them.

    The index of a class that does not occur has no meaning.
    """
    # Marked, not sorted: millions of pairs contain few classes.
    seen = torch.zeros(len(clouds), dtype=torch.bool, device=pairs.device)
    seen[pairs] = True
    places = seen.cumsum(0) - 1
    return [clouds[index] for index in seen.nonzero().squeeze(1).tolist()], places
