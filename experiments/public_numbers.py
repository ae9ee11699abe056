"""All pairs of MNIST, Fashion-MNIST, USPS and digits, whole: numbers to cite and to check.

    python -m experiments.public_numbers --data-root DIR --device cuda [--part 0/2] [--output DIR]
    python -m experiments.public_numbers --merge DIR DIR
    python -m experiments.public_numbers --table

Training images at 28 x 28 in [0, 1] (digits: all 1,797, their only set), gaussian class distances
measured once, in two conventions (`CONVENTIONS`): ours, and that of microsoft/otdd, the same costs
divided by 0.3081^2 with an epsilon of 0.1. Each has entropic values with bounds and the exact value
with its bracket. The value does not depend on the order of a pair: all six are solved in one order,
and last those that are cheap in the other too, as a check (`--pairs all`: all twelve).

A row is a pair in a convention, written once it is measured; a call goes on where the last one
ended. `--seconds` begins no further row after so long. `--part 1/2` takes the second of two shares
of about equal cost, for a second GPU with an `--output` of its own; `--merge` joins the shares.
`--table` writes the tables of docs/public-numbers.md from the file.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows, read_rows, write_rows

NAME = "public_numbers"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "public-numbers.md"
# Each with the split that is compared.
DATASETS = {"mnist": "train", "fashion_mnist": "train", "usps": "train", "digits": "all"}
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "usps": "USPS", "digits": "digits"}
# Of a solve's name: the heading of its column.
COLUMNS = {
    "default": "default settings",
    "tight": "to a marginal error of 1e-6",
    "converged": "converged",
    "exact": "exact",
}
SIZE = 28
# What microsoft/otdd divides pixels by; the mean that it subtracts cancels in every cost.
DEVIATION = 0.3081
ENTREG = 0.1
# Weight of both squared distances: half of them, in its unit.
WEIGHT = 0.5 / DEVIATION**2
DOUBLE = {"precision": "double"}
EXACT = {"epsilon": 0, "solver": otdd.Exact(bound_width=0)}
# Of each convention: what all of its solves share, and of each solve its settings and compute.
CONVENTIONS: dict[str, tuple[dict[str, Any], dict[str, tuple[dict[str, Any], dict[str, Any]]]]] = {
    "ours": (
        {},
        {
            "default": ({}, {}),
            "tight": ({"solver": otdd.Converged(tolerance=1e-6)}, DOUBLE),
            "exact": (EXACT, {}),
        },
    ),
    "microsoft_otdd": (
        {"lambda_x": WEIGHT, "lambda_y": WEIGHT},
        {
            "updates": ({"epsilon": ENTREG, "solver": otdd.GeomlossSchedule()}, DOUBLE),
            "converged": ({"epsilon": ENTREG}, DOUBLE),
            "exact": (EXACT, {}),
        },
    ),
}
# The other order is solved as well up to so many pairs of points.
CHEAP = 2e7
MARK = "<!-- tables: python -m experiments.public_numbers --table -->"
END = "<!-- end of tables -->"


def sha256(values: NDArray[Any]) -> str:
    """The digest of an array's bytes: row after row, little-endian."""
    values = np.ascontiguousarray(values)
    return hashlib.sha256(values.astype(values.dtype.newbyteorder("<")).tobytes()).hexdigest()


def load(name: str, root: Path, samples: int | None) -> tuple[otdd.LabeledSamples, dict[str, Any]]:
    """One dataset as vectors, and what tells whether somebody else's rows are the same."""
    data = otdd.load(name, root=root, split=DATASETS[name], max_samples=samples)
    side = otdd.embed(data, otdd.extractors.pixels(size=SIZE))
    assert side.labels is not None
    images, labels = np.asarray(data.inputs), side.labels.cpu().numpy().astype(np.int64)
    return side, {
        "split": DATASETS[name],
        "rows": len(side),
        "images": list(images.shape[1:]),
        "rows_of_classes": np.bincount(labels).tolist(),
        "sha256_images": sha256(images),
        "sha256_labels": sha256(labels),
        "sha256_features": sha256(side.features.cpu().numpy().astype(np.float32)),
        "fingerprint": side.fingerprint,
    }


