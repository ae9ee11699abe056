"""Solve many transport problems side by side, each until it is done.

A `Rule` says what one iteration is and when a segment is done; this file runs it, keeps what every
segment has proved when it finished, and goes on with those that are left. Whether a segment is done
is decided on the device; the host reads their number late, and then leaves out the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.engine.late_reader import LateReader
from otdd_flash.engine.rule import Rule, Segments

# finished(count): so many more segments are done.
Finished = Callable[[int], None]

# watch(value, lower, upper, marginal error, rounding, iterations): of one segment, whether to end.
Watch = Callable[..., bool]


class SegmentTerms(NamedTuple):
    """OT_epsilon of many problems, (S,) float64 each, as `term.TransportTerm` has it for one.

    Attributes:
        value: the dual value.
        lower: lower bound.
        upper: upper bound.
        marginal_error: L1 distance of the plan's marginals from the masses, rounding included.
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


def run(
    segments: Segments,
    rule: Rule,
    finished: Finished | None = None,
    *,
    watch: Watch | None = None,
    wait: bool = False,
) -> SegmentTerms:
    """Iterate until all segments are done; `segments` hold none afterwards, but a single one.

    Args:
        segments: the problems.
        rule: of their iterations.
        finished: told how many segments are done.
        watch: told of the only segment; ends the iterations if it says so.
        wait: ask the device after every step, as one takes longer than to launch the next.
    """
    results = torch.zeros_like(rule.terms)
    left = torch.arange(len(results), device=results.device)
    reader: LateReader[None] = LateReader(wait=wait)
    while len(left):
        segments.repeat(rule.step)
        if watch is None:
            numbers = rule.active.sum().reshape(1)
        else:
            numbers = torch.cat((rule.active, rule.terms[0]))
        reading = reader.exchange(numbers, None)
        if reading is None:
            continue
        if watch is not None and watch(*reading.numbers[1:]):
            break
        if reading.numbers[0] == len(left):
            continue
        results[left] = rule.terms
        order = _compacted(rule.active)
        if finished is not None:
            finished(len(left) - len(order))
        left = left[order]
        segments.keep(order)
        if not len(left):
            break
        rule.keep(order)
        reader = LateReader(wait=wait)
    if len(left):
        results[left] = rule.terms
    return SegmentTerms(*results.unbind(1))


def _compacted(active: Tensor) -> Tensor:
    """The active segments: in their places as far as possible, the last ones in those left free."""
    kept = torch.nonzero(active).squeeze(1)
    order = torch.arange(len(kept), device=active.device)
    order[~active[: len(kept)]] = kept[kept >= len(kept)]
    return order
