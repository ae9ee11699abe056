"""Solve many transport problems side by side, each until it is done.

`Iterations` say what one is and when a segment is done; this file runs them, keeps what every
segment has proved when it finished, and goes on with those that are left. Whether a segment is done
is decided on the device; the host reads their number late, and then leaves out the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.late_reader import LateReader
from otdd_flash.engine.rule import Iterations

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


class Told(NamedTuple):
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
        finished: told how many segments are done.
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


def run_one(iterations: Iterations, watch: Watch) -> Told:
    """Iterate until the only segment is done or `watch` ends it; return the last numbers read.

    Args:
        iterations: of the segment.
        watch: told of every reading.
    """
    reader: LateReader[None] = LateReader(wait=iterations.waits)
    while True:
        iterations.advance()
        reading = reader.exchange(iterations.terms[0], None)
        if reading is None:
            continue
        told = Told(*reading.numbers)
        if watch(told.marginal_error, int(told.iterations)) or not told.active:
            return told


def _compacted(active: Tensor) -> Tensor:
    """Order the active segments: in place where possible, the last ones in places left free."""
    kept = torch.nonzero(active).squeeze(1)
    order = torch.arange(len(kept), device=active.device)
    order[~active[: len(kept)]] = kept[kept >= len(kept)]
    return order
