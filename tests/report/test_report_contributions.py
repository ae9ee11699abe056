"""contributions.csv and its picture."""

from __future__ import annotations

import csv

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.report.distance.contributions import write_contributions


@pytest.fixture
def source() -> otdd.LabeledSamples:
    return otdd.LabeledSamples(torch.rand(30, 12), torch.arange(30) % 2, ("a, b", "$c$"))


def test_rows_stand_in_the_order_of_what_they_carry(source, tmp_path) -> None:
    values = torch.randn(30, dtype=torch.float64)
    values[3] = torch.nan
    report = write_contributions(source, values, tmp_path, None)
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
def test_images_are_drawn_where_rows_are(source, tmp_path, shape, sign) -> None:
    values = torch.randn(30, dtype=torch.float64)
    values = values if sign == 0 else sign * values.abs()
    report = write_contributions(source, values, tmp_path, shape)
    assert not report.missing
    assert (tmp_path / "contributions.png").stat().st_size > 1000
    without = write_contributions(source, values, tmp_path / "table", shape, content="table")
    assert [path.name for path in without.written] == ["contributions.csv"]
