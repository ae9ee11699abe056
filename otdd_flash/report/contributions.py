"""The contributions of source rows to a distance: a csv file, and the images that contribute most.

`commands.compare` calls `write_contributions`. Rows without mass have the contribution NaN and are
left out. The name of the csv file and its columns are for users' scripts and must stay.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from otdd_flash.arguments import takes
from otdd_flash.report.csv_tables import write_table_csv
from otdd_flash.report.figures.page import (
    INK,
    Report,
    Writers,
    fit,
    measure,
    name_style,
    new_figure,
    save_picture,
    wanted,
    write_each,
)
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SHOWN, ACROSS = 12, 6

# Inches: an image, the words above it, a block's heading, between images, the margin, the title.
SIDE, WORDS, HEAD, GAP, MARGIN, TITLE = 1.0, 0.34, 0.32, 0.12, 0.15, 0.52

TITLE_POINTS, NOTE_POINTS = 12.0, 9.0

LONGEST_NAME = 14


@takes()
def write_contributions(
    source: LabeledSamples,
    values: Tensor,
    directory: str | Path,
    image_shape: tuple[int, int, int] | None,
    *,
    target: str,
    content: str = "full",
) -> Report:
    """Write contributions.csv, the largest first, and contributions.png if rows are images.

    Args:
        source: the n source rows of the distance.
        values: (n,) from `DistanceResult.contributions`; NaN for rows without mass.
        directory: created if it does not exist.
        image_shape: (c, h, w) of the rows, or None if they are not images.
        target: the name of the target dataset.
        content: `full`; `table` and `none` write only the csv file.

    Returns:
        The files written and the files that could not be written.

    Warns:
        MissingFileNotice: a file could not be written.
    """
    directory = Path(directory)
    report = write_each(
        {directory / "contributions.csv": lambda path: _write_csv(source, values, path)}
    )
    if image_shape is None:
        return report
    pictures: Writers = {
        directory / "contributions.png": lambda path: draw_contributions(
            source, target, values, image_shape, path
        )
    }
    return report + write_each(wanted(pictures, content))


def draw_contributions(
    source: LabeledSamples,
    target: str,
    values: Tensor,
    shape: tuple[int, int, int],
    path: str | Path,
) -> None:
    """Draw the twelve rows with the largest contributions of each sign.

    The class of a row and its contribution, in units of the cost, are written above its image.

    Raises:
        InputError: the file cannot be written.
    """
    order = _descending(values)
    most = [row for row in order[:SHOWN] if values[row] > 0]
    least = [row for row in reversed(order[-SHOWN:]) if values[row] < 0]
    blocks = [
        (title, rows)
        for title, rows in (
            ("carry most of the distance", most),
            ("bring the datasets nearer", least),
        )
        if rows
    ]
    lines = [-(-len(rows) // ACROSS) for _, rows in blocks]
    width = 2 * MARGIN + ACROSS * (SIDE + GAP) - GAP
    height = 2 * MARGIN + TITLE + len(blocks) * HEAD + sum(lines) * (SIDE + WORDS)
    figure = new_figure(width, height)
    top = height - MARGIN
    for text, points, below in (
        (f"What rows of {source.name} contribute to the distance to {target}", TITLE_POINTS, 0.0),
        (
            "above each image: its class, its contribution in units of the cost",
            NOTE_POINTS,
            0.27,
        ),
    ):
        shown = fit(text, width - 2 * MARGIN, partial(_width, figure, points))
        at = MARGIN / width, (top - below) / height
        figure.text(*at, shown, fontsize=points, color=INK, va="top", **name_style(shown))
    top -= TITLE
    for (title, rows), count in zip(blocks, lines, strict=True):
        figure.text(
            MARGIN / width, (top - 0.6 * HEAD) / height, title, fontsize=11, color=INK, va="center"
        )
        top -= HEAD
        for place, row in enumerate(rows):
            down, across = divmod(place, ACROSS)
            left = MARGIN + across * (SIDE + GAP)
            bottom = top - (down + 1) * (SIDE + WORDS)
            box = (left / width, bottom / height, SIDE / width, SIDE / height)
            _draw_row(figure.add_axes(box), source, row, float(values[row]), shape)
        top -= count * (SIDE + WORDS)
    save_picture(figure, path)


def _width(figure: Figure, points: float, text: str) -> float:
    return measure(figure, text, points)[0]


def _draw_row(
    axes: Axes, source: LabeledSamples, row: int, value: float, shape: tuple[int, int, int]
) -> None:
    """Draw one image with its class and its contribution above it."""
    image = source.features[row].cpu().reshape(shape).movedim(0, 2).clamp(0, 1).numpy()
    axes.imshow(image[..., 0] if shape[0] == 1 else image[..., :3], cmap="gray", vmin=0, vmax=1)
    axes.axis("off")
    name, number = shorten(_class_of(source, row), LONGEST_NAME), f"{value:+#.3g}".rstrip(".")
    text = name + "\n" + number.replace("-", "−")
    axes.set_title(text, fontsize=7, color=INK, pad=2, **name_style(text))


def _write_csv(source: LabeledSamples, values: Tensor, path: Path) -> None:
    masses = source.masses.cpu()
    rows = [
        (row, _class_of(source, row), float(masses[row]), float(values[row]))
        for row in _descending(values)
    ]
    write_table_csv(path, ("row", "class", "mass", "contribution"), rows)


def _descending(values: Tensor) -> list[int]:
    """Return the indices of the rows with mass, the largest contribution first."""
    known = (~values.isnan()).nonzero().squeeze(1)
    order = torch.argsort(values[known], descending=True, stable=True)
    found: list[int] = known[order].tolist()
    return found


def _class_of(source: LabeledSamples, row: int) -> str:
    return "" if source.labels is None else source.class_names[int(source.labels[row])]
