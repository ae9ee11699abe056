"""The upper bound by oscillation: how far OT is above a dual value whose plan misses its marginals.

A plan P of potentials f, g is optimal between its own marginals r, c. OT is convex in the
marginals, with optimal potentials f*, g* of the problem as subgradients, so that

    OT <= D + <f* - f, a - r> + <g* - g, b - c>.

With r = a, and as g* is a softmin of costs, whose oscillation max - min is at most R,

    OT <= D + ||c - b||_1 (osc g* + osc g) / 2,    osc g* <= R = max C - min C.

A self term moves both marginals by the same, which doubles the last term. The bound is the lesser
one where epsilon is above the costs or nearly all mass is missing; else it is `primal`.

Shapes are () or (S,), and (n,), (m,) for potentials and sums; units those of the cost, or of mass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts, Number
from otdd_flash.engine.numbers import Numbers, clamp
from otdd_flash.operators.base import Marginals

# The L1 distance of two masses, at the most.
MOST_ERROR = 2.0


def swings(potentials: Tensor, absent: Tensor, *sides: slice) -> list[Tensor]:
    """Return max - min, () each, of each side's potentials (k,) over the points that carry mass."""
    lowest, highest = (potentials.masked_fill(absent, end) for end in (torch.inf, -torch.inf))
    return [highest[..., side].amax(-1) - lowest[..., side].amin(-1) for side in sides]


def perturbed_spread(costs: CostFacts, sums: Marginals, largest: Number) -> Number:
    """R of the perturbed costs, whose errors are at most `largest` () and a share of themselves."""
    return costs.spread + 2 * (largest + sums.cost_rounding * costs.largest)


def bound(dual: Number, error: Number, osc: Number, spread: Number) -> Number:
    """Return D + ||c - b||_1 (osc g + R) / 2, with R in `spread`."""
    return dual + error * ((osc + spread) / 2)


def self_bound(dual: Number, error: Number, osc: Number, spread: Number) -> Number:
    """Return D + ||r - a||_1 (osc f + R), of a plan of mass 1."""
    return bound(dual, 2 * error, osc, spread)


def slack(relative: float, osc: Number, spread: Number) -> Number:
    """What to add to the bounds if every sum is off by this share; `osc` is osc f + osc g."""
    return 2 * relative * (osc + 2 * spread)


def distance(one: Tensor, other: Tensor) -> Tensor:
    """||x - y||_1 (), over points."""
    apart: Tensor = torch.linalg.vector_norm(one - other, 1, dim=-1)
    return apart


def updated_gap(sums: Tensor, updated: Tensor, total: Tensor) -> Tensor:
    """Bound on ||P^T s - b||_1 of a plan P with sums (r, c) (n + m,) whose rows are scaled by s.

    With (s r, b) in `updated` it is, for any number t () in `total`,

        ||(r, c) / t - (s r, b)||_1 = sum_i r_i |s_i - 1 / t| + ||c / t - b||_1.
    """
    return distance(sums / total[..., None], updated)


def gap_at_mass_one(gap: Numbers, mass: Numbers) -> Numbers:
    """Bound on ||r / t - a||_1 of a plan with row sums r and mass t: ||r - a||_1 + |t - 1|."""
    return gap + abs(mass - 1)


def total_error(gap: Numbers, floor: Numbers) -> Numbers:
    """Bound on a marginal error: what was measured, and what rounding may hide."""
    return clamp(gap + floor, most=MOST_ERROR)
