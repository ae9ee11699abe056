"""The report of a study: all its csv files, pictures and the page, and the table for the terminal.

`commands.study` and users call `write_study_report`, and `commands.study` prints `study_table`;
`StudyResult.plot` (`study.result`) calls `plot_study`. The files are written beside study.json and
the folder of units; `FILES` lists their patterns, by which `commands.study` removes an old report,
so a new file needs an entry. The csv files hold no times, so that they are the same whenever the
same study is run. Pictures of matrices have sources as rows and targets as columns, all in the
order of `task_order`, so that they can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from otdd_flash.arguments import takes
from otdd_flash.errors import InputError, choose
from otdd_flash.report.heat_maps import Group, class_orders, heat_map
from otdd_flash.report.page import (
    CONTENTS,
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    TICK_POINTS,
    Pictures,
    Report,
    Writers,
    figure_of,
    new_figure,
    scale_logarithmically,
    write_each,
)
from otdd_flash.report.pairwise import bounds_text, rows_text
from otdd_flash.report.planes import PointName, draw_names
from otdd_flash.report.study.page import (
    measured_text,
    not_sampled,
    one_decimal,
    saturated_measures,
    write_page,
)
from otdd_flash.report.tables import write_table_csv
from otdd_flash.shown import epsilon_shown, shorten
from otdd_flash.study.findings import Choice, Finding
from otdd_flash.study.measures import MEASURES, Reading
from otdd_flash.study.result import MeasuredPair, StudyResult, TransferredPair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table


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
    tables: Writers = {
        directory / name: partial(_write_table, columns=columns, rows=rows)
        for name, columns, rows in (
            ("choices.csv", Choice._fields, partial(_choice_rows, result)),
            ("pairs.csv", MeasuredPair._fields, result.pairs),
            ("transfer.csv", TransferredPair._fields, result.transfers),
            ("correlations.csv", Finding._fields, result.correlations),
        )
    }
    captions, pictures = _pictures(result, directory)
    report = write_each(tables, pictures if content == "full" else {}, result.names)
    if content != "none":
        first = f"gains_against_{result.setup.settings.measure}.png"
        shown: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
        for path, caption in captions.items():
            shown[path.name.startswith("gains_against_") and path.name != first][caption] = path
        report += write_each({directory / PAGE: partial(write_page, result, *shown)})
    return report


def _write_table(
    path: Path, columns: Sequence[str], rows: Callable[[], Sequence[Sequence[object]]]
) -> None:
    write_table_csv(path, columns, rows())


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
            return draw_gains_against(result, gained[0])
        return draw_measure(result, _distance(known) or known[0])

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


def _pictures(result: StudyResult, directory: Path) -> tuple[dict[Path, str], Pictures]:
    """Return captions and pictures by file; saturated measures have no picture."""
    known = _drawn_measures(result)
    captions: dict[Path, str] = {}
    pictures: Pictures = {}
    if result.transfers():
        path = directory / "gains.png"
        captions[path], pictures[path] = "Gains by transfer", partial(draw_gains, result)
        for name in known:
            if result.table(name).count:
                path = directory / f"gains_against_{name}.png"
                captions[path] = f"Gains against {MEASURES[name].title}, target by target"
                pictures[path] = partial(draw_gains_against, result, name)
    near = _distance(known)
    if near is not None:
        path = directory / "distances.png"
        captions[path] = f"{MEASURES[near].title} between all tasks"
        pictures[path] = partial(draw_measure, result, near)
    return captions, pictures


# Inches of one panel of gains.
PANEL_WIDTH, PANEL_HEIGHT = 4.4, 3.5
PANELS_ACROSS, LONGEST_TARGET, MOST_TICKS = 3, 40, 5


def task_order(result: StudyResult) -> list[int]:
    """Return an order of tasks that puts near ones together, by the first complete distance.

    If no distance has a value for each pair, the given order is kept.
    """
    for name in result.readings:
        matrix = result.matrix(name)
        off_diagonal = ~np.eye(len(matrix), dtype=bool)
        if MEASURES[name].nearer < 0 and np.isfinite(matrix[off_diagonal]).all():
            symmetric = np.where(off_diagonal, (matrix + matrix.T) / 2, 0.0)
            (order,) = class_orders(torch.from_numpy(symmetric), [len(matrix)], "hierarchical")
            return order
    return list(range(len(result.names)))


def draw_measure(result: StudyResult, measure: str) -> Figure:
    """Draw one measure between all tasks as a heat map: sources are rows, targets are columns."""
    title = MEASURES[measure].title
    labels = {"title": title, "value_label": title, "notes": _notes(result, measure)}
    return _draw_tasks(result, result.matrix(measure), **labels)


def _notes(result: StudyResult, measure: str) -> list[str]:
    """Return the tasks' numbers of rows and, for entropic transport, epsilon and solver bounds."""
    settings = result.setup.settings
    rows = rows_text([len(task.train) for task in result.setup.tasks])
    pairs = [
        (one.lower, one.upper, one.converged)
        for (i, j), one in result.readings[measure].items()
        if i < j and one.lower is not None and one.upper is not None
    ]
    if not MEASURES[measure].proven or not pairs:
        return [rows]
    if result.epsilon is not None:
        epsilon = epsilon_shown(result.epsilon, result.mean_cost)
    elif settings.epsilon is not None:
        epsilon = f"{settings.epsilon:.6g}"
    else:
        epsilon = f"{settings.epsilon_relative:g} of the mean cost"
    return [f"epsilon {epsilon}, {rows}", bounds_text(pairs, settings.subsample is not None)]


