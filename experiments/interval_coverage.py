"""Do intervals hold the true number as often as they say?

    python -m experiments.interval_coverage [--part PART] [--draws 1000] [--device DEVICE]

`correlations`: intervals of a study's correlations over random pairs of datasets with effects of
their own, whose measure and gains correlate by a known amount: 8, 12 and 20 datasets, and 12 tasks
in four families, with an interval over families (a study gives none below five; here it is asked
for all the same). A measure is either one with a direction or, as a distance, the same both ways.
For Spearman's and Pearson's correlation the table says how often the interval of the jackknife over
datasets holds the truth, how often Fisher's for as many independent pairs does, and how often the
jackknife with the factor (K - 2) / (2 K) of independent dyads in place of (G - 1) / G.

`subsamples`: intervals of `subsample_interval` for the mean distance of datasets of n rows, at the
fewest subsamples that are accepted, the default and more. Distances are those of
`dense_distances`, thousands at a time; how far they are from `dataset_distance`, and ends from
`subsample_interval`, stands beside them. The mean distance comes from other datasets besides.

`sliced`: intervals of `sliced_distances` for the mean over a pool of draws, of which every interval
sees some. What is rarer than one of the pool is not simulated.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm, t
from torch import Tensor

import otdd_flash as otdd
from experiments.dense_distances import Sides, class_table, costs, distances, moments
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.comparison import subsample
from otdd_flash.sampling.subsampling import (
    DEFAULT_FRACTION,
    MOST_EXCESS,
    deviation_interval,
    sampling_rate,
)
from otdd_flash.sliced import (
    DRAWS_PER_CHUNK,
    LEAST_DRAWS,
    Draws,
    chunk_distances,
    draw_chunk,
    intervals,
    prepare,
    tail_excess,
)
from otdd_flash.study.statistics import (
    LEVEL,
    PairTable,
    Replicates,
    Statistic,
    correlation_interval,
    fisher,
    pearson,
    replicates,
    spearman,
)

NAME = "interval_coverage"
# Tasks, and families if they are the units.
DESIGNS = ((8, None), (12, None), (20, None), (12, 4))
CORRELATIONS, SHARES = (0.0, 0.5, 0.8), (0.3, 0.6)
STATISTICS: dict[str, Statistic] = {"spearman": spearman, "pearson": pearson}
WAYS = ("jackknife", "fisher", "independent_dyads")
# What every interval of the jackknife is to hold, but for those of 8 datasets.
AIM = 0.90

Numbers = NDArray[np.float64]
NORMAL = 1.96


class Design(NamedTuple):
    """What is simulated.

    Attributes:
        tasks: K.
        families: how many families of equal size; None where every task is a unit.
        rho: the correlation of a measure with the gain of its pair.
        share: of the variance, that of the datasets' effects.
        symmetric: whether the measure is the same in both directions.
    """

    tasks: int
    families: int | None
    rho: float
    share: float = 0.5
    symmetric: bool = False


def dyads(generator: np.random.Generator, design: Design) -> PairTable:
    """Measures and gains of all ordered pairs, each pair of both binormal of correlation rho.

    m_ij = a_i + b_j + e_ij, with b = a and e_ij = e_ji where it is symmetric, and g_ij is rho m_ij
    and sqrt(1 - rho^2) of as many effects of its own. With families, half of the variance of an
    effect is that of its family.
    """
    tasks, families, rho, share, symmetric = design
    units = np.arange(tasks) if families is None else np.arange(tasks) * families // tasks

    def effect() -> Numbers:
        own = generator.standard_normal(tasks)
        if families is None:
            return own
        return (own + generator.standard_normal(families)[units]) / math.sqrt(2)

    def numbers(*, mirrored: bool) -> Numbers:
        sources, noise = effect(), generator.standard_normal((tasks, tasks))
        targets = sources if mirrored else effect()
        if mirrored:
            noise = np.triu(noise, 1) + np.triu(noise, 1).T
        both = sources[:, None] + targets[None, :]
        return math.sqrt(share / 2) * both + math.sqrt(1 - share) * noise

    measure = numbers(mirrored=symmetric)
    gains = rho * measure + math.sqrt(1 - rho**2) * numbers(mirrored=False)
    np.fill_diagonal(gains, np.nan)
    return PairTable(measure, gains, [str(unit) for unit in units])


def truth_of(statistic: str, rho: float) -> float:
    """The correlation of binormal numbers: rho, or Spearman's."""
    return rho if statistic == "pearson" else 6 / math.pi * math.asin(rho / 2)


