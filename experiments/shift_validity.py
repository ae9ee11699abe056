"""Is the p-value of `shift_test` valid, and how powerful is it?

    python -m experiments.shift_validity [--part validity|sabotage|power] [--simulations N]

`validity`: both sides are drawn from one law, of each kind below, and the share of p-values at most
0.05 and 0.01 is counted, of the joint test, of class proportions, of the least adjusted p-value of
classes (the family) and of the first class by itself. With 2,000 simulations a valid test stays
below 0.067 and 0.018, three and a half standard errors above; on continuous data the joint test is
also above 0.033. Fewer simulations have wider limits. Seeds are those of the simulation's number:
none was chosen after a look.

`sabotage`: the same with class distances of the reference alone and of all rows, held fixed, for 60
classes of 3 rows in 20 dimensions. The first must break it: distances of the reference's own rows
are small where its rows are near, which its self term sees. Every pair of classes adds to that, so
that of ten classes it is lost in the noise of T (5.8% of p-values were at most 0.05).

`power`: the share of rejections at 0.05 against shifts of growing size, beside the energy distance
and MMD with a Gaussian kernel of the median distance, all by the same permutations.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.cost.ground import GroundCost
from otdd_flash.labels import Gaussian, NoLabels, class_distances
from otdd_flash.samples import LabeledSamples
from otdd_flash.shift.joint import DEFAULT_RELATIVE
from otdd_flash.shift.pooled import PooledCost, draws
from otdd_flash.shift.rows import PooledRows

NAME = "shift"
# Of validity and sabotage, and of power.
PERMUTATIONS, POWER_PERMUTATIONS = 99, 199
# Shares of p-values at most so large may be so many standard errors above, and on continuous data
# the first as many below: with 2,000 simulations 0.067 and 0.018, and 0.033.
LEVELS, ERRORS = (0.05, 0.01), 3.5

Numbers = NDArray[np.float64]
Generator = np.random.Generator


class Null(NamedTuple):
    """Two samples of one law; labels and weights with rows, groups beside them."""

    reference: LabeledSamples
    sample: LabeledSamples
    groups: list[list[int]] | None = None


def samples(
    features: Numbers,
    labels: NDArray[np.int64] | None = None,
    weights: Numbers | None = None,
) -> LabeledSamples:
    if labels is None:
        return LabeledSamples(torch.from_numpy(features), None, ())
    return LabeledSamples.from_arrays(features, labels, weights)


def pair(draw: Callable[[int], LabeledSamples], sizes: tuple[int, int]) -> Null:
    return Null(draw(sizes[0]), draw(sizes[1]))


def normal(generator: Generator) -> Null:
    return pair(lambda n: samples(generator.normal(size=(n, 5))), (40, 40))


def ties(generator: Generator) -> Null:
    return pair(lambda n: samples(generator.integers(0, 3, (n, 2)).astype(float)), (40, 40))


def unequal(generator: Generator) -> Null:
    return pair(lambda n: samples(generator.normal(size=(n, 5))), (20, 500))


def ten_classes(generator: Generator) -> Null:
    shares = np.array([0.28, 0.2, 0.14, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02])

    def draw(n: int) -> LabeledSamples:
        labels = generator.choice(10, n, p=shares)
        return samples(generator.normal(size=(n, 5)) + labels[:, None] / 3, labels)

    return pair(draw, (80, 80))


def heavy(generator: Generator) -> Null:
    return pair(lambda n: samples(generator.standard_t(1.5, (n, 5))), (40, 40))


def weighted(generator: Generator) -> Null:
    def draw(n: int) -> LabeledSamples:
        labels = generator.integers(0, 3, n)
        return samples(
            generator.normal(size=(n, 4)) + labels[:, None], labels, generator.exponential(size=n)
        )

    return pair(draw, (40, 40))


def grouped(generator: Generator) -> Null:
    sides, groups = [], []
    for side in range(2):
        sizes = generator.integers(1, 6, 15)
        own = np.repeat(np.arange(15), sizes)
        centres = generator.normal(size=(15, 4))
        labels = generator.integers(0, 3, 15)[own]
        sides.append(samples(centres[own] + 0.5 * generator.normal(size=(len(own), 4)), labels))
        groups.append((100 * side + own).tolist())
    return Null(sides[0], sides[1], groups)


KINDS = {
    "normal": normal,
    "ties": ties,
    "unequal": unequal,
    "ten_classes": ten_classes,
    "heavy": heavy,
    "weights": weighted,
    "groups": grouped,
}
CONTINUOUS = ("normal", "unequal", "ten_classes", "heavy", "weights", "groups")


def p_values(kind: str, seed: int) -> dict[str, float]:
    """The p-values of one simulation."""
    null = KINDS[kind](np.random.default_rng((seed, len(kind))))
    labelled = null.reference.labels is not None
    report = otdd.shift_test(
        null.reference,
        null.sample,
        permutations=PERMUTATIONS,
        groups=null.groups,
        labels="gaussian" if labelled else "none",
        parts=labelled,
        compute="cpu",
        seed=seed,
    )
    found = {"joint": report.p_value}
    if report.parts is not None and report.parts.label_p_value is not None:
        found["labels"] = report.parts.label_p_value
        tested = [each for each in report.parts.classes if each.adjusted is not None]
        found["family"] = min((each.adjusted or 0.0 for each in tested), default=1.0)
        found["first_class"] = tested[0].p_value or 0.0 if tested else 1.0
    return found


def shares_below(values: Sequence[float]) -> dict[str, float]:
    return {f"at_{level:g}": float(np.mean(np.array(values) <= level + 1e-12)) for level in LEVELS}


def reach(level: float, simulations: int) -> float:
    """How far from the level a share may be."""
    return ERRORS * float(np.sqrt(level * (1 - level) / simulations))


def validity(simulations: int, kinds: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The shares of every kind and test, with what they may be, as they grow."""
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        started = time.perf_counter()
        found = [p_values(kind, seed) for seed in range(simulations)]
        for test in found[0]:
            shares = shares_below([each[test] for each in found])
            within = all(
                shares[f"at_{level:g}"] <= level + reach(level, simulations) for level in LEVELS
            )
            if test == "joint" and kind in CONTINUOUS:
                within &= shares["at_0.05"] >= 0.05 - reach(0.05, simulations)
            rows.append(
                {
                    "kind": kind,
                    "test": test,
                    "simulations": simulations,
                    **shares,
                    "within": within,
                    "seconds": time.perf_counter() - started,
                    "commit": environment()["commit"],
                }
            )
            print(rows[-1], flush=True)
        yield rows


