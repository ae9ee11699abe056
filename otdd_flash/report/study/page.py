"""report.html of a study, and the sentences about a study that the page and the terminal share.

The page is one file that needs no network. Its first table says what choosing a source by the
study's measure costs; other measures and details are folded. The second part of the module has the
sentences: how to read the table of choices, the measure's correlation with the gain, or why there
is no choice.

`report.study.writing` calls `write_page` and uses some of the sentences; `commands.study` prints
`choice_sentences`. Every name that a user chose goes through `html_text`, because it may contain
markup. A page of an unfinished study must be written as well, because a study may be stopped and
resumed.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from otdd_flash.files.atomic import write_text
from otdd_flash.report.tables import (
    Cell,
    html_list,
    html_page,
    html_table,
    name_cell,
    value_cell,
)
from otdd_flash.shown import LONGEST_MESSAGE, display, html_text, interval, listing
from otdd_flash.study.findings import Choice, Finding
from otdd_flash.study.measures import MEASURES, Reading
from otdd_flash.study.result import FEWEST_TASKS, MeasuredPair, StudyResult
from otdd_flash.study.statistics import FEWEST_UNITS, Numbers

NEAREST = 3

# The most tied sources that are named; the rest are counted.
MOST_TIED = 3

# Marks a source of the target's own family.
OWN = "*"


def write_page(
    result: StudyResult,
    pictures: Mapping[str, Path],
    folded: Mapping[str, Path],
    path: Path,
) -> None:
    """Write the page of a study.

    Args:
        result: the study's result, which may be incomplete.
        pictures: files by their captions; files that do not exist are left out.
        folded: the same, for pictures of the other measures.
        path: the HTML file.

    Raises:
        InputError: the file cannot be written.
    """
    shown = [name for name in result.readings if name not in saturated_measures(result)]
    parts = [
        _progress(result),
        _choices(result, result.choices()),
        html_list(choice_sentences(result)),
        _without_own_family(result),
        _pictures(pictures),
        _fold("Other measures", _measures(result, shown), _pictures(folded)),
        _fold("Nearest sources", _nearest(result, shown)),
        _fold("All ordered pairs", _pairs(result, shown)),
        _fold("Left out", _left_out(result)),
        _fold("Settings and versions", _about(result)),
    ]
    write_text(path, html_page(f"Study of {listing(result.names)}", _heading(result), parts))


def _heading(result: StudyResult) -> str:
    tasks = f"{len(result.names)} tasks"
    if result.setup.settings.transfer is None:
        return f"Distances between {tasks}"
    measure = MEASURES[result.setup.settings.measure].title
    return f"Which of {tasks} to train on first, and whether {measure} tells"


def _progress(result: StudyResult) -> str:
    """Return how much of the work is done; "" if all of it is."""
    if result.complete:
        return ""
    failed = f", {len(result.failures)} failed" if result.failures else ""
    done = f"{result.done} of {result.total} pieces of work are done{failed}."
    return f'<p class="late">{done}</p>'


def _choices(result: StudyResult, rows: Sequence[Choice], title: str = "") -> str:
    """Return one row per target: the best source, the chosen one, and regrets of the choices."""
    if not rows:
        return ""
    measure = rows[0].measure
    chosen = MEASURES[measure].title
    heads = ["target", "best source", "gain, %", f"chosen by {chosen}", f"regret of {chosen}"]
    heads += ["regret of a random source", "regret of the largest source"]
    family = {task.name: task.family for task in result.setup.tasks}
    # Targets with a source whose reading is based on transport that did not converge.
    readings = result.readings[measure].items()
    late = {result.names[j] for (_, j), reading in readings if not reading.converged}

    def named(target: str, names: Sequence[str], link: str) -> str:
        marks = [OWN if family[name] == family[target] else "" for name in names]
        shown = [f"{html_text(name)}{mark}" for name, mark in zip(names, marks, strict=True)]
        more = [f"{len(names) - MOST_TIED} more"] if len(names) > MOST_TIED else []
        return link.join(shown[:MOST_TIED] + more)

    body = []
    for row in rows:
        tied = named(row.target, row.tied, ", ")
        best = named(row.target, (row.best,), "") + (
            f" <small>tied: {tied}</small>" if tied else ""
        )
        error = "" if row.gain_error is None else f" ± {row.gain_error:.1f}"
        first = named(row.target, row.chosen, " = ")
        if len(row.chosen) == row.sources:
            first = "any: the same for all sources"
        if row.target in late:
            first += ' <span class="late">NOT CONVERGED</span>'
        body.append(
            [
                name_cell(row.target),
                Cell(best, html_text(row.best), "name"),
                Cell(f"{one_decimal(row.gain)}{error}", repr(row.gain)),
                Cell(first, html_text(row.chosen[0]), "name"),
                *map(_points, (row.regret, row.random_regret, row.largest_regret)),
            ]
        )
    foot = [Cell(f"mean of {len(rows)} targets", "", "name"), Cell(""), Cell(""), Cell("")]
    found = {row.statistic: row for row in result.correlations() if row.measure == measure}
    for name in ("regret", "random_regret", "largest_regret"):
        mean = float(np.mean([getattr(row, name) for row in rows]))
        # The intervals are of the choices among all sources.
        foot.append(_points(mean, found.get(name) if rows[0].own_family else None))
    mark = any(OWN in cell.html for row in body for cell in (row[1], row[3]))
    note = f'<p class="quiet">{OWN} of the target\'s own family</p>' if mark else ""
    return html_table(title, heads, body, foot=foot) + note


def _has_own_family(result: StudyResult) -> bool:
    tasks = result.setup.tasks
    return any(tasks[i].family == tasks[j].family for i, j in result.setup.transferred())


def _without_own_family(result: StudyResult) -> str:
    """Return the table without sources of the target's own family; "" if there are none."""
    whole = result.choices()
    if not whole or not _has_own_family(result):
        return ""
    rows = result.choices(own_family=False)
    title = "Without sources of the target's own family"
    gone = [row.target for row in whole if row.target not in {one.target for one in rows}]
    note = ""
    if gone:
        names = html_text(listing(gone), LONGEST_MESSAGE)
        note = f'<p class="quiet">No two sources are left for {names}.</p>'
    return (_choices(result, rows, title) or f"<h2>{title}</h2>") + note


