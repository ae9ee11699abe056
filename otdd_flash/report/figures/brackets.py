"""Brackets with dataset names on the outer side of a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from otdd_flash.report.figures.page import SOURCE_COLOR, TARGET_COLOR, fit, measure, name_style
from otdd_flash.shown import display

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Groups = Sequence[tuple[str, int]]
# Okabe and Ito's, which colour-blind readers tell apart; a seventh dataset starts again.
COLORS = (SOURCE_COLOR, TARGET_COLOR, "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
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
    """Draw one line per group along an axis, its name on the outer side.

    Args:
        figure: a figure whose size is final.
        groups: (name, number of cells) from the axis's start.
        colors: one per group, from the first again if there are fewer.
        origin: inches from the figure's lower left corner to the axis's start: the left end of a
            horizontal axis, the upper end of a vertical one.
        length: the axis's length in inches.
        vertical: down the page instead of rightwards.
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
    """Shorten names and centre each on its span, moved aside where neighbours would touch.

    Args:
        figure: where the names will be drawn.
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
        # What short names leave over goes to the long ones.
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
