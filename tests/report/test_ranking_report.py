"""The report of a ranking: intervals as bars, unbounded ones too, and what cannot be written."""

from __future__ import annotations

import math
import re

import pytest

from otdd_flash.errors import InputError, MissingFileNotice
from otdd_flash.ranking.race import Cost, Ranked, Ranking
from otdd_flash.report.nearest import plot_ranking, write_ranking_report


@pytest.fixture
def ranking():
    rows = (
        Ranked("a", 1.0, 1.0, 1.5, True, ()),
        Ranked("b & c", math.nan, -math.inf, math.inf, False, ("d",)),
    )
    others = (Ranked("d", 2.0, 1.8, 3.0, False, ()),)
    cost = Cost(3, 2, 1, 10.0, 100.0, 0.1)
    details = {"k": 2, "tie": 1e-4, "unread": []}
    return Ranking("q", rows, others, False, "max_seconds", cost, details=details)


def test_bars_are_where_the_intervals_are(ranking, tmp_path):
    report = write_ranking_report(ranking, tmp_path)
    assert [path.name for path in report.written] == ["ranking.csv", "ranking.html", "ranking.png"]
    page = (tmp_path / "ranking.html").read_text(encoding="utf-8")
    bars = [
        tuple(map(float, found))
        for found in re.findall(r'<rect x="([\d.]+)%".*?width="([\d.]+)%"', page)
    ]
    # From 1 to 3 with a margin of 3% of that on both sides.
    assert bars[0] == pytest.approx((6 / 2.12, 50 / 2.12), abs=0.01)
    assert bars[1] == (0, 100)
    assert bars[2] == pytest.approx((86 / 2.12, 120 / 2.12), abs=0.01)
    assert "b &amp; c" in page
    # Rows are sorted by text, of which bars have none.
    heads = re.findall(r"<th\b( data-sorts)?.*?>(.*?)</th>", page)
    assert [name for sorts, name in heads if not sorts] == ["interval"]
    assert len(heads) == 7
    text = (tmp_path / "ranking.csv").read_text(encoding="utf-8")
    assert text.splitlines()[2:] == ["2,b & c,,,,false,d", ",d,2.0,1.8,3.0,false,"]


def test_the_picture_has_a_bar_for_each(ranking):
    (axes,) = plot_ranking(ranking).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b & c", "d"]
    first, unbounded, _ = axes.patches
    assert (first.get_x(), first.get_width()) == pytest.approx((1.0, 0.5))
    low, high = axes.get_xlim()
    assert (unbounded.get_x(), unbounded.get_width()) == pytest.approx((low, high - low))


def test_contents_and_what_cannot_be_written(ranking, tmp_path):
    assert write_ranking_report(ranking, tmp_path, content="none").written == ()
    table = write_ranking_report(ranking, tmp_path, content="table")
    assert [path.suffix for path in table.written] == [".csv", ".html"]
    with pytest.raises(InputError, match="content"):
        write_ranking_report(ranking, tmp_path, content="all")
    (tmp_path / "file").write_text("")
    with pytest.warns(MissingFileNotice):
        missing = write_ranking_report(ranking, tmp_path / "file")
    assert len(missing.missing) == 3
