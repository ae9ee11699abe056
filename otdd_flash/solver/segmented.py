"""Solve many transport problems side by side, each until it is done.

A `Rule` says what one iteration is and when a segment is done; this file runs it, keeps what every
segment has proved when it finished, and goes on with those that are left. Whether a segment is done
is decided on the device; the host reads their number late, and then leaves out the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.operators.segments import Segments
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.late_reader import LateReader

# finished(count): so many more segments are done.
Finished = Callable[[int], None]


class SegmentTerms(NamedTuple):
    """OT_epsilon of many problems, (S,) float64 each, as `term.TransportTerm` has it for one.

    Attributes:
        value: the dual value.
        lower: lower bound.
        upper: upper bound.
        marginal_error: L1 distance of the plan's marginals from the masses, rounding included.
        rounding: the part of `marginal_error` that rounding may hide; all of it where iterations
            no longer lower it.
        iterations: looks at both potentials, or at the only one.
    """

    value: Tensor
    lower: Tensor
    upper: Tensor
    marginal_error: Tensor
    rounding: Tensor
    iterations: Tensor


class Step(NamedTuple):
    """What an iteration has shown.

    Attributes:
        done: (S,) bool, which segments are done.
        terms: (S, 6) float64, the `SegmentTerms` of all of them.
    """

    done: Tensor
    terms: Tensor


class Rule(Protocol):
    """The iterations of all segments."""

    def step(self, active: Tensor) -> Step:
        """One iteration; what it says of segments that are not active (S,) does not matter."""
        ...

    def keep(self, order: Tensor) -> None:
        """Go on with the segments `order` (S',) only, in that order."""
        ...


class CoarseForm(NamedTuple):
    """Problems to iterate on first, and when to stop."""

    segments: Segments
    options: Converged


def coarse_form(segments: Segments, options: Converged) -> CoarseForm | None:
    """The coarse form of all segments, if there is one and an iteration to spare for it."""
    coarse = segments.coarse(options.asked_tolerance) if options.max_iterations > 1 else None
    if coarse is None:
        return None
    # The iteration that certifies comes after.
    return CoarseForm(coarse, Converged(options.asked_tolerance, options.max_iterations - 1))


def run(segments: Segments, rule: Rule, finished: Finished | None = None) -> SegmentTerms:
    """Iterate until all segments are done; `segments` hold none afterwards."""
    count = len(segments.mean_cost)
    device = segments.mean_cost.device
    results = torch.zeros((count, 6), dtype=torch.float64, device=device)
    last = results
    left = torch.arange(count, device=device)
    active = torch.ones(count, dtype=torch.bool, device=device)
    reader: LateReader[None] = LateReader()
    while len(left):
        for _ in range(segments.steps_between_looks):
            done, terms = rule.step(active)
            last = torch.where(active[:, None], terms, last)
            active = active & ~done
        reading = reader.exchange(active.sum().reshape(1), None)
        if reading is None or reading.numbers[0] == len(left):
            continue
        results[left] = last
        order = _compacted(active)
        if finished is not None:
            finished(len(left) - len(order))
        left, active, last = left[order], active[order], last[order]
        rule.keep(order)
        segments.keep(order)
        reader = LateReader()
    return SegmentTerms(*results.unbind(1))


def _compacted(active: Tensor) -> Tensor:
    """The active segments: in their places as far as possible, the last ones in those left free."""
    kept = torch.nonzero(active).squeeze(1)
    order = torch.arange(len(kept), device=active.device)
    order[~active[: len(kept)]] = kept[kept >= len(kept)]
    return order
