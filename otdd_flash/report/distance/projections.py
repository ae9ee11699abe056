"""Both datasets in one plane, with arrows for the mass that moves between their classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from otdd_flash.report.distance.class_moves import WORTH_SHOWING, Move, strongest_moves
from otdd_flash.report.figures.page import INK, SOURCE_COLOR, TARGET_COLOR, save_picture
from otdd_flash.report.figures.plane_frame import (
    axis_name,
    name_axes,
    plane_frame,
    write_legend,
    write_title,
)
from otdd_flash.report.figures.point_names import PointName, draw_names
from otdd_flash.report.figures.principal_plane import fit_plane
from otdd_flash.report.figures.projection_sides import ProjectedSide, rows_with_mass, side_of
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS_FITTED = 5000
# With more classes a side, only the heaviest moves are drawn and only their ends marked and named.
MOST_CLASSES, MOVES_OF_MANY, MOVES_AT_MOST = 20, 14, 40
LONGEST_DATASET = 60
SHORTEST_ARROW = 18.0  # pixels


def projection(
    source: LabeledSamples,
    target: LabeledSamples,
    coupling: Tensor,
    path: str | Path | None,
    seed: int,
) -> Figure:
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
        path: the PNG file; None writes none.
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

    figure, axes = plane_frame([left.points, right.points], [left.centroids, right.centroids])
    name_axes(axes, axis_name(plane, 0), axis_name(plane, 1))
    for side, classes in zip((left, right), marked, strict=True):
        _draw_points(axes, side, classes)
    flat = plane.explained[1] < 1e-9
    _draw_moves(axes, (left, right), moves, flat)
    _draw_labels(figure, axes, (left, right), marked, moves, flat)
    _draw_legend(figure, axes, (left, right), _about(moves, coupling))
    title = f"{source.name} and {target.name} in their common principal plane"
    write_title(figure, axes, title)
    save_picture(figure, path)
    return figure


def _moves_and_classes(coupling: Tensor) -> tuple[list[Move], tuple[list[int], list[int]]]:
    """The arrows, and the classes of each side that are marked and named."""
    if max(coupling.shape) > MOST_CLASSES:
        moves = strongest_moves(coupling, MOVES_OF_MANY)
        return moves, (sorted({m.source for m in moves}), sorted({m.target for m in moves}))
    # Between one class and one class everything moves: no arrow is needed to say so.
    moves = strongest_moves(coupling, MOVES_AT_MOST) if coupling.numel() > 1 else []
    return moves, (list(range(coupling.shape[0])), list(range(coupling.shape[1])))


def _draw_points(axes: Axes, side: ProjectedSide, marked: Sequence[int]) -> None:
    color, marker = side.color, side.marker
    x, y = side.points.T
    axes.scatter(x, y, s=11, c=color, marker=marker, alpha=0.28, linewidths=0)
    x, y = side.centroids[marked].T
    axes.scatter(x, y, s=75, c=color, marker=marker, edgecolors="white", linewidths=1.2, zorder=4)


def _draw_moves(
    axes: Axes, sides: tuple[ProjectedSide, ProjectedSide], moves: Sequence[Move], flat: bool
) -> None:
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
    sides: tuple[ProjectedSide, ProjectedSide],
    marked: tuple[list[int], list[int]],
    moves: Sequence[Move],
    flat: bool,
) -> None:
    """Name class means in their dataset's colour, the heaviest first; the target's in italics."""
    named = [
        (side, k)
        for i, side in enumerate(sides)
        for k in marked[i]
        if side.masses[k] > 0 and side.class_names[k]
    ]
    named.sort(key=lambda entry: -entry[0].masses[entry[1]])
    names = [
        PointName(side.class_names[k], tuple(side.centroids[k]), side.color, side is sides[1])
        for side, k in named
    ]
    ends = [(sides[0].centroids[m.source], sides[1].centroids[m.target]) for m in moves]
    x0, y0, x1, y1 = axes.get_window_extent().extents
    # Points on a line have their arrows above it.
    frame = (x0, y0, x1, (y0 + y1) / 2 if flat else y1)
    draw_names(figure, axes, names, np.array(ends).reshape(-1, 2, 2), frame)


def _about(moves: Sequence[Move], coupling: Tensor) -> str | None:
    if not moves:
        return None
    if max(coupling.shape) > MOST_CLASSES:
        return f"the {len(moves)} largest moves of mass between classes (width: mass)"
    largest = f"its largest share and any from {WORTH_SHOWING:.0%}"
    return f"where a class's mass goes: {largest} (width: mass)"


def _draw_legend(
    figure: Figure, axes: Axes, sides: tuple[ProjectedSide, ProjectedSide], about: str | None
) -> None:
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
    write_legend(figure, axes, handles, texts)