def pairs_of(asked: Sequence[str], sizes: dict[str, int]) -> list[tuple[str, str]]:
    """The ordered pairs that are solved: those asked for, all, or six and cheap other orders."""
    if [*asked] == ["all"]:
        return [*itertools.permutations(DATASETS, 2)]
    if asked:
        known = {f"{one}-{two}": (one, two) for one, two in itertools.permutations(DATASETS, 2)}
        if wrong := [each for each in asked if each not in known]:
            raise SystemExit(f"no pair {wrong[0]}; there are {', '.join(known)}")
        return [known[each] for each in asked]
    once = [*itertools.combinations(DATASETS, 2)]
    cheap = [(two, one) for one, two in once if sizes[one] * sizes[two] <= CHEAP]
    return [*once, *cheap]


def share(
    tasks: Sequence[tuple[str, str, str]], sizes: dict[str, int], part: str
) -> list[tuple[str, str, str]]:
    """The tasks of one of several processes: costly ones first, each to the least loaded.

    Those of a pair in its other order, which only check, come last.
    """
    mine, count = (int(each) for each in part.split("/"))
    if not 0 <= mine < count:
        raise SystemExit(f"--part is 0/{count} to {count - 1}/{count}, not {part}")

    def cost(task: tuple[str, str, str]) -> float:
        source, target, convention = task
        cross = sizes[source] * sizes[target]
        # In double precision self terms and more iterations count.
        own = sizes[source] ** 2 + sizes[target] ** 2
        return (4 if convention == "microsoft_otdd" else 2) * cross + 0.5 * own

    loads, dealt = [0.0] * count, []
    for task in sorted(tasks, key=cost, reverse=True):
        least = loads.index(min(loads))
        loads[least] += cost(task)
        if least == mine:
            dealt.append(task)
    once = [*itertools.combinations(DATASETS, 2)]
    return sorted(dealt, key=lambda task: task[:2] not in once)


def first_blur(sides: Sequence[otdd.LabeledSamples]) -> float:
    """The diameter at which microsoft/otdd begins, in its unit.

    It is the diagonal of the box around both datasets, of which labels, numbered from 0 through the
    classes of both, are one more coordinate.
    """
    lowest = torch.minimum(*(side.features.amin(0) for side in sides)).double()
    highest = torch.maximum(*(side.features.amax(0) for side in sides)).double()
    labels = sum(len(side.label_names) for side in sides) - 1
    diagonal = float(torch.linalg.vector_norm(highest - lowest)) / DEVIATION
    return math.hypot(diagonal, labels)


def solved(
    sides: Sequence[otdd.LabeledSamples],
    table: otdd.ClassDistances,
    settings: dict[str, Any],
    compute: dict[str, Any],
) -> dict[str, Any]:
    """One value, its bounds, how it ended, seconds and memory of the card."""
    device = str(sides[0].features.device)
    on_card = device.startswith("cuda")
    if isinstance(settings.get("solver"), otdd.GeomlossSchedule):
        settings = {**settings, "solver": otdd.GeomlossSchedule(diameter=first_blur(sides))}
    # What is quick runs twice on a card: the first run compiles kernels.
    for _ in range(2 if on_card and not (settings or compute) else 1):
        if on_card:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        with warnings.catch_warnings():
            # Fixed updates end early, which is what is measured; the others say how they ended.
            warnings.simplefilter("ignore", otdd.NotConvergedWarning)
            found = otdd.dataset_distance(
                *sides,
                class_distances=table,
                compute=otdd.ComputeOptions(device, **compute),
                **settings,
            )
        seconds = time.perf_counter() - started
    divergence, cross = found.divergence, found.divergence.xy
    solver = settings.get("solver")
    diameter = {"diameter": solver.diameter} if isinstance(solver, otdd.GeomlossSchedule) else {}
    return {
        "value": found.value,
        "bounds": list(found.bounds),
        "not_debiased": cross.value,
        "not_debiased_bounds": list(cross.bounds),
        "epsilon": found.epsilon,
        "mean_cost": found.mean_cost,
        "marginal_error": divergence.marginal_error,
        "stopped_by": divergence.stopped_by,
        "converged": divergence.converged,
        "precision": compute.get("precision", "fast"),
        **diameter,
        "seconds": seconds,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_card else None,
    }


