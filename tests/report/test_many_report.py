"""What is written of many distances: a matrix of datasets, and the jobs of a multirun."""

import csv
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from picture_checks import check_on_page

from otdd_flash.errors import IncompleteError, InputError, MissingFileNotice
from otdd_flash.pairwise import pairwise_distances
from otdd_flash.report import page
from otdd_flash.report import pairwise as pairwise_report
from otdd_flash.report.heat_maps import NOTE_POINTS
from otdd_flash.report.pairwise import rows_text, write_pairwise_report
from otdd_flash.report.sweep import axes_of, draw_sweep, summary_csv
from otdd_flash.samples import LabeledSamples

# Of pairs of datasets.


def blobs(seed, shift):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(20) % 2)
    points = torch.from_numpy(rng.normal(size=(20, 3)) + shift).float()
    return LabeledSamples(points, torch.from_numpy(labels), ("a", "b"), name=f"[{seed}]")


@pytest.fixture(scope="module")
def result():
    shifts = (0.0, 5.0, 0.3, 5.3)
    return pairwise_distances([blobs(k, shift) for k, shift in enumerate(shifts)], epsilon=30.0)


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_report_has_all_its_files_and_near_datasets_side_by_side(result, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(pairwise_report, "heat_map", lambda *parts, **_: parts)

    def save(parts, path):
        drawn[path.name] = parts
        path.touch()

    monkeypatch.setattr(page, "save_picture", save)
    with pytest.raises(InputError, match=r"unknown order 'best'; choose one of: given"):
        write_pairwise_report(result, tmp_path / "run", order="best")
    assert not (tmp_path / "run").exists()
    written = write_pairwise_report(result, tmp_path / "run", order="hierarchical").written
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in written}
    rows = rows_of(tmp_path / "run" / "distances.csv")
    assert [float(row["value"]) for row in rows] == [pair.value for pair in result.pairs()]
    assert {row["converged"] for row in rows} == {"true"}
    classes = rows_of(tmp_path / "run" / "class_distances.csv")
    assert [*classes[0]][:3] == ["class", "[0]:a", "[0]:b"]
    values = [[float(cell) for cell in [*row.values()][1:]] for row in classes]
    assert values == result.class_distances.full.tolist()
    matrix, (rows,), (columns,) = drawn["distances.png"]
    assert rows == columns
    rows = rows.members
    assert sorted(rows[:2]) in (["[0]", "[2]"], ["[1]", "[3]"])
    places = [result.names.index(name) for name in rows]
    assert torch.equal(matrix, result.values[places][:, places])
    # Numbers in the place of labels have no classes.
    numbers = [
        LabeledSamples(blobs(k, 0.0).features, None, (), targets=torch.arange(20.0))
        for k in range(2)
    ]
    told = pairwise_distances(numbers, epsilon=30.0, labels="continuous")
    written = write_pairwise_report(told, tmp_path / "numbers", order="given").written
    assert {path.name for path in written} == {"distances.csv", "distances.png"}


@pytest.mark.slow
def test_the_picture_names_epsilon_rows_and_solver_bounds(result, tmp_path, figures):
    upper = result.lower + torch.tensor([[0.0, 0.02], [0.02, 0.0]]).repeat(2, 2).double()
    late = result.converged.clone()
    late[0, 1] = False
    details = {**result.details, "n": [20, 1500, 20, 20]}
    write_pairwise_report(replace(result, upper=upper, converged=late, details=details), tmp_path)
    figure = figures[0]
    notes = [text for text in figure.texts if text.get_fontsize() == NOTE_POINTS]
    first, second = (text.get_text() for text in notes)
    assert re.fullmatch(r"epsilon 30 \([\d.]+ of the mean cost [\d.]+\), 20 to 1,500 rows", first)
    assert second == (
        "solver bounds at most 0.02 apart, 1 of 6 pairs not converged, sampling error not measured"
    )
    # In sight: on the page, below the title and above the table.
    groups = [text for text in figure.texts if text.get_text() == "datasets"]
    check_on_page(figure, [*notes, *groups])
    top = max(text.get_window_extent().y1 for text in groups)
    assert top < min(text.get_window_extent().y0 for text in notes)
    assert rows_text((7, 7)) == "7 rows each"


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


# Of a multirun: its jobs as a table, and their values against what was swept.


def job(number, value=1.0, **overrides):
    keys = {key.replace("__", "."): given for key, given in overrides.items()}
    row = {"job": str(number), "directory": str(number), "overrides": keys}
    if value is None:
        return row | {"error": "epsilon must be positive"}
    return row | {
        **{"source": "a", "target": "b", "value": value, "lower": value - 0.1},
        **{"upper": value + 0.2, "epsilon": 0.3, "converged": number != 1},
    }


def test_what_was_given_stands_where_a_job_has_no_result(tmp_path):
    jobs = [job(0, epsilon=0.30001, seed=1, name="=1+1"), job(1, None, epsilon=-1, labels="means")]
    summary_csv(jobs, tmp_path / "summary.csv")
    one, other = rows_of(tmp_path / "summary.csv")
    assert [*one][:4] == ["job", "seed", "name", "labels"]
    assert (one["epsilon"], one["seed"], one["name"], one["labels"]) == ("0.3", "1", "'=1+1", "")
    assert (other["epsilon"], other["labels"], other["value"]) == ("-1", "means", "")
    assert (one["converged"], one["directory"]) == ("true", "0")


GRID = [
    job(i, 1.0 + i, epsilon=e, solver__tolerance=t)
    for i, (e, t) in enumerate([(0.1, 1e-2), (0.1, 1e-3), (1, 1e-2), (1, 1e-3)])
]


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([job(0, epsilon=0.1, seed=3), job(1, epsilon=1, seed=3)], ("epsilon", None)),
        (GRID, ("epsilon", "solver.tolerance")),
        ([job(0, seed=1), job(1, seed=1)], "nothing is swept, which is no number"),
        # Given to one of the jobs only, as in a folder that holds two sweeps.
        ([job(0, seed=1), job(1)], "seed is swept, which is no number"),
        ([job(k, a=k, b=k, c=k) for k in (1, 2)], "3 settings are swept (a, b, c), and it shows"),
        ([job(i, seed=i % 2, k=i) for i in range(13)], "k takes 13 values, and it shows 12 lines"),
    ],
)
def test_the_picture_is_of_one_or_two_settings_of_which_one_is_a_number(jobs, expected):
    found = axes_of(jobs)
    assert found[: len(expected)] == expected


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.usefixtures("styled")
def test_values_are_drawn_with_their_intervals_a_line_for_each_second_value(sampled):
    more = {"sampling_lower": 0.5, "sampling_upper": 9.0} if sampled else {}
    figure = draw_sweep([one | more for one in GRID], "epsilon", "solver.tolerance")
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    # The smaller of the second numbers comes first.
    first, second = (f"solver.tolerance={value}" for value in ("0.001", "0.01"))
    assert [label for label in lines if label in (first, second)] == [first, second]
    assert lines[first].get_xydata().tolist() == [[0.1, 2.0], [1.0, 4.0]]
    assert lines[second].get_xydata().tolist() == [[0.1, 1.0], [1.0, 3.0]]
    ends = sorted(tuple(bar.get_segments()[0][:, 1].tolist()) for bar in axes.collections)
    bounds = [(one["lower"], one["upper"]) for one in GRID]
    assert ends == ([(0.5, 9.0)] * 4 if sampled else bounds)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts[-1] == ("sampling interval" if sampled else "solver bounds")
    assert "not converged: only the bounds hold" in texts
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "epsilon")
    assert axes.get_title(loc="left") == "a → b"
