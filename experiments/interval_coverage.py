"""Do the intervals of a study's correlations hold the true one?

    python -m experiments.interval_coverage [--draws 1000] [--output DIR]

Random pairs of datasets with effects of their own, whose measure and gains correlate by a known
amount: 8, 12 and 20 datasets, and 12 tasks in four families, with an interval over families (a
study gives none below five; here it is asked for all the same). A measure is either one with a
direction or, as a distance, the same both ways. For Spearman's and Pearson's correlation the table
says how often the interval of the jackknife over datasets holds the truth, how often Fisher's for
as many independent pairs does, and how often the jackknife with the factor (K - 2) / (2 K) of
independent dyads in place of (G - 1) / G.
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
from numpy.typing import NDArray
from scipy.stats import norm, t

from experiments.environment import RESULTS, environment, write_result
from otdd_flash.study.statistics.jackknife import (
    LEVEL,
    Replicates,
    correlation_interval,
    fisher,
    replicates,
)
from otdd_flash.study.statistics.pairs import PairTable
from otdd_flash.study.statistics.statistics import Statistic, pearson, spearman

NAME = "interval_coverage"
# Tasks, and families if they are the units.
DESIGNS = ((8, None), (12, None), (20, None), (12, 4))
CORRELATIONS, SHARES = (0.0, 0.5, 0.8), (0.3, 0.6)
STATISTICS: dict[str, Statistic] = {"spearman": spearman, "pearson": pearson}
WAYS = ("jackknife", "fisher", "independent_dyads")
# What every interval of the jackknife is to hold, but for those of 8 datasets.
AIM = 0.90

Numbers = NDArray[np.float64]


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="coverage of intervals of correlations")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for number, design in enumerate(designs()):
        rows += coverage(design, given.draws, given.seed + number)
    summary = ranges(rows)
    for row in summary:
        units = f"{row['tasks']} tasks" + (f" in {row['families']}" if row["families"] else "")
        told = ", ".join(f"{way} {row[way][0]:.1%} to {row[way][1]:.1%}" for way in WAYS)
        print(f"{units:14} {told}", flush=True)
    content = {
        "draws": given.draws,
        "seed": given.seed,
        "level": LEVEL,
        "ranges": summary,
        "aim_reached": all(row["jackknife"][0] >= AIM for row in summary if row["tasks"] > 8),
        "rows": rows,
        "seconds": time.perf_counter() - started,
        **environment("scipy"),
    }
    write_result(NAME, content, given.output)


if __name__ == "__main__":
    main()
