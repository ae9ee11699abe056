"""Names in any script: a font that has them, or one notice of what none has."""

import warnings

import pytest

from otdd_flash.errors import DataNotice
from otdd_flash.report.figures import page as fonts
from otdd_flash.report.figures.page import measure, name_style, new_figure, save_picture

# Inner Mongolian and cuneiform, which the test's fonts lack; Greek and Arabic, which they have.
LACKING, PRESENT = "ᠠ𒀀", "αب"


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Fonts and their characters; the default is the real one."""
    have = {fonts.DEFAULT: set(map(ord, "abc" + PRESENT))}
    fonts._for_characters.cache_clear()
    monkeypatch.setattr(fonts, "_installed", lambda: tuple(have))
    monkeypatch.setattr(fonts, "_characters_of", lambda name: frozenset(have[name]))
    return have


def test_a_font_that_has_the_characters_is_found_among_the_installed(installed):
    installed["Useless"] = {1, 2}
    installed["Mongolian"] = {ord(LACKING[0])}
    installed["Cuneiform"] = {ord(LACKING[1])}
    assert fonts.families("abc") == [fonts.DEFAULT]
    assert fonts.families(f"a{PRESENT}") == [fonts.DEFAULT]
    assert fonts.families(f"a{LACKING}") == [fonts.DEFAULT, "Mongolian", "Cuneiform"]
    assert name_style(LACKING[1])["fontfamily"] == [fonts.DEFAULT, "Cuneiform"]


def test_characters_without_a_font_are_told_of_once(installed, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fonts.notice_missing_glyphs(["abc", f"a{LACKING}", LACKING[0]])
        figure = new_figure(2, 1)
        measure(figure, LACKING, 9)
        figure.text(0, 0, LACKING, **name_style(LACKING))
        save_picture(figure, tmp_path / "names.png")
    assert [entry.category for entry in caught] == [DataNotice]
    assert f"{LACKING[0]} {LACKING[1]}, which pictures show as boxes" in str(caught[0].message)


def test_the_characters_of_a_font_are_those_of_its_file(monkeypatch):
    monkeypatch.undo()
    known = fonts._characters_of(fonts.DEFAULT)
    assert {ord(character) for character in "aZß" + PRESENT} <= known
    assert not {ord(character) for character in LACKING} & known
    assert fonts.DEFAULT in fonts._installed()
