"""A network that several processes run, each on some of the batches of one dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.data.lazy_items import LazyItems
from otdd_flash.extractors.network import Network
from otdd_flash.ranks import Ranks, restored, saved

# rows(blocks, count, progress): one matrix (count, d) of blocks of features.
Gather = Callable[[Iterator[Tensor], int, Callable[[int, int], None] | None], Tensor]


def features_of_ranks(
    ranks: Ranks,
    inputs: Any,
    network: Network,
    gather: Gather,
    settings: dict[str, Any],
    progress: Callable[[int, int], None] | None,
) -> Tensor:
    """Features (n, d) of all inputs, of which every rank extracts some.

    Batches are those of one process, and so are the features on devices of one kind.

    Args:
        ranks: that rank 0, which calls, leads.
        inputs: n raw inputs: an array, a list, or `LazyItems`, which each rank reads for itself.
        network: the extractor.
        gather: makes one matrix of a rank's blocks; a function of a module.
        settings: of `Network.stream`; on a GPU every rank takes its own.
        progress: called with (inputs done, n), by what rank 0 has done.
    """
    count, size = len(inputs), settings["batch_size"]
    batches = -(-count // size)
    rows = [ranks.share(batches, rank) for rank in range(ranks.size)]
    parts = [_rows(inputs, slice(part.start * size, part.stop * size)) for part in rows]
    # Its own part needs no copy.
    contents = [b"", *(saved((part, network)) for part in parts[1:])]
    number = ranks.number()
    ranks.held[number] = contents, parts[0], network
    ranks.heard = progress and (lambda done: progress(min(done * ranks.size, count), count))
    found = ranks.order(_extract, number, gather, settings)
    assert found is not None
    if progress is not None:
        progress(count, count)
    return found


def _rows(inputs: Any, rows: slice) -> Any:
    if isinstance(inputs, LazyItems):
        return inputs.take(np.arange(len(inputs))[rows])
    return inputs[rows]


def _extract(ranks: Ranks, number: int, gather: Gather, settings: dict[str, Any]) -> Tensor | None:
    contents, inputs, network = ranks.held.pop(number, (None, None, None))
    content = ranks.handed_out(contents)
    if contents is None:
        inputs, network = restored(content)
    settings = {**settings, "device": ranks.device_of(settings["device"])}

    def own() -> Tensor:
        if len(inputs) == 0:
            return torch.empty(0, 0)
        heard = ranks.heard
        told = None if heard is None else lambda done, _: heard(done)
        return gather(network.stream(inputs, **settings), len(inputs), told)

    return ranks.brought_together(ranks.together(own))
