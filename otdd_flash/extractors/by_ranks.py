"""Features that several processes extract, each of some of the batches of one dataset."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.data.lazy_items import LazyItems
from otdd_flash.distributed.ranks import Progress, Ranks, restored, saved
from otdd_flash.errors import InputError
from otdd_flash.extractors.base import Extractor
from otdd_flash.extractors.imported_function import ImportedFunction
from otdd_flash.extractors.module_features import ModuleFeatures
from otdd_flash.extractors.network import Network
from otdd_flash.extractors.pixel_values import PixelValues
from otdd_flash.importing import user_code

# Rows of the first batch that ranks compare, and how far rounding on other devices may take them
# apart, as a share of their norm.
COMPARED, ROUNDING = 16, 1e-2

# blocks(inputs, extractor, **settings): features of batch after batch, (b, ...).
Blocks = Callable[..., Iterator[Tensor]]
# gather(blocks, count, progress): one matrix (count, d) of blocks of features.
Gather = Callable[[Iterator[Tensor], int, Progress | None], Tensor]


class Ways(NamedTuple):
    """How a rank extracts, functions of a module.

    Attributes:
        blocks: makes features of inputs.
        gather: makes one matrix of them.
        check: refuses the shapes of an input's features on two ranks that do not agree.
    """

    blocks: Blocks
    gather: Gather
    check: Callable[[torch.Size, torch.Size], None]


def is_shared(extractor: Extractor, inputs: Any) -> bool:
    """Whether ranks share the work: where it takes longer than to send the inputs.

    So they do with networks, with functions and modules of a user's that pickle takes, and with
    pixels of files, which each rank reads for itself.
    """
    if isinstance(extractor, ImportedFunction | ModuleFeatures):
        try:
            pickle.dumps(extractor)
        except Exception:
            # Objects of a user's refuse this in ways of their own.
            return False
        return True
    from_files = isinstance(extractor, PixelValues) and isinstance(inputs, LazyItems)
    return isinstance(extractor, Network) or from_files


def features_of_ranks(
    ranks: Ranks,
    inputs: Any,
    extractor: Extractor,
    ways: Ways,
    settings: dict[str, Any],
    progress: Progress | None,
) -> Tensor:
    """Features (n, d) of all inputs, of which every rank extracts some.

    Batches are those of one process, and so are the features on devices of one kind.

    Args:
        ranks: that rank 0, which calls, leads.
        inputs: n raw inputs: an array, a list, or `LazyItems`, which each rank reads for itself.
        extractor: of which `is_shared` says so.
        ways: how.
        settings: of `ways.blocks`; on a GPU every rank takes its own.
        progress: called with (inputs done, n), by what rank 0 has done.

    Raises:
        InputError: on every rank, where one cannot extract its inputs, or where a function gives
            ranks other features of the same ones.
    """
    count, size = len(inputs), settings["batch_size"]
    batches = -(-count // size)
    rows = [ranks.share(batches, rank) for rank in range(ranks.size)]
    parts = [_rows(inputs, slice(part.start * size, part.stop * size)) for part in rows]
    # A function may draw or read what only this process has, and would silently be another there.
    compare = isinstance(extractor, ImportedFunction) and batches > 1
    first = _rows(inputs, slice(0, size if compare else 0))
    # Its own part needs no copy.
    contents = [b"", *(saved((part, first, extractor)) for part in parts[1:])]
    number = ranks.number()
    ranks.held[number] = contents, (parts[0], first, extractor)
    ranks.report_to(progress, count)
    found = ranks.order(_extract, number, ways, settings)
    assert found is not None
    if progress is not None:
        progress(count, count)
    return found


def _rows(inputs: Any, rows: slice) -> Any:
    if isinstance(inputs, LazyItems):
        return inputs.take(np.arange(len(inputs))[rows])
    return inputs[rows]


def _extract(ranks: Ranks, number: int, ways: Ways, settings: dict[str, Any]) -> Tensor | None:
    contents, given = ranks.held.pop(number, (None, None))
    content = ranks.scattered(contents)

    def received() -> tuple[Any, Any, Extractor]:
        # What it names is imported, which a user's module may refuse.
        with user_code("a function that rank 0 uses", doing="is not to be had here:"):
            found: tuple[Any, Any, Extractor] = given or restored(content)
            return found

    inputs, first, extractor = ranks.together(received)
    settings = {**settings, "device": ranks.device_of(settings["device"])}
    shapes: list[torch.Size] = []

    def seen(blocks: Iterator[Tensor]) -> Iterator[Tensor]:
        for block in blocks:
            shapes.append(block.shape[1:])
            yield block

    def extracted(some: Any, progress: Progress | None) -> Tensor:
        return ways.gather(seen(ways.blocks(some, extractor, **settings)), len(some), progress)

    def own() -> tuple[Tensor | None, Tensor]:
        if len(inputs) == 0:
            return None, torch.empty(0, 0)
        # First, so that a function that remembers its first batch has the same one everywhere.
        compared = extracted(first, None)[:COMPARED] if len(first) else None
        return compared, extracted(inputs, ranks.progress)

    compared, features = ranks.together(own)
    # As where one process has all: the first block says of what shape the others are, and all are
    # of the type that holds the numbers of each.
    said = [each for each in ranks.all_gathered_objects((shapes[:1], features.dtype)) if each[0]]
    firsts = ranks.all_gathered_objects(compared)

    def check() -> None:
        for (shape,), _ in said:
            ways.check(said[0][0][0], shape)
        if isinstance(extractor, ImportedFunction):
            _check_alike(firsts, extractor)

    ranks.together(check)
    dtype = reduce(torch.promote_types, (each[1] for each in said))
    return ranks.gathered_at_leader(features.to(dtype) if len(features) else features)


def _check_alike(compared: list[Tensor | None], extractor: ImportedFunction) -> None:
    """Refuse a function that is another one on some rank; None is of a rank that does nothing."""
    known = [(rank, part.double()) for rank, part in enumerate(compared) if part is not None]
    for rank, part in known[1:]:
        one, other = (each.nan_to_num() for each in (known[0][1], part))
        if (one - other).norm() > ROUNDING * one.norm():
            raise InputError(
                f"extractor {extractor.name} gives other features on rank {rank} than on rank "
                f"{known[0][0]} for the same inputs; draw what is random in it from a seed, set "
                "what it depends on where its module is imported, or start one process"
            )
