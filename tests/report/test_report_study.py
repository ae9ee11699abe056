"""What is written of a study: sentences, tables, pictures and the page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console
from small_tasks import small_study

import otdd_flash as otdd
from otdd_flash.report.study import pictures
from otdd_flash.report.study.console import study_table
from otdd_flash.report.study.page import write_page
from otdd_flash.report.study.pictures import draw_measure, task_order
from otdd_flash.report.study.sentences import (
    _differences,
    findings_sentences,
    measured_text,
)
from otdd_flash.report.study.writing import FILES, TABLES, write_study_report
from otdd_flash.study.measures.base import Reading


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> otdd.StudyResult:
    folder = tmp_path_factory.mktemp("study")
    return small_study(5, measures=["frechet", "knn"]).run(folder, threads=1)


class Page(HTMLParser):
    """Counts tags, and fails where one is closed that is not open."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.rows += tag == "tr"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_finding_is_a_sentence_with_its_interval(result) -> None:
    said = findings_sentences(result)
    first = said[0]
    assert re.match(
        r"Fréchet distance: rank correlation with the gain over ordered pairs [+-]\d\.\d\d "
        r"\[-?\d\.\d\d, -?\d\.\d\d\], p = \S+ by permuting tasks, 20 pairs of 5 units\.",
        first,
    ), first
    assert any("Choosing the source by Fréchet distance costs" in one for one in said)
    # Two seeds do not tell how far gains repeat.
    assert any("is not known: needs four seeds" in one for one in said)
    assert not any(" - " in one.partition(":")[0] for one in said)


def test_a_measure_that_follows_the_gain_more_closely_is_named(result) -> None:
    known = next(
        row
        for row in result.correlations()
        if row.measure == "frechet - knn" and row.statistic == "spearman"
    )
    for ends, expected in (
        ((-0.5, -0.9, -0.1), "k-nearest-neighbour accuracy follows the gain more closely than"),
        ((0.5, 0.1, 0.9), "Fréchet distance follows the gain more closely than k-nearest"),
    ):
        value, lower, upper = ends
        other = known._replace(value=value, lower=lower, upper=upper)
        (sentence,) = _differences([other])
        assert sentence.startswith(expected)
        assert sentence.endswith("is larger by 0.50 [0.10, 0.90].")
    (sentence,) = _differences([known._replace(value=0.1, lower=-0.1, upper=0.3)])
    assert sentence.startswith("No two measures differ")
    assert not list(_differences([known._replace(lower=None, upper=None)]))


def test_no_more_is_claimed_than_families_carry(result) -> None:
    tasks = tuple(
        replace(task, family=family)
        for task, family in zip(result.setup.tasks, "aabbc", strict=True)
    )
    fewer = replace(result, setup=replace(result.setup, tasks=tasks))
    said = findings_sentences(fewer)
    assert "no interval: 3 units, and 5 are needed" in said[0]
    assert any("5 tasks come from 3 families" in one for one in said)
    assert "An interval needs five independent units, datasets or families." in said