def coverage(design: Design, draws: int, seed: int) -> Iterator[dict[str, Any]]:
    """How often each interval holds the truth, for every statistic."""
    generator = np.random.default_rng(seed)
    held = np.zeros((len(STATISTICS), len(WAYS)))
    widths = np.zeros(len(STATISTICS))
    for _ in range(draws):
        table = dyads(generator, design)
        for place, (name, statistic) in enumerate(STATISTICS.items()):
            found = replicates(table, statistic)
            ends = list(_intervals(found, design.tasks))
            truth = truth_of(name, design.rho)
            held[place] += [lower <= truth <= upper for lower, upper in ends]
            widths[place] += ends[0][1] - ends[0][0]
    for place, name in enumerate(STATISTICS):
        yield {
            **design._asdict(),
            "statistic": name,
            "truth": truth_of(name, design.rho),
            "coverage": dict(zip(WAYS, (held[place] / draws).tolist(), strict=True)),
            "mean_width": float(widths[place] / draws),
        }


def _intervals(found: Replicates, tasks: int) -> Iterator[tuple[float, float]]:
    """The ends of each of the ways, on the scale of correlations."""
    whole = correlation_interval(found, least=2)
    assert whole.lower is not None
    assert whole.upper is not None
    yield whole.lower, whole.upper
    z = float(fisher(np.array(found.value), np.array(float(found.pairs))))
    reach = norm.ppf((1 + LEVEL) / 2) / math.sqrt(found.pairs - 3)
    yield math.tanh(z - reach), math.tanh(z + reach)
    left = fisher(found.left, found.left_pairs)
    factor = (tasks - 2) / (2 * tasks)
    error = math.sqrt(factor * float(np.square(left - left.mean()).sum()))
    reach = t.ppf((1 + LEVEL) / 2, len(left) - 1) * error
    yield math.tanh(z - reach), math.tanh(z + reach)


def designs() -> Iterator[Design]:
    """All that is simulated."""
    for (tasks, families), rho, share, symmetric in product(
        DESIGNS, CORRELATIONS, SHARES, (False, True)
    ):
        yield Design(tasks, families, rho, share, symmetric)


