"""The page, style and fonts that all pictures share, and the writing of a report's files.

The first part makes figures on their own Agg canvases, in the style `STYLE`, and measures and
shortens text. The second finds installed fonts for names in any script. The third writes the files
of a report one by one (`write_each`). All modules of `report` that draw pictures call it.
`commands.results` and `commands.outcome` call `write_each`, and every command adds up the `Report`s
of its run. `commands.settings` reads `CONTENTS`. Some experiments draw with it.

A change must keep three properties. A user's matplotlib state and backend are unchanged afterwards,
because results are also drawn in notebooks (`tests/report/test_plots.py`). matplotlib is imported
only through `load_matplotlib` or after it. A file that cannot be written gives a notice and does
not stop the others (`tests/report/test_many_report.py`): reports are written after result.json, so
a full disk never loses the computed number.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from otdd_flash.errors import DataNotice, IncompleteError, InputError, MissingFileNotice
from otdd_flash.files.atomic import replacing
from otdd_flash.shown import LONGEST_NAME, display, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


DPI = 150

INK = "#222222"

# Blue and vermilion of Okabe & Ito's palette, distinct for every common colour blindness.
SOURCE_COLOR = "#0072B2"

TARGET_COLOR = "#D55E00"

# Text is smaller than matplotlib's and dollar signs are plain: names are not mathematics.
STYLE: dict[str, Any] = {
    "text.parse_math": False,
    "text.color": INK,
    "font.size": 9.0,
    "axes.titlesize": 12.0,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": "0.8",
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 4),
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
    "grid.color": "0.92",
    "image.interpolation": "nearest",
    "legend.fontsize": 9.0,
    "legend.labelcolor": INK,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
    "xtick.color": "0.6",
    "ytick.color": "0.6",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}

# Font sizes, and the margin in inches. Axes whose ticks matplotlib chooses take TICK_POINTS by
# `tick_params`: the number of ticks follows from a size of the style when they are drawn anew.
TITLE_POINTS, TICK_POINTS, MARGIN = 12.0, 8.0, 0.15


def new_figure(width: float = 1.0, height: float = 1.0) -> Figure:
    """Return an empty white figure of this size in inches, on its own Agg canvas."""
    load_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def figure_of(draw: Callable[[], Figure], names: Collection[str]) -> Figure:
    """Call `draw` in the style of reports and return its figure, which notebooks can display.

    Matplotlib's state is restored, and pyplot does not register the figure.

    Args:
        draw: a function that makes a figure with `new_figure`.
        names: the users' names that appear in the figure.

    Warns:
        DataNotice: no installed font has some of their characters.
    """
    notice_missing_glyphs(names)
    with own_style(names):
        figure = draw()
        # Ticks take the style that is active when they are first drawn.
        figure.draw_without_rendering()
    # IPython shows only the size of figures that pyplot has not registered.
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Figure) -> bytes:
    sink = io.BytesIO()
    with own_style():
        figure.savefig(sink, format="png", dpi=DPI)
    return sink.getvalue()


def grow_page(figure: Figure) -> None:
    """Make the page as large as all that is drawn, with a margin; axes keep their sizes.

    Texts must be placed relative to axes, which this moves.
    """
    from matplotlib.transforms import Affine2D

    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    page = box.width + 2 * MARGIN, box.height + 2 * MARGIN
    moved = Affine2D().scale(width, height).translate(MARGIN - box.x0, MARGIN - box.y0)
    moved = moved.scale(1 / page[0], 1 / page[1])
    for axes in figure.axes:
        axes.set_position(axes.get_position(original=True).transformed(moved))
    figure.set_size_inches(*page)


def save_picture(figure: Figure, path: str | Path) -> None:
    """Write the figure as PNG at `DPI`, atomically."""
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=DPI)


def measure(
    figure: Figure | SubFigure, text: str, points: float, **style: Any
) -> tuple[float, float]:
    """Return width and height in inches of `text` at this font size."""
    drawn = figure.text(0, 0, text, fontsize=points, **style)
    box = drawn.get_window_extent()
    drawn.remove()
    return box.width / figure.dpi, box.height / figure.dpi


def fit_title(figure: Figure, text: str, width: float, points: float = TITLE_POINTS) -> str:
    """Return the longest shortening of a title that is at most `width` inches wide."""
    return fit(text, width, lambda shown: measure(figure, shown, points)[0])


def fit(name: str, width: float, width_of: Callable[[str], float]) -> str:
    """Return the longest shortening of `name` that is at most `width` wide.

    It has at least one character, even if that is wider.
    """
    for length in range(min(len(display(name)), LONGEST_NAME), 0, -1):
        text = shorten(name, length)
        if width_of(text) <= width:
            return text
    return shorten(name, 1)


# A range this wide is easier to read on a logarithmic scale.
LOGARITHMIC_FROM = 10.0


def logarithmic(values: NDArray[np.float64]) -> bool:
    """Return whether the finite values are positive and span a factor of `LOGARITHMIC_FROM`."""
    finite = values[np.isfinite(values)]
    if not len(finite) or finite.min() <= 0:
        return False
    return bool(finite.max() >= LOGARITHMIC_FROM * finite.min())


def scale_logarithmically(axes: Axes, along: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks."""
    axes.set(**{f"{along}scale": "log"})
    getattr(axes, f"{along}axis").set_major_formatter("{x:g}")
    axes.minorticks_off()


logger = logging.getLogger(__name__)

DEFAULT = "DejaVu Sans"

# This font has a box for every character, so its coverage means nothing.
BOXES = "Last Resort"

# The most characters that a notice lists.
SHOWN = 12


