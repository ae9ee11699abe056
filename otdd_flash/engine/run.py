"""Solve many transport problems side by side, each until it is done.

`Iterations` say what one is and when a segment is done; this file runs them, keeps what every
segment has proved when it finished, and goes on with those that are left. Whether a segment is done
is decided on the device; the host reads their number late, and then leaves out the others.
`solver.solve` calls `run` and `run_one`; `derivatives.plan_system` and `operators.parts` use
`LateReader`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from otdd_flash.engine.problems import Iterations

# finished(count): so many more segments are done.
Finished = Callable[[int], None]

# watch(marginal error, iterations): of one segment, whether to end.
Watch = Callable[[float, int], bool]


class SegmentTerms(NamedTuple):
    """OT_epsilon of many problems, (S,) float64 each, as `term.TransportTerm` has it for one.

    Attributes:
        value: the dual value.
        lower: lower bound.
        upper: upper bound.
        marginal_error: bound of the larger of ||P 1 - a||_1, ||P^T 1 - b||_1, rounding included.
        rounding: the part of `marginal_error` that rounding may hide; all of it where iterations
            no longer lower it.
        iterations: evaluations of both potentials, or at the only one.
    """

    value: Tensor
    lower: Tensor
    upper: Tensor
    marginal_error: Tensor
    rounding: Tensor
    iterations: Tensor


class SegmentReport(NamedTuple):
    """The numbers of a segment in `Iterations.terms`: its `SegmentTerms`, and two more.

    Attributes:
        value: as there, and so on.
        lower: likewise.
        upper: likewise.
        marginal_error: likewise.
        rounding: likewise.
        iterations: likewise.
        size: <a, |f|> + <b, |g|> of the potentials, both of which are one in a self term.
        active: 1 as long as it was not done.
    """

    value: float
    lower: float
    upper: float
    marginal_error: float
    rounding: float
    iterations: float
    size: float
    active: float


def run(iterations: Iterations, finished: Finished | None = None) -> SegmentTerms:
    """Iterate until all segments are done; there are none afterwards.

    Args:
        iterations: of the segments.
        finished: called with how many segments are done.
    """
    results = torch.zeros_like(iterations.terms)
    left = torch.arange(len(results), device=results.device)
    reader: LateReader[None] = LateReader()
    while len(left):
        iterations.advance()
        reading = reader.exchange(iterations.active.sum().reshape(1), None)
        if reading is None or reading.numbers[0] == len(left):
            continue
        results[left] = iterations.terms
        order = _compacted(iterations.active)
        if finished is not None:
            finished(len(left) - len(order))
        left = left[order]
        iterations.keep(order)
        reader = LateReader()
    return SegmentTerms(*results[:, : len(SegmentTerms._fields)].unbind(1))


def run_one(iterations: Iterations, watch: Watch) -> SegmentReport:
    """Iterate until the only segment is done or `watch` ends it; return the last numbers read.

    Args:
        iterations: of the segment.
        watch: called with every reading.
    """
    reader: LateReader[None] = LateReader(wait=iterations.waits)
    while True:
        iterations.advance()
        reading = reader.exchange(iterations.terms[0], None)
        if reading is None:
            continue
        report = SegmentReport(*reading.numbers)
        if watch(report.marginal_error, int(report.iterations)) or not report.active:
            return report


def _compacted(active: Tensor) -> Tensor:
    """Order the active segments: in place where possible, the last ones in places left free."""
    kept = torch.nonzero(active).squeeze(1)
    order = torch.arange(len(kept), device=active.device)
    order[~active[: len(kept)]] = kept[kept >= len(kept)]
    return order


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
