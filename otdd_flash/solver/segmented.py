"""Solve many transport problems side by side, each until it is done.

A `Rule` says what one iteration is and when a segment is done; this file runs it, keeps what every
segment has proved when it finished, and goes on with those that are left. Whether a segment is done
is decided on the device; the host reads their number late, and then leaves out the others.

Rounding. A pass sums the exponentials of some perturbed cost, C^, up to a relative error of rho:
`operators.segments.PassErrors` says how far both are off at most, and each kind of segments derives
it. For a cross term let f~ be the potentials of rows as computed and stored, f = T(g) the exact
ones, P the plan of f and g for the cost itself, whose rows are exact, and P~ what the columns' pass
has summed, c~. Both passes enter, as each has errors of its own:

    P~_ij / P_ij = e^((f~_i - f_i + C_ij - C^_ij) / epsilon) (1 + rho),
    e^((f~_i - f_i) / epsilon) = (1 + rho) e^(stored error / epsilon) / M_i,
    M_i = sum_j P_ij / a_i e^((C - C^)_ij / epsilon),    C^ of the rows' pass.

operation                              bound                         enters as
costs of the rows' pass                mean, largest                 f~ - f, and so c~; <a, f~>
sums of the rows' pass                 sums                          f~ - f, and so c~; <a, f~>
f as stored                            stored |f_i|                  f~ - f, and so c~; <a, f~>
costs of the columns' pass             mean, largest                 c~, the mass
sums of the columns' pass              sums                          c~, the mass
float64: exponents, logarithms         TRIFLE (m + R)                f~ - f, c~, the mass
float64: <a, f>, <b, g>, offset        VALUE_TRIFLE (m + R +         the value
                                         |offset| + epsilon)
float64: sums of c~                    sums                          c~, the mass

Let theta be the sum of all largest ones over epsilon: with |e^x - 1| <= |x| e^|x| twice,

    sum_ij |P~_ij - P_ij| <= growth sum_ij P_ij theta_ij,      growth = e^(theta + theta e^theta),

because e^-theta <= 1 / mean e^x <= mean e^-x. That is the floor: what is between the marginal error
that was measured and the true one. The mean over P needs its marginals, of which the columns' are
off by the measured error and the floor; so `mean` counts 1 + t peak times, t at most 2, and never
more than `largest`. A self term has one pass and divides by its mass, which doubles what its sums
are off: the same floor, without what is stored.

Value. What is computed is a dual value for C^, and OT(C^) <= OT(C) + <P*, C^ - C>: the lower bound
moves by `mean`, by epsilon sums times the mass, and by the trifles. In the upper bound, <a, f> +
<b, g> + ||c - b||_1 (osc g + R) / 2 with R that of the cost itself, T is concave in the cost: <a,
f>
<= <a, f~> + <P^, C - C^> + epsilon sums + <a, |f~|> stored, for P^ of the rows' pass. A self term
shifts by epsilon log of its mass, concave too. So both ends move by `value_rounding`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.operators.segments import Segments
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.late_reader import LateReader

# What float64 loses, relative to the largest of what a number is made of. Of exponents: 32
# roundings of 2^-53 in two passes. Of dual values, sums over up to 2^22 points, in blocks of 256
# and their lanes one after the other or sixteen at a time: at most 2^15 roundings.
TRIFLE, VALUE_TRIFLE = 2.0**-48, 2.0**-38

# The L1 distance of two masses, at the most.
MOST_ERROR = 2.0

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


class Rounding(NamedTuple):
    """What rounding may have done to a look, (S,) each.

    Attributes:
        floor: to the marginal error.
        value: to the value and the bounds that follow from it.
    """

    floor: Tensor
    value: Tensor


class Plan(NamedTuple):
    """What rounding depends on, (S,) each.

    Attributes:
        stored: <a, |f|> of potentials that a pass has made and rounded; 0 without any.
        size: <a, |f|> + <b, |g|>.
        off: marginal error as measured.
    """

    stored: Tensor
    size: Tensor
    off: Tensor


def rounding_of(segments: Segments, plan: Plan, epsilon: Tensor | float) -> Rounding:
    """Worst cases, as derived above."""
    errors, spread = segments.errors, segments.cost_spread
    trifles = TRIFLE * (plan.size + spread)
    whole = VALUE_TRIFLE * (plan.size + spread + segments.offset.abs() + epsilon)
    stored = errors.stored * plan.stored
    # The largest |f| is that of the mean and of the spread of the cost.
    most_stored = stored + errors.stored * spread
    theta = (2 * errors.largest + most_stored + trifles) / epsilon + 2 * errors.sums
    growth = (theta + theta * theta.exp()).exp()
    off = (plan.off + 2 * growth * theta).clamp_max(MOST_ERROR)
    mean = torch.minimum(errors.mean * (1 + off * errors.peak), errors.largest)
    floor = growth * ((2 * mean + stored + trifles) / epsilon + 2 * errors.sums)
    sums = epsilon * errors.sums * (1 + plan.off)
    return Rounding(floor, mean + stored + sums + errors.offset + whole)


def rounding_noise(segments: Segments, size: Tensor, epsilon: Tensor | float) -> Tensor:
    """The size of marginal errors that rounding makes as a rule (S,).

    Quasi-Newton steps are judged by it. Nothing that is reported rests on it.
    """
    unit, unit_of_sums = (
        torch.finfo(dtype).eps / 2 for dtype in (segments.dtype, segments.sum_dtype)
    )
    return unit * (size + 2 * segments.mean_cost) / epsilon + 4 * unit_of_sums


def _compacted(active: Tensor) -> Tensor:
    """The active segments: in their places as far as possible, the last ones in those left free."""
    kept = torch.nonzero(active).squeeze(1)
    order = torch.arange(len(kept), device=active.device)
    order[~active[: len(kept)]] = kept[kept >= len(kept)]
    return order
