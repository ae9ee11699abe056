"""Steps that are recorded once as a CUDA graph and replayed.

Where passes are short, launching their kernels one by one from Python takes longer than running
them. A graph launches all kernels of a step at once. A step changes tensors in place, and what
changes from one step to the next, epsilon and every decision, stands in the device's memory: so one
recording serves all levels of epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Steps of a recording, after which the device is asked how far they are. The first are launched one
# by one: they compile kernels, and may start from tensors that are aligned otherwise than others.
STEPS = 2


class Repeated:
    """Steps that become a CUDA graph after the first ones.

    It does not hold the step, which may hold it: memory is freed when a solve ends, not when the
    garbage collector finds the circle.
    """

    def __init__(self) -> None:
        self._taken = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Callable[[], None]) -> None:
        """Take `STEPS` steps, an even number, which change tensors without waiting for the device.

        Args:
            step: the same every time.
        """

        def launch() -> None:
            for _ in range(STEPS):
                step()

        if not self._taken:
            launch()
            self._taken = True
            return
        if self._graph is None:
            self._graph = _recorder(torch.cuda.current_stream()).record(launch)
        self._graph.replay()


class Recorded:
    """What a function launches, on tensors that stay where they are, recorded at its second call.

    The first call compiles kernels. Graphs of one `pool` share memory: they run one after another.
    It does not hold the function, as `Repeated`.
    """

    def __init__(self, pool: RecordingPool) -> None:
        self._pool, self._called = pool, False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, launch: Callable[[], object]) -> None:
        """Launch it.

        Args:
            launch: the same every time; it asks the device nothing.
        """
        if not self._called or self._pool.side is None:
            launch()
            self._called = True
            return
        if self._graph is None:
            self._graph = self._pool.record(launch)
        self._graph.replay()


class RecordingPool:
    """Memory that several recordings compute in, on a device; on a CPU nothing is recorded.

    Attributes:
        side: the stream that records.
    """

    def __init__(self, device: torch.device) -> None:
        self.side: torch.cuda.Stream | None = None
        self._handle: object = None
        if device.type == "cuda":
            self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._handle = torch.cuda.graph_pool_handle()

    def record(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:  # pragma: gpu
        """What a function launches."""
        assert self.side is not None
        with _recording:
            return _record(launch, self.side, self._handle)


class Branches:
    """What can run side by side on a device, in a recording too; on a CPU one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []

    def run(self, *launches: Callable[[], T]) -> list[T]:
        """What each of them returns; the first runs on the current stream, and all end with it."""
        if self._device.type != "cuda":
            return [launch() for launch in launches]
        while len(self._streams) < len(launches) - 1:
            self._streams.append(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        current, found = torch.cuda.current_stream(self._device), []
        for stream, launch in zip(self._streams, launches[1:], strict=False):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                found.append(launch())
        found.insert(0, launches[0]())
        for stream, _ in zip(self._streams, launches[1:], strict=False):
            current.wait_stream(stream)
        return found


# One recording at a time, of all threads.
_recording = Lock()


class _Recorder:  # pragma: gpu
    """Records graphs that are replayed on one stream; all compute in the memory of the first.

    They run one after another and leave results in tensors that are not in there. With memory of
    its own every graph would take new memory from the device, which PyTorch keeps when the graph is
    gone; what one side stream has used it gives to no other.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._side = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
        self._first: torch.cuda.CUDAGraph | None = None
        self._first = self.record(lambda: torch.zeros((), device=stream.device))

    def record(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """What a function launches."""
        try:
            return _record(launch, self._side, None if self._first is None else self._first.pool())
        except BaseException:
            # The pool may count as in use by this recording for ever.
            _recorder.cache_clear()
            raise


def _record(  # pragma: gpu
    launch: Callable[[], object], side: torch.cuda.Stream, pool: Any
) -> torch.cuda.CUDAGraph:
    """What a function launches, recorded on a stream of its own."""
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # In any other mode what is not recorded is forbidden meanwhile, and ends the recording: a
        # graph that the garbage collector frees, memory that another thread asks for.
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            launch()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph


_recorder = lru_cache(_Recorder)
