"""Steps that are recorded once as a CUDA graph and replayed.

Where passes are short, launching their kernels one by one from Python takes longer than running
them. A graph launches all kernels of a step at once. A step changes tensors in place, and what
changes from one step to the next, epsilon and every decision, stands in the device's memory: so one
recording serves all levels of epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

# Steps between two times that the device is asked how far they are.
STEPS = 2

# A graph takes about as long to record as this many steps. The first compiles their kernels, and
# may start from tensors that are aligned otherwise than those of the others.
STEPS_BEFORE_RECORDING = 2


class Repeated:
    """A step that becomes a CUDA graph after a few times.

    It does not hold the step, which may hold it: memory is freed when a solve ends, not when the
    garbage collector finds the circle.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Callable[[], None]) -> None:
        """Take `STEPS` steps, of one that changes tensors in place without waiting for the device.

        Args:
            step: the same every time.
        """
        for _ in range(STEPS):
            if self._taken < STEPS_BEFORE_RECORDING:
                step()
                self._taken += 1
                continue
            if self._graph is None:
                self._graph = _recorder(torch.cuda.current_stream()).record(step)
            self._graph.replay()


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
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            pool = None if self._first is None else self._first.pool()
            # In any other mode what is not recorded is forbidden meanwhile, and ends the recording:
            # a graph that the garbage collector frees, memory that another thread asks for.
            graph.capture_begin(pool=pool, capture_error_mode="relaxed")
            try:
                try:
                    launch()
                finally:
                    graph.capture_end()
            except BaseException:
                # The pool may count as in use by this recording for ever.
                _recorder.cache_clear()
                raise
        torch.cuda.current_stream().wait_stream(self._side)
        return graph


_recorder = lru_cache(_Recorder)
