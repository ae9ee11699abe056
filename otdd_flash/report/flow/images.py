"""images.png: particles that are images at several steps, and the nearest target images.

The report of a flow and `FlowResult.plot` call it through `writing`, if the particles are images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.data.writing import ImageShape, eight_bit_images
from otdd_flash.flows.history import Trajectory
from otdd_flash.report.figures.page import (
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    fit,
    measure,
    name_style,
    new_figure,
    save_picture,
)
from otdd_flash.report.flow.paths import evenly, evenly_over_classes
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Images = NDArray[np.uint8]
MOST_ROWS, MOST_STEPS, NEIGHBOURS = 12, 8, 2
# Inches.
CELL, GAP, BREAK, MARGIN, TOP, BOTTOM = 0.78, 0.05, 0.3, 0.1, 0.72, 0.1
LONGEST_NAME = 16
TITLE_POINTS, LABEL_POINTS = 12.0, 9.0


def draw_images(
    source: LabeledSamples,
    target: LabeledSamples,
    trajectory: Trajectory,
    image_shape: ImageShape,
    path: str | Path | None,
) -> Figure:
    """Draw particles in rows, evenly over classes, and steps in columns; then their nearest images.

    The last columns are the target's images that are nearest, by features, to the particle's last
    position, with the class of the nearest. They are left out if the target has another dimension.

    Args:
        source: the particles before the first step; their class names are written beside the rows.
        target: images of the same shape, or features of another dimension.
        trajectory: pixel values in [0, 1]; values outside are clipped.
        image_shape: (c, h, w) of one particle.
        path: the PNG file; None writes no file.

    Raises:
        InputError: particles are not images of this shape, or the file cannot be written.
    """
    labels = None if source.labels is None else source.labels.cpu()[trajectory.rows.cpu()]
    chosen = torch.from_numpy(evenly_over_classes(labels, len(trajectory.rows), MOST_ROWS))
    moments = evenly(len(trajectory.steps), MOST_STEPS).tolist()
    along = [eight_bit_images(trajectory.points[k, chosen], image_shape) for k in moments]
    found = _nearest(trajectory.points[-1, chosen], target)
    like = [eight_bit_images(target.features[rows], image_shape) for rows in found.T]
    names = _class_names(source, trajectory.rows[chosen.to(trajectory.rows.device)])
    resembled = _class_names(target, found[:, 0]) if like else []
    height = CELL * image_shape[1] / image_shape[2]
    page = _ImagePage(len(chosen), len(along), len(like), height, _room(names), _room(resembled))
    for column, images in enumerate([*along, *like]):
        page.draw_column(column, images)
    for column, k in enumerate(moments):
        step = int(trajectory.steps[k])
        page.head(column, str(step) if column else f"step {step}", "center", INK)
    if like:
        page.head(len(along), "nearest in the target", "left", TARGET_COLOR)
    page.name_rows(names, "right", SOURCE_COLOR)
    page.name_rows(resembled, "left", TARGET_COLOR)
    page.title(f"{source.name} on its way to {target.name}")
    save_picture(page.figure, path)
    return page.figure


def _class_names(samples: LabeledSamples, rows: Tensor) -> list[str]:
    if samples.labels is None:
        return []
    labels = samples.labels[rows.to(samples.labels.device)].tolist()
    return [shorten(samples.class_names[label], LONGEST_NAME) for label in labels]


def _room(names: Sequence[str]) -> float:
    """Return the inches that names beside the images need."""
    page = new_figure()
    return 2 * MARGIN + max((measure(page, name, LABEL_POINTS)[0] for name in names), default=0.0)


def _nearest(points: Tensor, target: LabeledSamples) -> Tensor:
    """Return (k, 2) the target rows nearest to each point, nearest first.

    The result is (k, 0) if the target has another dimension.
    """
    if target.dim != points.shape[1]:
        return torch.empty((len(points), 0), dtype=torch.int64)
    features = target.features.detach()
    distances = torch.cdist(points.to(features), features)
    return distances.topk(min(NEIGHBOURS, len(target)), largest=False).indices


class _ImagePage:
    """A grid of images of one shape, in data coordinates of inches from the top left corner.

    A gap separates the columns of steps from those of nearest images.
    """

    def __init__(
        self, rows: int, steps: int, neighbours: int, height: float, left: float, right: float
    ) -> None:
        self.steps, self.height, self.left, self.right = steps, height, left, right
        self.width = self._left(steps + neighbours) - GAP + right
        page = (self.width, TOP + rows * (height + GAP) + BOTTOM)
        self.figure: Figure = new_figure(*page)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()

    def _left(self, column: int) -> float:
        return self.left + column * (CELL + GAP) + BREAK * (column >= self.steps)

    def _top(self, row: int) -> float:
        return TOP + row * (self.height + GAP)

    def draw_column(self, column: int, images: Images) -> None:
        left = self._left(column)
        for row, image in enumerate(images):
            top = self._top(row)
            self.axes.imshow(
                image,
                cmap="gray",
                vmin=0,
                vmax=255,
                interpolation="nearest",
                aspect="auto",
                extent=(left, left + CELL, top + self.height, top),
            )
        # Each `imshow` sets the limits to its own image.
        width, height = self.figure.get_size_inches()
        self.axes.set(xlim=(0, width), ylim=(height, 0))

    def head(self, column: int, text: str, side: Literal["left", "center"], color: str) -> None:
        """Write a heading over the middle of a column, or from its left edge."""
        x = self._left(column) + (CELL / 2 if side == "center" else 0)
        self._write(x, TOP - 0.06, text, LABEL_POINTS, color, ha=side, va="bottom")

    def name_rows(self, names: Sequence[str], side: Literal["left", "right"], color: str) -> None:
        """Write a name beside each row: right-aligned before the images or left-aligned after."""
        x = self.left - MARGIN if side == "right" else self.width - self.right + MARGIN
        for row, name in enumerate(names):
            middle = self._top(row) + self.height / 2
            self._write(x, middle, name, LABEL_POINTS, color, ha=side, va="center")

    def title(self, text: str) -> None:
        """Write the title, shortened to the available width."""
        room = self.width - self.left
        shown = fit(text, room, lambda part: measure(self.figure, part, TITLE_POINTS)[0])
        self._write(self.left, 0.14, shown, TITLE_POINTS, INK, ha="left", va="top")

    def _write(self, x: float, y: float, text: str, points: float, color: str, **at: Any) -> None:
        self.axes.text(x, y, text, fontsize=points, color=color, **at, **name_style(text))
