"""How results show themselves where a session prints them: a line of numbers, no tensors."""

from __future__ import annotations

import math
import sys
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal


def interval(value: float, lower: float, upper: float) -> str:
    """`value [lower, upper]` with as many digits as the bounds support.

    The bounds are rounded outwards, so the printed interval still holds the true distance.
    """
    if not all(math.isfinite(number) for number in (value, lower, upper)):
        return f"{value:.6g} [{lower:.6g}, {upper:.6g}]"
    size = max(abs(value), abs(lower), abs(upper))
    leading = math.floor(math.log10(size)) if size > 0 else 0
    last = leading - 5
    if upper > lower:
        # Two digits of the width, but at least three and at most nine digits of the number.
        width = min(upper - lower, sys.float_info.max)
        last = min(max(math.floor(math.log10(width)) - 1, leading - 8), leading - 2)
    plain = -5 < leading < 9
    digit = Decimal(1).scaleb(min(last, 0) if plain else last)
    roundings = (ROUND_HALF_EVEN, ROUND_FLOOR, ROUND_CEILING)
    texts = []
    for number, rounding in zip((value, lower, upper), roundings, strict=True):
        # Through the shortest text of the float: rounding 1.4 outwards must not give 1.39.
        rounded = Decimal(repr(float(number))).quantize(digit, rounding)
        texts.append("0" if rounded == 0 else f"{rounded:{'f' if plain else 'e'}}")
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def convergence_text(converged: bool) -> str:
    """Whether a solve reached what its options ask for."""
    return "converged" if converged else "not converged"
