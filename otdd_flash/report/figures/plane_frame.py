"""The page on which points of one plane are drawn: its frame, axis labels, title and legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from otdd_flash.report.figures.page import INK, fit, measure, name_style, new_figure
from otdd_flash.report.figures.principal_plane import PrincipalPlane

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Array = NDArray[np.float64]
# Inches.
WIDTH, LEAST_HEIGHT, MOST_HEIGHT = 8.6, 3.6, 7.4
LEFT, RIGHT, TOP, BOTTOM = 0.75, 0.15, 0.5, 1.25
TITLE_POINTS = 12.0


def new_page(height: float) -> tuple[Figure, Axes]:
    """A page around axes of `WIDTH` and this height in inches."""
    page = (LEFT + WIDTH + RIGHT, BOTTOM + height + TOP)
    figure = new_figure(*page)
    axes = figure.add_axes((LEFT / page[0], BOTTOM / page[1], WIDTH / page[0], height / page[1]))
    axes.ticklabel_format(scilimits=(-2, 4), useMathText=True)
    axes.tick_params(labelsize=8, color="0.6", labelcolor=INK, length=3)
    axes.spines[:].set_color("0.8")
    return figure, axes


def plane_frame(clouds: Sequence[Array], means: Sequence[Array]) -> tuple[Figure, Axes]:
    """A page with one scale in both directions, around all points but far outliers.

    Args:
        clouds: points (k, 2), of which one in a hundred may lie outside.
        means: points (k, 2) that all lie inside; rows of NaN are left out.
    """
    points = np.concatenate(clouds)
    low, high = np.quantile(points, [0.005, 0.995], axis=0)
    reach = 0.25 * (high - low)
    low, high = np.maximum(low - reach, points.min(0)), np.minimum(high + reach, points.max(0))
    inside = np.concatenate(means)
    low, high = np.fmin(low, np.nanmin(inside, 0)), np.fmax(high, np.nanmax(inside, 0))
    span = high - low if (high > low).any() else np.ones(2)
    height = MOST_HEIGHT
    if span[1] * WIDTH < span[0] * MOST_HEIGHT:
        height = max(float(WIDTH * span[1] / span[0]), LEAST_HEIGHT)
    half = 0.54 * max(span[0] / WIDTH, span[1] / height) * np.array([WIDTH, height])
    centre = (low + high) / 2
    figure, axes = new_page(height)
    axes.set_xlim(centre[0] - half[0], centre[0] + half[0])
    axes.set_ylim(centre[1] - half[1], centre[1] + half[1])
    return figure, axes


def axis_name(plane: PrincipalPlane, k: int) -> str:
    """What to call a principal axis, with its share of the variance."""
    share = plane.explained[k]
    percent = f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"
    return f"principal axis {k + 1} ({percent} of the variance)"


def name_axes(axes: Axes, horizontal: str, vertical: str) -> None:
    """Label both axes."""
    axes.xaxis.set_label_text(horizontal, fontsize=9, color=INK)
    axes.yaxis.set_label_text(vertical, fontsize=9, color=INK)


def write_title(figure: Figure, axes: Axes, title: str) -> None:
    """Write a title above the axes, shortened to their width."""
    text = fit(title, WIDTH, lambda shown: measure(figure, shown, TITLE_POINTS)[0])
    place = (axes.get_position().x0, 1 - 0.15 / figure.get_size_inches()[1])
    figure.text(*place, text, fontsize=TITLE_POINTS, color=INK, va="top", **name_style(text))


def write_legend(
    figure: Figure, axes: Axes, handles: Sequence[Line2D], texts: Sequence[str], columns: int = 1
) -> None:
    """Explain below the axes what is drawn; there is room for three lines."""
    legend = figure.legend(
        handles,
        texts,
        loc="upper left",
        bbox_to_anchor=(axes.get_position().x0, (BOTTOM - 0.5) / figure.get_size_inches()[1]),
        frameon=False,
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        labelcolor=INK,
        ncols=columns,
    )
    for text in legend.get_texts():
        text.set(**name_style(text.get_text()))
