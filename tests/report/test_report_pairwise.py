import csv
import io
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from picture_checks import check_on_page
from rich.console import Console

from otdd_flash.errors import IncompleteError, InputError, MissingFileNotice
from otdd_flash.pairwise import pairwise_distances
from otdd_flash.report import pairwise as pairwise_report
from otdd_flash.report.figures.heat_maps import NOTE_POINTS
from otdd_flash.report.pairwise import pairwise_table, rows_text, write_pairwise_report
from otdd_flash.samples import LabeledSamples


def blobs(seed, shift):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(20) % 2)
    points = torch.from_numpy(rng.normal(size=(20, 3)) + shift).float()
    return LabeledSamples(points, torch.from_numpy(labels), ("a", "b"), name=f"[{seed}]")


@pytest.fixture(scope="module")
def result():
    shifts = (0.0, 5.0, 0.3, 5.3)
    return pairwise_distances([blobs(k, shift) for k, shift in enumerate(shifts)], epsilon=30.0)


def test_a_report_has_all_its_files_and_near_datasets_side_by_side(result, tmp_path, monkeypatch):
    drawn = {}

    def draw(matrix, rows, columns, path, **_):
        drawn[path.name] = matrix, rows, columns
        path.touch()

    monkeypatch.setattr(pairwise_report, "heat_map", draw)
    with pytest.raises(InputError, match=r"unknown order 'best'; choose one of: given"):
        write_pairwise_report(result, tmp_path / "run", order="best")
    assert not (tmp_path / "run").exists()
    written = write_pairwise_report(result, tmp_path / "run", order="hierarchical").written
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in written}
    with (tmp_path / "run" / "distances.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 6
    assert [float(row["value"]) for row in rows] == [pair.value for pair in result.pairs()]
    assert {row["converged"] for row in rows} == {"true"}
    with (tmp_path / "run" / "class_distances.csv").open(newline="") as lines:
        header, *body = csv.reader(lines)
    assert header[:3] == ["class", "[0]:a", "[0]:b"]
    values = [[float(cell) for cell in row[1:]] for row in body]
    assert values == result.class_distances.full.tolist()
    matrix, rows, columns = drawn["distances.png"]
    assert rows == columns
    assert sorted(rows[:2]) in (["[0]", "[2]"], ["[1]", "[3]"])
    places = [result.names.index(name) for name in rows]
    assert torch.equal(matrix, result.values[places][:, places])


@pytest.mark.slow
def test_the_picture_names_epsilon_rows_and_solver_bounds(result, tmp_path, figures):
    upper = result.lower + torch.tensor([[0.0, 0.02], [0.02, 0.0]]).repeat(2, 2).double()
    late = result.converged.clone()
    late[0, 1] = False
    details = {**result.details, "n": [20, 1500, 20, 20]}
    write_pairwise_report(replace(result, upper=upper, converged=late, details=details), tmp_path)
    figure = figures[0]
    texts = [text for text in figure.texts if text.get_fontsize() == NOTE_POINTS]
    first, second = (text.get_text() for text in texts)
    assert re.fullmatch(r"epsilon 30 \([\d.]+ of the mean cost [\d.]+\), 20 to 1,500 rows", first)
    assert second == (
        "solver bounds at most 0.02 apart, 1 of 6 pairs not converged, sampling error not measured"
    )
    # In sight: on the page, below the title and above the table.
    title, *notes = figure.texts[-3:]
    check_on_page(figure, [title, *notes])
    boxes = sorted((text.get_window_extent() for text in figure.texts[-3:]), key=lambda b: -b.y0)
    for above, below in itertools.pairwise(boxes):
        assert below.y1 <= above.y0
    groups = [text for text in figure.texts if text.get_text() == "datasets"]
    assert max(text.get_window_extent().y1 for text in groups) < boxes[-1].y0
    assert rows_text((7, 7)) == "7 rows each"
    assert rows_text((2000, 50, 7)) == "7 to 2,000 rows"


def test_the_table_shows_values_with_bounds(result):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(pairwise_table(result))
    text = console.export_text()
    lines = [line for line in text.splitlines() if "[0]" in line or "[1]" in line]
    assert len(lines) == 5
    assert "NOT CONVERGED" not in text
    assert "epsilon 30" in text
    assert "distance, solver bounds" in text
    assert "sampling error was not measured: otdd_flash.subsample_interval" in text


@pytest.mark.slow
def test_a_picture_that_fails_costs_no_other_file(result, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("Unable to allocate 4 GiB")

    (tmp_path / "distances.png").write_text("of an earlier result")
    monkeypatch.setattr(pairwise_report, "heat_map", broken)
    with pytest.warns(MissingFileNotice, match=r"distances.png \(MemoryError: Unable"):
        report = write_pairwise_report(result, tmp_path)
    assert [path.name for path in report.missing] == ["distances.png"]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in report.written}
    with pytest.raises(IncompleteError, match=r"but not distances.png"):
        report.require_complete()
