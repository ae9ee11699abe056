"""Seconds and peak memory against n, a column for each experiment, from the rows of the result."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otdd_flash.report.page import INK, SOURCE_COLOR, TARGET_COLOR, new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

WIDTH, ROW_HEIGHT, CAPTION_HEIGHT, LEGEND_HEIGHT = 12.0, 3.0, 1.15, 0.7
CAPTION_COLUMNS = 185
CAPACITY_COLOR = "#777777"
CROSS: dict[str, Any] = {"marker": "x", "markersize": 9, "markeredgewidth": 2}
COLUMNS = {
    ("features", "distance"): "OTDD, ResNet18 features",
    ("features", "flow"): "OTDD gradient flow, {steps} steps",
    ("pixels", "distance"): "Sinkhorn divergence, pixels, no labels",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """How a side is drawn."""

    label: str
    color: str
    marker: str
    dashes: str = "-"
    filled: bool = True


# Okabe & Ito's blue, vermilion and bluish green; markers tell them apart without colour.
LINES = {
    "ours": Line("ours", SOURCE_COLOR, "o"),
    "converged": Line(
        "ours, converged to 1e-3 and certified", SOURCE_COLOR, "o", "--", filled=False
    ),
    "tensorized": Line("dense PyTorch", TARGET_COLOR, "s"),
    "geomloss": Line("geomloss tensorized", "#009E73", "^"),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture of these rows, which come from one network; without rows, none."""
    if not rows:
        return
    columns = {
        title: sorted((row for row in rows if (row["points"], row["task"]) == key), key=_n)
        for key, title in COLUMNS.items()
    }
    columns = {title: found for title, found in columns.items() if found}
    weighed = any(row["sides"]["ours"]["peak_mib"] is not None for row in rows)
    quantities = ("ms", "peak_mib") if weighed else ("ms",)
    body = ROW_HEIGHT * len(quantities)
    height = body + CAPTION_HEIGHT + LEGEND_HEIGHT
    figure = new_figure(WIDTH, height)
    grid = figure.subplots(len(quantities), len(columns), squeeze=False, sharex="col", sharey="row")
    figure.subplots_adjust(
        left=0.065,
        right=0.985,
        bottom=CAPTION_HEIGHT / height,
        top=1 - LEGEND_HEIGHT / height,
        wspace=0.06,
        hspace=0.08,
    )
    for axes_row, quantity in zip(grid, quantities, strict=True):
        for axes, (title, found) in zip(axes_row, columns.items(), strict=True):
            _panel(axes, found, quantity)
            if quantity == quantities[0]:
                axes.set_title(_with_details(title, found), fontsize=10.5, color=INK, loc="left")
        label = "seconds" if quantity == "ms" else "peak memory above the inputs, MiB"
        axes_row[0].set_ylabel(label, fontsize=10, color=INK)
    for axes in grid[-1]:
        axes.set_xlabel("points a side, n", fontsize=10, color=INK)
    handles = _legend(grid.flat, rows)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="upper center",
        ncols=len(handles),
        fontsize=9.5,
        frameon=False,
        labelcolor=INK,
    )
    figure.text(
        0.015,
        0.08 / height,
        textwrap.fill(_caption(rows), CAPTION_COLUMNS),
        fontsize=8,
        color=INK,
        va="bottom",
        linespacing=1.35,
    )
    save_picture(figure, path)


def _legend(panels: Iterable[Axes], rows: Sequence[Row]) -> dict[str, Artist]:
    """Every label once, and the crosses, whose colours tell the side."""
    from matplotlib.lines import Line2D

    handles: dict[str, Artist] = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if any(_ran_out(part) for row in rows for part in row["sides"].values()):
        handles["out of memory"] = Line2D([], [], color=INK, linestyle="", **CROSS)
    return handles


