"""paths.png: the paths of a flow's particles in their principal plane, and what pictures select.

`draw_paths` draws at most 120 paths, coloured by class, with the mean path of each class and the
target; `report.flow.writing` calls it. `report.flow.images` uses `evenly` and
`evenly_over_classes`, which choose particles and steps without randomness, so that pictures of one
flow show the same particles in every run.
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

from otdd_flash.flows.result import Trajectory
from otdd_flash.report.figures.page import INK, save_picture
from otdd_flash.report.figures.planes import (
    PointName,
    ProjectedSide,
    draw_names,
    new_page,
    plane_frame,
    plane_of,
    side_of,
    write_legend,
)
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Array = NDArray[np.float64]

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
    from matplotlib.ticker import MaxNLocator

    clouds = [source, samples] + ([target] if target.dim == source.dim else [])
    plane = plane_of(clouds, seed)
    goal, title = None, f"{source.name} on its way to {target.name}"
    if target in clouds:
        classes_of = max(1, len(target.label_names))
        goal = side_of(target, classes_of, plane, seed, TARGET_INK, "^")
    s, k, d = trajectory.points.shape
    places = plane.project(trajectory.points.reshape(s * k, d)).reshape(s, k, 2)
    if plane.flat:
        times = trajectory.steps.double().numpy()
        # The target is drawn a little after the last step.
        after = times[-1] + 0.06 * max(times[-1] - times[0], 1.0)
        classes = class_paths(source, trajectory, _against(times[:, None], places))
        if goal is not None:
            turned = _against(after, goal.points), _against(after, goal.centroids)
            goal = replace(goal, points=turned[0], centroids=turned[1])
        figure, axes = new_page(STEPS_HEIGHT, title)
        axes.margins(0.06)
        axes.set(xlabel="step", ylabel=f"position along {plane.name(0)}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        classes = class_paths(source, trajectory, places)
        inside = [paths.lines.reshape(-1, 2) for paths in classes]
        inside += [] if goal is None else [goal.points]
        figure, axes = plane_frame(inside, [paths.mean for paths in classes], plane, title)
    marked = _draw_target(axes, goal)
    for paths in classes:
        _draw_class(axes, paths)
    # The particles' classes are named at the ends of their mean paths, then the target's.
    names = [PointName(c.name, tuple(c.mean[-1]), c.color) for c in classes if c.name]
    means = [c.mean[evenly(len(c.mean), CORNERS)] for c in classes]
    segments = [np.stack([mean[:-1], mean[1:]], axis=1) for mean in means]
    draw_names(axes, [*names, *marked], np.concatenate(segments))
    _explain(axes, classes, source, _about(goal, target, bool(marked)))
    save_picture(figure, path)


def _against(times: Array | float, places: Array) -> Array:
    """Replace coordinates (..., 2) by time and first coordinate, for points on a line."""
    return np.stack([np.broadcast_to(times, places.shape[:-1]), places[..., 0]], axis=-1)


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
    axes.add_collection(LineCollection(lines, colors=color, linewidths=0.7, alpha=0.4, zorder=2))
    x, y = paths.lines[:, 0].T
    axes.scatter(x, y, s=12, c="white", edgecolors=color, linewidths=0.7, alpha=0.6, zorder=2)
    x, y = paths.lines[:, -1].T
    axes.scatter(x, y, s=12, c=color, alpha=0.6, linewidths=0, zorder=2.5)
    x, y = paths.mean.T
    casing = [Stroke(linewidth=4.6, foreground="white"), Normal()]
    axes.plot(x, y, color=color, linewidth=2.6, zorder=4, path_effects=casing)
    axes.scatter(x[:1], y[:1], s=60, c="white", edgecolors=color, linewidths=2.0, zorder=4.5)
    axes.scatter(x[-1:], y[-1:], s=75, c=color, edgecolors="white", linewidths=1.2, zorder=5)


def _about(goal: ProjectedSide | None, target: LabeledSamples, marked: bool) -> str:
    name = shorten(target.name, LONGEST_DATASET)
    if goal is None:
        return f"{name} lies in another space and is not shown"
    return f"{name} ({goal.size:,} samples)" + (", and the means of its classes" if marked else "")


def _explain(
    axes: Axes, classes: Sequence[ClassPaths], source: LabeledSamples, about_target: str
) -> None:
    from matplotlib.lines import Line2D

    shown, total = sum(len(paths.lines) for paths in classes), source.class_total
    part = "" if len(classes) == total else f" ({len(classes)} of {total} shown)"
    path = f"path of a particle from ○ to ● ({shown:,} of {len(source):,} shown)"
    mean = "their mean" if source.labels is None else f"mean of a class{part}"
    write_legend(
        axes,
        Line2D([], [], color=INK, linewidth=0.7, alpha=0.6, label=path),
        Line2D([], [], color=INK, linewidth=2.6, label=mean),
        Line2D([], [], color=TARGET_INK, marker="^", linestyle="none", label=about_target),
    )


# With more, a picture can no longer be read.
MOST_LINES, MOST_CLASSES = 120, 20

# Tol's muted scheme, distinct for every common colour blindness, with its light colours darkened.
CLASS_COLORS = (
    *("#332288", "#CC6677", "#117733", "#4499DD", "#999933"),
    *("#AA4499", "#44AA99", "#882255", "#DDAA33", "#000000"),
)


@dataclass(frozen=True)
class ClassPaths:
    """One class of particles: `lines` (k, s, 2) of some, and `mean` (s, 2) of all recorded ones."""

    name: str
    color: str
    lines: Array
    mean: Array


def class_paths(source: LabeledSamples, trajectory: Trajectory, places: Array) -> list[ClassPaths]:
    """Return the paths of the at most 20 heaviest classes, heaviest first.

    Args:
        source: the particles before the first step, which give the classes; particles without
            labels are one class without a name.
        trajectory: the recorded positions.
        places: (s, k, 2) the positions as they are drawn.
    """
    rows = trajectory.rows.cpu()
    masses = source.masses.cpu()[rows].numpy()
    if not masses.any():
        masses = np.ones(len(rows))
    index = (
        np.zeros(len(rows), np.int64)
        if source.labels is None
        else source.labels.cpu()[rows].numpy()
    )
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


def evenly(total: int, count: int) -> NDArray[np.int64]:
    """Return at most `count` evenly spaced indices below `total`.

    The first index is among them, and the last if there are two or more.
    """
    places: NDArray[np.int64] = (
        np.linspace(0, total - 1, min(total, count)).round().astype(np.int64)
    )
    return places


def evenly_over_classes(labels: Tensor | None, total: int, count: int) -> NDArray[np.int64]:
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
