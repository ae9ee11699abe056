"""Heat maps of matrices between classes or datasets, and the order in which to show classes.

`heat_map` draws a page: cells with their numbers, names along both axes, a bracket with its name
for each group of consecutive rows or columns, a colour bar, a title and notes.
`draw_class_distances` does so for all classes of two or more datasets, and `class_orders` orders
classes by hierarchical clustering.

`report.distance`, `report.pairwise` and `report.study.writing` call it; `commands.settings` reads
`ORDERS`, whose names are values of `report.order`. Cells have a size in inches, smaller where more
than LONGEST_SIDE would be needed, and the page grows to all that stands around the matrix. Code
that reorders rows or columns must reorder matrix and names alike, or cells stand under wrong names
without an error, and must reorder each dataset by itself, as a bracket stands over consecutive
rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, cycle, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.report.page import (
    SOURCE_COLOR,
    TARGET_COLOR,
    TICK_POINTS,
    TITLE_POINTS,
    fit,
    fit_title,
    grow_page,
    measure,
    new_figure,
)
from otdd_flash.shown import display, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Inches: the side of a cell, the shortest and the longest side of the matrix, the distance of the
# colour bar from the matrix and its width, and the least width for a title.
CELL, SHORTEST_SIDE, LONGEST_SIDE, BAR_GAP, BAR_WIDTH, TITLE_ROOM = 0.40, 3.6, 9.6, 0.5, 0.18, 8.0

# Inches above the matrix, or right of it for brackets of rows, at which a bracket, its name and the
# lowest line of text stand, and from one line of text to the next.
BRACKET, BRACKET_NAME, NOTE, LINE = 0.05, 0.1, 0.38, 0.19

# Inches between the names of two brackets.
GAP = 0.12

# Font sizes: of notes, of the names of brackets, the smallest and the largest in cells and of their
# names; and how much higher a line is than its font.
NOTE_POINTS, BRACKET_POINTS, SMALLEST, LARGEST, LINE_HEIGHT = 9.0, 10.0, 6.0, 9.0, 1.25

POINTS_PER_INCH = 72.0

# The width of a digit, as a part of the font size.
DIGIT = 0.64

LONGEST_NAME = 18

# With more rows or columns, numbers in the cells distract even if they fit.
MOST_NUMBERED = 24

# Okabe and Ito's palette, distinct for colour-blind readers; a seventh dataset repeats the first.
COLORS = (SOURCE_COLOR, TARGET_COLOR, "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


class Group(NamedTuple):
    """Consecutive rows or columns: the name and colour of their bracket, and their own names."""

    name: str
    members: Sequence[str]
    color: str


def draw_class_distances(
    full: Tensor,
    names: Sequence[Sequence[str]],
    datasets: Sequence[str],
    *,
    title: str,
    orders: Sequence[Sequence[int]],
) -> Figure:
    """Draw class distances within each of some datasets and between them.

    Args:
        full: W (V, V), dataset after dataset, of any metric.
        names: the class names of each dataset.
        datasets: the names of the datasets.
        title: the title of the picture.
        orders: the order in which to show the classes of each dataset.
    """
    starts = accumulate(map(len, names), initial=0)
    # `starts` has one entry more than there are datasets: the end.
    places = [
        start + index for start, order in zip(starts, orders, strict=False) for index in order
    ]
    groups = [
        Group(dataset, [classes[index] for index in order], color)
        for dataset, classes, order, color in zip(
            datasets, names, orders, cycle(COLORS), strict=False
        )
    ]
    return heat_map(
        full[places][:, places],
        groups,
        groups,
        title=title,
        value_label="class distance W",
    )


def heat_map(
    matrix: Tensor,
    rows: Sequence[Group],
    columns: Sequence[Group],
    *,
    title: str,
    value_label: str,
    decimals: int | None = None,
    zero: str = "0",
    signed: bool = False,
    notes: Sequence[str] = (),
) -> Figure:
    """Draw a matrix (R, C) with names along both axes and one bracket per group.

    The page grows with the number of rows and columns up to about 12 inches a side; beyond that,
    names become smaller and then fewer. Matrices of up to 24 rows and columns have numbers in their
    cells, if these fit. Values that are not finite are grey.

    Args:
        matrix: (R, C), any real type and device.
        rows: groups with R members in all; long names are shortened.
        columns: groups with C members in all.
        title: one line above the picture.
        value_label: the colour bar's label with its unit.
        decimals: of the numbers in the cells; None keeps three digits of the largest.
        zero: the text of cells whose value rounds to 0.
        signed: whether the sign of values matters; colours then diverge from white at 0.
        notes: lines below the title.

    Raises:
        ValueError: the groups do not match the matrix.
    """
    values = matrix.detach().cpu().double().numpy()
    grouped = tuple(sum(len(group.members) for group in groups) for groups in (rows, columns))
    if grouped != values.shape or 0 in grouped:
        raise ValueError(f"the groups have {grouped} members, the matrix {values.shape}")
    exponent = power_of_ten(values)
    values = values / 10.0**exponent
    height, width = (min(LONGEST_SIDE, max(SHORTEST_SIDE, CELL * k)) for k in values.shape)
    figure = new_figure(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    image = _draw_cells(axes, values, signed)
    _name_cells(axes.yaxis, rows, height)
    _name_cells(axes.xaxis, columns, width)
    _draw_brackets(axes, rows, (height, width), vertical=True)
    _draw_brackets(axes, columns, (width, height), vertical=False)
    _draw_numbers(axes, image, values, (width, height), cell_texts(values, decimals, zero))
    bar = figure.add_axes((1 + BAR_GAP / width, 0, BAR_WIDTH / width, 1))
    bar.tick_params(labelsize=TICK_POINTS)
    label = with_unit(value_label, exponent)
    figure.colorbar(image, cax=bar, label=label).outline.set_visible(False)
    text = fit_title(figure, title, max(width + BAR_GAP, TITLE_ROOM))
    lines = [(text, TITLE_POINTS), *((note, NOTE_POINTS) for note in notes)]
    for number, (line, points) in enumerate(lines):
        up = 1 + (NOTE + LINE * (len(notes) - number)) / height
        figure.text(0, up, line, fontsize=points, va="bottom", transform=axes.transAxes)
    grow_page(figure)
    return figure


def _draw_cells(axes: Axes, values: NDArray[np.float64], signed: bool) -> AxesImage:
    import matplotlib

    finite = values[np.isfinite(values)]
    low, high = min(0.0, finite.min(initial=0.0)), finite.max(initial=-math.inf)
    if signed:
        high = max(high, -low) or 1.0
        low = -high
    return axes.imshow(
        np.ma.masked_invalid(values),
        cmap=matplotlib.colormaps["RdBu" if signed else "viridis"].with_extremes(bad="0.8"),
        vmin=low,
        vmax=high if high > low else low + 1.0,
        aspect="auto",
    )


def _name_cells(axis: Axis, groups: Sequence[Group], length: float) -> None:
    """Name the cells along an axis of this length in inches, so that names do not overlap.

    Narrow cells get a smaller font; below the smallest font only every k-th name is drawn. Names
    along a horizontal axis are upright unless all of them fit horizontally.
    """
    names = [shorten(name, LONGEST_NAME) for group in groups for name in group.members]
    cell = length / len(names)
    points = min(LARGEST, max(SMALLEST, cell * POINTS_PER_INCH / LINE_HEIGHT))
    # A quotient that is a whole number may be rounded to a little more: 1e-9 is for that.
    step = math.ceil(points * LINE_HEIGHT / POINTS_PER_INCH / cell - 1e-9)
    figure, ticks = axis.axes.figure, range(0, len(names), step)
    widest = max(measure(figure, name, points)[0] for name in names[::step])
    upright = axis is axis.axes.xaxis and (step > 1 or widest > 0.9 * cell)
    axis.set_ticks(ticks, names[::step], fontsize=points, rotation=90 if upright else 0)
    axis.set_tick_params(length=2, pad=2, width=0.6)


def _draw_numbers(
    axes: Axes,
    image: AxesImage,
    values: NDArray[np.float64],
    size: tuple[float, float],
    texts: list[list[str]],
) -> None:
    """Write the values into the cells in the largest font that fits; write none if no font fits."""
    longest = max(1, *(len(text) for row in texts for text in row))
    # Text may fill 0.88 of a cell's width and 0.6 of its height.
    wide, high = 0.88 * size[0] / values.shape[1] / longest / DIGIT, 0.6 * size[1] / len(values)
    points = min(LARGEST, POINTS_PER_INCH * min(wide, high))
    if points < SMALLEST or max(values.shape) > MOST_NUMBERED:
        return
    colors = image.to_rgba(np.ma.masked_invalid(values))
    for (i, j), _ in np.ndenumerate(values):
        color = ink_on(tuple(colors[i, j]))
        axes.text(j, i, texts[i][j], fontsize=points, color=color, ha="center", va="center")


def _draw_brackets(
    axes: Axes, groups: Sequence[Group], size: tuple[float, float], *, vertical: bool
) -> None:
    """Draw above columns, or right of rows, a line for each group, with its name outside.

    White lines through the cells separate the groups.

    Args:
        axes: the axes of the cells.
        groups: the groups along the axis.
        size: the length of the axis and that of the other one, in inches.
        vertical: whether the groups are of rows.
    """
    from matplotlib.lines import Line2D

    edges = np.cumsum([0, *(len(group.members) for group in groups)])
    length, across = size
    cell = length / edges[-1]
    figure, separate = axes.figure, axes.axhline if vertical else axes.axvline
    along = axes.get_yaxis_transform() if vertical else axes.get_xaxis_transform()
    names, centres = _place_names(axes, groups, edges * cell)
    places = zip(groups, names, centres, pairwise(edges - 0.5), strict=True)
    for group, name, centre, (start, end) in places:
        if start > 0:
            separate(start, color="white", linewidth=2.5)
        # Brackets begin and end 0.03 inches inside their group, but leave half of a small one.
        inset = min(0.03 / cell, (end - start) / 4)
        x, y = [start + inset, end - inset], [1 + BRACKET / across] * 2
        style: dict[str, Any] = {"transform": along, "color": group.color}
        line = (y, x) if vertical else (x, y)
        figure.add_artist(Line2D(*line, linewidth=2.5, solid_capstyle="butt", **style))
        place, out = centre / cell - 0.5, 1 + BRACKET_NAME / across
        figure.text(
            out if vertical else place,
            place if vertical else out,
            name,
            fontsize=BRACKET_POINTS,
            fontweight="bold",
            rotation=90 if vertical else 0,
            ha="left" if vertical else "center",
            va="center" if vertical else "bottom",
            **style,
        )
    axes.spines[:].set_visible(False)


def _place_names(
    axes: Axes, groups: Sequence[Group], edges: NDArray[np.float64]
) -> tuple[list[str], list[float]]:
    """Shorten names and centre each on its group, moved sideways where neighbours would touch.

    Returns:
        The texts and their centres in inches along the axis.
    """

    def width(text: str) -> float:
        return measure(axes.figure, text, BRACKET_POINTS, fontweight="bold")[0] + GAP

    names = [display(group.name) for group in groups]
    wanted, share = [*map(width, names)], float(edges[-1]) / len(names)
    if sum(wanted) > edges[-1]:
        # Room that short names do not use goes to the long ones.
        spare = sum(max(share - wide, 0.0) for wide in wanted)
        share += spare / sum(wide > share for wide in wanted)
        names = [fit(name, share, width) for name in names]
    widths = [width(name) for name in names]
    centres, least = [], 0.0
    for wide, (start, end) in zip(widths, pairwise(edges), strict=True):
        centres.append(max((start + end) / 2, least + wide / 2))
        least = centres[-1] + wide / 2
    most = float(edges[-1])
    for k in reversed(range(len(names))):
        centres[k] = min(centres[k], most - widths[k] / 2)
        most = centres[k] - widths[k] / 2
    return names, centres


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

    Above a luminance of 0.179 black contrasts more, below it white; the WCAG contrast is then at
    least 4.5 to 1.
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