def check(row: dict[str, Any]) -> None:
    """Raise an error if the numbers of a row contradict one another.

    Raises:
        AssertionError: a value outside of its bounds, or an exact value above the entropic one.
    """
    for name in CONVENTIONS[row["convention"]][1]:
        found = row[name]
        lower, upper = found["bounds"]
        # Values of fixed updates are those of geomloss, which no bound holds.
        slack = 1e-12 * abs(found["value"])
        if name != "updates" and not lower - slack <= found["value"] <= upper + slack:
            raise AssertionError(f"a value outside of its bounds: {row}")
        if row["exact"]["bounds"][0] > found["not_debiased_bounds"][1]:
            raise AssertionError(f"an exact value above the entropic one: {row}")
    if row["convention"] == "ours":
        default, tight = row["default"]["bounds"], row["tight"]["bounds"]
        if max(default[0], tight[0]) > min(default[1], tight[1]):
            raise AssertionError(f"intervals that exclude each other: {row}")


def measure(given: argparse.Namespace) -> None:
    """Measure the rows of this part that are not there yet."""
    started = time.perf_counter()
    read = {name: load(name, given.data_root, given.samples) for name in DATASETS}
    sides = {name: side.to(given.device) for name, (side, _) in read.items()}
    keys = ("source", "target", "convention")
    rows = Rows(NAME, keys, "torch", "POT", folder=given.output, again=given.again)
    datasets = {name: about for name, (_, about) in read.items()}
    _same_datasets(given.output, rows, datasets)
    began = time.perf_counter()
    classes = otdd.class_distances([*sides.values()])
    rows.head |= {
        "datasets": datasets,
        "class_distances": {
            "seconds": time.perf_counter() - began,
            "squared": classes.full.tolist(),
        },
    }
    sizes = {name: len(side) for name, side in sides.items()}
    tasks = [
        (*pair, convention)
        for pair in pairs_of(given.pairs, sizes)
        for convention in given.conventions
    ]
    places = {name: place for place, name in enumerate(DATASETS)}
    for source, target, convention in share(tasks, sizes, given.part):
        if rows.has(source=source, target=target, convention=convention):
            continue
        if time.perf_counter() - started > given.seconds:
            sys.stdout.write(f"{given.seconds:g} seconds are over; call again for the others\n")
            break
        pair = sides[source], sides[target]
        table = classes.between(places[source], places[target])
        shared, solves = CONVENTIONS[convention]
        row = {
            "source": source,
            "target": target,
            "convention": convention,
            "n": [len(side) for side in pair],
            "device": given.device,
            **{
                name: solved(pair, table, {**shared, **settings}, compute)
                for name, (settings, compute) in solves.items()
            },
        }
        # Before it is checked: what took minutes is not lost.
        rows.add(row)
    for row in rows.rows:
        check(row)


def _same_datasets(folder: Path, rows: Rows, datasets: dict[str, Any]) -> None:
    """Refuse to add rows of other data to a file."""
    if rows.rows:
        there = json.loads((folder / f"{NAME}.json").read_text("utf-8"))["datasets"]
        if there != datasets:
            raise SystemExit(f"{folder / NAME}.json has rows of other data; give --again")


