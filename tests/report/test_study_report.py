"""What is written of a study: sentences, tables, pictures and the page."""

import io
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from rich.console import Console
from small_tasks import small_study

from otdd_flash.report.page import own_style
from otdd_flash.report.study import writing
from otdd_flash.report.study.page import (
    choice_sentences,
    difference_sentences,
    measured_text,
    write_page,
)
from otdd_flash.report.study.writing import (
    FILES,
    TABLES,
    draw_gains_against,
    draw_measure,
    study_table,
    task_order,
    write_study_report,
)
from otdd_flash.study.measures.base import Reading


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return small_study(5, measures=["frechet", "leep"]).run(folder, threads=1)


class Page:
    """The page's text, and for every table its heads, rows and how many details are around it."""

    def __init__(self, result, folder):
        write_page(result, {}, {}, folder / "page.html")
        self.source = (folder / "page.html").read_text(encoding="utf-8")
        self.text = unescape(self.source)
        self.heads, self.tables, self.folds = [], [], []
        for table in re.finditer(r"<table.*?</table>", self.source, re.DOTALL):
            before = self.source[: table.start()]
            self.folds.append(before.count("<details") - before.count("</details"))
            self.heads.append(self.cells("th", table[0]))
            body = table[0].partition("</thead>")[2]
            rows = re.findall(r"<tr.*?</tr>", body, re.DOTALL)
            self.tables.append([self.cells("td", row) for row in rows])

    def cells(self, tag, text):
        found = re.findall(f"<{tag}[ >].*?</{tag}>", text, re.DOTALL)
        return [unescape(re.sub(r"<.*?>", "", cell, flags=re.DOTALL)) for cell in found]


def with_settings(result, **changes):
    settings = replace(result.setup.settings, **changes)
    return replace(result, setup=replace(result.setup, settings=settings))


def shown(result):
    """The study's table on a terminal."""
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(study_table(result))
    return console.export_text()


# Names that a page must escape, and families of which two have two tasks.
ODD = ["<b>one</b>", 'two "x"', "three & four", "task 3", "task 4"]


@pytest.fixture
def related(result):
    tasks = tuple(
        replace(task, name=name, family=family)
        for task, name, family in zip(result.setup.tasks, ODD, "aabbc", strict=True)
    )
    return replace(result, setup=replace(result.setup, tasks=tasks))