def ranges(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lowest and the highest coverage of each way, by tasks and families."""
    found = []
    for tasks, families in DESIGNS:
        mine = [row for row in rows if (row["tasks"], row["families"]) == (tasks, families)]
        numbers = {way: [row["coverage"][way] for row in mine] for way in WAYS}
        found.append(
            {
                "tasks": tasks,
                "families": families,
                **{way: [min(held), max(held)] for way, held in numbers.items()},
            }
        )
    return found


class Rows(NamedTuple):
    """What pairs of datasets of two classes are simulated.

    Attributes:
        law: of rows about their class mean: `normal`, `lognormal`, or `t3`, Student's of three
            degrees of freedom, one denominator a row; all of variance 1.
        dim: their features.
        shift: of the target's last feature.
        scale: of the target.
        ratio: rows of the target to one of the source.
    """

    law: str
    dim: int
    shift: float = 0.0
    scale: float = 1.0
    ratio: int = 1


LAWS = ("normal", "lognormal", "t3")
PAIRS = [
    *(Rows("normal", dim, 0.0) for dim in (2, 20)),
    *(Rows(law, dim, 1.0) for law in LAWS for dim in (2, 20)),
    *(Rows(law, dim, 0.0, 2.0) for law in LAWS for dim in (2, 20)),
    *(Rows("normal", dim, 0.0, 4.0) for dim in (2, 20)),
    *(Rows(law, 2, 1.0, 1.0, 2) for law in ("normal", "t3")),
]
SIZES, COUNTS = (20, 60, 200, 500), (39, 50, 200)
# Of the mean cost between two large datasets; the number itself is one for all datasets.
EPSILON = 0.05
FEWEST, OVER_ALL = 0.915, 0.93


def drawn(rows: Rows, count: int, size: int, generator: torch.Generator, *, target: bool) -> Sides:
    """`count` datasets of `size` rows: features (B, n, d) float64 and labels, at random 0 or 1."""
    options: Any = {"device": generator.device, "generator": generator}
    shape = (count, size, rows.dim)
    labels = torch.randint(0, 2, shape[:2], **options)
    x = torch.randn(shape, dtype=torch.float64, **options)
    if rows.law == "t3":
        squares = torch.randn((*shape[:2], 3), dtype=torch.float64, **options).square()
        x = x / squares.sum(-1, keepdim=True).sqrt()
    elif rows.law == "lognormal":
        x = (x.exp() - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e)
    x[..., 0] += 2.0 * labels
    if target:
        x = rows.scale * x
        x[..., -1] += rows.shift
    return x, labels


def subsampled(data: Sides, size: int, count: int, generator: torch.Generator) -> Sides:
    """`count` subsamples of each of B datasets, drawn as by `draws.subsample`, (B count, size)."""
    x, labels = data
    (pairs, rows), shape = labels.shape, (len(labels), count, labels.shape[1])
    order = torch.rand(shape, device=x.device, generator=generator).argsort(2)
    kinds = torch.gather(labels[:, None].expand(shape), 2, order)
    first = torch.arange(rows, device=x.device).repeat(pairs, count, 1)
    for kind in (0, 1):
        own = kinds == kind
        first[own & (own.cumsum(2) <= 2)] -= rows
    chosen = torch.gather(order, 2, first.argsort(2)[..., :size])
    places = torch.arange(pairs, device=x.device)[:, None, None]
    return x[places, chosen].flatten(0, 1), labels[places, chosen].flatten(0, 1)


def fixed_epsilon(rows: Rows, device: str) -> float:
    """The epsilon of all datasets of a law."""
    generator = torch.Generator(device).manual_seed(0)
    (x, kinds), (y, other) = (
        drawn(rows, 1, 4000, generator, target=target) for target in (False, True)
    )
    table = class_table(moments(x, kinds), moments(y, other))
    return float(f"{EPSILON * float(costs(x, kinds, y, other, table).mean()):.3g}")


def sampling_coverage(
    rows: Rows, size: int, draws: int, seed: int, device: str
) -> Iterator[dict[str, Any]]:
    """How often intervals by subsamples hold the mean distance of datasets of that size."""
    epsilon, sizes = fixed_epsilon(rows, device), (size, size * rows.ratio)
    generator = torch.Generator(device).manual_seed(seed)

    def some(count: int) -> tuple[Sides, Sides]:
        return (
            drawn(rows, count, sizes[0], generator, target=False),
            drawn(rows, count, sizes[1], generator, target=True),
        )

    # Where S has no variance, its mean takes more.
    others = distances(*some((4 if rows.law == "normal" else 10) * draws), epsilon)
    one, other = some(draws)
    values = distances(one, other, epsilon)
    everything = torch.cat((others, values))
    truth, error = float(everything.mean()), float(everything.std() / len(everything) ** 0.5)
    parts = [max(4, round(n * DEFAULT_FRACTION)) for n in sizes]
    most = max(COUNTS)
    at_once = max(1, int(1e8 // (most * sizes[1] * (rows.dim + 2))))
    found = []
    for start in range(0, draws, at_once):
        few = [
            subsampled(
                (x[start : start + at_once], kinds[start : start + at_once]), m, most, generator
            )
            for (x, kinds), m in zip((one, other), parts, strict=True)
        ]
        found.append(distances(few[0], few[1], epsilon).reshape(-1, most))
    deviations, whole = torch.cat(found).cpu().numpy(), values.cpu().numpy()
    lengths = [(x - x.mean(1, keepdim=True)).square().sum(2) for x, _ in (one, other)]
    excess = torch.maximum(*map(tail_excess, lengths)).clamp_max(MOST_EXCESS).cpu().numpy()
    rate = sampling_rate(sum(parts) / sum(sizes))
    for count in COUNTS:
        few_values = deviations[:, :count]
        ends = np.stack(deviation_interval(whole, few_values, rate, excess=excess), 1)
        yield {
            **rows._asdict(),
            "size": list(sizes),
            "subsample_size": parts,
            "count": count,
            "epsilon": epsilon,
            "truth": truth,
            "truth_error": error,
            **held(ends, truth),
            "mirrored_quantiles": held(_mirrored(whole, few_values, rate), truth),
        }


def held(ends: Numbers, truth: float) -> dict[str, float]:
    """How many of the intervals (R, 2) hold a number, lie below or above it; those that are NaN."""
    given = ends[~np.isnan(ends[:, 0])]
    below, above = float((given[:, 1] < truth).mean()), float((given[:, 0] > truth).mean())
    return {
        "coverage": 1 - below - above,
        "below": below,
        "above": above,
        "median_width": float(np.median(given[:, 1] - given[:, 0])),
        "refused": 1 - len(given) / len(ends),
    }


def _mirrored(values: Numbers, subsamples: Numbers, rate: float) -> Numbers:
    """Ends of another way: the value less upper and lower quantiles of the scaled deviations."""
    scaled = rate * (subsamples - subsamples.mean(1, keepdims=True))
    high, low = np.quantile(scaled, (0.975, 0.025), axis=1, method="weibull")
    return np.stack((values - high, values - low), 1)


def kinds_of(samples: LabeledSamples) -> Tensor:
    """Its labels."""
    assert samples.labels is not None
    return samples.labels


def agreement(device: str) -> dict[str, float]:
    """The largest differences to `dataset_distance` and to the ends of `subsample_interval`.

    Of three pairs of every law at 40 rows a side, distances in units of the value, ends in units of
    the interval's length.
    """
    generator, off, off_ends = torch.Generator(device).manual_seed(9), 0.0, 0.0
    for rows in PAIRS:
        epsilon = fixed_epsilon(rows, device)
        sides = [drawn(rows, 3, 40, generator, target=target) for target in (False, True)]
        values = distances(sides[0], sides[1], epsilon)
        for k in range(3):
            one, other = (LabeledSamples(x[k], kinds[k], ("0", "1")) for x, kinds in sides)
            expected = otdd.dataset_distance(one, other, epsilon=epsilon).value
            off = max(off, abs(float(values[k]) / expected - 1))
        exact = otdd.subsample_interval(one, other, expected, count=39, epsilon=epsilon)
        draws = np.random.default_rng(0)
        pieces = [[subsample(side, 10, draws) for side in (one, other)] for _ in range(39)]
        stacked = [
            (
                torch.stack([part.features for part in parts]),
                torch.stack([kinds_of(part) for part in parts]),
            )
            for parts in zip(*pieces, strict=True)
        ]
        values_of_parts = distances(stacked[0], stacked[1], epsilon).cpu().numpy()
        own = deviation_interval(expected, values_of_parts, exact.rate, excess=exact.excess)
        length = exact.upper - exact.lower
        off_ends = max(
            off_ends,
            *(abs(a - b) / length for a, b in zip(own, (exact.lower, exact.upper), strict=True)),
        )
    return {"distance": off, "end": off_ends}


LINES = (LEAST_DRAWS, 50, 100, 1000, 10_000)
# Draws that are taken as all of them, and pairs: rows a side, dimension, scale of one side.
POOL = 100_000
LINE_PAIRS = [
    (rows, dim, scale, shift)
    for rows in (24, 100)
    for dim in (2, 20)
    for scale, shift in ((1.0, 0.0), (1.0, 1.0), (2.0, 0.0), (4.0, 0.0))
]


def sliced_coverage(draws: int, seed: int, device: str) -> Iterator[dict[str, Any]]:
    """How often intervals of sliced distances hold the mean over a pool of draws."""
    generator = np.random.default_rng(seed)
    for number, (size, dim, scale, shift) in enumerate(LINE_PAIRS):
        sides = []
        for factor, move in ((1.0, 0.0), (scale, shift)):
            x, kinds = factor * generator.normal(size=(size, dim)), np.arange(size) % 2
            sides.append(
                LabeledSamples(torch.from_numpy(x + move), torch.from_numpy(kinds), ("a", "b"))
            )
        chunks = [draw_chunk(k, POOL, dim, seed + number) for k in range(POOL // DRAWS_PER_CHUNK)]
        everything = Draws(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))
        pool = chunk_distances(prepare(sides, device), everything)[0]
        truth = float(pool.mean())
        for lines in LINES:
            places = generator.integers(0, POOL, (draws, lines))
            some = pool[torch.from_numpy(places)]
            means, errors = some.mean(1), some.std(1) / math.sqrt(lines)
            normal = torch.stack((means - NORMAL * errors, means + NORMAL * errors), 1)
            yield {
                "size": size,
                "dim": dim,
                "scale": scale,
                "shift": shift,
                "projections": lines,
                "truth": truth,
                **held(torch.stack(intervals(some), 1).numpy(), truth),
                "normal": held(normal.numpy(), truth),
            }


def correlations(draws: int, seed: int, _: str) -> Iterator[dict[str, Any]]:
    """The section on correlations."""
    rows: list[dict[str, Any]] = []
    for number, design in enumerate(designs()):
        rows += coverage(design, draws, seed + number)
    summary = ranges(rows)
    for row in summary:
        units = f"{row['tasks']} tasks" + (f" in {row['families']}" if row["families"] else "")
        told = ", ".join(f"{way} {row[way][0]:.1%} to {row[way][1]:.1%}" for way in WAYS)
        print(f"{units:14} {told}", flush=True)
    reached = all(row["jackknife"][0] >= AIM for row in summary if row["tasks"] > 8)
    yield {"level": LEVEL, "ranges": summary, "aim_reached": reached, "rows": rows}


def subsamples(draws: int, seed: int, device: str) -> Iterator[dict[str, Any]]:
    """The section on intervals by subsamples, as it grows."""
    agreeing, rows = agreement(device), list[dict[str, Any]]()
    for number, (size, pair) in enumerate(product(SIZES, PAIRS)):
        rows += sampling_coverage(pair, size, draws, seed + number, device)
        yield {"agreement": agreeing, **over_all(rows), "rows": rows}


def sliced(draws: int, seed: int, device: str) -> Iterator[dict[str, Any]]:
    """The section on sliced distances."""
    rows = list(sliced_coverage(draws, seed, device))
    yield {"pool": POOL, **over_all(rows), "rows": rows}


def over_all(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst cell and the mean of all."""
    held_by = [row["coverage"] for row in rows]
    lowest, mean = min(held_by), float(np.mean(held_by))
    print(f"{len(rows)} cells: lowest {lowest:.1%}, mean {mean:.1%}", flush=True)
    reached = lowest >= FEWEST and mean >= OVER_ALL
    return {"lowest": lowest, "mean": mean, "aim_reached": reached}


PARTS = {"correlations": correlations, "subsamples": subsamples, "sliced": sliced}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="how often intervals hold the true number")
    parser.add_argument("--part", choices=PARTS, action="append", help="one or more; default: all")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    for part in given.part or PARTS:
        started = time.perf_counter()
        for section in PARTS[part](given.draws, given.seed, given.device):
            content = {
                "draws": given.draws,
                "seed": given.seed,
                **section,
                "seconds": time.perf_counter() - started,
                **environment("torch", "scipy", "triton"),
            }
            write_result(f"{NAME}_{part}", _short(content), given.output)


def _short(value: Any) -> Any:
    """The same with floats of five digits: of a thousand datasets no more are known."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
