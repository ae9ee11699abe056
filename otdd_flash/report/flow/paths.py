"""paths.png: the paths of a flow's particles in their principal plane, and what pictures select.

`draw_paths` draws at most 120 paths, coloured by class, with the mean path of each class and the
target; `report.flow.writing` calls it. `report.flow.animation` and `report.flow.images` use
`evenly` and `evenly_over_classes`, which choose particles and steps without randomness, so that
pictures of one flow show the same particles in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.flows.history import Trajectory
from otdd_flash.report.figures.page import INK, save_picture
from otdd_flash.report.figures.planes import (
    PrincipalPlane,
    ProjectedSide,
    axis_name,
    fit_plane,
    name_axes,
    new_page,
    plane_frame,
    rows_with_mass,
    side_of,
    write_legend,
    write_title,
)
from otdd_flash.report.figures.point_names import PointName, draw_names
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ROWS_FITTED = 5000

TARGET_GREY, TARGET_INK = "0.72", "0.35"

STEPS_HEIGHT = 4.6  # inches

LONGEST_DATASET = 60

# With more classes in the target, their names would cover those of the particles.
MOST_TARGET_NAMES = 12

# Points of each mean path that names avoid.
CORNERS = 10


def draw_paths(
    source: LabeledSamples,
    target: LabeledSamples,
    samples: LabeledSamples,
    trajectory: Trajectory,
    path: str | Path,
    *,
    seed: int = 0,
) -> None:
    """Draw paths of particles, coloured by class, with the mean path of each class and the target.

    The axes are the first two principal axes of target, start and end together, each fitted to at
    most 5,000 rows. If all points are on a line, the position is drawn against the step. At most
    120 paths and the 20 heaviest classes are shown; means are over all particles of `trajectory`. A
    target in another space than the particles is left out.

    Args:
        source: the n particles before the first step; their classes determine the colours.
        target: the m points.
        samples: the n particles after the last step.
        trajectory: the positions of some particles at some steps.
        path: the PNG file.
        seed: of the subsamples.

    Raises:
        InputError: the file cannot be written.
    """
    clouds = [source, samples] + ([target] if target.dim == source.dim else [])
    fitted = [c.features[torch.from_numpy(rows_with_mass(c, ROWS_FITTED, seed))] for c in clouds]
    plane = fit_plane(fitted, seed)
    goal = None
    if target in clouds:
        goal = side_of(target, target.class_total, plane, seed, TARGET_INK, "^")
    classes = class_paths(source, trajectory, plane)
    if plane.explained[1] < 1e-9:
        classes, goal = against_steps(classes, goal, trajectory.steps)
        figure, axes = _steps_frame(_places(classes, goal))
        name_axes(axes, "step", f"position along {axis_name(plane, 0)}")
    else:
        figure, axes = plane_frame(_places(classes, goal), [paths.mean for paths in classes])
        name_axes(axes, axis_name(plane, 0), axis_name(plane, 1))
    marked = _draw_target(axes, goal)
    for paths in classes:
        _draw_class(axes, paths)
    _draw_class_names(figure, axes, classes, marked)
    write_title(figure, axes, f"{source.name} on its way to {target.name}")
    _explain(figure, axes, classes, source, _about(goal, target, bool(marked)))
    save_picture(figure, path)


def _places(classes: Sequence[ClassPaths], goal: ProjectedSide | None) -> list[Array]:
    places = [paths.lines.reshape(-1, 2) for paths in classes]
    return places if goal is None else [*places, goal.points]


def _steps_frame(places: Sequence[Array]) -> tuple[Figure, Axes]:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_page(STEPS_HEIGHT)
    points = np.concatenate(places)
    low, high = points.min(0), points.max(0)
    room = np.where(high > low, 0.06 * (high - low), 0.5)
    (x0, y0), (x1, y1) = low - room, high + room
    axes.set(xlim=(x0, x1), ylim=(y0, y1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _draw_target(axes: Axes, goal: ProjectedSide | None) -> list[PointName]:
    """Draw the target in grey and, if they are few, its class means; return the names of these."""
    if goal is None:
        return []
    x, y = goal.points.T
    axes.scatter(x, y, s=14, c=TARGET_GREY, marker="^", alpha=0.6, linewidths=0, zorder=1)
    if not any(goal.class_names) or len(goal.class_names) > MOST_TARGET_NAMES:
        return []
    x, y = goal.centroids.T
    axes.scatter(x, y, s=60, c=TARGET_INK, marker="^", edgecolors="white", zorder=4.2)
    return [
        PointName(name, (x, y), TARGET_INK, italic=True)
        for name, (x, y), mass in zip(goal.class_names, goal.centroids, goal.masses, strict=True)
        if mass > 0
    ]


def _draw_class(axes: Axes, paths: ClassPaths) -> None:
    """Draw thin paths from hollow to full dots, and the mean path over them as a thicker line."""
    from matplotlib.collections import LineCollection
    from matplotlib.patheffects import Normal, Stroke

    color, lines = paths.color, list(paths.lines)
    axes.add_collection(
        LineCollection(lines, colors=color, linewidths=0.7, alpha=0.4, zorder=2), autolim=False
    )
    x, y = paths.lines[:, 0].T
    axes.scatter(x, y, s=12, c="white", edgecolors=color, linewidths=0.7, alpha=0.6, zorder=2)
    x, y = paths.lines[:, -1].T
    axes.scatter(x, y, s=12, c=color, alpha=0.6, linewidths=0, zorder=2.5)
    x, y = paths.mean.T
    casing = [Stroke(linewidth=4.6, foreground="white"), Normal()]
    axes.plot(x, y, color=color, linewidth=2.6, zorder=4, path_effects=casing)
    axes.scatter(x[:1], y[:1], s=60, c="white", edgecolors=color, linewidths=2.0, zorder=4.5)
    axes.scatter(x[-1:], y[-1:], s=75, c=color, edgecolors="white", linewidths=1.2, zorder=5)


def _draw_class_names(
    figure: Figure, axes: Axes, classes: Sequence[ClassPaths], marked: Sequence[PointName]
) -> None:
    """Name the particles' classes at the ends of their mean paths, then the target's classes."""
    names = [PointName(c.name, tuple(c.mean[-1]), c.color) for c in classes if c.name]
    means = [c.mean[evenly(len(c.mean), CORNERS)] for c in classes]
    segments = [np.stack([mean[:-1], mean[1:]], axis=1) for mean in means]
    draw_names(figure, axes, [*names, *marked], np.concatenate(segments))


def _about(goal: ProjectedSide | None, target: LabeledSamples, marked: bool) -> str:
    name = shorten(target.name, LONGEST_DATASET)
    if goal is None:
        return f"{name} lies in another space and is not shown"
    return f"{name} ({goal.size:,} samples)" + (", and the means of its classes" if marked else "")


def _explain(
    figure: Figure,
    axes: Axes,
    classes: Sequence[ClassPaths],
    source: LabeledSamples,
    about_target: str,
) -> None:
    from matplotlib.lines import Line2D

    shown, total = sum(len(paths.lines) for paths in classes), source.class_total
    part = "" if len(classes) == total else f" ({len(classes)} of {total} shown)"
    texts = [
        f"path of a particle from ○ to ● ({shown:,} of {len(source):,} shown)",
        "their mean" if source.labels is None else f"mean of a class{part}",
        about_target,
    ]
    handles = [
        Line2D([], [], color=INK, linewidth=0.7, alpha=0.6),
        Line2D([], [], color=INK, linewidth=2.6),
        Line2D([], [], color=TARGET_INK, marker="^", linestyle="none"),
    ]
    write_legend(figure, axes, handles, texts)


Array = NDArray[np.float64]

# With more, a picture can no longer be read.
MOST_LINES, MOST_CLASSES = 120, 20

# Tol's muted scheme, distinct for every common colour blindness, with its light colours darkened.
CLASS_COLORS = (
    "#332288",
    "#CC6677",
    "#117733",
    "#4499DD",
    "#999933",
    "#AA4499",
    "#44AA99",
    "#882255",
    "#DDAA33",
    "#000000",
)


@dataclass(frozen=True)
class ClassPaths:
    """One class of particles: `lines` (k, s, 2) of some, and `mean` (s, 2) of all recorded ones."""

    name: str
    color: str
    lines: Array
    mean: Array


def class_paths(
    source: LabeledSamples, trajectory: Trajectory, plane: PrincipalPlane
) -> list[ClassPaths]:
    """Return the paths, in the plane, of the at most 20 heaviest classes, heaviest first.

    Args:
        source: the particles before the first step, which give the classes; particles without
            labels are one class without a name.
        trajectory: the recorded positions.
        plane: the plane to project to.
    """
    s, k, d = trajectory.points.shape
    places = plane.project(trajectory.points.reshape(s * k, d)).numpy().reshape(s, k, 2)
    rows = trajectory.rows.cpu()
    masses = source.masses.cpu()[rows].numpy()
    if not masses.any():
        masses = np.ones(k)
    index = np.zeros(k, np.int64) if source.labels is None else source.labels.cpu()[rows].numpy()
    totals = np.bincount(index, masses)
    heaviest = [c for c in np.argsort(-totals, kind="stable")[:MOST_CLASSES] if totals[c] > 0]
    kept = np.flatnonzero(np.isin(index, heaviest) & (masses > 0))
    drawn = kept[evenly_over_classes(torch.from_numpy(index[kept]), len(kept), MOST_LINES)]
    names = source.class_names or ("",)
    return [
        ClassPaths(
            name=names[c],
            color=CLASS_COLORS[c % len(CLASS_COLORS)],
            lines=places[:, drawn[index[drawn] == c]].swapaxes(0, 1),
            mean=np.average(places[:, index == c], axis=1, weights=masses[index == c]),
        )
        for c in heaviest
    ]


def against_steps(
    classes: Sequence[ClassPaths], goal: ProjectedSide | None, steps: Tensor
) -> tuple[list[ClassPaths], ProjectedSide | None]:
    """Replace coordinates by (step, first coordinate), for points on a line.

    The target is drawn a little after the last step.
    """
    times = steps.double().numpy()
    moved = [
        replace(paths, lines=_turned(paths.lines, times), mean=_turned(paths.mean, times))
        for paths in classes
    ]
    if goal is None:
        return moved, None
    after = times[-1:] + 0.06 * max(times[-1] - times[0], 1.0)
    points, centroids = _turned(goal.points, after), _turned(goal.centroids, after)
    return moved, replace(goal, points=points, centroids=centroids)


def _turned(places: Array, times: Array) -> Array:
    return np.stack([np.broadcast_to(times, places.shape[:-1]), places[..., 0]], axis=-1)


Indices = NDArray[np.int64]


def evenly(total: int, count: int) -> Indices:
    """Return at most `count` evenly spaced indices below `total`.

    The first index is among them, and the last if there are two or more.
    """
    places: Indices = np.linspace(0, total - 1, min(total, count)).round().astype(np.int64)
    return places


def evenly_over_classes(labels: Tensor | None, total: int, count: int) -> Indices:
    """Return at most `count` of `total` particles, ordered by class, equally many of each class.

    A class with too few particles gives all it has.

    Args:
        labels: (total,) class indices, or None for particles of one class.
        total: how many particles there are.
        count: how many to choose; if there are more classes, evenly spaced classes get one each.
    """
    if labels is None:
        return evenly(total, count)
    index = labels.cpu().numpy()
    members = [np.flatnonzero(index == label) for label in np.unique(index)]
    members = [members[k] for k in evenly(len(members), count)]
    sizes = np.array([len(rows) for rows in members])
    quotas = np.zeros_like(sizes)
    while quotas.sum() < min(count, sizes.sum()):
        # One more particle for each class that has one left, starting with the first class.
        open_classes = np.flatnonzero(quotas < sizes)
        quotas[open_classes[: count - quotas.sum()]] += 1
    chosen = [rows[evenly(len(rows), q)] for rows, q in zip(members, quotas, strict=True)]
    return np.concatenate(chosen)
