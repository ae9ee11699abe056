"""Pairs of classes: their lists, chunks of these, measured distances and the table they fill.

The modules of `labels` that measure, `contributions`, `ranking.bounds`,
`flows.joint_modes` and `flows.modes` call it.

In `all_pairs` the larger index comes first, and pairs are measured in that direction. The other
direction would give other last digits, and distances are cached (`labels.classes.merge_identical`).
`labels.by_ranks` sends no list that `is_complete` finds equal to `all_pairs`, because each rank can
make it.

Matrix libraries choose an algorithm, and with it the order of a sum, by the shape of the whole
batch. So every chunk of `equal_chunks` has the same shape, the last one padded with copies of its
first pair, and a pair's number does not depend on the other pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.labels.classes import ClassCloud


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
