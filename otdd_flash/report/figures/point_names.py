"""Names written beside points of a picture, in free places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otdd_flash.report.figures.label_placement import Box, place_labels
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
    """`text` beside the marker at `place`, in data coordinates."""

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
    """Name points, the most important first, and leave out names for which there is no room.

    Args:
        figure: of the axes, which have their limits already.
        axes: where the points are drawn.
        names: what to write, shortened to 16 characters.
        lines: (s, 2, 2) ends of lines, in data coordinates, that had better stay uncovered.
        frame: where names may stand, in pixels; None is all of the axes.
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
