"""Class names along one side of a table: font, shortening, and which names there is room for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from otdd_flash.report.figures.page import measure
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_NAME = 18
SMALLEST_FONT, LARGEST_FONT = 6.0, 9.0
LINE_HEIGHT = 1.25
POINTS_PER_INCH = 72.0


@dataclass(frozen=True)
class AxisNames:
    """The names to draw: `texts[k]` beside cell `ticks[k]`, reading upwards where `upright[k]`.

    All are set in `points` and reach `depth` inches away from the axis.
    """

    ticks: tuple[int, ...]
    texts: tuple[str, ...]
    points: float
    upright: tuple[bool, ...]
    depth: float


def lay_out_names(
    figure: Figure, names: Sequence[str], cell: float, sizes: Sequence[int], *, vertical: bool
) -> AxisNames:
    """Choose names that do not overlap when the cells are `cell` inches apart.

    Many classes get a smaller font, and beyond the smallest font only every k-th name, counted from
    the first class of each group. Along a horizontal axis the names of a group stand upright unless
    all of them fit flat.

    Args:
        figure: where the names will be drawn.
        names: one per cell.
        cell: the distance between two cells in inches.
        sizes: how many cells each group of classes has.
        vertical: whether the axis is vertical, names reading along the rows.
    """
    points = min(LARGEST_FONT, max(SMALLEST_FONT, cell * POINTS_PER_INCH / LINE_HEIGHT))
    line = points * LINE_HEIGHT / POINTS_PER_INCH
    ticks = spaced_ticks(sizes, step=max(1, math.ceil(line / cell - 1e-9)))
    texts = tuple(shorten(names[tick], LONGEST_NAME) for tick in ticks)
    extents = [measure(figure, text, points) for text in texts]
    upright = [False] * len(ticks)
    if not vertical:
        groups = np.searchsorted(np.cumsum(sizes), ticks, side="right")
        crowded = {
            group
            for group, (width, _) in zip(groups, extents, strict=True)
            if len(ticks) < len(names) or width > 0.9 * cell
        }
        upright = [group in crowded for group in groups]
    sideways = [vertical or stands for stands in upright]
    return AxisNames(
        ticks=ticks,
        texts=texts,
        points=points,
        upright=tuple(upright),
        depth=max(extent[not along] for extent, along in zip(extents, sideways, strict=True)),
    )


def spaced_ticks(sizes: Sequence[int], step: int) -> tuple[int, ...]:
    """Every `step`-th cell of each group, never two closer than `step`.

    Where two groups meet, the first cell of the later one has precedence over all but a first one.
    """
    ticks: list[int] = []
    start, previous_start = 0, -1
    for size in sizes:
        if ticks and start - ticks[-1] < step and ticks[-1] > previous_start:
            ticks.pop()
        ticks += [
            tick
            for tick in range(start, start + size, step)
            if not ticks or tick - ticks[-1] >= step
        ]
        start, previous_start = start + size, start
    return tuple(ticks)
