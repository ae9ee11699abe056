"""Where labels go, so that none covers another, a marker or the frame."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Box = tuple[float, float, float, float]
RADII = (13.0, 18.0, 25.0, 35.0, 48.0, 64.0, 84.0, 110.0, 145.0, 190.0)
DIRECTIONS = 16
# In pixels of distance that one would accept instead.
CROSSING_COST, CONFUSION_COST = 25.0, 20.0


@dataclass(frozen=True)
class Placement:
    """The centre of a label, and how far its edge is from the point it names, in pixels."""

    centre: tuple[float, float]
    distance: float


def place_labels(
    anchors: Array, sizes: Array, markers: Array, segments: Array, frame: Box
) -> list[Placement | None]:
    """Place labels one after another, each at the nearest good spot around its point.

    A spot is free if it lies inside the frame and meets no marker and no earlier label. Among free
    spots a short distance counts, and so do every segment that would run under the label and every
    other point that the label might be taken to name.

    Args:
        anchors: (k, 2) the named points, most important first, in pixels.
        sizes: (k, 2) widths and heights.
        markers: (k, 4) boxes (x0, y0, x1, y1) around the points.
        segments: (s, 2, 2) lines that had better stay uncovered.
        frame: (x0, y0, x1, y1).

    Returns:
        One placement per label; None where there is no room.
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
    """Centres (c, 2) of boxes around a point, and the distances (c,) they keep from it."""
    angles = np.arange(DIRECTIONS) * (2 * np.pi / DIRECTIONS)
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    # A box touches the circle with the side that faces it: beside it, above it or a corner.
    sides = np.clip(1.5 * directions, -1.0, 1.0) * size / 2
    centres = [anchor + radius * directions + sides for radius in RADII]
    return np.concatenate(centres), np.repeat(np.array(RADII), DIRECTIONS)


def _inside(boxes: Array, frame: Box) -> NDArray[np.bool_]:
    """(b,): whether a box lies in the frame."""
    low, high = np.array(frame[:2]), np.array(frame[2:])
    return np.asarray((boxes[:, :2] >= low).all(1) & (boxes[:, 2:] <= high).all(1))


def _overlap(boxes: Array, others: Array) -> NDArray[np.bool_]:
    """(b, o): whether two boxes share an area."""
    a, b = boxes[:, None], others[None]
    return np.asarray((a[..., :2] < b[..., 2:]).all(-1) & (b[..., :2] < a[..., 2:]).all(-1))


def _gaps(boxes: Array, points: Array) -> Array:
    """(b, p): the distance from each box to each point."""
    low, high = boxes[:, None, :2] - points, points - boxes[:, None, 2:]
    gaps: Array = np.linalg.norm(np.maximum(np.maximum(low, high), 0.0), axis=-1)
    return gaps


def _crossings(boxes: Array, dots: Array) -> NDArray[np.int64]:
    """(b,): how many segments, given as dots (t, s, 2) along them, run under each box."""
    low, high = boxes[:, None, None, :2], boxes[:, None, None, 2:]
    under = np.all((dots[None] > low) & (dots[None] < high), axis=-1)
    crossings: NDArray[np.int64] = np.any(under, axis=1).sum(1)
    return crossings
