"""Small multiples of the traces: a row for each problem, a column for each epsilon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import NullFormatter

from experiments.convergence.problem import TARGET
from otdd_flash.report.page import INK, new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

# Inches; the legend lies above all panels.
WIDTH, ROW_HEIGHT, ABOVE, BELOW = 10.0, 2.3, 0.75, 0.5
NAMES = {"mnist": "MNIST", "usps": "USPS", "fashion_mnist": "Fashion-MNIST"}


@dataclass(frozen=True)
class Style:
    """How a method is drawn."""

    label: str
    color: str
    marker: str
    dashes: str = "-"


# Okabe & Ito: told apart with every common colour blindness, and by markers and dashes.
STYLES = {
    "ours": Style("ours", "#0072B2", "o"),
    "ours, labels": Style("ours, labels", "#0072B2", "o", ":"),
    "plain": Style("plain updates", "#777777", "", "-"),
    "flash-sinkhorn": Style("flash-sinkhorn", "#D55E00", "s"),
    "flash-sinkhorn alternating": Style("flash-sinkhorn, alternating", "#D55E00", "D", "--"),
    "geomloss": Style("geomloss", "#009E73", "^"),
    "OTT-JAX": Style("OTT-JAX", "#CC79A7", "v"),
    "POT": Style("POT", "#E69F00", "P"),
    "POT log": Style("POT log", "#E69F00", "X", "--"),
}
AXES = {
    "seconds": "seconds, from the clouds on the device",
    "passes": "sweeps over n × m scores",
}
QUANTITIES = {"error": "marginal error", "width": "relative width of the bounds"}


def draw(rows: Sequence[Row], folder: Path, name: str, *, everything: bool = False) -> None:
    """Write NAME_n.png, the error against seconds for the largest n.

    With `everything` a picture for every n, quantity and axis: NAME_n_width_passes.png and so on.
    """
    if not everything:
        largest = max(row["n"] for row in rows)
        found = [row for row in rows if row["n"] == largest and row.get("trace")]
        draw_figure(found, "error", "seconds", folder / f"{name}_{largest}.png")
        return
    for n in dict.fromkeys(row["n"] for row in rows):
        found = [row for row in rows if row["n"] == n and row.get("trace")]
        for quantity, along in product(QUANTITIES, AXES):
            ends = ("_width" if quantity == "width" else "", "_passes" if along == "passes" else "")
            draw_figure(found, quantity, along, folder / f"{name}_{n}{''.join(ends)}.png")


def draw_figure(rows: Sequence[Row], quantity: str, along: str, path: Path) -> None:
    """One quantity of the rows of one n, along seconds or passes."""
    problems = list(dict.fromkeys((row["pair"], row["points"]) for row in rows))
    epsilons = sorted({row["epsilon_relative"] for row in rows}, reverse=True)
    heights = [y for row in rows for _, y in _points(row, quantity, along)]
    if not heights:
        return
    height = ROW_HEIGHT * len(problems) + ABOVE + BELOW
    figure = new_figure(WIDTH, height)
    grid = figure.subplots(len(problems), len(epsilons), squeeze=False, sharey=True)
    figure.subplots_adjust(
        0.115, BELOW / height, 0.985, 1 - ABOVE / height, wspace=0.06, hspace=0.5 / ROW_HEIGHT
    )
    for line, (pair, points) in zip(grid, problems, strict=True):
        for axes, relative in zip(line, epsilons, strict=True):
            key = pair, points, relative
            found = [
                row for row in rows if (row["pair"], row["points"], row["epsilon_relative"]) == key
            ]
            if not found:
                axes.set_visible(False)
                continue
            _panel(axes, found, quantity, along, (min(heights), max(heights)))
            axes.set_title(
                f"ε = {relative:g} of the mean cost", fontsize=9.5, loc="left", color=INK
            )
        first = next(row for row in rows if (row["pair"], row["points"]) == (pair, points))
        line[0].set_ylabel(
            f"{_problem_name(first)}\n{QUANTITIES[quantity]}", fontsize=9.5, color=INK
        )
    for axes in grid[-1]:
        axes.set_xlabel(AXES[along], fontsize=9.5, color=INK)
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    handles = [lines[style.label] for style in STYLES.values() if style.label in lines]
    figure.legend(
        handles=handles,
        loc="upper center",
        ncols=math.ceil(len(handles) / 2),
        frameon=False,
        fontsize=9.5,
    )
    save_picture(figure, path)


def _problem_name(row: Row) -> str:
    source, _, target = row["pair"].partition(" -> ")
    sizes = f"{row['n']:,} × {row['m']:,}, d = {row['d']}"
    return f"{NAMES[source]} → {NAMES[target]}\n{sizes}"


def _panel(
    axes: Axes, rows: Sequence[Row], quantity: str, along: str, heights: tuple[float, float]
) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="major", color="0.92", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8.5, colors=INK)
    low, high = heights
    axes.set_ylim(low / 1.5, high * 1.5)
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    axes.set_yticks([10.0**power for power in powers])
    axes.set_yticks([], minor=True)
    axes.xaxis.set_minor_formatter(NullFormatter())
    for method, style in STYLES.items():
        row = next((row for row in rows if row["method"] == method), None)
        line = [] if row is None else _points(row, quantity, along)
        if not line:
            continue
        axes.plot(
            *zip(*line, strict=True),
            label=style.label,
            color=style.color,
            linestyle=style.dashes,
            marker=style.marker,
            markersize=3.5,
            linewidth=2.2 if method == "ours" else 1.3,
            zorder=3 if method.startswith("ours") else 2,
        )
    if quantity == "error":
        axes.axhline(TARGET, color=INK, linewidth=0.8, linestyle=":")


def _points(row: Row, quantity: str, along: str) -> list[tuple[float, float]]:
    if quantity == "width":
        certified = [point for point in row["trace"] if point["bounds"]]
        return [(point[along], _width(*point["bounds"])) for point in certified]
    # The lower of the two errors is the one that counts; ours has one.
    errors = (
        (point[along], [error for error in (point["error"], point["own_error"]) if error])
        for point in row["trace"]
    )
    return [(x, min(known)) for x, known in errors if known]


def _width(low: float, high: float) -> float:
    return (high - low) / abs(high)