def draw_gains(result: StudyResult) -> Figure:
    """Draw the gains of all transfers as a heat map."""
    title = "Gain by transfer, sources down and targets across"
    labels = {"title": title, "value_label": "errors spared, %"}
    return _draw_tasks(result, result.gains, **labels, decimals=0, signed=True)


def _draw_tasks(result: StudyResult, matrix: Any, **labels: Any) -> Figure:
    order = task_order(result)
    names = [result.names[place] for place in order]
    rows, columns = ([Group(side, names, INK)] for side in ("sources", "targets"))
    return heat_map(torch.from_numpy(matrix[np.ix_(order, order)]), rows, columns, **labels)


def draw_gains_against(result: StudyResult, measure: str) -> Figure:
    """Draw gains against a measure: one panel per target, and one named point per source.

    Sources of the target's own family are italic. Axes are directed so that sources further to the
    right are predicted to gain more.
    """
    table = result.table(measure)
    targets = [j for j in range(len(result.names)) if table.present[:, j].any()]
    across = min(PANELS_ACROSS, len(targets))
    down = math.ceil(len(targets) / across)
    figure = new_figure(PANEL_WIDTH * across, PANEL_HEIGHT * down)
    figure.set_layout_engine("constrained")
    panels = [figure.add_subplot(down, across, k + 1) for k in range(len(targets))]
    drawn = [_draw_panel(axes, result, measure, j) for axes, j in zip(panels, targets, strict=True)]
    # Names are placed in pixels, when the panels have their places.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes, names in zip(panels, drawn, strict=True):
        draw_names(axes, names)
    return figure


def _draw_panel(axes: Axes, result: StudyResult, measure: str, j: int) -> list[PointName]:
    """Draw the sources of one target, and return the names of its points."""
    from matplotlib.ticker import MaxNLocator

    present, values = result.table(measure).present, result.matrix(measure)
    kind, tasks = MEASURES[measure], result.setup.tasks
    sources = np.flatnonzero(present[:, j])
    x, y = values[sources, j], result.gains[sources, j]
    readings = [result.readings[measure][int(i), j] for i in sources]
    spread = result.gain_errors[sources, j]
    color = SOURCE_COLOR if kind.nearer < 0 else TARGET_COLOR
    axes.errorbar(
        x,
        y,
        xerr=np.array([_reach(one) for one in readings]).T,
        yerr=None if np.isnan(spread).all() else np.nan_to_num(spread),
        fmt="o",
        markersize=3.5,
        color=color,
        ecolor="0.75",
        linewidth=0.8,
    )
    axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.margins(0.12, 0.15)
    if kind.nearer < 0:
        axes.invert_xaxis()
    label = kind.title + (" (falls to the right)" if kind.nearer < 0 else "")
    axes.set(xlabel=label, ylabel="gain, %")
    axes.set_title(f"target {shorten(result.names[j], LONGEST_TARGET)}", fontsize=10)
    axes.tick_params(labelsize=TICK_POINTS)
    axes.xaxis.set_major_locator(MaxNLocator(MOST_TICKS))
    if x.min() > 0 and x.max() > 30 * x.min():
        scale_logarithmically(axes, "x")
    order = sources[np.argsort(-y)]
    return [
        PointName(
            result.names[i],
            (float(values[i, j]), float(result.gains[i, j])),
            INK,
            italic=tasks[i].family == tasks[j].family,
        )
        for i in order
    ]


