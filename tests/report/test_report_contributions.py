"""contributions.csv and its picture."""

import csv
from dataclasses import replace

import pytest
import torch
from picture_checks import check_on_page

import otdd_flash as otdd
from otdd_flash.report.contributions import write_contributions

IMAGES = (3, 2, 2)


@pytest.fixture
def source():
    return otdd.LabeledSamples(torch.rand(30, 12), torch.arange(30) % 2, ("a, b", "$c$"))


def test_rows_stand_in_the_order_of_what_they_carry(source, tmp_path):
    values = torch.randn(30, dtype=torch.float64)
    values[3] = torch.nan
    report = write_contributions(source, values, tmp_path, None, target="t")
    table = write_contributions(source, values, tmp_path, IMAGES, target="t", content="table")
    for each in (report, table):
        assert [path.name for path in each.written] == ["contributions.csv"]
    with (tmp_path / "contributions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 29
    found = [float(row["contribution"]) for row in rows]
    assert found == sorted(found, reverse=True)
    for row in rows:
        place = int(row["row"])
        assert float(row["contribution"]) == float(values[place])
        assert row["class"] == source.class_names[place % 2]


@pytest.mark.slow
def test_images_are_drawn_where_rows_are(source, figures, tmp_path):
    values = torch.randn(30, dtype=torch.float64)
    for shape, given in ((IMAGES, values.abs()), ((1, 3, 4), -values.abs())):
        assert not write_contributions(source, given, tmp_path, shape, target="t").missing
        assert len(figures[-1].axes) > 1
    named = replace(source, name="photos $x$")
    values = torch.zeros(30, dtype=torch.float64)
    values[4], values[7] = 40.0, -0.25
    write_contributions(named, values, tmp_path, IMAGES, target="drawings")
    figure = figures[-1]
    title, note, *heads = (text.get_text() for text in figure.texts)
    assert title == "What rows of photos $x$ contribute to the distance to drawings"
    assert note.endswith("its contribution in units of the cost")
    assert heads == ["carry most of the distance", "bring the datasets nearer"]
    assert [axes.get_title() for axes in figure.axes] == ["a, b\n+40.0", "$c$\n−0.250"]
    check_on_page(figure, figure.texts)