def test_the_page_is_whole_and_escapes_names(result, tmp_path) -> None:
    names = ["<b>one</b>", 'two "x"', "three & four", "task 3", "task 4"]
    tasks = tuple(
        replace(task, name=name) for task, name in zip(result.setup.tasks, names, strict=True)
    )
    renamed = replace(result, setup=replace(result.setup, tasks=tasks))
    write_page(renamed, {"nowhere": tmp_path / "missing.png"}, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>one" not in text
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.rows > 20
    assert "nowhere" not in text


@pytest.mark.slow
def test_all_files_are_written_and_tables_are_the_same_again(result, tmp_path) -> None:
    report = write_study_report(result, tmp_path)
    assert {path.name for path in report.written} == {*FILES}
    before = {name: (tmp_path / name).read_bytes() for name in TABLES}
    write_study_report(replace(result, seconds=99.0), tmp_path, content="none")
    assert {name: (tmp_path / name).read_bytes() for name in TABLES} == before


def test_near_tasks_stand_side_by_side(result) -> None:
    assert sorted(task_order(result)) == list(range(5))
    near = [{0, 3}, {1, 2, 4}]
    found = {
        (i, j): replace(one, value=1.0 if any({i, j} <= group for group in near) else 9.0)
        for (i, j), one in result.readings["frechet"].items()
    }
    order = task_order(replace(result, readings={"knn": {}, "frechet": found}))
    assert {*order[:2]} in near or {*order[3:]} in near


def test_a_table_says_what_did_not_converge(result) -> None:
    late = {
        name: {pair: replace(one, converged=False) for pair, one in found.items()}
        for name, found in result.readings.items()
    }
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(study_table(replace(result, readings=late)))
    text = console.export_text()
    assert "frechet NOT CONVERGED" in text
    console.print(study_table(result))
    assert "NOT CONVERGED" not in console.export_text()


def test_before_anything_is_gained_distances_are_told(result, tmp_path) -> None:
    early = replace(result, errors=np.full_like(result.errors, np.nan))
    why, nearest, sampling = findings_sentences(early)
    assert why == "No ordered pair has both a measure and a gain yet."
    (i, j), least = min(result.readings["frechet"].items(), key=lambda item: item[1].value)
    assert nearest == (
        f"Fréchet distance: of all pairs task {i} and task {j} are nearest, {least.value:.6g}."
    )
    assert sampling.startswith("Sampling error was not measured: subsample=50")
    bounded = {"otdd": {(0, 1): Reading(2.0, 1.49996, 2.50004)}, "sliced": {(2, 1): Reading(3.0)}}
    told = findings_sentences(replace(early, readings=bounded))
    near = "OTDD: of all pairs task 0 and task 1 are nearest, 2.00 [1.49, 2.51] (solver bounds)."
    assert told[1] == near
    assert told[2].endswith("task 2 and task 1 are nearest, 3.")
    write_page(early, {}, tmp_path / "page.html")
    assert "gain, %" not in (tmp_path / "page.html").read_text(encoding="utf-8")
    write_page(result, {}, tmp_path / "page.html")
    assert "gain, %" in (tmp_path / "page.html").read_text(encoding="utf-8")
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(study_table(early))
    table = console.export_text()
    assert "task 4" in table
    assert "Sampling error was not measured: subsample=50" in " ".join(table.split())


@pytest.mark.parametrize(
    ("measure", "row", "text"),
    [
        ("otdd", Reading(2.0, 1.5, 2.5), "2.00 [1.50, 2.50] (solver bounds)"),
        ("otdd", Reading(2.0, 1.9, 2.1, 1.0, 4.0), "2.00 [1.00, 4.00] (sampling interval)"),
        ("sliced", Reading(2.0, 1.5, 2.5), "2.00 [1.50, 2.50] (interval over draws)"),
        ("knn", Reading(0.25), "0.25"),
    ],
)
def test_an_interval_is_called_what_it_is(measure, row, text) -> None:
    assert measured_text(measure, row) == text


def test_the_picture_of_distances_names_rows_epsilon_and_solver_bounds(
    result, tmp_path, monkeypatch
) -> None:
    notes = {}

    def draw(matrix, rows, columns, path, **more) -> None:
        notes[path.name] = more["notes"]

    monkeypatch.setattr(pictures, "heat_map", draw)
    known = {"otdd": {pair: Reading(2.0, 1.9, 2.15) for pair in result.readings["frechet"]}}
    several = replace(result, readings={**result.readings, **known})
    settings = replace(several.setup.settings, epsilon=0.25, epsilon_relative=None)
    draw_measure(several, "frechet", tmp_path / "frechet")
    fixed = replace(several, setup=replace(several.setup, settings=settings))
    draw_measure(fixed, "otdd", tmp_path / "fixed")
    settings = replace(settings, epsilon_relative=0.05, subsample=50)
    relative = replace(several, setup=replace(several.setup, settings=settings))
    draw_measure(relative, "otdd", tmp_path / "relative")
    assert [*notes["frechet"]] == ["30 to 50 rows"]
    bounds = "solver bounds at most 0.25 apart"
    first = "epsilon 0.25, 30 to 50 rows"
    assert [*notes["fixed"]] == [first, f"{bounds}, sampling error not measured"]
    assert [*notes["relative"]] == ["epsilon 0.05 of the mean cost, 30 to 50 rows", bounds]


def test_a_study_with_sampling_intervals_misses_none(result) -> None:
    settings = replace(result.setup.settings, subsample=50)
    sampled = replace(result, setup=replace(result.setup, settings=settings))
    assert not any("Sampling error" in sentence for sentence in findings_sentences(sampled))
    assert any("Sampling error" in sentence for sentence in findings_sentences(result))


@pytest.mark.slow
def test_a_study_of_nothing_yet_is_told_as_such(result, tmp_path) -> None:
    empty = replace(
        result,
        readings={"frechet": {}},
        errors=np.full_like(result.errors, np.nan),
        alone=np.full_like(result.alone, np.nan),
        done=0,
    )
    assert findings_sentences(empty) == ["No ordered pair has both a measure and a gain yet."]
    report = write_study_report(empty, tmp_path)
    assert not report.missing
    assert "0 of" in (tmp_path / "report.html").read_text(encoding="utf-8")
