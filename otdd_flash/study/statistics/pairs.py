"""The ordered pairs of K tasks: what a measure says of each, and what was gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PairTable:
    """A measure and gains over all ordered pairs, rows sources and columns targets.

    Args:
        measure: (K, K), NaN where the measure has no number.
        gains: (K, K), NaN where nothing was gained or the pair has no part.
        families: (K,) the unit to which every task belongs.
        nearer: the sign of a change of the measure for the better, -1 of a distance.
    """

    measure: Numbers
    gains: Numbers
    families: Sequence[str]
    nearer: int

    @cached_property
    def present(self) -> Mask:
        """(K, K) the pairs of different tasks with both numbers."""
        off_diagonal = ~np.eye(len(self.gains), dtype=bool)
        return np.isfinite(self.measure) & np.isfinite(self.gains) & off_diagonal

    @property
    def count(self) -> int:
        """The number of pairs that are present."""
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
