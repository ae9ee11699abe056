"""Numbers from the device, read one step late where it would wait for the host otherwise."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Reading(NamedTuple, Generic[T]):
    """Numbers that a step computed, and what the caller kept with them."""

    numbers: list[float]
    kept: T


class LateReader(Generic[T]):
    """Hands out the numbers of the step before the one that was just launched.

    While the host waits for them the device already works on the next step. On a CPU, where nothing
    runs behind the host's back, a step's own numbers come back at once.

    Args:
        wait: hand out a step's own numbers on a GPU too: for steps that take longer than to launch
            the next one, which may not be needed.
    """

    def __init__(self, *, wait: bool = False) -> None:
        self._wait = wait
        self._pending: tuple[Tensor, Any, T] | None = None

    def exchange(self, numbers: Tensor, kept: T) -> Reading[T] | None:
        """Send a few numbers (k,); receive those sent before, or None the first time on a GPU."""
        if self._wait or not numbers.is_cuda:
            return Reading(numbers.tolist(), kept)
        copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copied.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(numbers.device))
        before, self._pending = self._pending, (copied, arrived, kept)
        return None if before is None else _wait(*before)

    def last(self) -> Reading[T] | None:
        """Receive what is still on its way."""
        before, self._pending = self._pending, None
        return None if before is None else _wait(*before)


def _wait(copied: Tensor, arrived: Any, kept: T) -> Reading[T]:
    arrived.synchronize()
    return Reading(copied.tolist(), kept)
