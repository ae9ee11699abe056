"""Exact distances of all pairs of four real datasets, and how far entropic ones are from them.

    python -m experiments.exact_distance --data-root DIR [--samples 2000] [--output DIR]

MNIST, Fashion-MNIST, USPS and the bundled digits, at most so many images each, at 28 x 28, gaussian
class distances measured once. Of every pair the exact distance, solved until its plan is proven
optimal, with its interval, and entropic distances at shares of the mean cost, debiased and not, in
double precision to a marginal error of 1e-3. The picture shows which epsilon is close enough.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.report.page import INK, new_figure, save_picture

NAMES = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "usps": "USPS",
    "digits": "digits",
}
SHARES = (0.1, 0.03, 0.01, 0.003, 0.001)
DOUBLE = otdd.ComputeOptions(precision="double")
# Okabe & Ito: told apart with every common colour blindness; markers tell as well.
STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
)
ENOUGH = 0.01


def measured(sides: Sequence[otdd.LabeledSamples], table: otdd.ClassDistances) -> dict[str, Any]:
    """The exact distance of two datasets, and entropic ones beside it."""
    started = time.perf_counter()
    exact = otdd.dataset_distance(
        *sides, epsilon=0, class_distances=table, solver=otdd.Exact(bound_width=0)
    )
    seconds = time.perf_counter() - started
    entropic = []
    for share in SHARES:
        started = time.perf_counter()
        found = otdd.dataset_distance(
            *sides, epsilon_relative=share, class_distances=table, compute=DOUBLE
        )
        cross = found.divergence.xy
        entropic.append(
            {
                "epsilon_relative": share,
                "epsilon": found.epsilon,
                "debiased": found.value,
                "debiased_bounds": list(found.bounds),
                "not_debiased": cross.value,
                "not_debiased_bounds": list(cross.bounds),
                "seconds": time.perf_counter() - started,
            }
        )
    return {
        "n": [len(side) for side in sides],
        "value": exact.value,
        "bounds": list(exact.bounds),
        "stopped_by": exact.divergence.stopped_by,
        "seconds": seconds,
        "entropic": entropic,
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw by how much entropic values are off, a panel each for those debiased and not."""
    figure = new_figure(11.0, 5.6)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, title in zip(
        panels,
        ("not_debiased", "debiased"),
        ("Not debiased", "Debiased"),
        strict=True,
    ):
        axes.axhline(100 * ENOUGH, color=INK, linewidth=1, linestyle="--")
        for row, (color, marker) in zip(rows, STYLES, strict=False):
            off = [100 * (each[key] / row["value"] - 1) for each in row["entropic"]]
            shares = [each["epsilon_relative"] for each in row["entropic"]]
            axes.plot(shares, [abs(each) for each in off], color=color, linewidth=1.4)
            for share, each in zip(shares, off, strict=True):
                # Hollow where the value is below the exact one.
                fill = color if each >= 0 else "white"
                axes.plot(share, abs(each), marker, color=color, markerfacecolor=fill)
            pair = " - ".join(NAMES[name] for name in row["pair"])
            axes.plot([], [], marker, linestyle="-", color=color, label=pair)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.invert_xaxis()
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        axes.set_xlabel("epsilon over the mean cost")
        axes.grid(color="#e5e5e5")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("off the exact distance by, %")
    panels[0].text(SHARES[0], 108 * ENOUGH, "1%", fontsize=9, color=INK, va="bottom")
    panels[1].plot([], [], "o", color=INK, markerfacecolor="white", label="below the exact one")
    handles, names = panels[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=4, frameon=False, fontsize=9.5)
    figure.subplots_adjust(0.07, 0.23, 0.98, 0.93, wspace=0.06)
    save_picture(figure, path)


def main() -> None:
    """Write exact_distance.json and .png."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    pixels = otdd.extractors.pixels(size=28)
    sides = [
        otdd.embed(
            otdd.load(name, root=given.data_root, split="all", max_samples=given.samples), pixels
        )
        for name in NAMES
    ]
    table = otdd.class_distances(sides)
    rows = []
    for (i, one), (j, other) in itertools.combinations(enumerate(NAMES), 2):
        found = measured((sides[i], sides[j]), table.between(i, j))
        rows.append({"pair": [one, other], **found})
        sys.stdout.write(f"{one} {other} {found['value']:.6f} {found['seconds']:.1f} s\n")
        sys.stdout.flush()
    content = {"environment": environment("torch", "POT"), "samples": given.samples, "rows": rows}
    write_result("exact_distance", content, given.output)
    draw(rows, given.output / "exact_distance.png")


if __name__ == "__main__":
    main()
