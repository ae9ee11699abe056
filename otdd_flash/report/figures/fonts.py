"""Fonts for names in any script, among those installed, and a notice where none has a letter."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

from otdd_flash.errors import DataNotice

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
