"""The result of sliced distances: means over draws, their standard errors and intervals.

A draw is a random projection, with random orders l of the moments of classes (`sliced.distances`).
W_2^2 has a heavy tail over draws, the heavier the larger the features are: a moment of order l
contributes the power 2 l of a projection. Means of L draws are skewed, and symmetric intervals that
miss lie below the mean. With the tail excess of the draws (`tail_excess`) the interval is

    [mean - q se, mean exp((q se / mean) (1 + 6 excess))],

with q Student's quantile of L - 1 degrees of freedom and se the deviation over draws over sqrt(L).
Heavy draws are no reason to withhold an interval: samples that lack such draws look harmless, and
their intervals, the ones that miss, would remain. An interval is missing only below LEAST_DRAWS
draws, or if its upper end is not finite.

The mean of numbers with a heavy tail lies above most of the means of samples: a sample that lacks
the rare large numbers has a mean that is too low and a spread that is too small. Intervals of means
therefore miss on one side. How far the upper end must reach follows from the tail index gamma of
P(X > x) ~ x^(-1/gamma), for gamma of 1/2 and more X has no finite variance. It is estimated from
the k = sqrt(n) largest of n numbers (Hill 1975, A simple general approach to inference about the
tail of a distribution),

    gamma = mean of log x_(1..k) - log x_(k+1),    standard error gamma / sqrt(k),

and one standard error is added, since small samples seldom show their tail. How the excess
lengthens an interval was fitted by simulation (`experiments.interval_coverage`); a change of the
estimate invalidates that fit.

`sliced.distances` and `study.measures.distances` build `SlicedResult`, and `report.pairwise` draws
it; `sampling.subsampling` and `study.measures.distances` call `rows_excess`. The keys of `to_dict`
are those of files that users write, so they must stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch
from scipy.stats import t
from torch import Tensor

from otdd_flash.cost.points import extent, squared_distances
from otdd_flash.errors import DataNotice, warn
from otdd_flash.files.atomic import json_content
from otdd_flash.raw_labels import frame_of
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import listing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

MATRICES = ("values", "standard_errors", "lower", "upper")
LEVEL = 0.95
# From simulations: the fewest draws for an interval, and the factor by which an excess lengthens
# the interval above the mean.
LEAST_DRAWS, LONGER = 30, 6.0
# If the HEAVY_DRAWS largest share of the draws carries more than HEAVY_SHARE of the sum, the
# interval is of little use.
HEAVY_DRAWS, HEAVY_SHARE = 0.01, 0.5


class SlicedPair(NamedTuple):
    """The sliced distance between two of several datasets.

    Attributes:
        source: the name of the earlier dataset.
        target: the name of the later one.
        value: mean of W_2^2 over the draws.
        standard_error: s / sqrt(L), with s the deviation over draws.
        lower: lower end of a 95% interval for the mean over all possible draws; None below 30 draws
            or without a finite upper end.
        upper: its upper end, farther from the value the heavier the tail of the draws, or None.
        root: the square root of the value.
        root_lower: the square root of the lower end, 0 if that is negative.
        root_upper: the square root of the upper end.
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
        standard_errors: (K, K) standard errors of the values, s / sqrt(L), with s the standard
            deviation over draws.
        lower: (K, K) lower ends of 95% intervals for means over all possible draws, which may be
            below 0; NaN below 30 draws, or if the upper end is not finite.
        upper: (K, K) upper ends.
        names: the datasets, in the order of rows and columns.
        projections: L, the number of draws, each a random map of labelled samples to numbers.
        seed: seed of the draws.
    """

    values: Tensor
    standard_errors: Tensor
    lower: Tensor
    upper: Tensor
    names: tuple[str, ...]
    projections: int
    seed: int

    def __repr__(self) -> str:
        """Return the number of datasets and of draws; `pairs()` lists distances."""
        return (
            f"SlicedResult({len(self.names)} datasets: {listing(self.names, 12)}; "
            f"{self.projections:,} draws)"
        )

    @classmethod
    def of_draws(cls, draws: Tensor, names: Sequence[str], seed: int) -> SlicedResult:
        """Build the result from W_2^2 of every pair and draw, (K (K - 1) / 2, L).

        Warns:
            DataNotice: there are too few draws for intervals, or few of them carry most of a mean.
        """
        count = draws.shape[1]
        means, errors = draws.mean(1), draws.std(1) / math.sqrt(count)
        lower, upper = intervals(draws)
        of_little_use = (heavy(draws) | upper.isnan()).double()
        values, spread, lower, upper, wide = (
            _symmetric(part, len(names)) for part in (means, errors, lower, upper, of_little_use)
        )
        result = cls(values, spread, lower, upper, tuple(names), count, seed)
        result._warn(wide)
        return result

    @property
    def roots(self) -> Tensor:
        """Square roots (K, K) of the values, in the units of the features."""
        return self.values.sqrt()

    def pairs(self) -> tuple[SlicedPair, ...]:
        """Return one row for every pair of different datasets, the nearest first."""
        rows = [self._pair(i, j) for i, j in combinations(range(len(self.names)), 2)]
        return tuple(sorted(rows, key=lambda row: row.value))

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON's own types, matrices as lists of rows.

        Missing ends of intervals are None.
        """
        return json_content(
            {
                "datasets": self.names,
                **{key: getattr(self, key) for key in MATRICES},
                "projections": self.projections,
                "seed": self.seed,
            }
        )

    def to_frame(self) -> DataFrame:
        """Return a pandas table of one row a pair of different datasets, the nearest first.

        The columns are those of `pairs()`: `source` and `target`; `value`, `standard_error`,
        `lower` and `upper` in squared units of the features, and the roots `root`, `root_lower` and
        `root_upper` in units of the features. Ends of intervals that do not exist are missing
        values.
        """
        return frame_of(self.pairs(), get_type_hints(SlicedPair))

    def plot(self, order: str = "given") -> Figure:
        """Draw the means over all draws as a table of colours, with the largest error in the title.

        Arguments and errors are those of `PairwiseResult.plot`.
        """
        from otdd_flash.report.pairwise import plot_sliced_distances

        return plot_sliced_distances(self, order)

    def _pair(self, i: int, j: int) -> SlicedPair:
        value, error, *ends = (float(getattr(self, key)[i, j]) for key in MATRICES)
        lower, upper = (None if math.isnan(end) else end for end in ends)
        roots = (None if end is None else math.sqrt(max(end, 0.0)) for end in (lower, upper))
        names = self.names[i], self.names[j]
        return SlicedPair(*names, value, error, lower, upper, math.sqrt(value), *roots)

    def _warn(self, wide: Tensor) -> None:
        """Report why there are no intervals, or why those of some pairs (K, K) are wide."""
        if self.projections < LEAST_DRAWS:
            message = (
                f"{self.projections} draws are too few for intervals of sliced distances, which "
                f"need at least {LEAST_DRAWS}"
            )
            warn(message, DataNotice)
            return
        found = wide.triu().nonzero().tolist()
        if not found:
            return
        i, j = found[0]
        more = f" and {len(found) - 1} more pairs" if len(found) > 1 else ""
        warn(
            f"the largest {HEAVY_DRAWS:.0%} of draws carry more than half of the sliced distance "
            f"between {self.names[i]} and {self.names[j]}{more}: its mean is hardly known, and the "
            "interval is as wide as that, or not given where it has no end; standardize the "
            "features, such as with extractor.standardize=true (in Python "
            "otdd.extractors.standardize)",
            DataNotice,
        )


