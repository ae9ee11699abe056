"""What a session shows of results: the answer in a line, not thousands of coordinates."""

from __future__ import annotations

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.shown import (
    LONGEST_MESSAGE,
    csv_cell,
    display,
    hidden,
    html_text,
    interval,
    listing,
    sentence,
    shorten,
)


def _blobs() -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(15) % 3
    x = torch.randn(15, 2, generator=draw)
    source = otdd.LabeledSamples(x, labels, ("a", "b", "c"), name="photos")
    return source, otdd.LabeledSamples(x + 1, labels, ("a", "b", "c"), name="drawings")


SOURCE, TARGET = _blobs()
HOSTILE = otdd.LabeledSamples(SOURCE.features, SOURCE.labels, ("a", "b", "c"), name="\x1b[2J\u202e")


def test_a_distance_shows_value_bounds_and_datasets() -> None:
    result = otdd.dataset_distance(SOURCE, TARGET, epsilon=2.0)
    shown = (
        f"DistanceResult({interval(result.value, *result.bounds)} (solver bounds), epsilon=2, "
        f"converged, {SOURCE!r} to {TARGET!r}, class distances gaussian)"
    )
    assert repr(result) == shown
    lower, upper = map(float, shown.split("[")[1].split("]")[0].split(", "))
    assert lower <= result.bounds[0] < result.bounds[1] <= upper
    pairs = otdd.pairwise_distances([SOURCE, TARGET], epsilon=2.0)
    assert repr(pairs) == "PairwiseResult(2 datasets: photos, drawings; epsilon=2, converged)"
    for found in (result, pairs):
        first, second = str(found).splitlines()
        assert first == repr(found)
        assert second.startswith("sampling error was not measured: otdd_flash.subsample_interval")
    same = otdd.dataset_distance(SOURCE, SOURCE, epsilon=2.0)
    assert str(same) == repr(same)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain 'é' 漢字 ❤️ a\u3000b", "plain 'é' 漢字 ❤️ a\u3000b"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x1b]8;;http://x\x07", "\\x1b]8;;http://x\\x07"),
        ("c1 \x9b del \x7f a\nb\tc\rd", "c1 \\x9b del \\x7f a\\nb\\tc\\rd"),
        ("\u202eabc\u2066\u200f", "\\u202eabc\\u2066\\u200f"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("lines\u2028and \u3164\U000e0101", "lines\\u2028and \\u3164\\U000e0101"),
        ("\udcff alone", "\\udcff alone"),
        ("[red]markup[/]", "[red]markup[/]"),
        ("x" * 1_000_000, "x" * 176 + "… (1,000,000 characters)"),
    ],
)
def test_foreign_text_is_displayed_in_one_harmless_line(text: str, shown: str) -> None:
    assert display(text) == shown
    # Displayed once more, as a part of a sentence is.
    assert display(shown) == shown
    assert sentence(display(text)) == shown


def test_a_long_message_keeps_its_way_out() -> None:
    error = otdd.InputError("\x1b" + "no " * 1_000_000 + "\nuse another")
    assert len(str(error)) == LONGEST_MESSAGE
    assert str(error).startswith("\\x1bno no")
    assert str(error).endswith("no  use another")
    assert "… (3,000,013 characters)" in str(error)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("-2+3", "'-2+3"),
        ("\u00a0=1", "'\u00a0=1"),
        ("\uff1d1", "'\uff1d1"),
        ("\t=1", "\\t=1"),
        ("'tis", "''tis"),
        ("-1.5", "-1.5"),
        ("+2e-3", "+2e-3"),
    ],
)
def test_cells_of_csv_files_are_no_formulas(name: str, cell: str) -> None:
    assert csv_cell(name) == cell


def test_html_narrow_places_and_lists() -> None:
    assert html_text("<b>&\"'\x1b") == "&lt;b&gt;&amp;&quot;&#x27;\\x1b"
    assert shorten("a\n  b \x1b" + "c" * 1_000_000, 12) == "a b \\x1bccc…"
    assert listing(["a", "\x07", "c"], 2) == "a, \\x07, ... 1 more"


def test_what_a_session_shows_holds_no_control() -> None:
    shown = [repr(HOSTILE), repr(otdd.dataset_distance(HOSTILE, TARGET, epsilon=2.0))]
    shown.append(repr(otdd.pairwise_distances([HOSTILE, TARGET], epsilon=2.0)))
    with pytest.raises(otdd.InputError) as refused:
        otdd.dataset_distance(HOSTILE, otdd.LabeledSamples(torch.zeros(3, 5), None, ()))
    shown.append(str(refused.value))
    assert all(text.isprintable() for text in shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pa@ss@host/x", "https://***@host/x"),
        ("https://h/x?a=1&X-Amz-Signature=abc", "https://h/x?a=1&X-Amz-Signature=***"),
        ("https://h/x?access_token=abc&b=2", "https://h/x?access_token=***&b=2"),
        ("mail me@home", "mail me@home"),
    ],
)
def test_addresses_are_shown_without_passwords(text: str, shown: str) -> None:
    assert hidden(text) == shown