def _measures(result: StudyResult, shown: Sequence[str]) -> str:
    """Return one row per measure: its regrets and its correlation with the gain over sources."""
    found = {(row.measure, row.statistic): row for row in result.correlations()}
    with_families = _has_own_family(result)
    heads = ["measure", "mean regret", "p"]
    heads += ["mean regret without own family"] if with_families else []
    heads += ["rank correlation over sources", "independent datasets"]
    rows = []
    for name in shown:
        lost = found.get((name, "regret"))
        if lost is None or lost.value is None:
            continue
        others = [row.regret for row in result.choices(name, own_family=False)]
        mean = [_points(float(np.mean(others))) if others else Cell("")] if with_families else []
        correlation = found[name, "spearman_over_sources"]
        key = "" if correlation.lower is None else repr(correlation.value)
        rows.append(
            [
                name_cell(MEASURES[name].title),
                _points(lost.value, lost),
                Cell("" if lost.p is None else f"{lost.p:.2g}", repr(lost.p)),
                *mean,
                Cell(html_text(correlation_text(correlation)), key),
                value_cell(correlation.datasets),
            ]
        )
    if not rows:
        return ""
    note = (
        '<p class="quiet">p: the share of permutations of the tasks whose regret is as small. '
        "These measures were not fixed beforehand: the best of several looks better than it is. "
        "Correlations over ordered pairs, and given sizes, are in correlations.csv.</p>"
    )
    return html_table("", heads, rows) + note + html_list(difference_sentences(result))


def _pairs(result: StudyResult, shown: Sequence[str]) -> str:
    """Return one row per ordered pair: the values of all measures, and the gain."""
    measures = [name for name in shown if result.readings[name]]
    transfers = {(row.source, row.target): row for row in result.transfers()}
    rows = []
    for i, j in result.setup.ordered_pairs():
        names = result.names[i], result.names[j]
        cells = [name_cell(name) for name in names]
        for measure in measures:
            reading = result.readings[measure].get((i, j))
            late = "" if reading is None or reading.converged else "late"
            value = np.nan if reading is None else reading.value
            cells.append(value_cell(value if np.isfinite(value) else None, late))
        if transfers:
            row = transfers.get(names)
            parts = (row.gain, row.gain_error, row.alone, row.transferred) if row else [None] * 4
            cells += map(value_cell, parts)
        rows.append(cells)
    heads = ["source", "target", *(MEASURES[measure].title for measure in measures)]
    heads += ["gain, %", "±", "error alone, %", "transferred, %"] if transfers else []
    return html_table("", heads, rows, kind="wide")


