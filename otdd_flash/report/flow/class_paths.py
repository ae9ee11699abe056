"""The particles of a flow, class by class: the paths that are drawn, and the mean of each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.flows.history import Trajectory
from otdd_flash.report.figures.principal_plane import PrincipalPlane
from otdd_flash.report.figures.projection_sides import ProjectedSide
from otdd_flash.report.flow.particles import evenly_over_classes
from otdd_flash.samples import LabeledSamples

Array = NDArray[np.float64]
# Beyond these a picture can no longer be read.
MOST_LINES, MOST_CLASSES = 120, 20
# After Tol's muted scheme, told apart with every common colour blindness; light ones are darkened.
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
    """One class of particles: `lines` (k, s, 2) of some of them, `mean` (s, 2) of all kept ones."""

    name: str
    color: str
    lines: Array
    mean: Array


def class_paths(
    source: LabeledSamples, trajectory: Trajectory, plane: PrincipalPlane
) -> list[ClassPaths]:
    """The paths in the plane of the at most 20 classes of most mass, heaviest first.

    Args:
        source: the particles before the first step, whose classes count; unlabelled ones are one
            class without a name.
        trajectory: where some of them were.
        plane: to project to.
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
    """Take the step as first coordinate, and the first coordinate as second.

    The target stands a little after the last step.
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
