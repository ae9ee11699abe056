"""The table that a command prints of a study: the statistics of every measure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from otdd_flash.shown import interval, shorten
from otdd_flash.study.result import MeasuredPair, StudyResult
from otdd_flash.study.statistics.findings import Finding

if TYPE_CHECKING:
    from rich.table import Table

LONGEST_NAME = 24
MOST_ROWS = 20
SHOWN = ("spearman", "spearman_over_sources", "regret")


def study_table(result: StudyResult) -> Table:
    """Make a table of one line per measure if there are correlations, else one per pair of tasks.

    `StudyResult.notes` says why a measure has no correlation.
    """
    known = any(row.pairs for row in result.correlations())
    table = _statistics(result) if known else _pairs(result)
    said = [part for part in (table.caption, result.epsilon_text()) if part]
    table.caption, table.caption_justify = "\n".join(map(str, said)) or None, "left"
    return table


def _statistics(result: StudyResult) -> Table:
    from rich.table import Table

    rows = {(row.measure, row.statistic): row for row in result.correlations()}
    some = next(iter(rows.values()))
    title = f"{len(result.names)} tasks, {some.pairs} ordered pairs, {some.units} units"
    table = Table(title=title, title_justify="left")
    for column in ("measure", "rank correlation", "over sources", "regret", "p"):
        table.add_column(column)
    for measure in result.readings:
        found = [rows.get((measure, statistic)) for statistic in SHOWN]
        if found[0] is None:
            continue
        late = not all(one.converged for one in result.readings[measure].values())
        p = "" if found[0].p is None else f"{found[0].p:.2g}"
        cells = [_cell(one) for one in found]
        name = measure + (" NOT CONVERGED" if late else "")
        table.add_row(name, *cells, p, style="bold red" if late else "")
    table.caption = "a positive correlation predicts gain"
    return table


def _pairs(result: StudyResult) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{len(result.names)} tasks", title_justify="left")
    for column in ("measure", "source", "target", "value"):
        table.add_column(column)
    places, names = list(result.readings), list(result.names)
    scores = {name: result.oriented(name) for name in places}

    def key(row: MeasuredPair) -> tuple[int, float]:
        score = scores[row.measure][names.index(row.source), names.index(row.target)]
        return places.index(row.measure), math.inf if math.isnan(score) else -score

    rows = sorted(result.pairs(), key=key)
    for row in rows[:MOST_ROWS]:
        bounds = row.lower is not None and row.upper is not None
        value = interval(row.value, row.lower, row.upper) if bounds else _number(row.value)  # type: ignore[arg-type]
        both = (Text(shorten(name, LONGEST_NAME)) for name in (row.source, row.target))
        late = "" if row.converged else " NOT CONVERGED"
        table.add_row(row.measure, *both, value + late, style="" if row.converged else "bold red")
    if len(rows) > MOST_ROWS:
        table.caption = f"{len(rows) - MOST_ROWS} more rows in pairs.csv"
    return table


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _cell(row: Finding | None) -> str:
    if row is None:
        return ""
    if row.value is None:
        return "none"
    if row.lower is None or row.upper is None:
        return f"{row.value:.2f}"
    return f"{row.value:.2f} [{row.lower:.2f}, {row.upper:.2f}]"