def families(text: str) -> list[str]:
    """Return the default font and installed fonts for the characters that it lacks."""
    return [DEFAULT, *_for_characters(frozenset(text))[0]]


def font_file(text: str) -> str:
    """Return the file of the default font, or of the next if it lacks characters of a text."""
    load_matplotlib()
    from matplotlib.font_manager import findfont

    return findfont(families(text)[:2][-1])


def notice_missing_glyphs(names: Collection[str]) -> None:
    """Warn once of the characters of some names that no installed font can draw.

    Warns:
        DataNotice: there are such characters.
    """
    try:
        missing = sorted(_for_characters(frozenset("".join(names)))[1])
    except Exception as error:
        # The fonts cannot be read: pictures that need them fail with a notice of their own.
        logger.debug("no fonts: %s", error)
        return
    if missing:
        listed = " ".join(missing[:SHOWN]) + (" ..." if len(missing) > SHOWN else "")
        warnings.warn(
            f"no installed font has the characters {listed}, which pictures show as boxes; install "
            "one that has, such as Noto Sans of that script",
            DataNotice,
            # The notice counts as given here, so that reports of one result say it once.
            stacklevel=1,
        )


def load_matplotlib() -> None:
    """Import matplotlib, even if the environment names a backend that is not installed.

    Notebooks pass `MPLBACKEND=module://matplotlib_inline.backend_inline` to the processes they
    start, and the import fails if that package is missing. The pictures here use their own Agg
    canvases; the backend serves the user's figures only, and is set to the value of the environment
    afterwards.
    """
    if "matplotlib" in sys.modules:
        return
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend


@contextmanager
def own_style(names: Collection[str] = ()) -> Iterator[None]:
    """Draw in the style of reports, with fonts for names in any script.

    The user's settings, which may ask for LaTeX or other sizes, are restored afterwards. Warnings
    per missing character are silent; `notice_missing_glyphs` warns once instead.
    """
    load_matplotlib()
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font", category=UserWarning
        )
        matplotlib.rcdefaults()
        style: Any = STYLE | {"font.family": families("".join(names))}
        matplotlib.rcParams.update(style)
        yield


@cache
def _for_characters(characters: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return fonts for the characters that the default lacks, and the characters that none has."""
    missing = {c for c in characters if c.isprintable() and ord(c) not in _characters_of(DEFAULT)}
    found: list[str] = []
    for name in _installed() if missing else ():
        covered = {c for c in missing if ord(c) in _characters_of(name)}
        if covered:
            found.append(name)
            missing -= covered
        if not missing:
            break
    return tuple(found), frozenset(missing)


@cache
def _installed() -> tuple[str, ...]:
    """Return the names of all installed fonts, sans-serif fonts first."""
    load_matplotlib()
    from matplotlib.font_manager import fontManager

    names = {font.name for font in fontManager.ttflist if not font.name.startswith(BOXES)}
    return tuple(sorted(names, key=lambda name: ("Sans" not in name, name)))


@cache
def _characters_of(name: str) -> frozenset[int]:
    load_matplotlib()
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont(name)).get_charmap())


# The contents of a report: no files, tables, or tables and pictures.
CONTENTS = ("none", "table", "full")

# For each path the function that writes the file, called with the path.
Writers = dict[Path, Callable[[Path], object]]

# For each path of a PNG file the function that draws its figure.
Pictures = dict[Path, Callable[[], "Figure"]]


@dataclass(frozen=True)
class Report:
    """The files of a report: those written and those that could not be.

    Attributes:
        written: the files written, in the order asked for.
        missing: the files that could not be written; a notice gave the reason.
    """

    written: tuple[Path, ...] = ()
    missing: tuple[Path, ...] = ()

    def __add__(self, other: Report) -> Report:
        """Return the files written and the files missing in both reports together."""
        return Report(self.written + other.written, self.missing + other.missing)

    def require_complete(self) -> None:
        """Raise an `IncompleteError` that names the missing files, if there are any."""
        if self.missing:
            raise IncompleteError(
                "the result was written, but not "
                f"{', '.join(path.name for path in self.missing)}; the notices say why"
            )


def write_each(
    files: Writers, pictures: Pictures | None = None, names: Collection[str] = ()
) -> Report:
    """Write each file, then draw each picture; if one fails, warn and go on with the next.

    Files of an earlier report at these paths are removed first: they would not match the new
    result.

    Args:
        files: their writers are called in order.
        pictures: drawn in the style of reports.
        names: the users' names that appear in pictures.

    Warns:
        MissingFileNotice: a file could not be written, with the reason.
        DataNotice: no installed font has some characters of the names.
    """
    writers = {**files}
    if pictures:
        notice_missing_glyphs(names)
        for path, draw in pictures.items():
            writers[path] = partial(_write_picture, draw, names)
    for path in writers:
        # If a file cannot be removed, its writer will fail to replace it and give a notice.
        with suppress(OSError):
            path.unlink(missing_ok=True)
    report = Report()
    for path, writer in writers.items():
        try:
            writer(path)
        except Exception as error:
            # Any exception: a failed drawing must not lose the run.
            logger.debug("%s", traceback.format_exc())
            warnings.warn(_reason(path, error), MissingFileNotice, stacklevel=2)
            report += Report(missing=(path,))
        else:
            report += Report(written=(path,))
    return report


def _write_picture(draw: Callable[[], Figure], names: Collection[str], path: Path) -> None:
    with own_style(names):
        save_picture(draw(), path)


def _reason(path: Path, error: Exception) -> str:
    if isinstance(error, InputError):
        return str(error)
    return f"cannot write {path} ({type(error).__name__}: {error})"
