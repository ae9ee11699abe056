"""Names written beside points of a picture, so that none covers another, a marker or the frame.

`draw_names` writes the names; `place_labels` chooses their places. `report.distance`,
`report.flow.paths` and `report.study.pictures` call it. Placement works in pixels, so the limits of
the axes and the size of the figure must be final before the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otdd_flash.report.figures.page import DPI, measure, name_style
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Array = NDArray[np.float64]

LONGEST_NAME = 16

POINTS = 9.0

# Pixels.
MARKER_RADIUS, LEADER_FROM = 8.0, 24.0


class PointName(NamedTuple):
    """A name `text` to write beside the marker at `place`, in data coordinates."""

    text: str
    place: tuple[float, float]
    color: str
    italic: bool = False


def draw_names(
    figure: Figure,
    axes: Axes,
    names: Sequence[PointName],
    lines: Array,
    frame: Box | None = None,
) -> None:
    """Name points, the most important first; a name for which there is no room is left out.

    Args:
        figure: the figure of the axes.
        axes: where the points are drawn; their limits must be final.
        names: the names, which are shortened to 16 characters.
        lines: (s, 2, 2) ends of line segments, in data coordinates, that names should not cover.
        frame: (x0, y0, x1, y1) in pixels, in which names may be placed; None takes all of the axes.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    texts = [shorten(name.text, LONGEST_NAME) for name in names]
    sizes = [measure(figure, text, POINTS, fontweight="bold") for text in texts]
    pixels = axes.transData.transform
    anchors = pixels(np.array([name.place for name in names]).reshape(-1, 2))
    spots = place_labels(
        anchors,
        DPI * np.array(sizes).reshape(-1, 2) + 3,
        np.hstack([anchors - MARKER_RADIUS, anchors + MARKER_RADIUS]),
        pixels(lines.reshape(-1, 2)).reshape(-1, 2, 2),
        frame or axes.get_window_extent().extents,
    )
    page = DPI * figure.get_size_inches()
    for name, text, anchor, spot in zip(names, texts, anchors, spots, strict=True):
        if spot is None:
            continue
        x, y = np.array(spot.centre) / page
        if spot.distance > LEADER_FROM:
            start = anchor / page
            figure.add_artist(
                Line2D((start[0], x), (start[1], y), color=name.color, linewidth=0.7, zorder=4)
            )
        figure.text(
            x,
            y,
            text,
            fontsize=POINTS,
            fontweight="bold",
            fontstyle="italic" if name.italic else "normal",
            color=name.color,
            ha="center",
            va="center",
            zorder=6,
            path_effects=[withStroke(linewidth=2.2, foreground="white")],
            **name_style(text),
        )


Box = tuple[float, float, float, float]

RADII = (13.0, 18.0, 25.0, 35.0, 48.0, 64.0, 84.0, 110.0, 145.0, 190.0)

DIRECTIONS = 16

# Penalties, in pixels of distance that are as bad.
CROSSING_COST, CONFUSION_COST = 25.0, 20.0


@dataclass(frozen=True)
class Placement:
    """The centre of a label and the distance of its edge from the point it names, in pixels."""

    centre: tuple[float, float]
    distance: float


def place_labels(
    anchors: Array, sizes: Array, markers: Array, segments: Array, frame: Box
) -> list[Placement | None]:
    """Place labels one after another, each at the best free position around its point.

    A position is free if the label is inside the frame and overlaps no marker and no earlier label.
    Among free positions the cost decides: the distance, plus a penalty for each segment under the
    label and for each other point that the label might seem to name.

    Args:
        anchors: (k, 2) the named points, most important first, in pixels.
        sizes: (k, 2) widths and heights.
        markers: (k, 4) boxes (x0, y0, x1, y1) around the points.
        segments: (s, 2, 2) lines that labels should not cover.
        frame: (x0, y0, x1, y1).

    Returns:
        One placement per label; None if there is no room.
    """
    taken = markers.reshape(-1, 4)
    along = np.linspace(0.0, 1.0, 40)[:, None, None]
    dots = segments[None, :, 0] * (1 - along) + segments[None, :, 1] * along
    placements: list[Placement | None] = []
    for k, (anchor, size) in enumerate(zip(anchors, sizes, strict=True)):
        centres, distances = _candidates(anchor, size)
        boxes = np.hstack([centres - size / 2, centres + size / 2])
        free = _inside(boxes, frame) & ~_overlap(boxes, taken).any(1)
        if not free.any():
            placements.append(None)
            continue
        confusing = _gaps(boxes, np.delete(anchors, k, axis=0)) < 1.5 * distances[:, None]
        cost = (
            distances + CROSSING_COST * _crossings(boxes, dots) + CONFUSION_COST * confusing.sum(1)
        )
        best = int(np.where(free, cost, np.inf).argmin())
        centre = (float(centres[best, 0]), float(centres[best, 1]))
        placements.append(Placement(centre, float(distances[best])))
        taken = np.vstack([taken, boxes[best]])
    return placements


def _candidates(anchor: Array, size: Array) -> tuple[Array, Array]:
    """Return centres (c, 2) of boxes around a point, and their distances (c,) from it."""
    angles = np.arange(DIRECTIONS) * (2 * np.pi / DIRECTIONS)
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    # A box touches the circle with the side that faces it: beside it, above it or a corner.
    sides = np.clip(1.5 * directions, -1.0, 1.0) * size / 2
    centres = [anchor + radius * directions + sides for radius in RADII]
    return np.concatenate(centres), np.repeat(np.array(RADII), DIRECTIONS)


def _inside(boxes: Array, frame: Box) -> NDArray[np.bool_]:
    """Return (b,) whether each box is inside the frame."""
    low, high = np.array(frame[:2]), np.array(frame[2:])
    return np.asarray((boxes[:, :2] >= low).all(1) & (boxes[:, 2:] <= high).all(1))


def _overlap(boxes: Array, others: Array) -> NDArray[np.bool_]:
    """Return (b, o) whether two boxes share an area."""
    a, b = boxes[:, None], others[None]
    return np.asarray((a[..., :2] < b[..., 2:]).all(-1) & (b[..., :2] < a[..., 2:]).all(-1))


def _gaps(boxes: Array, points: Array) -> Array:
    """Return (b, p), the distance from each box to each point."""
    low, high = boxes[:, None, :2] - points, points - boxes[:, None, 2:]
    gaps: Array = np.linalg.norm(np.maximum(np.maximum(low, high), 0.0), axis=-1)
    return gaps


def _crossings(boxes: Array, dots: Array) -> NDArray[np.int64]:
    """Return (b,) the number of segments, given as dots (t, s, 2) along them, under each box."""
    low, high = boxes[:, None, None, :2], boxes[:, None, None, 2:]
    under = np.all((dots[None] > low) & (dots[None] < high), axis=-1)
    crossings: NDArray[np.int64] = np.any(under, axis=1).sum(1)
    return crossings