def _nearest(result: StudyResult, shown: Sequence[str]) -> str:
    """Return for each target the sources that each measure ranks first."""
    rows = []
    for j, target in enumerate(result.names):
        for measure in shown:
            scores = result.oriented(measure)[:, j]
            found = result.readings[measure]
            sources = [i for i, k in found if k == j and np.isfinite(scores[i])]
            if sources:
                near = _first(result.names, sources, scores)
                title = MEASURES[measure].title
                rows.append([name_cell(target), name_cell(title), name_cell(near, LONGEST_MESSAGE)])
    return html_table("", ("target", "by", "sources, the nearest first"), rows)


def _first(names: Sequence[str], sources: Iterable[int], scores: Numbers) -> str:
    """Return the names of the first sources, with = between tied ones."""
    order = sorted(sources, key=lambda i: (-scores[i], i))
    if len(order) > 1 and scores[order[0]] == scores[order[-1]]:
        return "the same for all sources"
    text = names[order[0]]
    for place, (one, other) in enumerate(pairwise(order), 1):
        tied = scores[one] == scores[other]
        if place >= NEAREST:
            return text + (" = ..." if tied else "")
        text += (" = " if tied else ", ") + names[other]
    return text


def _left_out(result: StudyResult) -> str:
    """Return the list of missing numbers, and of measures left out of tables and pictures."""
    said = [
        f"{name} chooses no source, and is left out of pictures and tables"
        for name in saturated_measures(result)
    ]
    return html_list([*result.notes(), *said])


def _about(result: StudyResult) -> str:
    lines = json.dumps(result.setup.to_dict(), indent=1, ensure_ascii=False).split("\n")
    settings = "\n".join(html_text(line, LONGEST_MESSAGE) for line in lines)
    return (
        f"<p>{result.epsilon_text()}</p><pre>{settings}</pre>"
        f"<p>{result.done} of {result.total} pieces of work; "
        f"{result.seconds:.1f} s in the last run.</p>"
    )


def _fold(title: str, *parts: str) -> str:
    content = "".join(parts)
    return f"<details><summary>{title}</summary>{content}</details>" if content else ""


def _pictures(files: Mapping[str, Path]) -> str:
    return "".join(
        f'<h2>{html_text(caption)}</h2><img alt="{html_text(caption)}" '
        f'src="data:image/png;base64,{b64encode(file.read_bytes()).decode()}">'
        for caption, file in files.items()
        if file.exists()
    )


def _points(value: float, row: Finding | None = None) -> Cell:
    """Return points of gain, with the interval of a finding if it has one."""
    ends = ""
    if row is not None and row.lower is not None and row.upper is not None:
        ends = f" <small>[{one_decimal(row.lower)}, {one_decimal(row.upper)}]</small>"
    return Cell(one_decimal(value) + ends, repr(value))


def not_sampled(result: StudyResult) -> list[str]:
    """Return the sentence for a study without sampling intervals, or an empty list."""
    if result.setup.settings.subsample is not None or not any(result.readings.values()):
        return []
    return ["Sampling error was not measured: subsample=50 gives every distance an interval."]


def measured_text(measure: str, row: Reading | MeasuredPair) -> str:
    """Return a reading with its interval and the kind of the interval."""
    kind = "solver bounds" if MEASURES[measure].proven else "interval over draws"
    if row.value is None:
        return "none"
    for lower, upper, name in (
        (row.sample_lower, row.sample_upper, "sampling interval"),
        (row.lower, row.upper, kind),
    ):
        if lower is not None and upper is not None:
            return f"{interval(row.value, lower, upper)} ({name})"
    return f"{row.value:.6g}"


def choice_sentences(result: StudyResult) -> list[str]:
    """Return how to read the table of choices, and the measure's correlation with the gain.

    If there is no choice, the sentences say why, and which tasks are nearest.
    """
    if not result.choices():
        return [_why_none(result), *_nearest_sources(result), *not_sampled(result)]
    measure = result.setup.settings.measure
    (row,) = (
        row
        for row in result.correlations()
        if (row.measure, row.statistic) == (measure, "spearman_over_sources")
    )
    return [
        f"{MEASURES[measure].title} was fixed as the measure that chooses before any gain was "
        "known. A gain is by how many percent fewer errors the target's test rows have than "
        "without a source, a regret how many points of it a choice gives away to the best source.",
        _picking(result),
        _correlation(row),
        *_about_families(result),
        *not_sampled(result),
    ]


