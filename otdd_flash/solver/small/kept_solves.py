"""Small solves that are kept for the next problem of their size, on a GPU with recordings."""

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

# Solves that are kept, and bytes that they may take, on a GPU and on a processor: there they save
# the time to make a few tensors.
MOST_KEPT, MOST_BYTES, MOST_BYTES_CPU = 16, 1 << 32, 1 << 25

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
            while _too_many(room.device.type):
                # Whatever stream used it last.
                if room.device in _left:
                    _left[room.device].synchronize()
                _taken(_kept_on(room.device.type)[0])


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


def _kept_on(kind: str) -> list[tuple[Room, bool]]:
    """List what is kept on a kind of device, the oldest first."""
    return [key for key in _kept if key[0].device.type == kind]


def _too_many(kind: str) -> bool:
    """Return whether more is kept on a kind of device than there should be."""
    keys = _kept_on(kind)
    counts = [len(_kept[key]) for key in keys]
    taken = sum(room.bytes * count for (room, _), count in zip(keys, counts, strict=True))
    # A room in the interpreter is one of a GPU.
    most = MOST_BYTES if any(room.in_triton for room, _ in keys) else MOST_BYTES_CPU
    return sum(counts) > MOST_KEPT or taken > most
