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
from otdd_flash.report.figures.page import INK, new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

WIDTH, ROW_HEIGHT, MARGIN = 12.0, 3.7, 0.75
# Heights of a panel's curves, in parts of the panel; names hang below.
CURVES = 0.42
# The least distance of two of them, in parts of a panel's width.
NAME_GAP = 0.062
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
    "flash-sinkhorn alternating": Style("flash, alternating", "#D55E00", "D", "--"),
    "geomloss": Style("geomloss", "#009E73", "^"),
    "OTT-JAX": Style("OTT-JAX", "#CC79A7", "v"),
    "POT": Style("POT", "#E69F00", "P"),
    "POT log": Style("POT log", "#E69F00", "X", "--"),
}
AXES = {
    "seconds": "seconds, from the clouds on the device",
    "passes": "sweeps over n × m scores",
}
QUANTITIES = {"error": "L1 marginal error", "width": "relative width of the bounds"}


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
    height = ROW_HEIGHT * len(problems) + MARGIN
    figure = new_figure(WIDTH, height)
    grid = figure.subplots(len(problems), len(epsilons), squeeze=False, sharey=True)
    figure.subplots_adjust(
        0.105, 0.55 / height, 0.985, 1 - 0.3 / height, wspace=0.05, hspace=0.55 / ROW_HEIGHT
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
    low, high = (math.log10(bound) for bound in heights)
    bottom = low - (high - low) * CURVES / (1 - CURVES)
    axes.set_ylim(10**bottom, 10**high * 1.5)
    decades = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
    axes.set_yticks(decades)
    axes.set_yticks([], minor=True)
    axes.xaxis.set_minor_formatter(NullFormatter())
    ends: list[tuple[float, float, Style]] = []
    for method, style in STYLES.items():
        row = next((row for row in rows if row["method"] == method), None)
        line = [] if row is None else _points(row, quantity, along)
        if not line:
            continue
        axes.plot(
            *zip(*line, strict=True),
            color=style.color,
            linestyle=style.dashes,
            marker=style.marker,
            markersize=3.5,
            linewidth=2.2 if method == "ours" else 1.3,
            zorder=3 if method.startswith("ours") else 2,
        )
        ends.append((*line[-1], style))
    if quantity == "error":
        axes.axhline(TARGET, color=INK, linewidth=0.8, linestyle=":")
    _name_lines(axes, ends)


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


def _name_lines(axes: Axes, ends: Sequence[tuple[float, float, Style]]) -> None:
    """Names below the curves, from left to right as they end, each with a thread to its end."""
    if not ends:
        return
    ordered = sorted(ends, key=lambda end: end[0])
    axes.margins(x=0.06)
    # Autoscaling is lazy, and the transform below is not.
    axes.autoscale_view(scaley=False)
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [to_axes.transform((x, y))[0] for x, y, _ in ordered]
    gap = NAME_GAP
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    places[-1] = min(places[-1], 1 - gap / 4)
    for i in reversed(range(len(places) - 1)):
        places[i] = min(places[i], places[i + 1] - gap)
    for place, (x, y, style) in zip(places, ordered, strict=True):
        axes.annotate(
            style.label,
            (x, y),
            xytext=(place, CURVES - 0.07),
            textcoords="axes fraction",
            rotation=90,
            ha="center",
            va="top",
            fontsize=8,
            color=style.color,
            arrowprops={
                "arrowstyle": "-",
                "color": style.color,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 2,
            },
        )