def difference_sentences(result: StudyResult) -> Iterable[str]:
    """Yield which measures correlate more strongly with the gain over a target's sources."""
    known = clear = 0
    for row in result.correlations():
        value, ends = row.value, (row.lower, row.upper)
        if " - " not in row.measure or row.statistic != "spearman_over_sources":
            continue
        if value is None or ends[0] is None or ends[1] is None:
            continue
        known += 1
        if ends[0] <= 0 <= ends[1]:
            continue
        clear += 1
        better, worse = (MEASURES[name].title for name in row.measure.split(" - "))
        if value < 0:
            better, worse = worse, better
        lower, upper = sorted((abs(ends[0]), abs(ends[1])))
        yield (
            f"{better} follows the gain over sources more closely than {worse}: Fisher's z of its "
            f"rank correlation is larger by {abs(value):.2f} [{lower:.2f}, {upper:.2f}]."
        )
    if known and not clear:
        yield (
            "No two measures differ in their rank correlation over sources by more than the "
            "intervals of these differences."
        )


def correlation_text(row: Finding) -> str:
    """Return a correlation with its interval, or a note that there are too few datasets."""
    if row.value is None:
        return row.note
    if row.lower is None or row.upper is None:
        return "too few to tell"
    return f"{row.value:+.2f} [{row.lower:+.2f}, {row.upper:+.2f}]"


def one_decimal(points: float) -> str:
    """Return points of gain with one decimal; a value that rounds to 0 has no sign."""
    return f"{round(points, 1) + 0.0:.1f}"


def saturated_measures(result: StudyResult) -> list[str]:
    """Return the measures that are the same for all sources of every target, and so choose none."""
    known = (name for name, found in result.readings.items() if found)
    return [name for name in known if result.table(name).saturated]


def _picking(result: StudyResult) -> str:
    if result.alone.shape[-1] < 2:
        return (
            "There is one seed, so that the best source is picked and scored on the same runs: its "
            "gain and all regrets are too large on average, by an amount that is not known, and "
            "there is no standard error; transfer.seeds=2 or more tells them apart."
        )
    return (
        "The best source is picked on half of the seeds and scored on the others, in both "
        "directions, and its gain is that score, so that none is best by luck; a regret below 0 "
        "says that a choice did better than the source picked so. Tied are sources within one "
        "standard error (±, over seeds) of the best; where a measure does not tell sources apart, "
        "their mean counts."
    )


def _correlation(row: Finding) -> str:
    title = MEASURES[row.measure].title
    found = correlation_text(row)
    about = f"Rank correlation of {title} with the gain over the sources of each target"
    if row.value is None:
        return f"{about}: none; {found}."
    if row.lower is None:
        few = f", and an interval needs {FEWEST_UNITS}" if row.datasets < FEWEST_UNITS else ""
        return f"{about}: {found}, from {row.datasets} independent datasets{few}."
    return (
        f"{about}: {found}, the mean over targets, from {row.datasets} independent datasets; it is "
        "positive where the measure predicts gain."
    )


def _about_families(result: StudyResult) -> Iterable[str]:
    families = {task.family for task in result.setup.tasks}
    if len(families) < len(result.names):
        yield (
            f"The {len(result.names)} tasks come from {len(families)} families, which count as one "
            "dataset each: nothing here is known of other datasets than these."
        )


def _why_none(result: StudyResult) -> str:
    if result.setup.settings.transfer is None:
        return "Nothing was transferred, so that there are distances alone."
    if len(result.names) < FEWEST_TASKS:
        return f"A choice of sources asks for {FEWEST_TASKS} tasks."
    return "No target has two sources with a gain yet."


def _nearest_sources(result: StudyResult) -> Iterable[str]:
    """Yield the two nearest tasks by each distance, with the distance's interval."""
    for name, found in result.readings.items():
        if MEASURES[name].nearer > 0 or not found:
            continue
        scores = result.oriented(name)
        best = [pair for pair in sorted(found) if scores[pair] == np.nanmax(scores)]
        if not best:
            continue
        (i, j), reading = best[0], found[best[0]]
        others = {tuple(sorted(pair)) for pair in best[1:]} - {tuple(sorted((i, j)))}
        tied = f", as near as {len(others)} other pairs" if others else ""
        yield (
            f"{MEASURES[name].title}: of all pairs {display(result.names[i])} and "
            f"{display(result.names[j])} are nearest, {measured_text(name, reading)}{tied}."
        )
