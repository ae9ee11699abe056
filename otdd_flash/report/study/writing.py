"""The report of a study: all its csv files, pictures and the page, and the table for the terminal.

`commands.study` calls `write_study_report` and prints `study_table`; `StudyResult.plot`
(`study.result`) calls `plot_study`. The files are written beside study.json and the folder of
units; `FILES` lists their patterns, by which `commands.study` removes an old report, so a new file
needs an entry. The csv files hold no times, so that they are the same whenever the same study is
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from otdd_flash.arguments import takes
from otdd_flash.errors import InputError, choose
from otdd_flash.report.csv_tables import write_table_csv
from otdd_flash.report.figures.page import (
    CONTENTS,
    Report,
    Writers,
    figure_of,
    notice_missing_glyphs,
    wanted,
    write_each,
)
from otdd_flash.report.study.page import (
    measured_text,
    not_sampled,
    one_decimal,
    saturated_measures,
    write_page,
)
from otdd_flash.report.study.pictures import draw_gains, draw_gains_against, draw_measure
from otdd_flash.shown import shorten
from otdd_flash.study.findings import Choice, Finding
from otdd_flash.study.measures import MEASURES
from otdd_flash.study.result import MeasuredPair, StudyResult, TransferredPair

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


Writer = Callable[[Path], object]

PAGE = "report.html"

TABLES = ("choices.csv", "pairs.csv", "transfer.csv", "correlations.csv")

PICTURES = ("distances.png", "gains.png", "gains_against_*.png")

# Patterns of all report files; patterns, because other packages may add measures.
FILES = (*TABLES, *PICTURES, PAGE)


@takes()
def write_study_report(
    result: StudyResult, directory: str | Path, *, content: str = "full"
) -> Report:
    """Write choices.csv, pairs.csv, transfer.csv, correlations.csv, pictures and report.html.

    The csv files hold no times, so the same study always gives the same csv files.

    Args:
        result: the result of `Study.run`; units that are not done are left out.
        directory: created if it does not exist.
        content: `full`, `table` for no pictures or `none` for csv files alone.

    Returns:
        The files written and the files that could not be written.

    Raises:
        InputError: `content` is not one of the choices.

    Warns:
        MissingFileNotice: a file could not be written; the others are written.
    """
    choose("report", content, CONTENTS)
    directory = Path(directory)
    contents: tuple[tuple[Sequence[str], Callable[[], Sequence[Sequence[object]]]], ...] = (
        (Choice._fields, partial(_choice_rows, result)),
        (MeasuredPair._fields, result.pairs),
        (TransferredPair._fields, result.transfers),
        (Finding._fields, result.correlations),
    )
    writers: Writers = {
        directory / name: partial(_write_table, columns, rows)
        for name, (columns, rows) in zip(TABLES, contents, strict=True)
    }
    report = write_each(writers)
    if content == "full":
        notice_missing_glyphs(result.names)
    pictures = _pictures(result, directory)
    drawn = {path: writer for path, (_, writer) in pictures.items()}
    report += write_each(wanted(drawn, content))
    if content != "none":
        first = f"gains_against_{result.setup.settings.measure}.png"
        shown: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
        for path, (caption, _) in pictures.items():
            shown[path.name.startswith("gains_against_") and path.name != first][caption] = path
        report += write_each({directory / PAGE: partial(write_page, result, *shown)})
    return report


def plot_study(result: StudyResult) -> Figure:
    """Draw gains against the measure that chooses, or without gains the first distance or measure.

    Raises:
        InputError: no unit is done that could be drawn.
    """
    known = _drawn_measures(result)
    if not known:
        raise InputError(
            f"nothing of this study can be drawn yet, {result.done} of {result.total} pieces of "
            "work are done; run it again with resume=True to go on"
        )
    gained = [name for name in known if result.transfers() and result.table(name).count]

    def draw() -> Figure:
        if gained:
            return draw_gains_against(result, gained[0], None)
        return draw_measure(result, _distance(known) or known[0], None)

    return figure_of(draw, result.names)


def _drawn_measures(result: StudyResult) -> list[str]:
    """Return the measures that differ between sources, the one that chooses first."""
    flat = saturated_measures(result)
    known = [name for name, found in result.readings.items() if found and name not in flat]
    return sorted(known, key=lambda name: name != result.setup.settings.measure)


def _distance(known: Sequence[str]) -> str | None:
    """Return the first of some measures that is a distance, or None."""
    return next((name for name in known if MEASURES[name].nearer < 0), None)


def _choice_rows(result: StudyResult) -> list[tuple[object, ...]]:
    """Return the choices of all measures, with and without sources of the target's own family."""
    return [
        tuple("; ".join(part) if isinstance(part, tuple) else part for part in row)
        for measure, found in result.readings.items()
        if found
        for own_family in (True, False)
        for row in result.choices(measure, own_family=own_family)
    ]


def _write_table(
    columns: Sequence[str], rows: Callable[[], Sequence[Sequence[object]]], path: Path
) -> None:
    write_table_csv(path, columns, rows())


def _pictures(result: StudyResult, directory: Path) -> dict[Path, tuple[str, Writer]]:
    """Return caption and writer by file; saturated measures have no picture."""
    known = _drawn_measures(result)
    found: dict[Path, tuple[str, Writer]] = {}
    if result.transfers():
        found[directory / "gains.png"] = "Gains by transfer", partial(draw_gains, result)
        for name in known:
            if result.table(name).count:
                caption = f"Gains against {MEASURES[name].title}, target by target"
                writer = partial(draw_gains_against, result, name)
                found[directory / f"gains_against_{name}.png"] = caption, writer
    near = _distance(known)
    if near is not None:
        caption = f"{MEASURES[near].title} between all tasks"
        found[directory / "distances.png"] = caption, partial(draw_measure, result, near)
    return found


LONGEST_NAME = 24

MOST_ROWS = 20


def study_table(result: StudyResult) -> Table:
    """Make a table of one line per target if sources can be chosen, else one per pair of tasks."""
    rows = result.choices()
    table = _choices_table(result, rows) if rows else _pairs(result)
    said = [part for part in (table.caption, result.epsilon_text()) if part]
    table.caption, table.caption_justify = "\n".join(map(str, said)) or None, "left"
    return table


def _choices_table(result: StudyResult, rows: Sequence[Choice]) -> Table:
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