def merge(folders: Sequence[Path], output: Path) -> None:
    """Join the rows of several parts, which must be of the same data, into one file."""
    heads = [json.loads((each / f"{NAME}.json").read_text("utf-8")) for each in folders]
    if any(head["datasets"] != heads[0]["datasets"] for head in heads):
        raise SystemExit("parts of different data cannot be joined")
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for folder in folders:
        for row in read_rows(NAME, folder):
            rows[row["convention"], row["source"], row["target"]] = row
    head = {key: heads[0][key] for key in ("environment", "datasets", "class_distances")}
    write_rows(NAME, head, in_order([*rows.values()]), output)


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by convention: pairs once in the order of `DATASETS`, then those in the other order."""
    pairs = [*itertools.combinations(DATASETS, 2), *itertools.permutations(DATASETS, 2)]
    conventions = [*CONVENTIONS]

    def place(row: dict[str, Any]) -> tuple[int, int]:
        return conventions.index(row["convention"]), pairs.index((row["source"], row["target"]))

    return sorted(rows, key=place)


def outward(bounds: Sequence[float], decimals: int) -> str:
    """An interval with so many decimals, rounded so that it holds the given one."""
    unit = Decimal(1).scaleb(-decimals)
    lower = Decimal(bounds[0]).quantize(unit, ROUND_FLOOR)
    upper = Decimal(bounds[1]).quantize(unit, ROUND_CEILING)
    return f"[{lower}, {upper}]"


def bracket(value: float, bounds: Sequence[float]) -> str:
    """A value with the digits that its interval leaves, and a half-width that covers this."""
    half = max(Decimal(bounds[1]) - Decimal(value), Decimal(value) - Decimal(bounds[0]))
    half = max(half, Decimal(math.ulp(value)))
    unit = Decimal(1).scaleb(half.adjusted())
    shown = Decimal(value).quantize(unit, ROUND_HALF_EVEN)
    width = (half + abs(shown - Decimal(value))).quantize(unit, ROUND_CEILING)
    return f"{shown:f} ± {float(width):.0e}".replace("e-0", "e-")


def tables(content: dict[str, Any]) -> str:
    """The tables of the page in Markdown."""
    gpu = content["environment"]["gpu"] or content["environment"]["processor"]
    rows_in_order = in_order(content["rows"])
    lines = [
        "All digits, class distances, intervals, seconds and memory are in "
        f"[{NAME}](../experiments/results/{NAME}.json).",
        "",
        _datasets_table(content["datasets"]),
        "",
    ]
    for convention, heading, columns in (
        (
            "ours",
            "### Our convention",
            "epsilon | default settings | to a marginal error of 1e-6 | exact | seconds",
        ),
        (
            "microsoft_otdd",
            "### The convention of microsoft/otdd",
            "its updates (marginal error, first blur) | converged | the same, not debiased | exact "
            "| seconds",
        ),
    ):
        rows = [row for row in rows_in_order if row["convention"] == convention]
        if not rows:
            continue
        lines += [heading, "", f"| source → target | {columns} |", "|---|---|---|---|---|---|"]
        lines += [_line(row) for row in rows]
        lines += ["", *_agreement(rows), ""]
    solves = [row[name] for row in content["rows"] for name in CONVENTIONS[row["convention"]][1]]
    peaks = [each["peak_gib"] for each in solves if each["peak_gib"] is not None]
    memory = f", with at most {max(peaks):.0f} GiB of its memory" if peaks else ""
    lines += [
        *_scaled(content["rows"]),
        "",
        "Seconds are in the order of the columns: default settings / to a marginal error of 1e-6 / "
        "exact, and its updates / converged / exact. The converged solve also gives the value that "
        f"is not debiased. All were measured on one {gpu}{memory}. Class distances are measured "
        "before and not counted. The first run with default settings compiles kernels; the second "
        "is shown.",
    ]
    return "\n".join(lines)


def _datasets_table(datasets: dict[str, Any]) -> str:
    lines = [
        "| dataset | split | images | SHA-256 of the images | of the labels | of the features |",
        "|---|---|---|---|---|---|",
    ]
    for name, about in datasets.items():
        size = " × ".join(str(each) for each in about["images"])
        digests = (about[f"sha256_{key}"][:12] for key in ("images", "labels", "features"))
        shown = " | ".join(f"`{each}…`" for each in digests)
        lines.append(
            f"| {TITLES[name]} | {about['split']} | {about['rows']:,} of {size} | {shown} |"
        )
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    """One row of a table."""
    solves = [row[name] for name in CONVENTIONS[row["convention"]][1]]
    exact = bracket(row["exact"]["value"], row["exact"]["bounds"])
    if row["convention"] == "ours":
        default, tight, _ = solves
        cells = [
            f"{default['epsilon']:.7g}",
            f"{default['value']:.4f} {outward(default['bounds'], 4)}",
            f"{tight['value']:.6f} {outward(tight['bounds'], 6)}",
        ]
    else:
        updates, converged, _ = solves
        cells = [
            f"{updates['value']:.2f} ({updates['marginal_error']:.2f}, {updates['diameter']:.7g})",
            f"{converged['value']:.3f} {outward(converged['bounds'], 3)}",
            f"{converged['not_debiased']:.3f} {outward(converged['not_debiased_bounds'], 3)}",
        ]
    seconds = " / ".join(f"{each['seconds']:.1f}" for each in solves)
    pair = f"{TITLES[row['source']]} → {TITLES[row['target']]}"
    return f"| {pair} | {' | '.join([*cells, exact, seconds])} |"


def _agreement(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence on pairs that were solved in both orders; their intervals must overlap."""
    by_pair = {(row["source"], row["target"]): row for row in rows}
    names = [name for name in CONVENTIONS[rows[0]["convention"]][1] if name != "updates"]
    largest = dict.fromkeys(names, 0.0)
    once = itertools.combinations(DATASETS, 2)
    both = [pair for pair in once if {pair, pair[::-1]} <= {*by_pair}]
    for pair, name in itertools.product(both, names):
        one, other = by_pair[pair][name], by_pair[pair[::-1]][name]
        if max(one["bounds"][0], other["bounds"][0]) > min(one["bounds"][1], other["bounds"][1]):
            raise AssertionError(f"both orders of {pair} exclude each other: {one} and {other}")
        off = abs(one["value"] - other["value"]) / abs(one["value"])
        largest[name] = max(largest[name], off)
    if not both:
        return []
    found = ", ".join(
        f"{off:.0e} ({COLUMNS[name]})" if off else f"0 ({COLUMNS[name]})"
        for name, off in largest.items()
    )
    pairs = ", ".join(f"{TITLES[one]} and {TITLES[other]}" for one, other in both)
    return [
        f"Solved in both orders: {pairs}. The intervals of the two orders overlap. The largest "
        f"relative difference of the two values is {found}."
    ]