def sabotaged(seed: int, measured_on: str) -> float:
    """The p-value of two samples of one law with class distances of all rows, or of other rows.

    60 classes of 3 rows a side in 20 dimensions. Rows are exchanged within their class, as numbers
    of rows are no part of chance here.
    """
    generator, classes, each = np.random.default_rng((seed, 7)), 60, 3
    labels = np.repeat(np.arange(classes), each)
    sides = [samples(generator.normal(size=(len(labels), 20)), labels) for _ in range(2)]
    rows, cpu = PooledRows.of(sides[0], sides[1], Gaussian(), None), torch.device("cpu")
    kinds = torch.from_numpy(np.tile(labels, 2))
    if measured_on == "all rows":
        cost = rows.cost(GroundCost(), Gaussian(), cpu)
    else:
        table = class_distances(sides[:1]).full
        cost = rows.cost(GroundCost(lambda_y=0.0), Gaussian(), cpu) + table[kinds][:, kinds] / 2
    masks = np.zeros((2 * len(labels), 1 + PERMUTATIONS), dtype=bool)
    masks[:, 0] = rows.in_reference
    for label in range(classes):
        own = np.flatnonzero(kinds.numpy() == label)
        for k in range(PERMUTATIONS):
            masks[generator.permutation(own)[:each], 1 + k] = True
    pooled = PooledCost(cost, rows.samples.masses, None, DEFAULT_RELATIVE)
    found = pooled.statistics(*rows.sides(masks, cpu))
    return (1 + int((found.upper[1:] >= found.lower[0]).sum())) / (1 + PERMUTATIONS)


def sabotage(simulations: int) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for name in ("reference", "all rows"):
        found = [sabotaged(seed, name) for seed in range(simulations)]
        rows.append({"class_distances_of": name, **shares_below(found)})
        print(rows[-1], flush=True)
        yield rows


# Shifts of the sample: features (n, d) and labels (n,) of three classes, and a size.
def _mean(x: Numbers, labels: Any, size: float) -> None:
    x += size / np.sqrt(x.shape[1])


def _scale(x: Numbers, labels: Any, size: float) -> None:
    x *= 1 + size


def _correlation(x: Numbers, labels: Any, size: float) -> None:
    x[:, 0] = size * x[:, 1] + np.sqrt(1 - size**2) * x[:, 0]


def _one_class(x: Numbers, labels: Any, size: float) -> None:
    x[labels == 2] += size / np.sqrt(x.shape[1])


