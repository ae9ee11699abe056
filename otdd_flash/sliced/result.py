"""What sliced distances return: means over draws, their errors and intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import DataNotice, warn

# Quantile of the normal distribution for an interval of 95%.
NORMAL_95 = 1.96
# Where so large a share of the draws carries so much of the sum, their mean is not near normal.
HEAVY_DRAWS, HEAVY_SHARE = 0.01, 0.5


class SlicedPair(NamedTuple):
    """The sliced distance between two of several datasets.

    Attributes:
        source: the name of the earlier dataset.
        target: the name of the later one.
        value: mean of W_2^2 over the draws.
        standard_error: s / sqrt(L), s the deviation over draws.
        lower: value - 1.96 standard errors; None where few draws carry most of the sum.
        upper: value + 1.96 standard errors, or None.
        root: the square root of the value.
        root_lower: that of the interval's lower end, 0 below 0.
        root_upper: that of the upper end.
    """

    source: str
    target: str
    value: float
    standard_error: float
    lower: float | None
    upper: float | None
    root: float
    root_lower: float | None
    root_upper: float | None


@dataclass(frozen=True, eq=False)
class SlicedResult:
    """Sliced distances between K datasets, each with each, all over the same L draws.

    Attributes:
        values: (K, K) float64, means of W_2^2 over the draws; symmetric, 0 on the diagonal.
        standard_errors: (K, K) s / sqrt(L), s the deviation over draws.
        lower: (K, K) lower ends of 95% intervals; NaN where a pair has none.
        upper: (K, K) upper ends.
        names: the datasets, in the order of rows and columns.
        projections: L.
        seed: of the draws.
    """

    values: Tensor
    standard_errors: Tensor
    lower: Tensor
    upper: Tensor
    names: tuple[str, ...]
    projections: int
    seed: int

    @classmethod
    def of_draws(cls, draws: Tensor, names: Sequence[str], seed: int) -> SlicedResult:
        """From W_2^2 of every pair along every draw, (K (K - 1) / 2, L).

        Warns:
            DataNotice: few draws carry most of a mean, which then has no interval.
        """
        count = draws.shape[1]
        means, errors = draws.mean(1), draws.std(1) / math.sqrt(count)
        reach = torch.where(heavy(draws), math.nan, NORMAL_95 * errors)
        values, spread, lower, upper = (
            _symmetric(part, len(names)) for part in (means, errors, means - reach, means + reach)
        )
        result = cls(values, spread, lower, upper, tuple(names), count, seed)
        result._warn_heavy()
        return result

    @property
    def roots(self) -> Tensor:
        """(K, K) square roots of the values, in the units of the features."""
        return self.values.sqrt()

    def pairs(self) -> tuple[SlicedPair, ...]:
        """One row for every pair of different datasets, the nearest first."""
        rows = [self._pair(i, j) for i, j in combinations(range(len(self.names)), 2)]
        return tuple(sorted(rows, key=lambda row: row.value))

    def _pair(self, i: int, j: int) -> SlicedPair:
        value, error, *ends = (
            float(table[i, j])
            for table in (self.values, self.standard_errors, self.lower, self.upper)
        )
        lower, upper = (None if math.isnan(end) else end for end in ends)
        roots = (None if end is None else math.sqrt(max(end, 0.0)) for end in (lower, upper))
        names = self.names[i], self.names[j]
        return SlicedPair(*names, value, error, lower, upper, math.sqrt(value), *roots)

    def _warn_heavy(self) -> None:
        found = self.lower.isnan().triu().nonzero().tolist()
        if not found:
            return
        i, j = found[0]
        more = f" and {len(found) - 1} more pairs" if len(found) > 1 else ""
        warn(
            f"the largest {HEAVY_DRAWS:.0%} of draws carry more than half of the sliced distance "
            f"between {self.names[i]} and {self.names[j]}{more}: its mean is no better known than "
            "those few, and no interval is given; standardize the features, such as with "
            "extractor.standardize=true",
            DataNotice,
        )


def heavy(draws: Tensor) -> Tensor:
    """Whether the largest draws carry most of the sum, (P,) bool of draws (P, L)."""
    largest = draws.topk(math.ceil(HEAVY_DRAWS * draws.shape[1]), 1).values.sum(1)
    return largest > HEAVY_SHARE * draws.sum(1)


def _symmetric(values: Tensor, count: int) -> Tensor:
    """(K, K) with values of the pairs above and below a diagonal of 0."""
    table = torch.zeros(count, count, dtype=torch.float64)
    rows, columns = torch.triu_indices(count, count, 1)
    table[rows, columns] = table[columns, rows] = values
    return table