def _panel(axes: Axes, rows: Sequence[Row], quantity: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="major", color="0.9", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=9, colors=INK)
    sizes = [row["n"] for row in rows]
    axes.set_xticks(sizes, [f"{n // 1000}k" if n % 1000 == 0 else f"{n}" for n in sizes])
    axes.set_xticks([], minor=True)
    # Room for the ratios on the right.
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.7)
    for side, line in LINES.items():
        found = _points(rows, side, quantity)
        if found:
            axes.plot(
                *zip(*found, strict=True),
                color=line.color,
                marker=line.marker,
                linestyle=line.dashes,
                markersize=5.5,
                markerfacecolor=line.color if line.filled else "white",
                label=line.label,
            )
    for side in LINES:
        _mark_failures(axes, rows, side, quantity)
    capacity = max((row["device_memory_mib"] or 0.0 for row in rows), default=0.0)
    if quantity == "peak_mib" and capacity:
        axes.axhline(
            capacity, color=CAPACITY_COLOR, linewidth=1, linestyle=":", label="memory of the GPU"
        )
    if quantity == "ms":
        _write_ratios(axes, rows[-1])
        axes.margins(y=0.28)


def _points(rows: Sequence[Row], side: str, quantity: str) -> list[tuple[int, float]]:
    """(n, seconds or MiB) of a side where it ran; a flow has no converged solve."""
    parts = [(row, _part(row, side)) for row in rows]
    scale = 1e-3 if quantity == "ms" else 1.0
    return [
        (row["n"], part[quantity] * scale) for row, part in parts if part.get(quantity) is not None
    ]


def _part(row: Row, side: str) -> Row:
    if side == "converged":
        return row["converged"] if row["task"] == "distance" else {}
    part: Row = row["sides"].get(side, {})
    return part


def _ran_out(part: Row) -> bool:
    """Whether a side was tried and ran out of memory."""
    return str(part.get("failed", "")).startswith("out of memory")


def _mark_failures(axes: Axes, rows: Sequence[Row], side: str, quantity: str) -> None:
    """A cross at the n where memory ran out: at its need if that is known, else at the top."""
    color = LINES[side].color
    for row in rows:
        part = _part(row, side)
        if not _ran_out(part):
            continue
        needed = part.get("needed_mib")
        if quantity == "peak_mib" and needed is not None:
            axes.plot([row["n"]], [needed], color=color, linestyle="", **CROSS)
            continue
        # Sides at different heights, in parts of the panel.
        height = 0.97 - 0.08 * (side == "tensorized")
        place = axes.get_xaxis_transform()
        axes.plot([row["n"]], [height], transform=place, color=color, linestyle="", **CROSS)
        axes.annotate(
            part["failed"].partition(", ")[2],
            (row["n"], height),
            xycoords=place,
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
            color=color,
        )


def _write_ratios(axes: Axes, row: Row) -> None:
    """Times ours at the largest n, beside the points of the others."""
    for side, ratio in row["ratio"].items():
        if ratio is None:
            continue
        axes.annotate(
            f"{ratio:.3g}×",
            (row["n"], row["sides"][side]["ms"] / 1000),
            xytext=(7, 3 if side == "geomloss" else -3),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=LINES[side].color,
        )


def _with_details(title: str, rows: Sequence[Row]) -> str:
    steps = (rows[-1]["flow"] or {}).get("steps")
    return f"{title.format(steps=steps)}, d = {rows[-1]['d']}"


def _caption(rows: Sequence[Row]) -> str:
    """What was measured, on what, and with which network."""
    last = rows[-1]
    networks = {row["network"]: row["training"] for row in rows if row["network"] is not None}
    texts = [
        f"MNIST against Fashion-MNIST on {last['device_name']}. All sides: {last['iterations']} "
        f"iterations at epsilon = {last['epsilon_relative']} of the mean cost"
        + ("; geomloss reaches it along its schedule. " if _has(rows, "geomloss") else ". ")
        + "Numbers at the largest n: times the seconds of ours, where our marginal error is not "
        "larger; the errors are in the JSON."
    ]
    for name, training in networks.items():
        accuracy = training.get("accuracy_on_new_batches")
        texts.append(
            f"Features: {name}, without pretrained weights; it tells the class of {accuracy:.0%} "
            "of new images."
            if accuracy is not None
            else f"Features: {name}."
        )
    return " ".join(texts)


def _has(rows: Sequence[Row], side: str) -> bool:
    return any(side in row["sides"] for row in rows)


def _n(row: Row) -> int:
    n: int = row["n"]
    return n
