"""contributions.csv and its picture."""

import csv
from dataclasses import replace

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.report.distance import contributions
from otdd_flash.report.distance.contributions import write_contributions


@pytest.fixture
def source():
    return otdd.LabeledSamples(torch.rand(30, 12), torch.arange(30) % 2, ("a, b", "$c$"))


def test_rows_stand_in_the_order_of_what_they_carry(source, tmp_path):
    values = torch.randn(30, dtype=torch.float64)
    values[3] = torch.nan
    report = write_contributions(source, values, tmp_path, None, target="t")
    assert [path.name for path in report.written] == ["contributions.csv"]
    with (tmp_path / "contributions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 29
    found = [float(row["contribution"]) for row in rows]
    assert found == sorted(found, reverse=True)
    for row in rows:
        place = int(row["row"])
        assert float(row["contribution"]) == float(values[place])
        assert row["class"] == source.class_names[place % 2]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("shape", [(3, 2, 2), (1, 3, 4)])
@pytest.mark.parametrize("sign", [0, 1, -1])
def test_images_are_drawn_where_rows_are(source, tmp_path, shape, sign):
    values = torch.randn(30, dtype=torch.float64)
    values = values if sign == 0 else sign * values.abs()
    report = write_contributions(source, values, tmp_path, shape, target="t")
    assert not report.missing
    assert (tmp_path / "contributions.png").stat().st_size > 1000
    without = write_contributions(
        source, values, tmp_path / "table", shape, target="t", content="table"
    )
    assert [path.name for path in without.written] == ["contributions.csv"]


def test_the_picture_names_both_datasets_the_unit_and_every_number(source, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(contributions, "save_picture", lambda figure, path: drawn.append(figure))
    named = replace(source, name="photos $x$")
    values = torch.zeros(30, dtype=torch.float64)
    values[4], values[7] = 40.0, -0.25
    write_contributions(named, values, tmp_path, (3, 2, 2), target="drawings")
    (figure,) = drawn
    title, note, *heads = (text.get_text() for text in figure.texts)
    assert title == "What rows of photos $x$ contribute to the distance to drawings"
    assert note.endswith("its contribution in units of the cost")
    assert heads == ["carry most of the distance", "bring the datasets nearer"]
    assert [axes.get_title() for axes in figure.axes] == ["a, b\n+40.0", "$c$\n−0.250"]
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.texts:
        box = text.get_window_extent()
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= width
        assert box.y1 <= height
