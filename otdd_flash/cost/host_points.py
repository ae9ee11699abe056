"""Points in host memory or in a file that are streamed to the device, one block at a time.

While passes use one block, a thread reads the next; for a GPU into page-locked memory, from which
it copies on a CUDA stream of its own: a pass over enough rows hides both. `operators.comparison`
makes a `Streaming` if points are to stream; `cost.points` then makes `HostPoints` and reads them as
it reads tensors. `operators.packed_blocks` streams them, or the packed form of their blocks,
`derivatives.centred` and `cost.rounding` the points alone. `operators.build` and
`operators.sharing` ask whether points are `HostPoints`. `operators.blocked` cuts blocks by
`by_class`; other operators, `solver.exact` and `solver.small` cut any ranges by `spans`.

A change must keep that the copy of block k + 1 waits until passes are done with block k - 1,
because the host enqueues passes faster than a GPU runs them, and blocks would fill the device
(`tests/cost/test_host_points.py`). Points that are on the device already, such as particles of a
flow, must be read on the current stream, because earlier work on it may still write them.
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

# Share of a solve's time that passes wait for points, above which it is limited by reading.
LIMIT = 0.1

# Points on the device at once when facts of them are computed.
STREAMED_ROWS = 1 << 14

# A block is read in pieces of so many bytes: a GPU copies one while the next is read, and
# page-locked host memory, which takes longer to allocate than to fill, is reused.
PIECE_BYTES = 1 << 25

# Cached results for whole clouds: means and norms for the terms of a divergence.
MOST_RECALLED = 8

T = TypeVar("T")


class Block(NamedTuple):
    """Which points of a cloud make a block.

    Attributes:
        rows: a slice, or indices (k,) int64 on the device.
        host: the same on the host.
    """

    rows: slice | Tensor
    host: slice | Tensor


class Arrived(NamedTuple):
    """Points (k, d) on the device, and the event after their copy."""

    points: Tensor
    copied: torch.cuda.Event | None


@dataclass(eq=False)
class _Turn:
    """Two events of a block on a GPU; None on a processor.

    Attributes:
        begins: passes are done with all earlier blocks.
        copied: the block is on the device.
    """

    begins: torch.cuda.Event | None
    copied: torch.cuda.Event | None = None

    def waited(self) -> float:
        """Return the seconds that the GPU waited for the block, after its copy."""
        if self.begins is None or self.copied is None:
            return 0.0
        milliseconds: float = self.begins.elapsed_time(self.copied)
        return max(0.0, milliseconds / 1000)


@dataclass(eq=False)
class Tally:
    """Statistics of streamed points, for all clouds of a comparison.

    Attributes:
        moved: bytes read so far.
        reading: seconds that reading took, in parallel to passes.
        waited: seconds that passes waited for points; on a GPU without the last two blocks of each
            pass.
        held: most bytes of packed blocks that host memory held at once.
        copied: bytes of packed blocks that were copied to the device.
    """

    moved: int = 0
    reading: float = 0.0
    waited: float = 0.0
    held: int = 0
    copied: int = 0

    def summary(self, seconds: float) -> dict[str, Any] | None:
        """Return what a result reports after a solve of `seconds`; None if nothing was read."""
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
    """A cached result for all points of a cloud, at one version of their tensor and arguments."""

    features: Tensor
    version: int
    name: str
    given: tuple[Tensor, ...]
    found: Any


@dataclass(frozen=True, eq=False)
class Streaming:
    """Device, memory limits and caches for streaming all clouds of a comparison.

    Attributes:
        device: on which passes run.
        room: bytes that points of both clouds may take on the device at once.
        host_room: bytes of host memory that packed blocks of a cost may take.
        tally: statistics of streamed points.
        found: cached results for whole clouds, see `HostPoints.recalled`.
        staying: the stores of `packed_blocks` that may have a block resident on the device.
    """

    device: torch.device
    room: int
    host_room: int = 0
    tally: Tally = field(default_factory=Tally)
    found: deque[_Found] = field(default_factory=lambda: deque(maxlen=MOST_RECALLED), init=False)
    staying: WeakSet[Any] = field(default_factory=WeakSet, init=False)

    def __reduce__(self) -> tuple[type[Streaming], tuple[Any, ...]]:
        # Caches hold device tensors, which another process does not get.
        return Streaming, (self.device, self.room, self.host_room, self.tally)


class HostPoints:
    """A cloud (n, d) that is streamed; it has some members of a tensor on the device.

    Args:
        features: (N, d), in host memory or in a file; or on the device already (`on_device`).
        streaming: the device and the statistics of streaming.
        chosen: (n,) int64 on the host, the rows of `features` that are the cloud; None for all.
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
        # Two threads: a cloud's cost with itself streams rows and columns at once from here.
        self._reader = ThreadPoolExecutor(2)

    @property
    def on_device(self) -> bool:
        """Whether the points are on the device already, such as particles of a flow."""
        return self.features.device.type != "cpu"

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Return some points (k, d), copied to the device."""
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
        """Return `find()` for all points, cached by `name` and the values of `given`."""
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
        """Yield the points of each block on the device, while the next block is being copied.

        `arrive` may copy something else of a block in their place. The host enqueues work faster
        than a GPU does it, so the copy of block k + 1 waits until passes are done with block k - 1:
        few blocks are on the device at once.
        """
        if self.on_device:
            # Indexed on the current stream: work that was enqueued before has written the points.
            for block in blocks:
                rows = block.rows if self._chosen is None else self._chosen[block.host]
                yield self.features.detach()[rows]
            return
        arrive = arrive or self.arrive
        last, turn = None, _Turn(self._after_passes())
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
            last, turn = turn, _Turn(self._after_passes())

    def _arrive_in_turn(
        self, last: _Turn | None, turn: _Turn, arrive: Callable[[Block], Arrived], block: Block
    ) -> Arrived:
        """Copy a block once passes have begun to use the one before it."""
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
        for part in spans(first, last, size):
            to = points[part.start - first : part.stop - first]
            piece = to
            if self._stream is not None:
                piece = torch.empty(to.shape, dtype=to.dtype, pin_memory=True)
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
        """Keep the memory of a tensor from being reused before it is copied."""
        if self._stream is not None:
            there.record_stream(self._stream)

    def _after_passes(self) -> torch.cuda.Event | None:
        """Return an event after the passes issued so far; None on a processor."""
        on_gpu = self._stream is not None
        return self._event(torch.cuda.current_stream(self.device)) if on_gpu else None

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record a timed event on a stream; a thread that waits for it sleeps."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _read(self, rows: slice | Tensor, out: Tensor) -> None:
        """Read some rows into `out` (k, d), on the host."""
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


def slices(count: int, size: int) -> list[Block]:
    """Return `count` points cut into blocks of at most `size`, in order."""
    return [Block(cut, cut) for cut in spans(0, count, size)]


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield the ranges of `size` places that follow each other from start to stop."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def by_class(labels: Tensor, classes: int, size: int) -> list[Block]:
    """Return all points in blocks of about `size`, cut in the order of the classes.

    Kernels pad the points that a block has of each class; sorted, most classes are in one block.
    """
    if classes == 1:
        return slices(len(labels), size)
    order = torch.argsort(labels, stable=True)
    host = order.cpu()
    return [
        Block(*pair) for pair in zip(torch.split(order, size), torch.split(host, size), strict=True)
    ]
