"""Small solves that are kept with their recordings, for the next problem of their size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from threading import Lock, RLock

import torch

from otdd_flash.devices import current
from otdd_flash.operators.score_pool import Room
from otdd_flash.solver.small.pooled_solve import PooledSolve

# Solves that are kept, and bytes that they may take.
MOST_KEPT, MOST_BYTES = 16, 1 << 32

_kept: OrderedDict[tuple[Room, bool], list[PooledSolve]] = OrderedDict()
_changing = Lock()

# What the last solve on a device launched last.
_left: dict[torch.device, torch.cuda.Event] = {}


@lru_cache
def _turn(device: torch.device) -> RLock:
    """Return the lock of a device's solves."""
    return RLock()


@contextmanager
def kept(room: Room, debias: bool) -> Iterator[PooledSolve]:
    """A solve that nobody else uses meanwhile, kept for the next problem of its size.

    On a GPU they take turns, whatever threads and streams they are of: recordings share the memory
    in which cuBLAS computes.
    """
    key = room, debias
    turn = nullcontext() if room.device.type == "cpu" else _turn(room.device)
    with turn, current(room.device):
        with _changing:
            solve = _taken(key)
        if room.device in _left:
            torch.cuda.current_stream(room.device).wait_event(_left[room.device])
        if solve is None:
            solve = PooledSolve(room, debias=debias)
        try:
            yield solve
        finally:
            if room.device.type == "cuda":
                _left[room.device] = torch.cuda.current_stream(room.device).record_event()
        # One that failed is not kept.
        with _changing:
            _kept.setdefault(key, []).append(solve)
            _kept.move_to_end(key)
            while _too_many():
                # Whatever stream used it last.
                if room.device in _left:
                    _left[room.device].synchronize()
                _taken(next(iter(_kept)))


def is_kept(room: Room) -> bool:
    """Whether there is a solve with this room, whatever its classes."""
    return any(key[0]._replace(classes=1) == room for key in list(_kept))


def forget() -> None:
    """Keep nothing: all memory of solves goes back to PyTorch."""
    with _changing:
        _kept.clear()


def _taken(key: tuple[Room, bool]) -> PooledSolve | None:
    """Take a solve out of the cache; None if there is none."""
    if key not in _kept:
        return None
    solve = _kept[key].pop()
    if not _kept[key]:
        del _kept[key]
    return solve


def _too_many() -> bool:
    counts = [len(solves) for solves in _kept.values()]
    taken = sum(room.bytes * count for (room, _), count in zip(_kept, counts, strict=True))
    return sum(counts) > MOST_KEPT or taken > MOST_BYTES
