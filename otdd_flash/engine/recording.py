"""Steps that are recorded once as a CUDA graph and replayed.

Where passes are short, launching their kernels one by one from Python takes longer than running
them. A graph launches all kernels of a step at once. A step changes tensors in place, and what
changes from one step to the next, epsilon and every decision, stands in the device's memory: so one
recording serves all levels of epsilon.

`Repeated` is for a step that is taken again and again, in `quasi_newton_kernels` and
`conjugate_gradients_kernels`. `Recorded` is for all that a small solve launches:
`solver.small.pooled_solve` keeps its tensors, and the next problem that fits them replays the
recording. `operators.score_pool` and `solver.small.pooled_solve` give `run_branches` what can run
side by side.

A graph repeats launches on the same addresses, and no Python. So a recorded function must not wait
for the device, read a number from it, or replace a tensor by another
(`tests/engine/test_recording.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import cycle
from threading import RLock
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Steps of a recording, after which the device is asked how far they are.
STEPS = 2

# How often steps are launched one by one before they are recorded. The first compile kernels, and
# may start from tensors that are aligned otherwise than others; and a recording takes the time of
# some more, which those who need few never pay.
LAUNCHED = 3


class Repeated:
    """Steps that become a CUDA graph after the first ones, `LAUNCHED` times `STEPS`.

    It does not hold the step, which may hold it: memory is freed when a solve ends, not when the
    garbage collector finds the circle.
    """

    def __init__(self) -> None:
        self._launched = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Callable[[], None]) -> None:
        """Take `STEPS` steps, an even number, which change tensors without waiting for the device.

        Args:
            step: the same every time.
        """

        def launch() -> None:
            for _ in range(STEPS):
                step()

        if self._launched < LAUNCHED:
            launch()
            self._launched += 1
            return
        if self._graph is None:
            self._graph = _recorder(torch.cuda.current_stream()).record(launch)
        self._graph.replay()


class Recorded:
    """The launches of a function, on tensors that stay in place, recorded at its second call.

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
        if not self._called or self._pool.handle is None:
            launch()
            self._called = True
            return
        if self._graph is None:
            self._graph = self._pool.record(launch)
        self._graph.replay()


class RecordingPool:
    """Memory that several recordings compute in, on a device; on a CPU nothing is recorded.

    Attributes:
        handle: of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.handle = device, None
        if device.type == "cuda":
            self.handle = torch.cuda.graph_pool_handle()

    def record(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:  # pragma: gpu
        return _record(launch, self._device, self.handle)


def run_branches(device: torch.device, *launches: Callable[[], T]) -> list[T]:
    """Return what each of some launches returns.

    In a recording they run side by side on `STREAMS` streams: the first has one of its own, which
    waits for all others, and of more launches than streams the others take turns. Outside of one
    they run one after another: those streams are for recordings only, and another thread's may use
    them now.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [launch() for launch in launches]
    return _run_on_streams(device, launches)


def _run_on_streams(  # pragma: gpu
    device: torch.device, launches: Sequence[Callable[[], T]]
) -> list[T]:
    current, found = torch.cuda.current_stream(device), []
    streams = _streams(device)[1 : len(launches)]
    for stream in streams:
        stream.wait_stream(current)
    for launch, stream in zip(launches[1:], cycle(streams), strict=False):
        with torch.cuda.stream(stream):
            found.append(launch())
    found.insert(0, launches[0]())
    for stream in streams:
        current.wait_stream(stream)
    return found


class _Recorder:  # pragma: gpu
    """Records graphs that are replayed on one stream; all compute in the memory of the first.

    They may share that memory, as they run one after another and write their results into tensors
    allocated outside of it. With memory of its own every graph would take new memory from the
    device, which PyTorch keeps when the graph is gone.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._first: torch.cuda.CUDAGraph | None = None
        self._first = self.record(lambda: torch.zeros((), device=stream.device))

    def record(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        pool = None if self._first is None else self._first.pool()
        try:
            return _record(launch, self._device, pool)
        except BaseException:
            # The pool may count as in use by this recording for ever.
            _recorder.cache_clear()
            raise


# The stream that records, and others for launches that run side by side.
STREAMS = 4

# One recording at a time, of all threads: they share these streams.
_recording = RLock()


@lru_cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:  # pragma: gpu
    """Streams that nothing but recordings uses.

    PyTorch hands out few streams, in turns; launches of others on one that records would become
    part of the recording. Those of high priority hardly anybody asks for.
    """
    return [torch.cuda.Stream(device, priority=-1) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _record(  # pragma: gpu
    launch: Callable[[], object], device: torch.device, pool: Any
) -> torch.cuda.CUDAGraph:
    """Record what a function launches, on a stream of its own."""
    graph = torch.cuda.CUDAGraph()
    with _recording:
        side = _streams(device)[0]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # In any other mode operations outside the graph are forbidden, and end the recording:
            # a graph that the garbage collector frees, memory that another thread asks for.
            graph.capture_begin(pool=pool, capture_error_mode="relaxed")
            try:
                launch()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
    return graph


_recorder = lru_cache(_Recorder)
