"""Points that stay in host memory or in a file, and come to the device a block at a time.

While one block is computed with, a thread reads the next into page-locked memory and copies it on a
stream of its own: a pass over enough rows hides that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from otdd_flash.features.file_features import FileFeatures

# Share of the time that passes wait, from which on reading is what takes the time.
LIMIT = 0.1

# Points that are on the device at once where they are only looked at.
STREAMED_ROWS = 1 << 14

# A block is read in pieces of so many bytes: a GPU copies one while the next is read, and host
# memory that is page-locked for it, which takes longer than reading, is used again.
PIECE_BYTES = 1 << 25

# What was found of whole clouds and is not found again: means and norms of the terms of a
# divergence.
MOST_RECALLED = 8

T = TypeVar("T")


class Block(NamedTuple):
    """Some points of a cloud.

    Attributes:
        rows: which, where passes run: a slice or indices (k,) int64.
        host: the same on the host.
    """

    rows: slice | Tensor
    host: slice | Tensor


class Arrived(NamedTuple):
    """Points (k, d) on the device, and the event that says that they are there."""

    points: Tensor
    copied: torch.cuda.Event | None


@dataclass(eq=False)
class _Turn:
    """A block's turn on a GPU, in events; on a processor there are none.

    Attributes:
        begins: passes are done with all blocks before it.
        copied: it is there.
    """

    begins: torch.cuda.Event | None
    copied: torch.cuda.Event | None = None

    def waited(self) -> float:
        """Seconds that the GPU waited for the block, which is there by now."""
        if self.begins is None or self.copied is None:
            return 0.0
        milliseconds: float = self.begins.elapsed_time(self.copied)
        return max(0.0, milliseconds / 1000)


@dataclass(eq=False)
class Tally:
    """What was read, for all clouds of a comparison.

    Attributes:
        moved: bytes so far.
        reading: seconds that it took, beside passes.
        waited: seconds that passes waited for it, on a GPU but for the last block of each pass.
        held: bytes of packed blocks that host memory held at once.
        copied: bytes that came from there.
    """

    moved: int = 0
    reading: float = 0.0
    waited: float = 0.0
    held: int = 0
    copied: int = 0

    def summary(self, seconds: float) -> dict[str, Any] | None:
        """What a result says of it, after a solve of so many seconds; None if nothing was read."""
        if self.moved == 0:
            return None
        return {
            "bytes": self.moved,
            "bytes_per_second": self.moved / max(self.reading, 1e-9),
            "seconds_waited": self.waited,
            "limited_by_reading": self.waited > LIMIT * seconds,
            "bytes_held": self.held,
            "bytes_copied": self.copied,
        }


class _Found(NamedTuple):
    """What was found of all points of a cloud, in one version of its tensor, from some numbers."""

    features: Tensor
    version: int
    name: str
    given: tuple[Tensor, ...]
    found: Any


@dataclass(frozen=True, eq=False)
class Streaming:
    """How points come to the device, for all clouds of a request.

    Attributes:
        device: where passes run.
        room: bytes that points of both clouds may take there at once.
        host_room: bytes of host memory that packed blocks of a cost may take.
        tally: of what was read.
        found: of whole clouds, for those who ask the same.
        staying: whose points may still be on the device, while it lives.
    """

    device: torch.device
    room: int
    host_room: int = 0
    tally: Tally = field(default_factory=Tally)
    found: deque[_Found] = field(default_factory=lambda: deque(maxlen=MOST_RECALLED), init=False)
    staying: WeakSet[Any] = field(default_factory=WeakSet, init=False)

    def __reduce__(self) -> tuple[type[Streaming], tuple[Any, ...]]:
        # What is on a device stays there.
        return Streaming, (self.device, self.room, self.host_room, self.tally)


class HostPoints:
    """A cloud (n, d) that is streamed; in part it behaves as a tensor on the device.

    Args:
        features: (N, d), where they stay.
        streaming: where passes run, and what is counted.
        chosen: (n,) int64 on the host, which of them these are; None for all.
    """

    def __init__(
        self, features: Tensor, streaming: Streaming, chosen: Tensor | None = None
    ) -> None:
        self.features, self.streaming, self._chosen = features, streaming, chosen
        device = self.device = streaming.device
        count = features.shape[0] if chosen is None else len(chosen)
        self.shape = torch.Size((count, features.shape[1]))
        self.dtype, self.is_cuda = features.dtype, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.is_cuda else None  # type: ignore[no-untyped-call]
        # For rows and for columns, of which the cost of a cloud with itself streams both from here.
        self._reader = ThreadPoolExecutor(2)

    @property
    def are_there(self) -> bool:
        """Whether the points are on the device already, such as particles that move."""
        return self.features.device.type != "cpu"

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Copy some points (k, d) to the device."""
        if isinstance(rows, slice) and rows.step not in (None, 1):
            # Blocks are read as ranges.
            rows = torch.arange(self.shape[0], device=self.device)[rows]
        host = rows if isinstance(rows, slice) else rows.cpu()
        (points,) = self.stream([Block(rows, host)])
        return points

    def part(self, rows: slice | Tensor) -> HostPoints:
        """Return some of the points, still on the host."""
        if isinstance(rows, slice) and rows == slice(None):
            return self
        every = torch.arange(self.shape[0]) if self._chosen is None else self._chosen
        here = rows if isinstance(rows, slice) else rows.cpu()
        return HostPoints(self.features, self.streaming, every[here])

    def recalled(self, name: str, given: tuple[Tensor, ...], find: Callable[[], T]) -> T:
        """Call `find` once for all points and the numbers `given`, and cache its result."""
        features = self.features
        if self._chosen is not None or features.is_inference():
            return find()
        for before in self.streaming.found:
            same = before.features is features and before.version == features._version
            if same and before.name == name and all(map(torch.equal, before.given, given)):
                found: T = before.found
                return found
        found = find()
        self.streaming.found.append(_Found(features, features._version, name, given, found))
        return found

    def stream(
        self, blocks: Sequence[Block], arrive: Callable[[Block], Arrived] | None = None
    ) -> Iterator[Tensor]:
        """Yield the points of one block after the other on the device, the next on its way.

        `arrive` gives something else of a block in their place. The host tells a GPU what to do
        faster than it is done, so a block comes when the one before the last has been used: there
        are never more than a few.
        """
        if self.are_there:
            # Read where passes run and in their order, as they were written.
            for block in blocks:
                rows = block.rows if self._chosen is None else self._chosen[block.host]
                yield self.features.detach()[rows]
            return
        arrive = arrive or self.arrive
        last, turn = None, _Turn(self._told())
        ahead = self._reader.submit(arrive, blocks[0])
        for following in (*blocks[1:], None):
            start = time.perf_counter()
            points, turn.copied = ahead.result()
            if self._stream is None:
                self.streaming.tally.waited += time.perf_counter() - start
            if following is not None:
                ahead = self._reader.submit(self._arrive_in_turn, last, turn, arrive, following)
            if turn.copied is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_event(turn.copied)
                points.record_stream(current)
            yield points
            last, turn = turn, _Turn(self._told())

    def _arrive_in_turn(
        self, last: _Turn | None, turn: _Turn, arrive: Callable[[Block], Arrived], block: Block
    ) -> Arrived:
        """Wait until the block before it is in use, then start to copy a block."""
        if turn.begins is not None:
            turn.begins.synchronize()
            if last is not None:
                self.streaming.tally.waited += last.waited()
        return arrive(block)

    @torch.no_grad()
    def arrive(self, block: Block) -> Arrived:
        """Start to copy the points of a block to the device."""
        rows, count = block.host, self.shape[0]
        if self._chosen is not None:
            rows = self._chosen[rows]
        first, last = 0, len(rows) if isinstance(rows, Tensor) else 0
        if isinstance(rows, slice):
            first, last, _ = rows.indices(count)
        with self.copying():
            shape = max(0, last - first), self.shape[1]
            points = torch.empty(shape, dtype=self.dtype, device=self.device)
        size = max(1, PIECE_BYTES // max(1, self.shape[1] * self.dtype.itemsize))
        for start in range(first, last, size):
            part = slice(start, min(start + size, last))
            to = points[start - first : part.stop - first]
            piece = to if self._stream is None else _page_locked(to)
            began = time.perf_counter()
            self._read(part if isinstance(rows, slice) else rows[part], piece)
            self.streaming.tally.reading += time.perf_counter() - began
            self.streaming.tally.moved += piece.nbytes
            if piece is not to:
                with self.copying():
                    to.copy_(piece, non_blocking=True)
        return Arrived(points, self.copied())

    @contextmanager
    def copying(self, *, after: bool = False) -> Iterator[None]:
        """Copy on a stream beside the passes, or `after` the passes issued so far."""
        if self._stream is None:
            yield
            return
        if after:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def copied(self) -> torch.cuda.Event | None:
        """Return an event after the copies issued so far; None on a processor."""
        return None if self._stream is None else self._event(self._stream)

    def keep(self, there: Tensor) -> None:
        """Keep the memory of a tensor from being used again before it is copied."""
        if self._stream is not None:
            there.record_stream(self._stream)

    def _told(self) -> torch.cuda.Event | None:
        """Return an event after the passes issued so far; None on a processor."""
        on_gpu = self._stream is not None
        return self._event(torch.cuda.current_stream(self.device)) if on_gpu else None

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record a timed event on a stream; a thread that waits for it gives way to others."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _read(self, rows: slice | Tensor, out: Tensor) -> None:
        """Read some rows (k, d) into `out`, on the host."""
        features = self.features
        if isinstance(features, FileFeatures):
            if isinstance(rows, slice):
                features.file.read(rows, out)
            else:
                features.file.take(rows, out)
        elif isinstance(rows, slice):
            out.copy_(features[rows])
        else:
            torch.index_select(features.detach(), 0, rows, out=out)


def _page_locked(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def slices(count: int, size: int) -> list[Block]:
    """Cut `count` points into blocks of up to `size`, in order."""
    cuts = (slice(first, min(first + size, count)) for first in range(0, count, size))
    return [Block(cut, cut) for cut in cuts]


def by_class(labels: Tensor, classes: int, size: int) -> list[Block]:
    """All points in blocks of about one size that hold few classes each.

    A class of its own block of rows costs less padding than one that every block has a part of.
    """
    if classes == 1:
        return slices(len(labels), size)
    order = torch.argsort(labels, stable=True)
    host = order.cpu()
    return [
        Block(*pair) for pair in zip(torch.split(order, size), torch.split(host, size), strict=True)
    ]