SHIFTS: dict[str, tuple[Callable[[Numbers, Any, float], None] | None, tuple[float, ...]]] = {
    "mean": (_mean, (0.5, 0.8, 1.1)),
    "scale": (_scale, (0.2, 0.35, 0.5)),
    "correlation": (_correlation, (0.6, 0.8, 0.95)),
    "labels": (None, (0.1, 0.2, 0.3)),
    "one class": (_one_class, (1.0, 1.75, 2.5)),
}


def shifted(shift: str, size: float, generator: Generator, n: int, d: int) -> Sequence[Any]:
    """Two samples of which the second is shifted, as features and labels."""
    apply, sides = SHIFTS[shift][0], []
    for moved in (False, True):
        more = size if moved and apply is None else 0.0
        third = (1 - more) / 3
        labels = generator.choice(3, n, p=[third + more, third, 1 - 2 * third - more])
        x = generator.normal(size=(n, d))
        if moved and apply is not None:
            apply(x, labels, size)
        x[:, 0] += 1.5 * labels
        sides.append((x, labels))
    return sides


def rivals(x: Numbers, rows: PooledRows, count: int, seed: int) -> dict[str, float]:
    """P-values of the energy distance and of MMD (biased, Gaussian, median), same permutations."""
    points = torch.from_numpy(x)
    gaps = torch.cdist(points, points)
    median = gaps[gaps > 0].median()
    matrices = {"energy": -gaps, "mmd": torch.exp(-(gaps**2) / (2 * median**2))}
    masks = np.hstack((rows.unit_in_reference[:, None], *draws(rows, count, seed, count)))
    ours, others = rows.sides(masks, points.device)
    found, signed = {}, ours - others
    for name, kernel in matrices.items():
        values = (signed * (kernel @ signed)).sum(0)
        found[name] = (1 + int((values[1:] >= values[0] - 1e-12).sum())) / (1 + count)
    return found


def power(simulations: int) -> Iterator[list[dict[str, Any]]]:
    """The shares of rejections at 0.05 against every shift, as they grow."""
    rows: list[dict[str, Any]] = []
    for shift, (_, sizes) in SHIFTS.items():
        for d, size in product((2, 10), sizes):
            found = [powers(shift, size, seed, d) for seed in range(simulations)]
            shares = {
                test: shares_below([each[test] for each in found])["at_0.05"] for test in found[0]
            }
            rows.append({"shift": shift, "d": d, "size": size, **shares})
            print(rows[-1], flush=True)
            yield rows


def powers(shift: str, size: float, seed: int, d: int) -> dict[str, float]:
    """The p-values of every test in one simulation of 50 + 50 rows."""
    generator = np.random.default_rng((seed, d, len(shift)))
    (x, kinds), (y, others) = shifted(shift, size, generator, 50, d)
    one, other = samples(x, kinds), samples(y, others)
    found = {
        # Few p-values are as small as this alpha, so that few intervals of effects are computed.
        name: otdd.shift_test(
            one,
            other,
            permutations=POWER_PERMUTATIONS,
            alpha=1 / (1 + POWER_PERMUTATIONS),
            parts=False,
            labels=labels,
            compute="cpu",
            seed=seed,
        ).p_value
        for name, labels in (("otdd", "gaussian"), ("otdd_without_labels", "none"))
    }
    pooled = PooledRows.of(one, other, NoLabels(), None)
    return found | rivals(np.concatenate((x, y)), pooled, POWER_PERMUTATIONS, seed)


# The simulations of each part.
PARTS = {"validity": 2000, "sabotage": 500, "power": 100}


def other_kinds(folder: Path, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """What the file of validity holds of kinds that are not run."""
    path = folder / f"{NAME}_validity.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in known if row["kind"] not in kinds]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="validity and power of the shift test")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="of validity; others stay in its file"
    )
    parser.add_argument("--simulations", type=int, help=f"of each part; by default {PARTS}")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    for part in given.part or PARTS:
        count, kept, started = given.simulations or PARTS[part], [], time.perf_counter()
        if part == "validity":
            kinds = given.kind or tuple(KINDS)
            kept, found = other_kinds(given.output, kinds), validity(count, kinds)
        else:
            found = (sabotage if part == "sabotage" else power)(count)
        for rows in found:
            content = {
                "simulations": count,
                "permutations": POWER_PERMUTATIONS if part == "power" else PERMUTATIONS,
                "rows": kept + rows,
                "seconds": time.perf_counter() - started,
                **environment("torch", "scipy"),
            }
            write_result(f"{NAME}_{part}", content, given.output)


if __name__ == "__main__":
    main()
