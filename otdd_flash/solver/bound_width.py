"""Solve until the bounds of a divergence are narrow enough, rather than to a given marginal error.

The bounds of the cross term are about as wide as its marginal error times the costs, those of a
self term narrower still, but the value they are compared with is known only once all terms are. So
the terms are solved coarsely first; then those that make the interval wide go on from where they
are, at a marginal error lowered by the factor that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from otdd_flash.solver.term.result import StoppedBy, TransportTerm
from otdd_flash.solver.term_solves import TermSolves

FIRST_TOLERANCE = 0.1

# What a term adds to the width is left alone below this share of what is allowed. Two such self
# terms and a cross term at the rest make up all of it.
NEGLIGIBLE = 0.1

# How much of the allowance the next tolerance aims at, and by what it falls at the least and most:
# the first values are rough.
AIM = 0.8
LEAST_FALL, MOST_FALL = 0.5, 0.01

# The share of its own width that a term adds to that of the divergence.
SHARES = {"xy": 1.0, "xx": 0.5, "yy": 0.5}


def solve_to_width(
    solves: TermSolves,
    names: Sequence[str],
    bound_width: float,
    max_iterations: int,
    offset: float = 0.0,
) -> None:
    """Bring the terms to where their interval is `bound_width` times the value, or stop.

    All terms then say what stopped the solve, and whether the width was reached.

    Args:
        solves: the terms, of which self terms may be known.
        names: the terms of the value, in the order of their turns.
        bound_width: (upper - lower) / |value| of the divergence.
        max_iterations: of a term, after which it does not go on.
        offset: what its value is raised by.
    """
    asked = {name: FIRST_TOLERANCE for name in names if name not in solves.terms}
    solves.solve(asked)
    while True:
        terms = {name: solves.terms[name] for name in names}
        wide, factor = _too_wide(terms, bound_width, offset)
        able = [name for name in wide if terms[name].marginal_error <= asked.get(name, math.inf)]
        reason = _reason(wide, able, solves, max_iterations)
        if reason is not None:
            reached = reason == "bound_width"
            for name, term in terms.items():
                solves.terms[name] = replace(
                    term, converged=reached, stopped_by=reason, tolerance=None
                )
            return
        following = {name: terms[name].marginal_error * factor for name in able}
        solves.solve(following)
        asked |= following


def relative_width(value: float, bounds: tuple[float, float]) -> float:
    """(upper - lower) / |value|."""
    width = bounds[1] - bounds[0]
    if width == 0:
        return 0.0
    return width / abs(value) if value else math.inf


def _too_wide(
    terms: Mapping[str, TransportTerm], target: float, offset: float
) -> tuple[list[str], float]:
    """The terms to go on with, none at the end, and the factor for their marginal errors."""
    parts = {name: SHARES[name] * (term.bounds[1] - term.bounds[0]) for name, term in terms.items()}
    signed = (term.value if name == "xy" else -term.value / 2 for name, term in terms.items())
    allowed, total = target * abs(sum(signed) + offset), sum(parts.values())
    if total <= allowed:
        return [], 1.0
    factor = min(max(AIM * allowed / total, MOST_FALL), LEAST_FALL)
    return [name for name, part in parts.items() if part > NEGLIGIBLE * allowed], factor


def _reason(
    wide: Sequence[str], able: Sequence[str], solves: TermSolves, most: int
) -> StoppedBy | None:
    """What ends the solve, if anything does.

    A term that did not stop for its budget, and yet is above the marginal error it was asked for,
    is at its rounding floor.
    """
    if not wide:
        return "bound_width"
    late = [term for name in wide if not (term := solves.terms[name]).converged]
    if late:
        return late[-1].stopped_by
    if not able:
        return "rounding"
    return "max_iterations" if any(solves.iterations[name] >= most for name in able) else None
