"""Both datasets in one plane, with arrows for the mass that moves between their classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.report.class_moves import WORTH_SHOWING, Move, strongest_moves
from otdd_flash.report.label_placement import place_labels
from otdd_flash.report.page import (
    DPI,
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    fit,
    measure,
    name_style,
    new_figure,
    save_picture,
    shorten,
)
from otdd_flash.report.principal_plane import fit_plane
from otdd_flash.report.projection_sides import Side, rows_with_mass, side_of
from otdd_flash.samples import LabeledSamples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
ROWS_FITTED = 5000
# With more classes a side, only the heaviest moves are drawn and only their ends marked and named.
MOST_CLASSES, MOVES_OF_MANY, MOVES_AT_MOST = 20, 14, 40
# Inches.
WIDTH, LEAST_HEIGHT, MOST_HEIGHT = 8.6, 3.6, 7.4
LEFT, RIGHT, TOP, BOTTOM = 0.75, 0.15, 0.5, 1.25
LONGEST_LABEL, LONGEST_DATASET = 16, 60
LABEL_POINTS, TITLE_POINTS = 9.0, 12.0
# Pixels.
MARKER_RADIUS, LEADER_FROM, SHORTEST_ARROW = 8.0, 24.0, 18.0


def projection(
    source: LabeledSamples, target: LabeledSamples, coupling: Tensor, path: str | Path, seed: int
) -> None:
    """Draw two datasets in their common principal plane, with class means and the class coupling.

    An arrow goes from the mean of a source class to the mean of a target class if it is the largest
    of the source class or carries at least a quarter of its mass; its width is the mass. With more
    than 20 classes on a side only the 14 heaviest arrows and their ends are shown. The axes are
    fitted to at most 5,000 rows a side and at most 2,000 are drawn, less the one in a hundred that
    may lie beyond the frame; means use all rows.

    Args:
        source: features of any dimension; labels may be None.
        target: features of the same dimension.
        coupling: (Vx, Vy) masses that sum to 1. A side with one row or column counts as one class.
        path: the PNG file.
        seed: of the subsamples.

    Raises:
        ValueError: the coupling's shape does not match the classes.
        InputError: the file cannot be written.
    """
    coupling = coupling.detach().cpu().double()
    fitted = [
        samples.features[torch.from_numpy(rows_with_mass(samples, ROWS_FITTED, seed))]
        for samples in (source, target)
    ]
    plane = fit_plane(fitted, seed)
    left = side_of(source, coupling.shape[0], plane, seed, SOURCE_COLOR, "o")
    right = side_of(target, coupling.shape[1], plane, seed, TARGET_COLOR, "^")
    moves, marked = _moves_and_classes(coupling)

    figure, axes = _frame([left.points, right.points], [left.centroids, right.centroids])
    for axis, k in ((axes.xaxis, 0), (axes.yaxis, 1)):
        share = plane.explained[k]
        percent = f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"
        text = f"principal axis {k + 1} ({percent} of the variance)"
        axis.set_label_text(text, fontsize=9, color=INK)
    for side, classes in zip((left, right), marked, strict=True):
        _draw_points(axes, side, classes)
    flat = plane.explained[1] < 1e-9
    _draw_moves(axes, (left, right), moves, flat)
    _draw_labels(figure, axes, (left, right), marked, moves, flat)
    _draw_legend(figure, axes, (left, right), _about(moves, coupling))
    title = f"{source.name} and {target.name} in their common principal plane"
    text = fit(title, WIDTH, lambda shown: measure(figure, shown, TITLE_POINTS)[0])
    height = figure.get_size_inches()[1]
    place = (axes.get_position().x0, 1 - 0.15 / height)
    figure.text(*place, text, fontsize=TITLE_POINTS, color=INK, va="top", **name_style())
    save_picture(figure, path)


def _moves_and_classes(coupling: Tensor) -> tuple[list[Move], tuple[list[int], list[int]]]:
    """The arrows, and the classes of each side that are marked and named."""
    if max(coupling.shape) > MOST_CLASSES:
        moves = strongest_moves(coupling, MOVES_OF_MANY)
        return moves, (sorted({m.source for m in moves}), sorted({m.target for m in moves}))
    # Between one class and one class everything moves: no arrow is needed to say so.
    moves = strongest_moves(coupling, MOVES_AT_MOST) if coupling.numel() > 1 else []
    return moves, (list(range(coupling.shape[0])), list(range(coupling.shape[1])))


def _frame(clouds: Sequence[Array], centroids: Sequence[Array]) -> tuple[Figure, Axes]:
    """A page with one scale in both directions, around all points but far outliers."""
    points = np.concatenate(clouds)
    low, high = np.quantile(points, [0.005, 0.995], axis=0)
    reach = 0.25 * (high - low)
    low, high = np.maximum(low - reach, points.min(0)), np.minimum(high + reach, points.max(0))
    means = np.concatenate(centroids)
    low, high = np.fmin(low, np.nanmin(means, 0)), np.fmax(high, np.nanmax(means, 0))
    span = high - low if (high > low).any() else np.ones(2)
    height = MOST_HEIGHT
    if span[1] * WIDTH < span[0] * MOST_HEIGHT:
        height = max(float(WIDTH * span[1] / span[0]), LEAST_HEIGHT)
    half = 0.54 * max(span[0] / WIDTH, span[1] / height) * np.array([WIDTH, height])
    centre = (low + high) / 2
    page = (LEFT + WIDTH + RIGHT, BOTTOM + height + TOP)
    figure = new_figure(*page)
    axes = figure.add_axes((LEFT / page[0], BOTTOM / page[1], WIDTH / page[0], height / page[1]))
    axes.set_xlim(centre[0] - half[0], centre[0] + half[0])
    axes.set_ylim(centre[1] - half[1], centre[1] + half[1])
    axes.ticklabel_format(scilimits=(-2, 4), useMathText=True)
    axes.tick_params(labelsize=8, color="0.6", labelcolor=INK, length=3)
    axes.spines[:].set_color("0.8")
    return figure, axes


def _draw_points(axes: Axes, side: Side, marked: Sequence[int]) -> None:
    color, marker = side.color, side.marker
    x, y = side.points.T
    axes.scatter(x, y, s=11, c=color, marker=marker, alpha=0.28, linewidths=0)
    x, y = side.centroids[marked].T
    axes.scatter(x, y, s=75, c=color, marker=marker, edgecolors="white", linewidths=1.2, zorder=4)


def _draw_moves(axes: Axes, sides: tuple[Side, Side], moves: Sequence[Move], flat: bool) -> None:
    """Draw arrows between class means, the lightest last; on a line they bow upwards."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.patheffects import Normal, Stroke

    for move in moves:
        start, end = sides[0].centroids[move.source], sides[1].centroids[move.target]
        run = axes.transData.transform(end) - axes.transData.transform(start)
        if np.linalg.norm(run) < SHORTEST_ARROW:
            continue
        width = 0.7 + 2.8 * move.mass / moves[0].mass
        bow = float(-0.45 * np.sign(run[0])) if flat else 0.0
        axes.add_patch(
            FancyArrowPatch(
                tuple(start),
                tuple(end),
                arrowstyle="-|>",
                connectionstyle=f"arc3,rad={bow}",
                mutation_scale=7 + 2.5 * width,
                linewidth=width,
                color=INK,
                alpha=0.85,
                shrinkA=3,
                shrinkB=4,
                zorder=3,
                path_effects=[Stroke(linewidth=width + 1.6, foreground="white"), Normal()],
            )
        )


