"""The ordered pairs of K tasks: what a measure says of each, and what was gained.

Measures are oriented before they come here: the larger, the more gain they predict. And numbers
that are equal up to rounding are equal here, so that ranks, choices and constants need no
tolerance of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Of the largest number of a table, or of what rounding is relative to.
ROUNDING = 1e-12


def levelled(
    numbers: Numbers,
    *,
    unit: float = 0.0,
    lower: Numbers | None = None,
    upper: Numbers | None = None,
) -> Numbers:
    """Replace numbers that rounding cannot distinguish by one of them.

    Two numbers are tied if their intervals overlap, and ties are transitive. An interval is the
    number with its rounding, `ROUNDING` times the largest size of all, and its bounds if it has
    any. This is the only place that decides what is tied.

    Args:
        numbers: any shape; what is not finite stays as it is.
        unit: rounding is relative to at least this size.
        lower: lower solver bounds, NaN where there is none.
        upper: upper ones.
    """
    finite = np.isfinite(numbers)
    if not finite.any():
        return numbers
    known = numbers[finite]
    half = ROUNDING * max(unit, float(np.abs(known).max())) / 2
    low = np.fmin(known - half, np.inf if lower is None else lower[finite])
    high = np.fmax(known + half, -np.inf if upper is None else upper[finite])
    order = np.argsort(low, kind="stable")
    reach = np.maximum.accumulate(high[order])
    group = np.concatenate(([0], np.cumsum(low[order][1:] > reach[:-1])))
    ordered = known[order]
    # The least of every group stands for it; members are numbers that were there.
    least = np.minimum.reduceat(ordered, np.flatnonzero(np.diff(group, prepend=-1)))
    found = numbers.astype(np.float64)
    level = np.empty_like(known)
    level[order] = least[group]
    found[finite] = level
    return found


@dataclass(frozen=True, eq=False)
class PairTable:
    """A measure and gains over all ordered pairs, rows sources and columns targets.

    Args:
        measure: (K, K), the larger the more gain it predicts; NaN where there is no number.
        gains: (K, K), NaN where nothing was gained or the pair has no part.
        families: (K,) the unit to which every task belongs.
    """

    measure: Numbers
    gains: Numbers
    families: Sequence[str]

    def __post_init__(self) -> None:
        for name in ("measure", "gains"):
            object.__setattr__(self, name, levelled(getattr(self, name)))

    @cached_property
    def present(self) -> Mask:
        """(K, K) the pairs of different tasks with both numbers."""
        off_diagonal = ~np.eye(len(self.gains), dtype=bool)
        return np.isfinite(self.measure) & np.isfinite(self.gains) & off_diagonal

    @cached_property
    def saturated(self) -> bool:
        """Whether the measure is the same for all sources of every target: it chooses none."""
        high = np.where(self.present, self.measure, -np.inf).max(0)
        low = np.where(self.present, self.measure, np.inf).min(0)
        return bool((self.present.sum(0) >= 2).any()) and not (high > low).any()

    @property
    def count(self) -> int:
        return int(self.present.sum())

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The different families of tasks that have a pair, in their order."""
        used = self.present.any(0) | self.present.any(1)
        return tuple(dict.fromkeys(np.asarray(self.families, dtype=object)[used]))

    def without_each_unit(self) -> Mask:
        """(G, K, K) the pairs that are left without each of the units."""
        families = np.asarray(self.families, dtype=object)
        kept = families[None] != np.asarray(self.units, dtype=object)[:, None]
        left: Mask = self.present & kept[:, :, None] & kept[:, None, :]
        return left
