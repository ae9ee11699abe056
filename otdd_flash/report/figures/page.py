"""The paper the pictures are drawn on: inches, a font, two colours, saved as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otdd_flash.files.atomic import replacing
from otdd_flash.report.figures.fonts import (
    families,
    load_matplotlib,
    notice_missing_glyphs,
    own_style,
    without_glyph_warnings,
)
from otdd_flash.shown import LONGEST_NAME, display, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
INK = "#222222"
# Blue and vermilion of Okabe & Ito's palette, told apart with every common colour blindness.
SOURCE_COLOR = "#0072B2"
TARGET_COLOR = "#D55E00"


def new_figure(width: float = 1.0, height: float = 1.0) -> Figure:
    """An empty white figure of this size in inches, on its own Agg canvas."""
    load_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def figure_of(draw: Callable[[], Figure], names: Iterable[str]) -> Figure:
    """Return what `draw` draws as reports draw it, as a figure that shows itself in notebooks.

    Matplotlib's state is afterwards what it was, and pyplot does not know the figure.

    Args:
        draw: makes a figure of `new_figure`.
        names: those of users that stand in it.

    Warns:
        DataNotice: no installed font has some of their characters.
    """
    notice_missing_glyphs(names)
    with own_style(), without_glyph_warnings():
        figure = draw()
        # Ticks are made when they are first drawn, and then in the style of the moment.
        figure.draw_without_rendering()
    # Of figures that pyplot does not know, IPython shows no more than their size.
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Figure) -> bytes:
    sink = io.BytesIO()
    with own_style(), without_glyph_warnings():
        figure.savefig(sink, format="png", dpi=DPI)
    return sink.getvalue()


def save_picture(figure: Figure, path: str | Path | None) -> None:
    """Write the figure as PNG at `DPI`, whole or not at all; nothing where `path` is None."""
    if path is None:
        return
    with replacing(path) as partial, without_glyph_warnings():
        figure.savefig(partial, format="png", dpi=DPI)


def name_style(text: str) -> dict[str, Any]:
    """Properties of a text with names users chose: dollar signs are plain, any script shows."""
    return {"parse_math": False, "fontfamily": families(text)}


def measure(figure: Figure, text: str, points: float, **style: Any) -> tuple[float, float]:
    """Width and height in inches of `text` set at this font size."""
    drawn = figure.text(0, 0, text, fontsize=points, **name_style(text), **style)
    with without_glyph_warnings():
        box = drawn.get_window_extent()
    drawn.remove()
    return box.width / figure.dpi, box.height / figure.dpi


def fit(name: str, width: float, width_of: Callable[[str], float]) -> str:
    """The longest shortening of `name`, at least one character, that is at most `width` wide."""
    for length in range(min(len(display(name)), LONGEST_NAME), 0, -1):
        text = shorten(name, length)
        if width_of(text) <= width:
            return text
    return shorten(name, 1)