def _reach(reading: Reading) -> tuple[float, float]:
    """Return how far an error bar extends down and up.

    The bar is the sampling interval, or else the reading's own interval (over draws, or solver
    bounds), or else the deviation over seeds.
    """
    for lower, upper in (
        (reading.sample_lower, reading.sample_upper),
        (reading.lower, reading.upper),
    ):
        if lower is not None and upper is not None:
            # A value may lie outside the interval for its mean.
            return max(reading.value - lower, 0.0), max(upper - reading.value, 0.0)
    deviation = reading.deviation or 0.0
    return deviation, deviation


LONGEST_NAME = 24

MOST_ROWS = 20


def study_table(result: StudyResult) -> Table:
    """Make a table of one line per target if sources can be chosen, else one per pair of tasks."""
    rows = result.choices()
    table = _choices_table(result, rows) if rows else _pairs(result)
    said = [part for part in (table.caption, result.epsilon_text()) if part]
    table.caption, table.caption_justify = "\n".join(map(str, said)) or None, "left"
    table.title_justify = "left"
    return table


def _choices_table(result: StudyResult, rows: Sequence[Choice]) -> Table:
    from rich.table import Table
    from rich.text import Text

    measure = rows[0].measure
    late = not all(one.converged for one in result.readings[measure].values())
    seeds = result.alone.shape[-1]
    by = f"chosen by {measure}" + (" NOT CONVERGED" if late else "")
    heads = ("target", "best source", "gain, %", by, "regret", "random", "largest")
    table = Table(*heads, title=f"{len(result.names)} tasks, {seeds} seeds")
    for row in rows:
        error = "" if row.gain_error is None else f" ± {row.gain_error:.1f}"
        tied = f", {len(row.tied)} tied" if row.tied else ""
        chosen = " = ".join(shorten(name, LONGEST_NAME) for name in row.chosen[:2])
        table.add_row(
            Text(shorten(row.target, LONGEST_NAME)),
            Text(shorten(row.best, LONGEST_NAME) + tied),
            f"{one_decimal(row.gain)}{error}",
            "any" if len(row.chosen) == row.sources else Text(chosen),
            *map(one_decimal, (row.regret, row.random_regret, row.largest_regret)),
            style="bold red" if late else "",
        )
    table.add_section()
    means = np.array([(row.regret, row.random_regret, row.largest_regret) for row in rows]).mean(0)
    table.add_row("mean", "", "", "", *map(one_decimal, means))
    table.caption = "regrets in points of gain"
    return table


def _pairs(result: StudyResult) -> Table:
    from rich.table import Table
    from rich.text import Text

    places, names = list(result.readings), list(result.names)
    scores = {name: result.oriented(name) for name in places}

    def key(row: MeasuredPair) -> tuple[int, float]:
        score = scores[row.measure][names.index(row.source), names.index(row.target)]
        return places.index(row.measure), math.inf if math.isnan(score) else -score

    table = Table("measure", "source", "target", "value", title=f"{len(names)} tasks")
    rows = sorted(result.pairs(), key=key)
    for row in rows[:MOST_ROWS]:
        value = measured_text(row.measure, row)
        both = (Text(shorten(name, LONGEST_NAME)) for name in (row.source, row.target))
        late = "" if row.converged else " NOT CONVERGED"
        table.add_row(row.measure, *both, value + late, style="" if row.converged else "bold red")
    more = [f"{len(rows) - MOST_ROWS} more rows in pairs.csv"] if len(rows) > MOST_ROWS else []
    table.caption = "\n".join([*more, *not_sampled(result)])
    return table
