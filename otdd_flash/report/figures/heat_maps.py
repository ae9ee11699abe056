"""Heat maps of matrices between classes or datasets, and the order in which to show classes.

`heat_map` draws a page: cells with their numbers, class names along both axes, brackets with
dataset names outside them, a colour bar, a title and notes. `lay_out_names` chooses the class
names, `draw_brackets` draws the brackets, `cell_texts` writes the numbers, and `class_orders`
orders classes by hierarchical clustering.

`report.figures.class_pictures`, `report.distance`, `report.pairwise` and `report.study.pictures`
call it; `commands.settings` reads `ORDERS`, whose names are values of `report.order`. All lengths
are in inches. The page size follows from the number of rows and columns and from the widths of
names, so names are measured before it is set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
from otdd_flash.shown import display, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


# Inches.
CELL, SHORTEST_SIDE, LONGEST_SIDE = 0.40, 3.6, 9.6

MARGIN, TICK_GAP, BAR_GAP, BAR_WIDTH, BAR_LABELS = 0.15, 0.08, 0.2, 0.18, 0.75

TITLE_POINTS, TITLE_DEPTH, WIDEST_FOR_TITLE = 12.0, 0.36, 8.0

NOTE_POINTS, NOTE_DEPTH = 9.0, 0.19

# With more rows or columns, numbers in the cells distract even if they fit.
MOST_NUMBERED = 24

NUMBER_FONTS = (9.0, 8.0, 7.0, 6.0)


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
    """Write the values into the cells in the largest font that fits; write none if no font fits."""
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
    """Return for each cell (R, C) the colour, black or white, in which text is readable."""
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


LONGEST_NAME = 18

SMALLEST_FONT, LARGEST_FONT = 6.0, 9.0

LINE_HEIGHT = 1.25

POINTS_PER_INCH = 72.0


@dataclass(frozen=True)
class AxisNames:
    """The names along one axis: `texts[k]` is written beside cell `ticks[k]`.

    A name reads upwards if `upright[k]`. The font size is `points`, and names extend `depth` inches
    from the axis.
    """

    ticks: tuple[int, ...]
    texts: tuple[str, ...]
    points: float
    upright: tuple[bool, ...]
    depth: float


def lay_out_names(
    figure: Figure, names: Sequence[str], cell: float, sizes: Sequence[int], *, vertical: bool
) -> AxisNames:
    """Choose the names to draw and their font, so that names do not overlap.

    Narrow cells get a smaller font; below the smallest font only every k-th name is drawn, counted
    from the first class of each group. Along a horizontal axis the names of a group are upright
    unless all of them fit horizontally.

    Args:
        figure: the figure on which the names will be drawn.
        names: one per cell.
        cell: the distance between two cells in inches.
        sizes: how many cells each group of classes has.
        vertical: whether the axis is vertical; its names are horizontal.
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
    """Return every `step`-th cell of each group, with no two closer than `step`.

    Where two groups meet, the first cell of the later group replaces the last tick of the earlier
    one, unless that tick is the first cell of its group.
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


Groups = Sequence[tuple[str, int]]

# Okabe and Ito's palette, distinct for colour-blind readers; a seventh dataset repeats the first.
COLORS = (SOURCE_COLOR, TARGET_COLOR, "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


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
    """Draw a matrix (R, C) with class names and one bracket per dataset, separated by lines.

    The page grows with the number of classes up to about 12 inches a side; beyond that, names
    become smaller and then fewer. Matrices of up to 24 rows and columns have numbers in their
    cells, if these fit. Values that are not finite are grey.

    Args:
        matrix: (R, C), any real type and device.
        row_names: R class names; long names are shortened.
        column_names: C class names.
        path: the PNG file; None writes no file.
        title: one line above the picture.
        value_label: the colour bar's label with its unit.
        row_groups: (dataset name, number of classes) of the rows; the numbers sum to R.
        column_groups: the same for the columns.
        row_colors: bracket colours of the row groups.
        column_colors: bracket colours of the column groups.
        decimals: of the numbers in the cells; None keeps three digits of the largest.
        zero: the text of cells whose value rounds to 0.
        signed: whether the sign of values matters; colours then diverge from white at 0.
        notes: lines below the title; the page is made wide enough for them.

    Returns:
        The figure.

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


POINTS = 10.0

BRACKET_DEPTH = 0.32

GAP = 0.12


def draw_brackets(
    figure: Figure,
    groups: Groups,
    colors: Sequence[str],
    origin: tuple[float, float],
    length: float,
    *,
    vertical: bool,
) -> None:
    """Draw one line per group along an axis, with the group's name on the outer side.

    Args:
        figure: a figure whose size is final.
        groups: (name, number of cells) from the axis's start.
        colors: one per group; repeated if there are fewer.
        origin: inches from the figure's lower left corner to the axis's start, which is the left
            end of a horizontal axis and the upper end of a vertical one.
        length: the axis's length in inches.
        vertical: whether the axis runs down the page instead of to the right.
    """
    from matplotlib.lines import Line2D

    total = sum(size for _, size in groups)
    ends = [sum(size for _, size in groups[: k + 1]) * length / total for k in range(len(groups))]
    starts = [0.0, *ends[:-1]]
    texts, centres = place_names(
        figure, [name for name, _ in groups], list(zip(starts, ends, strict=True)), length
    )
    width, height = figure.get_size_inches()

    def at(along: float, out: float) -> tuple[float, float]:
        x, y = (
            (origin[0] - out, origin[1] - along)
            if vertical
            else (origin[0] + along, origin[1] + out)
        )
        return x / width, y / height

    each = zip(texts, centres, starts, ends, cycle(colors), strict=False)
    for text, centre, start, end, color in each:
        inset = min(0.03, (end - start) / 4)
        line = [at(start + inset, 0.0), at(end - inset, 0.0)]
        figure.add_artist(
            Line2D(*zip(*line, strict=True), color=color, linewidth=2.5, solid_capstyle="butt")
        )
        figure.text(
            *at(centre, 0.06),
            text,
            fontsize=POINTS,
            color=color,
            fontweight="bold",
            rotation=90 if vertical else 0,
            ha="right" if vertical else "center",
            va="center" if vertical else "bottom",
            **name_style(text),
        )


