"""Repeat a step of a solve: as it is, or recorded once as a CUDA graph and replayed.

Where passes are short, launching their kernels one by one from Python takes longer than running
them. A graph launches all kernels of a step at once. They read epsilon from the device's memory, so
one recording serves all levels of epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from otdd_flash.operators.base import Epsilon, Operator

State = tuple[Tensor, ...]
Step = Callable[[Operator, Epsilon, State], State]

# Steps between two looks at the marginals where passes are short, and how many at one epsilon are
# looked at one by one before: most levels end before that.
SHORT_STEPS = 4
STEPS_LOOKED_AT = 32

# A graph takes about as long to record as this many steps. The first compiles their kernels, and
# may start from tensors that are aligned otherwise than those of the others.
STEPS_BEFORE_RECORDING = 2

_recordings: WeakKeyDictionary[Operator, dict[Step, _Recording]] = WeakKeyDictionary()


def sweep(operator: Operator, step: Step, epsilon: float, state: State, count: int) -> State:
    """The state after `count` steps; a state is a few tensors whose shapes stay the same.

    Args:
        operator: given to the step.
        step: new state = step(operator, epsilon, state), without waiting for the device.
        epsilon: given to the step, where passes are short as a tensor () on the device.
        state: to start from; it is not changed.
        count: of steps, at least 1.
    """
    if not operator.short_passes:
        return _one_by_one(operator, step, epsilon, state, count)
    kept = _recordings.setdefault(operator, {})
    if step not in kept:
        kept[step] = _Recording(operator, step)
    return kept[step].run(operator, epsilon, state, count)


def steps_between_looks(operator: Operator, taken: int) -> int:
    """How many steps to take before the marginals are looked at, after `taken` at this epsilon."""
    return SHORT_STEPS if operator.short_passes and taken >= STEPS_LOOKED_AT else 1


def _one_by_one(
    operator: Operator, step: Step, epsilon: Epsilon, state: State, count: int
) -> State:
    for _ in range(count):
        state = step(operator, epsilon, state)
    return state


class _Recording:
    """A step that becomes a CUDA graph, which reads and overwrites its own state, in time."""

    def __init__(self, operator: Operator, step: Step) -> None:
        self._step = step
        self._epsilon = torch.empty((), dtype=torch.float64, device=operator.a.device)
        self._level = math.nan
        self._taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._state: State = ()
        self._handed_out: State = ()

    def run(self, operator: Operator, epsilon: float, state: State, count: int) -> State:
        """The state after `count` steps."""
        if epsilon != self._level:
            # Passed by value: the host does not wait.
            self._epsilon.fill_(epsilon)
            self._level = epsilon
        alone = min(count, STEPS_BEFORE_RECORDING - self._taken)
        state = _one_by_one(operator, self._step, self._epsilon, state, alone)
        self._taken += alone
        if alone == count:
            return state
        if self._graph is None:
            self._graph = self._record(operator, state)
        if not _same(state, self._handed_out):
            _overwrite(self._state, state)
        for _ in range(count - alone):
            self._graph.replay()
        self._handed_out = tuple(map(torch.empty_like, self._state))
        _overwrite(self._handed_out, self._state)
        return self._handed_out

    def _record(  # pragma: gpu
        self, operator: Operator, state: State
    ) -> torch.cuda.CUDAGraph:
        self._state = tuple(tensor.clone() for tensor in state)
        recorder = _recorder(torch.cuda.current_stream())
        return recorder.record(
            lambda: _overwrite(self._state, self._step(operator, self._epsilon, self._state))
        )


class _Recorder:  # pragma: gpu
    """Records graphs that are replayed on one stream; all compute in the memory of the first.

    They run one after another and leave results in their states, which are not in there. With
    memory of its own every graph would take new memory from the device, which PyTorch keeps when
    the graph is gone; what one side stream has used it gives to no other.
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


def _same(state: State, other: State) -> bool:
    """Whether they are the same tensors, not only of the same values."""
    return len(state) == len(other) and all(a is b for a, b in zip(state, other, strict=True))


def _overwrite(state: State, new: State) -> None:
    """Give a state new values, by one launch for all tensors of a type."""
    # Copies first: a new state may hold parts of the old one.
    held = {tensor.untyped_storage().data_ptr() for tensor in state}
    pairs = [
        (old, value.clone() if value.untyped_storage().data_ptr() in held else value)
        for old, value in zip(state, new, strict=True)
    ]
    for dtype in {old.dtype for old in state}:
        olds, values = zip(*(pair for pair in pairs if pair[0].dtype == dtype), strict=True)
        torch._foreach_copy_(olds, values)