def _draw_labels(
    figure: Figure,
    axes: Axes,
    sides: tuple[Side, Side],
    marked: tuple[list[int], list[int]],
    moves: Sequence[Move],
    flat: bool,
) -> None:
    """Name class means in their dataset's colour, the heaviest first; the target's in italics."""
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    pixels = [axes.transData.transform(side.centroids) for side in sides]
    named = [
        (side, k, pixels[i][k])
        for i, side in enumerate(sides)
        for k in marked[i]
        if side.masses[k] > 0 and side.class_names[k]
    ]
    named.sort(key=lambda entry: -entry[0].masses[entry[1]])
    texts = [shorten(side.class_names[k], LONGEST_LABEL) for side, k, _ in named]
    sizes = [measure(figure, text, LABEL_POINTS, fontweight="bold") for text in texts]
    anchors = np.array([where for *_, where in named]).reshape(-1, 2)
    x0, y0, x1, y1 = axes.get_window_extent().extents
    spots = place_labels(
        anchors,
        DPI * np.array(sizes).reshape(-1, 2) + 3,
        np.hstack([anchors - MARKER_RADIUS, anchors + MARKER_RADIUS]),
        np.array([(pixels[0][m.source], pixels[1][m.target]) for m in moves]).reshape(-1, 2, 2),
        # Points on a line have their arrows above it.
        (x0, y0, x1, (y0 + y1) / 2 if flat else y1),
    )
    page = DPI * figure.get_size_inches()
    for (side, _, anchor), text, spot in zip(named, texts, spots, strict=True):
        if spot is None:
            continue
        x, y = np.array(spot.centre) / page
        if spot.distance > LEADER_FROM:
            start = anchor / page
            figure.add_artist(
                Line2D((start[0], x), (start[1], y), color=side.color, linewidth=0.7, zorder=4)
            )
        figure.text(
            x,
            y,
            text,
            fontsize=LABEL_POINTS,
            fontweight="bold",
            fontstyle="italic" if side is sides[1] else "normal",
            color=side.color,
            ha="center",
            va="center",
            zorder=6,
            path_effects=[withStroke(linewidth=2.2, foreground="white")],
            **name_style(),
        )


def _about(moves: Sequence[Move], coupling: Tensor) -> str | None:
    if not moves:
        return None
    if max(coupling.shape) > MOST_CLASSES:
        return f"the {len(moves)} largest moves of mass between classes (width: mass)"
    largest = f"its largest share and any from {WORTH_SHOWING:.0%}"
    return f"where a class's mass goes: {largest} (width: mass)"


def _draw_legend(figure: Figure, axes: Axes, sides: tuple[Side, Side], about: str | None) -> None:
    from matplotlib.lines import Line2D

    handles, texts = [], []
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    for side in sides:
        x, y = side.points.T
        shown = int(((x >= x0) & (x <= x1) & (y >= y0) & (y <= y1)).sum())
        part = "" if shown == side.size else f", {shown:,} shown"
        texts.append(f"{shorten(side.name, LONGEST_DATASET)} ({side.size:,} samples{part})")
        handles.append(Line2D([], [], color=side.color, marker=side.marker, linestyle="none"))
    if about is not None:
        texts.append(about)
        handles.append(Line2D([], [], color=INK, marker=">", linewidth=1.8, markevery=[1]))
    height = figure.get_size_inches()[1]
    legend = figure.legend(
        handles,
        texts,
        loc="upper left",
        bbox_to_anchor=(axes.get_position().x0, (BOTTOM - 0.5) / height),
        frameon=False,
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        labelcolor=INK,
    )
    for text in legend.get_texts():
        text.set(**name_style())
