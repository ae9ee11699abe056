"""The evidence of an evaluation as part of a kernel: of one problem, or of a block of them.

The formulas are those of `engine.evidence.evaluated`, derived in `dual`, `oscillation`, `scale` and
`two_passes`. An evaluation has the numbers of `engine.segments.Evaluation`, costs are described by
`COSTS` numbers: mean, spread, offset, and `engine.segments.PassErrors`.
"""

from __future__ import annotations

import triton
import triton.language as tl

COSTS = 12


@triton.jit
def evaluate(
    p_rows,  # (2,) float64
    p_columns,  # (NUMBERS,) float64
    p_costs,  # (COSTS,) float64
    epsilon,
    unit,  # unit roundoff of potentials
    unit_of_sums,
    SELF: tl.constexpr,
    VALUE_TRIFLE: tl.constexpr,
    MOST_ERROR: tl.constexpr,
    LEAST_MASS: tl.constexpr,
    MOST_MASS: tl.constexpr,
):
    """Dual, gain, noise, floor, reach, value, lower, upper and error, as in `Evidence`."""
    paid, size, mass = tl.load(p_columns), tl.load(p_columns + 1), tl.load(p_columns + 5)
    swing, off = tl.load(p_columns + 3) - tl.load(p_columns + 2), tl.load(p_columns + 4)
    gain, offset = tl.load(p_columns + 8), tl.load(p_costs + 2)
    mean_cost, spread = tl.load(p_costs), tl.load(p_costs + 1)
    if SELF:
        shift = epsilon * tl.log(tl.minimum(tl.maximum(mass, LEAST_MASS), MOST_MASS))
        dual = tl.where(mass <= MOST_MASS, 2 * paid - shift, -float("inf"))
        gain, off = gain + shift, off + tl.abs(mass - 1)
        highest, moves = tl.where(dual == -float("inf"), float("inf"), dual), 2
        stored, size = 0.0, 2 * size
        shifted_size = size + tl.abs(shift)
    else:
        exact, stored = tl.load(p_rows) + paid, tl.load(p_rows + 1)
        dual, gain = exact + epsilon * (1 - mass), gain + epsilon * (mass - 1)
        highest, size, moves = tl.maximum(exact, dual), stored + size, 1
        shifted_size = size
    noise = unit * (size + 2 * mean_cost) / epsilon + 4 * unit_of_sums

    # As in `two_passes`.
    largest, peak, sums = tl.load(p_costs + 4), tl.load(p_costs + 5), tl.load(p_costs + 6)
    kept, trifles = tl.load(p_costs + 7) * stored, tl.load(p_costs + 11) * (shifted_size + spread)
    whole = VALUE_TRIFLE * (shifted_size + spread + tl.abs(offset) + epsilon)
    theta = (2 * largest + kept + tl.load(p_costs + 7) * spread + trifles) / epsilon + 2 * sums
    growth = tl.exp(theta + theta * tl.exp(theta))
    most = tl.minimum(off + 2 * growth * theta, MOST_ERROR)
    mean = tl.minimum(tl.load(p_costs + 3) * (1 + most * peak), largest)
    others = kept + tl.load(p_costs + 9) * shifted_size + trifles
    floor = growth * ((2 * mean + others) / epsilon + 2 * sums)
    reach = floor + tl.load(p_costs + 10) / epsilon
    of_sums = epsilon * sums * (1 + sums) * (1 + off)
    rounding = mean + kept + of_sums + tl.load(p_costs + 8) + whole

    error, value = tl.minimum(off + floor, MOST_ERROR), dual + offset
    upper = highest + offset + moves * error * ((swing + spread) / 2) + rounding
    return dual, gain, noise, floor, reach, value, value - rounding, upper, error