def intervals(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ends (P,) of 95% intervals for means over all possible draws, or NaN.

    Args:
        draws: (P, L) values of P pairs in L draws.
    """
    count = draws.shape[1]
    means = draws.mean(1)
    if count < LEAST_DRAWS:
        return torch.full_like(means, math.nan), torch.full_like(means, math.nan)
    reach = float(t.ppf((1 + LEVEL) / 2, count - 1)) * draws.std(1) / math.sqrt(count)
    ratios = reach / means * (1 + LONGER * tail_excess(draws))
    # All draws between a dataset and itself are 0.
    upper = torch.where(means > 0, means * ratios.exp(), means)
    lower, upper = (end.where(upper.isfinite(), math.nan) for end in (means - reach, upper))
    return lower, upper


def heavy(draws: Tensor) -> Tensor:
    """Return whether the largest draws carry most of the sum, (P,) bool of draws (P, L)."""
    largest = draws.topk(math.ceil(HEAVY_DRAWS * draws.shape[1]), 1).values.sum(1)
    return largest > HEAVY_SHARE * draws.sum(1)


def _symmetric(values: Tensor, count: int) -> Tensor:
    """Fill a symmetric (K, K) table with values of the pairs and a diagonal of 0."""
    table = torch.zeros(count, count, dtype=torch.float64)
    rows, columns = torch.triu_indices(count, count, 1)
    table[rows, columns] = table[columns, rows] = values
    return table


# Lighter tails do no harm; the squared lengths of Gaussian vectors reach this index.
LIGHT = 0.3


def tail_excess(numbers: Tensor) -> Tensor:
    """Return by how much tail indices exceed a light one, (...) of numbers (..., n), n >= 3.

    It is 0 if all numbers are 0, and infinite if all but a few are 0.

    Args:
        numbers: not negative.
    """
    largest = max(2, round(math.sqrt(numbers.shape[-1])))
    logs = numbers.topk(largest + 1, -1).values.log()
    # Each of the k largest minus number k + 1, the one that follows them.
    # The log difference of two zeros counts as 0, like that of any equal numbers.
    apart = (logs[..., :largest] - logs[..., largest:]).nan_to_num(0, posinf=math.inf)
    return (apart.mean(-1) * (1 + 1 / math.sqrt(largest)) - LIGHT).clamp_min(0)


def rows_excess(*datasets: LabeledSamples) -> float:
    """Return the largest `tail_excess` of squared distances of rows from their dataset's mean."""
    found = []
    for samples in datasets:
        points, masses = samples.features, samples.masses
        lengths = squared_distances(points, extent(points, masses).mean.double())
        found.append(float(tail_excess(len(samples) * masses * lengths)))
    return max(found)
