"""A matrix between classes as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.report.figures.axis_names import AxisNames, lay_out_names
from otdd_flash.report.figures.brackets import BRACKET_DEPTH, COLORS, Groups, draw_brackets
from otdd_flash.report.figures.cell_numbers import cell_texts, ink_on, power_of_ten, with_unit
from otdd_flash.report.figures.page import INK, fit, measure, name_style, new_figure, save_picture
from otdd_flash.shown import display

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Inches.
CELL, SHORTEST_SIDE, LONGEST_SIDE = 0.40, 3.6, 9.6
MARGIN, TICK_GAP, BAR_GAP, BAR_WIDTH, BAR_LABELS = 0.15, 0.08, 0.2, 0.18, 0.75
TITLE_POINTS, TITLE_DEPTH, WIDEST_FOR_TITLE = 12.0, 0.36, 8.0
NOTE_POINTS, NOTE_DEPTH = 9.0, 0.19
# Beyond this many rows or columns numbers in the cells are noise, even where they fit.
MOST_NUMBERED = 24
NUMBER_FONTS = (9.0, 8.0, 7.0, 6.0)


def heat_map(
    matrix: Tensor,
    row_names: Sequence[str],
    column_names: Sequence[str],
    path: str | Path | None,
    *,
    title: str,
    value_label: str,
    row_groups: Groups,
    column_groups: Groups,
    row_colors: Sequence[str] = COLORS,
    column_colors: Sequence[str] = COLORS,
    decimals: int | None = None,
    zero: str = "0",
    signed: bool = False,
    notes: Sequence[str] = (),
) -> Figure:
    """Draw a matrix (R, C) with its class names, datasets bracketed and separated by a line.

    The page grows with the number of classes up to about 12 inches a side; beyond that names become
    smaller and then fewer. Numbers stand in the cells up to 24 rows and columns. Values that are
    not finite are grey.

    Args:
        matrix: (R, C), any real type and device.
        row_names: R class names; shortened where too long.
        column_names: C class names.
        path: the PNG file; None writes none.
        title: one line above the picture.
        value_label: the colour bar's label with its unit.
        row_groups: (dataset name, number of classes) of the rows; the numbers sum to R.
        column_groups: the same for the columns.
        row_colors: bracket colours of the row groups.
        column_colors: bracket colours of the column groups.
        decimals: of the numbers in the cells; None keeps three digits of the largest.
        zero: what cells show whose value rounds to nothing.
        signed: values have a sign that matters; colours diverge from white at 0.
        notes: lines below the title, for which the page is made wide enough.

    Raises:
        ValueError: names or groups do not match the matrix.
        InputError: the file cannot be written.
    """
    values = matrix.detach().cpu().double().numpy()
    _check(values.shape, row_names, column_names, row_groups, column_groups)
    exponent = power_of_ten(values)
    values = values / 10.0**exponent

    figure = new_figure()
    height, width = (min(LONGEST_SIDE, max(SHORTEST_SIDE, CELL * k)) for k in values.shape)
    row_sizes, column_sizes = (
        [size for _, size in groups] for groups in (row_groups, column_groups)
    )
    rows = lay_out_names(figure, row_names, height / len(row_names), row_sizes, vertical=True)
    columns = lay_out_names(
        figure, column_names, width / len(column_names), column_sizes, vertical=False
    )
    left = MARGIN + BRACKET_DEPTH + rows.depth + TICK_GAP
    bottom = MARGIN + columns.depth + TICK_GAP
    title = display(title)
    title_width, _ = measure(figure, title, TITLE_POINTS)
    page_width = max(
        left + width + BAR_GAP + BAR_WIDTH + BAR_LABELS,
        min(2 * MARGIN + title_width, WIDEST_FOR_TITLE),
        *(2 * MARGIN + measure(figure, note, NOTE_POINTS)[0] for note in notes),
    )
    head = TITLE_DEPTH + NOTE_DEPTH * len(notes) + MARGIN
    page_height = bottom + height + BRACKET_DEPTH + head
    figure.set_size_inches(page_width, page_height)

    def box(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        return x / page_width, y / page_height, w / page_width, h / page_height

    axes = figure.add_axes(box(left, bottom, width, height))
    image = _draw_cells(axes, values, signed)
    _draw_separators(axes, row_sizes, column_sizes)
    _draw_names(axes, rows, columns)
    _draw_numbers(figure, axes, image, values, (width, height), cell_texts(values, decimals, zero))
    bar_axes = figure.add_axes(box(left + width + BAR_GAP, bottom, BAR_WIDTH, height))
    _draw_bar(figure, image, bar_axes, with_unit(value_label, exponent))
    draw_brackets(
        figure, column_groups, column_colors, (left, bottom + height + 0.05), width, vertical=False
    )
    draw_brackets(
        figure,
        row_groups,
        row_colors,
        (MARGIN + BRACKET_DEPTH - 0.06, bottom + height),
        height,
        vertical=True,
    )
    _draw_title(figure, title)
    for line, note in enumerate(notes):
        top = MARGIN + TITLE_DEPTH - 0.06 + NOTE_DEPTH * line
        at = MARGIN / page_width, 1 - top / page_height
        figure.text(*at, note, fontsize=NOTE_POINTS, color=INK, va="top", **name_style(note))
    save_picture(figure, path)
    return figure


def _check(
    shape: tuple[int, ...],
    row_names: Sequence[str],
    column_names: Sequence[str],
    row_groups: Groups,
    column_groups: Groups,
) -> None:
    if shape != (len(row_names), len(column_names)) or 0 in shape:
        raise ValueError(
            f"a {shape} matrix cannot have {len(row_names)} row names and "
            f"{len(column_names)} column names"
        )
    grouped = tuple(sum(size for _, size in groups) for groups in (row_groups, column_groups))
    if grouped != shape:
        raise ValueError(f"the groups hold {grouped} classes, the matrix {shape}")


def _draw_cells(axes: Axes, values: NDArray[np.float64], signed: bool) -> AxesImage:
    import matplotlib

    finite = values[np.isfinite(values)]
    low = min(0.0, float(finite.min())) if finite.size else 0.0
    high = float(finite.max()) if finite.size else 0.0
    if signed:
        high = max(high, -low) or 1.0
        low = -high
    colors = matplotlib.colormaps["RdBu" if signed else "viridis"].with_extremes(bad="0.8")
    shown = np.ma.masked_invalid(values)
    return axes.imshow(
        shown, cmap=colors, vmin=low, vmax=high if high > low else low + 1.0, aspect="auto"
    )


def _draw_separators(axes: Axes, row_sizes: Sequence[int], column_sizes: Sequence[int]) -> None:
    for edge in np.cumsum(row_sizes)[:-1]:
        axes.axhline(float(edge) - 0.5, color="white", linewidth=2.5)
    for edge in np.cumsum(column_sizes)[:-1]:
        axes.axvline(float(edge) - 0.5, color="white", linewidth=2.5)
    axes.spines[:].set_visible(False)


def _draw_names(axes: Axes, rows: AxisNames, columns: AxisNames) -> None:
    style = {"color": INK, **name_style("".join((*rows.texts, *columns.texts)))}
    axes.set_yticks(rows.ticks, rows.texts, fontsize=rows.points, **style)
    axes.set_xticks(columns.ticks, columns.texts, fontsize=columns.points, **style)
    for label, upright in zip(axes.get_xticklabels(), columns.upright, strict=True):
        label.set_rotation(90 if upright else 0)
    axes.tick_params(length=2, pad=2, color="0.6", width=0.6)


def _draw_numbers(
    figure: Figure,
    axes: Axes,
    image: AxesImage,
    values: NDArray[np.float64],
    size: tuple[float, float],
    texts: list[list[str]],
) -> None:
    """Write the values into the cells, in the largest font that fits, if one does."""
    if max(values.shape) > MOST_NUMBERED:
        return
    cell_width, cell_height = size[0] / values.shape[1], size[1] / values.shape[0]
    longest = max((text for row in texts for text in row), key=len)
    for points in NUMBER_FONTS:
        width, height = measure(figure, longest, points)
        if width <= 0.88 * cell_width and height <= 0.8 * cell_height:
            break
    else:
        return
    for (i, j), color in np.ndenumerate(_inks(image, values)):
        axes.text(j, i, texts[i][j], fontsize=points, color=color, ha="center", va="center")


def _inks(image: AxesImage, values: NDArray[np.float64]) -> NDArray[Any]:
    """Per cell (R, C), the colour that text can be read in."""
    colors = np.asarray(image.cmap(image.norm(np.ma.masked_invalid(values))))
    return np.array([[ink_on(tuple(cell)) for cell in row] for row in colors])


def _draw_bar(figure: Figure, image: AxesImage, axes: Axes, label: str) -> None:
    bar = figure.colorbar(image, cax=axes)
    bar.set_label(label, fontsize=9, color=INK)
    bar.outline.set_visible(False)
    axes.tick_params(labelsize=8, colors=INK, length=3)


def _draw_title(figure: Figure, title: str) -> None:
    width, height = figure.get_size_inches()
    room = width - 2 * MARGIN
    text = fit(title, room, lambda shown: measure(figure, shown, TITLE_POINTS)[0])
    figure.text(
        MARGIN / width,
        1 - MARGIN / height,
        text,
        fontsize=TITLE_POINTS,
        color=INK,
        ha="left",
        va="top",
        **name_style(text),
    )