def place_names(
    figure: Figure, names: Sequence[str], spans: Sequence[tuple[float, float]], length: float
) -> tuple[list[str], list[float]]:
    """Shorten names and centre each on its span, moved sideways where neighbours would touch.

    Args:
        figure: the figure on which the names will be drawn.
        names: one per span.
        spans: (start, end) in inches along the axis, in order.
        length: the axis's length in inches.

    Returns:
        The texts and their centres in inches along the axis.
    """

    def width_of(text: str) -> float:
        return measure(figure, text, POINTS, fontweight="bold")[0]

    room = length - GAP * (len(names) - 1)
    names = [display(name) for name in names]
    wanted = [width_of(name) for name in names]
    if sum(wanted) > room:
        share = room / len(names)
        # Room that short names do not use goes to the long ones.
        spare = sum(max(share - width, 0.0) for width in wanted)
        long = sum(width > share for width in wanted)
        texts = [
            fit(name, share + spare / long if w > share else w, width_of)
            for name, w in zip(names, wanted, strict=True)
        ]
    else:
        texts = list(names)
    widths = [width_of(text) for text in texts]
    lefts: list[float] = []
    for width, (start, end) in zip(widths, spans, strict=True):
        earliest = lefts[-1] + widths[len(lefts) - 1] + GAP if lefts else 0.0
        lefts.append(max((start + end - width) / 2, earliest))
    limit = length
    for k in reversed(range(len(lefts))):
        lefts[k] = min(lefts[k], limit - widths[k])
        limit = lefts[k] - GAP
    return texts, [left + width / 2 for left, width in zip(lefts, widths, strict=True)]


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_ten(values: NDArray[np.float64]) -> int:
    """Return the exponent, a multiple of 3, to divide out so that the numbers are easy to read.

    It is 0 if the largest value is between 0.01 and 10,000.
    """
    largest = _largest(values)
    if largest == 0 or 0.01 <= largest < 10_000:
        return 0
    return 3 * math.floor(math.log10(largest) / 3)


def with_unit(label: str, exponent: int) -> str:
    """Return the label with the power of ten that was divided out of the values."""
    return f"{label} (× 10{str(exponent).translate(SUPERSCRIPTS)})" if exponent else label


def cell_texts(
    values: NDArray[np.float64], decimals: int | None = None, zero: str = "0"
) -> list[list[str]]:
    """Return the values as text, all with the same number of decimals.

    By default the largest value has three digits. A value that rounds to 0 becomes `zero`, and a
    value that is not finite a dash.
    """
    largest = _largest(values)
    if decimals is None:
        decimals = max(0, 2 - math.floor(math.log10(largest))) if largest > 0 else 0

    def text(value: float) -> str:
        if not math.isfinite(value):
            return "–"
        written = f"{value:.{decimals}f}"
        return written if float(written) else zero

    return [[text(float(value)) for value in row] for row in values]


def ink_on(color: tuple[float, ...]) -> str:
    """Return black or white, whichever contrasts more with an RGB colour.

    The WCAG contrast is at least 4.5 to 1.
    """
    return "black" if relative_luminance(color) > 0.179 else "white"


def relative_luminance(color: tuple[float, ...]) -> float:
    """Return the WCAG 2 relative luminance of an sRGB colour with channels in [0, 1]."""
    red, green, blue = (
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in color[:3]
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _largest(values: NDArray[Any]) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0


ORDERS = ("given", "hierarchical")


def class_orders(table: Tensor, sizes: Sequence[int], order: str) -> list[list[int]]:
    """Return for each dataset the order in which to show its classes.

    Args:
        table: (V, V) squared distances between all classes, dataset after dataset.
        sizes: how many classes each dataset has.
        order: one of `ORDERS`. `given` keeps the datasets' order. `hierarchical` takes the leaves
            of average linkage, ordered so that neighbours are as near as possible (Bar-Joseph et
            al. 2001, Fast optimal leaf ordering for hierarchical clustering). One tree is built for
            all datasets, so that similar classes get similar places in each.

    Returns:
        One list of class indices per dataset.
    """
    if order == "given" or len(table) < 3:
        return [list(range(size)) for size in sizes]
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    distances = table.detach().cpu().double().clamp_min(0).sqrt().numpy()
    # `squareform` refuses the asymmetry and the diagonal that rounding may leave.
    distances = (distances + distances.T) / 2
    np.fill_diagonal(distances, 0.0)
    leaves = leaves_list(
        linkage(squareform(distances), method="average", optimal_ordering=True)
    ).tolist()
    ends = pairwise(accumulate(sizes, initial=0))
    return [[leaf - start for leaf in leaves if start <= leaf < end] for start, end in ends]