def _scaled(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence on exact values of both conventions, whose ratio is known.

    Raises:
        AssertionError: it is another one, by more than rounding.
    """
    exact = {(row["source"], row["target"], row["convention"]): row["exact"] for row in rows}
    off = [
        abs(exact[source, target, "microsoft_otdd"]["value"] / (2 * WEIGHT * ours["value"]) - 1)
        for (source, target, convention), ours in exact.items()
        if convention == "ours" and (source, target, "microsoft_otdd") in exact
    ]
    if not off:
        return []
    # Intervals are some 1e-12 wide.
    if max(off) > 1e-11:
        raise AssertionError(f"exact values of both conventions do not have their ratio: {off}")
    return [
        "Exact values of the second table are solved on their own. They should be those of the "
        f"first, divided by 0.3081²; the largest relative difference is {max(off):.0e}."
    ]


def write_tables(content: dict[str, Any], page: Path) -> None:
    """Replace what stands between the two marks of a page by the tables."""
    before, mark, rest = page.read_text("utf-8").partition(MARK)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{page} has no line {MARK} with {END} below it")
    page.write_text(f"{before}{MARK}\n\n{tables(content)}\n\n{END}{after}", "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write public_numbers.json, join its parts, or write the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, help="at most so many images each; all")
    parser.add_argument("--pairs", nargs="+", default=(), help="such as mnist-usps; or all")
    parser.add_argument("--conventions", nargs="+", choices=CONVENTIONS, default=(*CONVENTIONS,))
    parser.add_argument("--part", default="0/1", help="I/K: share I, from 0, of K")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows measured before")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    if given.merge:
        merge(given.merge, given.output)
    elif given.table:
        content = json.loads((given.output / f"{NAME}.json").read_text("utf-8"))
        write_tables(content, given.page)
    elif given.data_root is None:
        parser.error("--data-root is the folder of MNIST, FashionMNIST and USPS")
    else:
        measure(given)


if __name__ == "__main__":
    main()
