"""Repeat a step of a solve: as it is, or recorded once as a CUDA graph and replayed.

Where passes are short, launching their kernels one by one from Python takes longer than running
them. A graph launches all kernels of a step at once.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator

State = tuple[Tensor, ...]
Step = Callable[[Operator, float, State], State]

# Steps between two looks at the marginals where passes are short and recorded.
SHORT_STEPS = 4

# A graph takes about as long to record as this many steps, so it is not recorded before them.
STEPS_BEFORE_RECORDING = 12

_recordings: WeakKeyDictionary[Operator, dict[tuple[Step, float], _Recording]] = WeakKeyDictionary()


def sweep(operator: Operator, step: Step, epsilon: float, state: State, count: int) -> State:
    """The state after `count` steps; a state is a few tensors whose shapes stay the same.

    Args:
        operator: given to the step.
        step: new state = step(operator, epsilon, state), without waiting for the device.
        epsilon: given to the step.
        state: to start from; it is not changed.
        count: of steps, at least 1.
    """
    if not operator.short_passes:
        return _one_by_one(operator, step, epsilon, state, count)
    kept = _recordings.setdefault(operator, {})
    recording = kept.setdefault((step, epsilon), _Recording())
    return recording.run(operator, step, epsilon, state, count)


def steps_between_looks(operator: Operator, taken: int) -> int:
    """How many steps to take before the marginals are looked at, after `taken` at this epsilon."""
    return SHORT_STEPS if operator.short_passes and taken >= STEPS_BEFORE_RECORDING else 1


def _one_by_one(operator: Operator, step: Step, epsilon: float, state: State, count: int) -> State:
    for _ in range(count):
        state = step(operator, epsilon, state)
    return state


class _Recording:
    """A step that becomes a CUDA graph, which reads and overwrites its own state, in time."""

    def __init__(self) -> None:
        self._taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._state: State = ()

    def run(
        self, operator: Operator, step: Step, epsilon: float, state: State, count: int
    ) -> State:
        """The state after `count` steps."""
        alone = min(count, max(0, STEPS_BEFORE_RECORDING - self._taken))
        state = _one_by_one(operator, step, epsilon, state, alone)
        self._taken += count
        if alone == count:
            return state
        if self._graph is None:
            self._graph = self._record(operator, step, epsilon, state)
        _overwrite(self._state, state)
        for _ in range(count - alone):
            self._graph.replay()
        return tuple(tensor.clone() for tensor in self._state)

    def _record(
        self, operator: Operator, step: Step, epsilon: float, state: State
    ) -> torch.cuda.CUDAGraph:
        self._state = tuple(tensor.clone() for tensor in state)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                _overwrite(self._state, step(operator, epsilon, self._state))
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


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