def test_the_page_opens_with_one_table_of_choices_and_one_correlation(result, tmp_path):
    page = Page(result, tmp_path)
    assert re.search(r"<body>\s*<h1>[^<]*</h1>\s*<table", page.source)
    head = ["target", "best source", "gain, %", "chosen by Fréchet distance"]
    head += ["regret of Fréchet distance", "regret of a random source"]
    assert page.heads[0] == [*head, "regret of the largest source"]
    *rows, foot = page.tables[0]
    for row, choice in zip(rows, result.choices(), strict=True):
        assert row[0] == choice.target
        assert row[1].split(" tied: ")[0] == choice.best
        assert row[2] == f"{choice.gain:.1f} ± {choice.gain_error:.1f}"
        assert row[3] == " = ".join(choice.chosen)
        numbers = choice.regret, choice.random_regret, choice.largest_regret
        assert [float(cell) for cell in row[4:]] == pytest.approx(numbers, abs=0.051)
    # The mean over targets is the statistic, with its interval over five datasets.
    assert foot[0] == "mean of 5 targets"
    found = {(row.measure, row.statistic): row for row in result.correlations()}
    for cell, name in zip(foot[4:], ("regret", "random_regret", "largest_regret"), strict=True):
        mean, lower, upper = map(float, re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", cell).groups())
        row = found["frechet", name]
        assert (mean, lower, upper) == pytest.approx((row.value, row.lower, row.upper), abs=0.051)
    # All else is folded, and nothing is unfolded.
    assert page.folds[0] == 0
    assert set(page.folds[1:]) == {1}
    assert "details open" not in page.text
    # Names of columns go with the cells, which are blocks of lines below 600 px.
    assert page.source.count("<td") == len(re.findall(r"<td[^>]* data-label=", page.source))
    assert "@media (max-width: 600px)" in page.text
    assert "width=device-width" in page.text
    assert "own family" not in page.text
    row = found["frechet", "spearman_over_sources"]
    (sentence,) = (s for s in choice_sentences(result) if s.startswith("Rank correlation"))
    assert sentence == (
        "Rank correlation of Fréchet distance with the gain over the sources of each target: "
        f"{row.value:+.2f} [{row.lower:+.2f}, {row.upper:+.2f}], the mean over targets, from 5 "
        "independent datasets; it is positive where the measure predicts gain."
    )


@pytest.mark.slow
def test_own_families_are_marked_and_left_out_of_a_second_table_and_names_escaped(
    related, tmp_path
):
    page = Page(related, tmp_path)
    assert "<b>one" not in page.source
    assert {row[0] for row in page.tables[0][:-1]} == {*ODD}
    family = {task.name: task.family for task in related.setup.tasks}
    for row in page.tables[0][:-1]:
        for cell in (row[1].split(" tied: ")[0], row[3]):
            own = family[cell.removesuffix("*")] == family[row[0]]
            assert cell.endswith("*") == own
    assert "* of the target's own family" in page.text
    assert "Without sources of the target's own family" in page.text
    assert page.folds[:2] == [0, 0]
    assert not any("*" in cell for row in page.tables[1] for cell in row)
    for row, choice in zip(page.tables[1], related.choices(own_family=False), strict=False):
        assert float(row[4]) == pytest.approx(choice.regret, abs=0.051)
        assert choice.sources == 4 - (choice.target != "task 4")
    # Below five independent datasets it is too few to tell.
    few = "too few to tell, from 3 independent datasets, and an interval needs 5."
    said = choice_sentences(related)
    assert any(one.endswith(few) for one in said)
    assert any("5 tasks come from 3 families" in one for one in said)
    # One seed picks and scores the best by the same runs.
    one = replace(related, errors=related.errors[..., :1], alone=related.alone[:, :1])
    assert any(said.startswith("There is one seed, so that") for said in choice_sentences(one))
    assert not any("one seed" in sentence for sentence in said)
    alone = Page(one, tmp_path)
    for row, choice in zip(alone.tables[0], one.choices(), strict=False):
        assert choice.gain == pytest.approx(np.nanmax(one.gains[:, one.names.index(choice.target)]))
        assert choice.gain_error is None
        assert "±" not in row[2]
    assert all("[" not in cell for cell in page.tables[0][-1])
    assert [row[4] for row in page.tables[2]] == ["too few to tell"] * 2


@pytest.mark.slow
def test_a_measure_that_follows_the_gain_more_closely_is_named(result):
    key = "frechet - leep", "spearman_over_sources"
    (known,) = (row for row in result.correlations() if (row.measure, row.statistic) == key)

    def said(value, lower, upper):
        changed = replace(result)
        changed.__dict__["_findings"] = (known._replace(value=value, lower=lower, upper=upper),)
        return list(difference_sentences(changed))

    for ends, expected in (
        ((-0.5, -0.9, -0.1), "LEEP follows the gain over sources more closely than Fréchet"),
        ((0.5, 0.1, 0.9), "Fréchet distance follows the gain over sources more closely than LEEP"),
    ):
        (sentence,) = said(*ends)
        assert sentence.startswith(expected)
        assert sentence.endswith("is larger by 0.50 [0.10, 0.90].")
    (sentence,) = said(0.1, -0.1, 0.3)
    assert sentence.startswith("No two measures differ")
    assert not said(known.value, None, None)


@pytest.mark.slow
def test_all_files_are_written_and_tables_are_the_same_again(result, tmp_path):
    report = write_study_report(result, tmp_path)
    shown = {f"gains_against_{name}.png" for name in result.readings}
    assert {path.name for path in report.written} == {*FILES, *shown} - {"gains_against_*.png"}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    # That of the measure that chooses stands open, the other's is folded with its table.
    places = [page.index(f"<h2>Gains against {name}") for name in ("Fréchet", "LEEP")]
    assert places[0] < page.index("Other measures</summary>") < places[1]
    before = {name: (tmp_path / name).read_bytes() for name in TABLES}
    write_study_report(replace(result, seconds=99.0), tmp_path, content="none")
    assert {name: (tmp_path / name).read_bytes() for name in TABLES} == before
    # Also of nothing yet.
    nothing = np.full_like(result.errors, np.nan), np.full_like(result.alone, np.nan)
    empty = replace(result, readings={"frechet": {}}, errors=nothing[0], alone=nothing[1], done=0)
    assert choice_sentences(empty) == ["No target has two sources with a gain yet."]
    assert not write_study_report(empty, tmp_path).missing
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f'<p class="late">0 of {empty.total} pieces of work are done.</p>' in page


def test_near_tasks_stand_side_by_side_and_what_did_not_converge_is_said(result, tmp_path):
    assert sorted(task_order(result)) == list(range(5))
    near = [{0, 3}, {1, 2, 4}]
    found = {
        (i, j): replace(one, value=1.0 if any({i, j} <= group for group in near) else 9.0)
        for (i, j), one in result.readings["frechet"].items()
    }
    order = task_order(replace(result, readings={"leep": {}, "frechet": found}))
    assert {*order[:2]} in near or {*order[3:]} in near
    late = {
        name: {pair: replace(one, converged=False) for pair, one in found.items()}
        for name, found in result.readings.items()
    }
    changed = replace(result, readings=late)
    changed.__dict__["_findings"] = result.correlations()
    assert "frechet NOT CONVERGED" in shown(changed)
    assert "NOT CONVERGED" not in shown(result)
    page = Page(changed, tmp_path)
    assert all(row[3].endswith(" NOT CONVERGED") for row in page.tables[0][:-1])


def test_before_anything_is_gained_distances_are_told(result, tmp_path):
    early = replace(result, errors=np.full_like(result.errors, np.nan))
    why, nearest, sampling = choice_sentences(early)
    assert why == "No target has two sources with a gain yet."
    (i, j), least = min(result.readings["frechet"].items(), key=lambda item: item[1].value)
    assert nearest == (
        f"Fréchet distance: of all pairs task {i} and task {j} are nearest, {least.value:.6g}."
    )
    assert sampling.startswith("Sampling error was not measured: subsample=50")
    sampled = choice_sentences(with_settings(result, subsample=50))
    assert not any("Sampling error" in sentence for sentence in sampled)
    bounded = {"otdd": {(0, 1): Reading(2.0, 1.49996, 2.50004)}, "sliced": {(2, 1): Reading(3.0)}}
    told = choice_sentences(replace(with_settings(early, measure="otdd"), readings=bounded))
    near = "OTDD: of all pairs task 0 and task 1 are nearest, 2.00 [1.49, 2.51] (solver bounds)."
    assert told[1] == near
    assert told[2].endswith("task 2 and task 1 are nearest, 3.")
    assert "gain, %" not in Page(early, tmp_path).text
    table = shown(early)
    assert "task 4" in table
    assert "Sampling error was not measured: subsample=50" in " ".join(table.split())


def test_the_table_ends_with_the_mean_over_targets(result):
    (line,) = (line for line in shown(result).splitlines() if line.strip(" │").startswith("mean"))
    rows = result.choices()
    names = ("regret", "random_regret", "largest_regret")
    means = [np.mean([getattr(row, name) for row in rows]) for name in names]
    numbers = [float(each) for each in re.findall(r"-?\d+\.\d+", line)]
    assert numbers == pytest.approx(means, abs=0.051)


def test_error_bars_reach_to_the_ends_of_an_interval():
    for reading, reach in (
        (Reading(2.0, 1.75, 2.5), (0.25, 0.5)),
        (Reading(2.0, 1.75, 2.5, 1.0, 4.0), (1.0, 2.0)),
        # The interval is for the mean, beside which the value may lie.
        (Reading(2.0, 2.25, 2.5), (0.0, 0.5)),
        (Reading(2.0, 1.0, 1.5), (1.0, 0.0)),
        (Reading(2.0, deviation=0.125), (0.125, 0.125)),
        (Reading(2.0), (0.0, 0.0)),
    ):
        assert writing._reach(reading) == reach


def test_an_interval_is_called_what_it_is():
    for measure, row, text in (
        ("otdd", Reading(2.0, 1.5, 2.5), "2.00 [1.50, 2.50] (solver bounds)"),
        ("otdd", Reading(2.0, 1.9, 2.1, 1.0, 4.0), "2.00 [1.00, 4.00] (sampling interval)"),
        ("sliced", Reading(2.0, 1.5, 2.5), "2.00 [1.50, 2.50] (interval over draws)"),
        ("knn", Reading(0.25), "0.25"),
    ):
        assert measured_text(measure, row) == text


@pytest.mark.slow
def test_a_measure_of_wide_range_has_a_logarithmic_scale_with_plain_numbers(result):
    readings = result.readings["frechet"].items()
    wide = {(i, j): replace(one, value=10.0 ** (i - 3)) for (i, j), one in readings}
    with own_style():
        figure = draw_gains_against(replace(result, readings={"frechet": wide}), "frechet")
        figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.get_xscale() == "log"
        shown = [text.get_text() for text in axes.get_xticklabels()]
        assert {"0.01", "0.1"} <= set(shown)
        assert all(float(number) > 0 for number in shown)


def test_the_picture_of_distances_names_rows_epsilon_and_solver_bounds(result, monkeypatch):
    monkeypatch.setattr(writing, "heat_map", lambda *_, notes, **__: notes)
    known = {"otdd": {pair: Reading(2.0, 1.9, 2.15) for pair in result.readings["frechet"]}}
    several = replace(result, readings={**result.readings, **known})
    fixed = with_settings(several, epsilon=0.25, epsilon_relative=None)
    relative = with_settings(fixed, epsilon=None, epsilon_relative=0.05, subsample=50)
    relative = replace(relative, epsilon=0.5, mean_cost=10.0)
    assert draw_measure(several, "frechet") == ["30 to 50 rows"]
    bounds = "solver bounds at most 0.25 apart"
    first = "epsilon 0.25, 30 to 50 rows"
    assert draw_measure(fixed, "otdd") == [first, f"{bounds}, sampling error not measured"]
    first = "epsilon 0.5 (0.05 of the mean cost 10), 30 to 50 rows"
    assert draw_measure(relative, "otdd") == [first, bounds]
