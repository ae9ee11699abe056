"""The paper the pictures are drawn on: inches, a font, two colours, saved as PNG.

Fonts for names in any script, among those installed, and a notice where none has a letter.

The files beside a number: each is written for itself, and one that fails costs no other.

They come after `result.json` has been written and the number printed, so that a disk that fills, or
a picture that cannot be drawn, never loses what was computed.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otdd_flash.errors import DataNotice, IncompleteError, InputError, MissingFileNotice
from otdd_flash.files.atomic import replacing
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


logger = logging.getLogger(__name__)


DEFAULT = "DejaVu Sans"


# It has a box for every character, and so nothing to show.
BOXES = "Last Resort"


# How many characters a notice lists.
SHOWN = 12


def families(text: str) -> list[str]:
    """The default font and, for the characters that it lacks, installed fonts that have them."""
    return [DEFAULT, *_for_characters(frozenset(text))[0]]


def font_file(text: str) -> str:
    """The file of one font for a text: the default or, where that lacks letters, the next."""
    load_matplotlib()
    from matplotlib.font_manager import findfont

    return findfont(families(text)[:2][-1])


def notice_missing_glyphs(names: Iterable[str]) -> None:
    """Say once which characters of some names no installed font can draw.

    Warns:
        DataNotice: there are such characters.
    """
    try:
        missing = sorted(_for_characters(frozenset("".join(names)))[1])
    except Exception as error:
        # Fonts that cannot be read: the pictures that need them say so themselves.
        logger.debug("no fonts: %s", error)
        return
    if missing:
        listed = " ".join(missing[:SHOWN]) + (" ..." if len(missing) > SHOWN else "")
        warnings.warn(
            f"no installed font has the characters {listed}, which pictures show as boxes; install "
            "one that has, such as Noto Sans of that script",
            DataNotice,
            stacklevel=3,
        )


def load_matplotlib() -> None:
    """Import matplotlib, whatever backend the environment names.

    `MPLBACKEND=module://matplotlib_inline.backend_inline`, which notebooks hand to what they start,
    keeps it from being imported where that package is missing. Pictures have Agg canvases of their
    own; the backend is for the user's figures, and stays what it would have been.
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
def own_style() -> Iterator[None]:
    """Draw with matplotlib's defaults, not the user's, which may ask for LaTeX or other sizes."""
    load_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


@contextmanager
def without_glyph_warnings() -> Iterator[None]:
    """Keep matplotlib from warning of every character and size; `notice_missing_glyphs` has."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font", category=UserWarning
        )
        yield


@cache
def _for_characters(characters: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Fonts that have what the default lacks, and the characters that none has."""
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
    """Names of all installed fonts, sans-serif ones first."""
    load_matplotlib()
    from matplotlib.font_manager import fontManager

    names = {font.name for font in fontManager.ttflist if not font.name.startswith(BOXES)}
    return tuple(sorted(names, key=lambda name: ("Sans" not in name, name)))


@cache
def _characters_of(name: str) -> frozenset[int]:
    """The code points that a font has glyphs for."""
    load_matplotlib()
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont(name)).get_charmap())


# What a report consists of beside the number: nothing, tables, or pictures as well.
CONTENTS = ("none", "table", "full")


PICTURES = (".png", ".gif")


# What draws or writes a file, called as writer(path), by its path.
Writers = dict[Path, Callable[[Path], object]]


@dataclass(frozen=True)
class Report:
    """What became of the files of a report.

    Attributes:
        written: the files that are there, in the order asked for.
        missing: those that could not be written; a notice has said why.
    """

    written: tuple[Path, ...] = ()
    missing: tuple[Path, ...] = ()

    def __add__(self, other: Report) -> Report:
        """What both have written, and what either lacks."""
        return Report(self.written + other.written, self.missing + other.missing)

    def require_complete(self) -> None:
        """Raise an `IncompleteError` that names what is missing, if anything is."""
        if self.missing:
            raise IncompleteError(
                "the result was written, but not "
                f"{', '.join(path.name for path in self.missing)}; the notices say why"
            )


def wanted(writers: Writers, content: str) -> Writers:
    """Return the writers of the files that a report of this content, one of `CONTENTS`, has."""
    if content == "none":
        return {}
    return {
        path: writer
        for path, writer in writers.items()
        if content == "full" or path.suffix not in PICTURES
    }


def write_each(writers: Writers) -> Report:
    """Call every writer with its path; one that fails is a notice, and the next one's turn.

    A file of an earlier report under the same name goes first: beside a new result it would lie.

    Args:
        writers: called one after the other.

    Warns:
        MissingFileNotice: a file could not be written, and why.
    """
    for path in writers:
        # A file that cannot be removed cannot be replaced either, which its writer will say.
        with suppress(OSError):
            path.unlink(missing_ok=True)
    report = Report()
    for path, writer in writers.items():
        try:
            with own_style() if path.suffix in PICTURES else nullcontext():
                writer(path)
        except Exception as error:
            # Of any kind: drawing is not worth the run.
            logger.debug("%s", traceback.format_exc())
            warnings.warn(_reason(path, error), MissingFileNotice, stacklevel=2)
            report += Report(missing=(path,))
        else:
            report += Report(written=(path,))
    return report


def _reason(path: Path, error: Exception) -> str:
    if isinstance(error, InputError):
        return str(error)
    return f"cannot draw {path} ({type(error).__name__}: {error})"
