"""The table that a command prints of a study: what choosing sources by its measure costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from otdd_flash.report.study.sentences import measured_text, not_sampled, one_decimal
from otdd_flash.shown import shorten
from otdd_flash.study.result import MeasuredPair, StudyResult
from otdd_flash.study.statistics.choices import Choice

if TYPE_CHECKING:
    from rich.table import Table

LONGEST_NAME = 24
MOST_ROWS = 20


def study_table(result: StudyResult) -> Table:
    """Make a table of one line per target if sources can be chosen, else one per pair of tasks."""
    rows = result.choices()
    table = _choices(result, rows) if rows else _pairs(result)
    said = [part for part in (table.caption, result.epsilon_text()) if part]
    table.caption, table.caption_justify = "\n".join(map(str, said)) or None, "left"
    return table


def _choices(result: StudyResult, rows: Sequence[Choice]) -> Table:
    from rich.table import Table
    from rich.text import Text

    measure = rows[0].measure
    late = not all(one.converged for one in result.readings[measure].values())
    seeds = result.alone.shape[-1]
    table = Table(title=f"{len(result.names)} tasks, {seeds} seeds", title_justify="left")
    by = f"chosen by {measure}" + (" NOT CONVERGED" if late else "")
    for column in ("target", "best source", "gain, %", by, "regret", "random", "largest"):
        table.add_column(column)
    for row in rows:
        error = "" if row.gain_error is None else f" ± {row.gain_error:.1f}"
        tied = f", {len(row.tied)} tied" if row.tied else ""
        chosen = " = ".join(shorten(name, LONGEST_NAME) for name in row.chosen[:2])
        chosen = "any" if len(row.chosen) == row.sources else chosen
        names = (shorten(row.target, LONGEST_NAME), shorten(row.best, LONGEST_NAME) + tied, chosen)
        target, best, chosen_text = map(Text, names)
        table.add_row(
            target,
            best,
            f"{one_decimal(row.gain)}{error}",
            chosen_text,
            *map(one_decimal, (row.regret, row.random_regret, row.largest_regret)),
            style="bold red" if late else "",
        )
    table.add_section()
    means = np.array([(row.regret, row.random_regret, row.largest_regret) for row in rows]).mean(0)
    table.add_row("mean", "", "", "", *map(one_decimal, means))
    table.caption = "regrets in points of gain"
    table.caption_justify = "left"
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
        value = measured_text(row.measure, row)
        both = (Text(shorten(name, LONGEST_NAME)) for name in (row.source, row.target))
        late = "" if row.converged else " NOT CONVERGED"
        table.add_row(row.measure, *both, value + late, style="" if row.converged else "bold red")
    more = [f"{len(rows) - MOST_ROWS} more rows in pairs.csv"] if len(rows) > MOST_ROWS else []
    table.caption = "\n".join([*more, *not_sampled(result)])
    table.caption_justify = "left"
    return table
