"""Sliced dataset distances between all pairs of several labelled datasets (s-OTDD).

    s-OTDD^2 = mean over draws of W_2^2(numbers of one dataset, numbers of the other)

after Nguyen et al. 2025, "Lightspeed geometric dataset distance via sliced optimal transport". A
draw maps every sample to a number; every dataset is projected and sorted once per draw
(`Projected`), and of a pair the sorted numbers are subtracted (`squared_wasserstein`), of unequal
masses or sizes after a merge of both.

`sliced_distances` is public; `study.measures.distances` calls `prepare`, `chunks_of`, `draws_in`,
`draw_chunk` and `chunk_distances` to measure chunk by chunk; `gromov.bounds` calls `equal_steps`
and `weighted_steps`. Everything is float64. A change must keep draw k of a seed the same however
many draws there are, also if its chunk is computed alone: a study stores chunks and resumes from
them (`tests/sliced/test_sliced_distances.py`). MOMENTS, DRAWS_PER_CHUNK and the order of the random
calls in `draw_chunk` decide every draw; WORK_BYTES, BUFFERS and ROWS_AT_ONCE decide memory and
speed, and of the result only its rounding.

W_2^2 has a heavy tail over draws, the heavier the larger the features are: a moment of order l
contributes the power 2 l of a projection. Means of L draws are skewed, and symmetric intervals that
miss lie below the mean. With the tail excess of the draws (`tail_excess`) the interval is

    [mean - q se, mean exp((q se / mean) (1 + 6 excess))],

with q Student's quantile of L - 1 degrees of freedom and se the deviation over draws over sqrt(L).
Intervals must not be withheld because some draws are heavy: those that miss come from samples
without heavy draws, and would remain. An interval is missing only below LEAST_DRAWS draws, or if
its upper end is not finite.

The mean of numbers with a heavy tail lies above most of the means of samples: a sample that lacks
the rare large numbers has a mean that is too low and a spread that is too small. Intervals of means
therefore miss on one side. How far the upper end must reach follows from the tail index gamma of
P(X > x) ~ x^(-1/gamma), for gamma of 1/2 and more X has no finite variance. It is estimated from
the k = sqrt(n) largest of n numbers (Hill 1975, A simple general approach to inference about the
tail of a distribution),

    gamma = mean of log x_(1..k) - log x_(k+1),    standard error gamma / sqrt(k),

and one standard error is added, since small samples seldom show their tail. The excess is by how
much the sum exceeds LIGHT. How it lengthens an interval was fitted by simulation
(`experiments.interval_coverage`); a change of the estimate invalidates that fit.

`report.pairwise` draws a `SlicedResult`, which `study.measures.distances` builds too;
`sampling.subsampling` and `study.measures.distances` call `rows_excess`. The keys of `to_dict` are
those of files that users write, so they must stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import poisson, t
from torch import Tensor

from otdd_flash.arguments import DeviceName, Progress, Seed, takes
from otdd_flash.checks import integer
from otdd_flash.cost.points import extent, squared_distances
from otdd_flash.data.given import Samples
from otdd_flash.devices import resolve_device
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.files.atomic import json_content
from otdd_flash.labels.measuring import as_datasets
from otdd_flash.labels.pairs import symmetric_table
from otdd_flash.labels.table import distinct_names
from otdd_flash.raw_labels import frame_of
from otdd_flash.samples import (
    HOW_TO_SCALE,
    LabeledSamples,
    check_same_dimension,
    check_squares,
    needs_classes,
)
from otdd_flash.shown import listing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# Bytes in memory for the draws that are computed together.
WORK_BYTES = 2**29

# Arrays (draws, rows) of float64 counted for the projections and the sort of the largest dataset.
BUFFERS = 6


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as autocast, out.
@computes
@takes(projections=integer(at_least=2))
def sliced_distances(
    datasets: Sequence[Samples],
    *,
    projections: int = 10_000,
    seed: Seed = 0,
    device: DeviceName = "auto",
    progress: Progress | None = None,
) -> SlicedResult:
    """Compute the sliced distances between several labelled datasets, each with each.

    Args:
        datasets: K >= 2 labelled datasets of one dimension, as samples or as arrays (features,
            labels). Weights count; classes need not be the same.
        projections: L, the number of draws, each a random map of labelled samples to numbers, at
            least 2; confidence intervals need 30. Draw k is the same whatever L is.
        seed: seed of the draws.
        device: where to compute; everything is float64.
        progress: called as progress(draws done, their total).

    Raises:
        InputError: a dataset has no labels or several a row, dimensions differ, or powers of
            features overflow.

    Warns:
        DataNotice: there are too few draws for confidence intervals, or few draws carry most of a
            mean over draws.
    """
    given = as_datasets(datasets, at_least=2)
    for other in given[1:]:
        check_same_dimension(given[0], other)
    check_squares(*given)
    prepared = prepare(given, device)
    found: list[Tensor] = []
    for draws in draw_all(projections, given[0].dim, seed):
        found.append(chunk_distances(prepared, draws))
        if progress is not None:
            progress(sum(part.shape[1] for part in found), projections)
    return SlicedResult.of_draws(torch.cat(found, 1), distinct_names(given), seed)


def prepare(datasets: Sequence[LabeledSamples], device: str) -> list[Projected]:
    """Return the datasets on a device, ready for draws.

    Raises:
        InputError: there is no such device, or a dataset has no labels or several a row.
    """
    place = resolve_device(device)
    return [Projected(samples.to(place)) for samples in datasets]


def chunk_distances(datasets: Sequence[Projected], draws: Draws) -> Tensor:
    """Compute W_2^2 of all pairs along some draws, (K (K - 1) / 2, C) float64 on the CPU.

    Pairs are in the order of `itertools.combinations`. As many draws are computed together as
    `WORK_BYTES` allow.
    """
    sizes = [len(dataset) for dataset in datasets]
    held = 8 * (sum(sizes) + BUFFERS * max(sizes))
    at_once = max(1, WORK_BYTES // held)
    device = datasets[0].features.device
    parts = []
    for start in range(0, len(draws.orders), at_once):
        some = draws.part(start, start + at_once).to(device)
        numbers = [dataset.along(some) for dataset in datasets]
        pairs = [squared_wasserstein(x, y) for x, y in combinations(numbers, 2)]
        parts.append(torch.stack(pairs).cpu())
    return torch.cat(parts, 1)


# Rows that are cast to float64 together.
ROWS_AT_ONCE = 4096


class SortedNumbers(NamedTuple):
    """The numbers of a dataset along C draws.

    Attributes:
        values: (C, n) float64, each row ascending.
        masses: (C, n) float64, in the order of the values; None if all are equal.
    """

    values: Tensor
    masses: Tensor | None


class Projected:
    """A dataset prepared for draws: its rows of positive weight.

    Of each row it holds the share of the mass of its class.

    A draw maps row i to

        z_i = psi_0 theta.x_i + sum_{k=1..5} psi_k M_k(class of x_i)
        M_k(c) = weighted mean over class c of (theta.x)^l_k / l_k!

    Neither p^l nor l! is formed: powers are built up by p^l / l! = (p^(l - 1) / (l - 1)!) (p / l),
    up to the largest order drawn. The means of all classes of one order are a matrix product.

    Args:
        samples: labelled samples, on the device that computes.

    Raises:
        InputError: there are no labels, or several a row.
    """

    def __init__(self, samples: LabeledSamples) -> None:
        if samples.labels is None:
            raise needs_classes(samples)
        if samples.label_sets is not None:
            raise InputError(
                f"{samples.name} has several labels a row, and sliced distances are of one class a "
                "row; take dataset_distance or pairwise_distances"
            )
        masses = samples.masses
        # Rows without mass change no quantile function.
        if samples.weights is not None and not bool((masses > 0).all()):
            samples = samples.take((masses > 0).nonzero().squeeze(1))
            masses = samples.masses
        assert samples.labels is not None
        self.name, self.features, self.labels = samples.name, samples.features, samples.labels
        # Equal masses need no order, and their steps are the same for every draw.
        self.masses = None if bool((masses == masses[0]).all()) else masses
        weighted = samples.shares * masses.unsqueeze(1)
        # A class without rows would be divided by 0; no row uses its moments.
        self._shares = weighted / weighted.sum(0).clamp_min(torch.finfo(torch.float64).tiny)

    def __len__(self) -> int:
        return len(self.features)

    def along(self, draws: Draws) -> SortedNumbers:
        """Return the sorted numbers along some draws, on the same device.

        Raises:
            InputError: powers of the projections overflow float64.
        """
        projections = self._project(draws.directions)
        moments = self._moments(projections, draws.orders)
        by_class = (draws.weights[:, 1:, None] * moments).sum(1)
        # In place: arrays (C, n) fill the memory that WORK_BYTES allow.
        projections.mul_(draws.weights[:, :1]).add_(by_class[:, self.labels])
        if not bool(torch.isfinite(projections).all()):
            raise InputError(
                f"powers of the features of {self.name} overflow float64 in a sliced distance; "
                f"{HOW_TO_SCALE}"
            )
        values, order = projections.sort(1)
        return SortedNumbers(values, None if self.masses is None else self.masses[order])

    def _project(self, directions: Tensor) -> Tensor:
        """Return theta.x (C, n), float64."""
        found = directions.new_empty(len(directions), len(self))
        for start in range(0, len(self), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            found[:, rows] = directions @ self.features[rows].double().T
        return found

    def _moments(self, projections: Tensor, orders: Tensor) -> Tensor:
        """Return M_k of every class, (C, MOMENTS, V)."""
        count = self._shares.shape[1]
        moments = projections.new_zeros(*orders.shape, count)
        power = torch.ones_like(projections)
        for order in range(1, int(orders.max()) + 1):
            power.mul_(projections).div_(order)
            means = power @ self._shares
            moments += (orders == order).unsqueeze(2) * means.unsqueeze(1)
        return moments


# The parts of [0, 1] on which two quantile functions are both constant: for each part the index
# among the n sorted numbers, (S,) or (C, S), that among the m, and its length, summing to 1.
Steps = tuple[Tensor, Tensor, Tensor]


def squared_wasserstein(x: SortedNumbers, y: SortedNumbers) -> Tensor:
    """Compute W_2^2 (C,) between the numbers x (C, n) and y (C, m) of C draws.

        W_2^2 = int_0^1 (F^-1(t) - G^-1(t))^2 dt

    Both quantile functions are step functions, so the integral is a sum over the steps of both
    together. With equal masses these steps are the same for every draw and are computed once, in
    integers.
    """
    if x.masses is None and y.masses is None:
        if x.values.shape == y.values.shape:
            return (x.values - y.values).square_().mean(1)
        rows, columns, widths = equal_steps(x.values.shape[1], y.values.shape[1], x.values.device)
        return (x.values[:, rows] - y.values[:, columns]).square_() @ widths
    rows, columns, widths = weighted_steps(_masses(x), _masses(y))
    gaps = x.values.gather(1, rows) - y.values.gather(1, columns)
    return gaps.square_().mul_(widths).sum(1)


def equal_steps(n: int, m: int, device: torch.device) -> Steps:
    """Return the steps between n and m equal masses.

    Ends i / n and j / m are compared as the integers i m and j n.
    """
    each = [torch.arange(1, size + 1, device=device) for size in (n, m)]
    ends = torch.unique(torch.cat((each[0] * m, each[1] * n)))
    # The step that ends at e lies in the mass whose end is the first that is at least e.
    rows, columns = (ends + m - 1) // m - 1, (ends + n - 1) // n - 1
    widths = ends.diff(prepend=ends.new_zeros(1)).double() / (n * m)
    return rows, columns, widths


def weighted_steps(a: Tensor, b: Tensor) -> Steps:
    """Return the steps between masses a (C, n) and b (C, m), each in the order of its numbers."""
    ends_a, ends_b = a.cumsum(1), b.cumsum(1)
    # Both sums are 1 up to rounding; divided by themselves they end at exactly 1.
    ends_a, ends_b = ends_a / ends_a[:, -1:], ends_b / ends_b[:, -1:]
    ends = torch.cat((ends_a, ends_b), 1).sort(1).values
    widths = ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1))
    rows, columns = (
        torch.searchsorted(side.contiguous(), ends).clamp_max(side.shape[1] - 1)
        for side in (ends_a, ends_b)
    )
    return rows, columns, widths


def _masses(numbers: SortedNumbers) -> Tensor:
    if numbers.masses is not None:
        return numbers.masses
    return torch.full_like(numbers.values, 1 / numbers.values.shape[1])


# Moments of a class in a draw, of orders from the Poisson distributions of rates 1 to 5.
MOMENTS = 5

# Draws of one random generator.
DRAWS_PER_CHUNK = 500

# At rate 5, the highest, a larger order has probability 1e-23.
LARGEST_ORDER = 40


class Draws(NamedTuple):
    """C draws for features of d dimensions, made on the CPU; all datasets share them.

    Attributes:
        directions: theta (C, d) float64, rows of length 1.
        weights: psi (C, 1 + MOMENTS) float64, rows of length 1.
        orders: l (C, MOMENTS) int64, at least 1.
    """

    directions: Tensor
    weights: Tensor
    orders: Tensor

    def part(self, start: int, end: int) -> Draws:
        return Draws(*(part[start:end] for part in self))

    def to(self, device: torch.device) -> Draws:
        return Draws(*(part.to(device) for part in self))


def chunks_of(projections: int) -> range:
    """Return the numbers of the chunks that hold `projections` draws."""
    return range(-(-projections // DRAWS_PER_CHUNK))


def draws_in(chunk: int, projections: int) -> int:
    """Return how many draws a chunk holds."""
    return min(DRAWS_PER_CHUNK, projections - chunk * DRAWS_PER_CHUNK)


def draw_chunk(chunk: int, projections: int, dim: int, seed: int) -> Draws:
    """Draw one chunk; the last chunk of `projections` may hold fewer draws than the others.

    A draw consists of a direction theta, uniform on the unit sphere of the features, weights psi,
    uniform on the unit sphere of 1 + 5 dimensions, and orders l_1 to l_5 of moments, l_i from the
    Poisson distribution of rate i without 0. Each chunk has a generator of its own.
    """
    generator = np.random.default_rng([seed, chunk])
    directions = _on_sphere(generator, dim)
    weights = _on_sphere(generator, 1 + MOMENTS)
    orders = _positive_poisson(generator)
    # A whole chunk is drawn and then cut, so that draw k does not depend on `projections`.
    draws = Draws(*(torch.from_numpy(part) for part in (directions, weights, orders)))
    return draws.part(0, draws_in(chunk, projections))


def draw_all(projections: int, dim: int, seed: int) -> Iterator[Draws]:
    """Yield all chunks in turn."""
    for chunk in chunks_of(projections):
        yield draw_chunk(chunk, projections, dim, seed)


def _on_sphere(generator: np.random.Generator, dim: int) -> NDArray[np.float64]:
    normal = generator.standard_normal((DRAWS_PER_CHUNK, dim))
    lengths = np.linalg.norm(normal, axis=1, keepdims=True)
    return np.asarray(normal / lengths)


def _positive_poisson(generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw orders whose column i - 1 is Poisson(i) conditioned on not being 0, by inversion."""
    uniform = generator.random((DRAWS_PER_CHUNK, MOMENTS))
    orders = np.empty((DRAWS_PER_CHUNK, MOMENTS), dtype=np.int64)
    for place in range(MOMENTS):
        below = poisson.cdf(np.arange(LARGEST_ORDER), place + 1)
        # Uniform between P(0) and 1, which leaves 0 out.
        level = below[0] + (1 - below[0]) * uniform[:, place]
        # The first order, from 1 on, whose cumulative probability reaches the level.
        orders[:, place] = np.searchsorted(below[1:], level) + 1
    return orders


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
        pairs = torch.triu_indices(len(names), len(names), 1).T
        values, spread, lower, upper, wide = (
            symmetric_table(part, pairs, len(names))
            for part in (means, errors, lower, upper, of_little_use)
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
