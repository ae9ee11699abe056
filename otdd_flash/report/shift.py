"""The report of shift tests: csv files, pictures, and the table for the terminal.

For one test `write_shift_report` writes null.csv and shift.png; if parts were asked for also
rows.csv, and classes.csv if rows have one label each. For the windows of a stream it writes
windows.csv and windows.png instead. `commands.shift` calls it, and prints `shift_table` for one
test; `ShiftReport.plot` (`shift.result`) calls `plot_shift`. Users' scripts read the files, so
names and columns must stay; the columns of classes.csv are the fields of `ClassShift`
(`shift.parts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from otdd_flash.report.page import (
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    Pictures,
    Report,
    Writers,
    figure_of,
    fit_title,
    new_figure,
    scale_logarithmically,
    write_each,
)
from otdd_flash.report.tables import facts_table, write_table_csv
from otdd_flash.shift.parts import ShiftParts
from otdd_flash.shift.result import ShiftReport
from otdd_flash.shown import bounded, display, epsilon_shown, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

# More classes than this have no bar, those with the largest p-values first; characters of a name.
MOST_BARS, LONGEST = 30, 24
WIDTH, HEIGHT, BAR = 9.0, 3.6, 0.22  # inches
WINDOW_COLUMNS = ("window", "p_value", "level", "shifted", "statistic", "effect", "permutations")


def write_shift_report(
    reports: Sequence[ShiftReport], directory: Path, *, window: int | None, content: str
) -> Report:
    """Write csv files and the picture of a test, or of its windows.

    Args:
        reports: one, or one a window.
        directory: of the run.
        window: rows of a window; None for one test.
        content: `full`, `table` for no pictures or `none` for no files.

    Warns:
        MissingFileNotice: a file could not be written; the others are written.
    """
    first = reports[0]
    classes = first.parts.classes if first.parts is not None else ()
    tables: dict[str, tuple[Sequence[str], Sequence[Sequence[Any]]]] = {}
    if window is not None:
        tables["windows"] = (
            WINDOW_COLUMNS,
            [
                (k, r.p_value, r.alpha, r.shifted, r.statistic, r.effect.value, r.permutations)
                for k, r in enumerate(reports, 1)
            ],
        )
    else:
        tables["null"] = ("permutation", "statistic"), list(enumerate(first.null.tolist(), 1))
        if first.parts is not None:
            tables["rows"] = ("side", "row", "contribution"), _rows(first.parts)
        if classes:
            tables["classes"] = [*asdict(classes[0])], [[*asdict(c).values()] for c in classes]
    writers: Writers = {
        directory / f"{name}.csv": partial(write_table_csv, columns=columns, rows=rows)
        for name, (columns, rows) in tables.items()
    }
    pictures: Pictures = {directory / "shift.png": lambda: _draw(first)}
    if window is not None:
        pictures = {directory / "windows.png": lambda: _draw_windows(reports, window)}
    return write_each(
        {} if content == "none" else writers,
        pictures if content == "full" else {},
        [*first.names, *(each.name for each in classes)],
    )


def _rows(parts: ShiftParts) -> list[tuple[str, int, float]]:
    """Return side, place and contribution of every row with weight, the largest first."""
    sides = {"reference": parts.reference_rows, "sample": parts.sample_rows}
    found = [
        (side, row, value)
        for side, values in sides.items()
        for row, value in enumerate(values.tolist())
        if not math.isnan(value)
    ]
    return sorted(found, key=lambda each: -each[2])


def shift_table(report: ShiftReport) -> Table:
    """Make the terminal's table of one test."""
    effect = f"{report.effect.value:.4g} of the mean cost"
    if report.effect.lower is not None:
        effect += f" [{report.effect.lower:.4g}, {report.effect.upper:.4g}]"
    found = [
        ("p-value", f"{report.p_value:.4g} ({'shifted' if report.shifted else 'no shift found'})"),
        ("effect", effect),
    ]
    details = [
        ("distance", bounded(report.statistic, *report.bounds)),
        ("null mean", f"{float(report.null.mean()):.6g}"),
        ("permutations", f"{report.permutations}, {report.hits} with a distance as large"),
        ("level", f"{report.alpha:.4g}"),
        ("rows", "{} and {}".format(*report.sizes)),
        ("epsilon", epsilon_shown(report.epsilon, report.mean_cost)),
        ("class distances", report.labels),
        ("seconds", f"{report.seconds:.2f}"),
    ]
    if report.groups is not None:
        details.insert(5, ("groups", "{} and {}".format(*report.groups)))
    title = f"shift: {display(report.names[0])} → {display(report.names[1])}"
    return facts_table(title, found, None, details)


def plot_shift(report: ShiftReport) -> Figure:
    """Draw the picture of a test for a notebook."""
    classes = report.parts.classes if report.parts is not None else ()
    return figure_of(lambda: _draw(report), [*report.names, *(each.name for each in classes)])


def _draw(report: ShiftReport) -> Figure:
    classes = report.parts.classes if report.parts is not None else ()
    tested = [(each.adjusted, each.name) for each in classes if each.adjusted is not None]
    tested.sort()
    height = max(HEIGHT, 1.2 + BAR * min(len(tested), MOST_BARS))
    figure = new_figure(WIDTH if tested else WIDTH / 2, height)
    figure.set_layout_engine("constrained")
    axes: Any = figure.subplots(1, 2 if tested else 1, squeeze=False)[0]
    title = f"{report.names[0]} and {report.names[1]}: p = {report.p_value:.3g}"
    figure.suptitle(fit_title(figure, title, figure.get_size_inches()[0] - 0.3), x=0.02, ha="left")
    _draw_null(axes[0], report)
    if tested:
        _draw_classes(axes[1], tested[:MOST_BARS], report.alpha)
    return figure


def _draw_null(axes: Axes, report: ShiftReport) -> None:
    bins = min(40, max(8, report.permutations // 15))
    axes.hist(report.null.numpy(), bins=bins, color=SOURCE_COLOR, alpha=0.6)
    axes.axvline(report.statistic, color=TARGET_COLOR, linewidth=2, label="the rows as they are")
    axes.legend(loc="best", fontsize=8)
    axes.set_xlabel("distance, in units of the cost")
    axes.set_ylabel("permutations")


def _draw_classes(axes: Axes, tested: Sequence[tuple[float, str]], alpha: float) -> None:
    at = np.arange(len(tested))
    p_values = np.array([p for p, _ in tested])
    colors = np.where(p_values <= alpha, TARGET_COLOR, "0.7")
    axes.barh(at, -np.log10(p_values), color=colors, height=0.7)
    axes.axvline(-np.log10(alpha), color=INK, linewidth=1, linestyle=":")
    axes.set_yticks(at, [shorten(name, LONGEST) for _, name in tested], fontsize=8)
    axes.set_ylim(len(tested) - 0.5, -0.5)
    axes.set_xlabel(f"-log10 of adjusted p of features; dotted: {alpha:g}")
    axes.set_ylabel("class")


def _draw_windows(reports: Sequence[ShiftReport], window: int) -> Figure:
    """Draw p-values of windows with their levels, and effects, over time."""
    figure = new_figure(WIDTH, 1.3 * HEIGHT)
    figure.set_layout_engine("constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    at = np.arange(1, len(reports) + 1)
    shifted = np.array([report.shifted for report in reports])
    colors = np.where(shifted, TARGET_COLOR, SOURCE_COLOR)
    scale_logarithmically(upper, "y")
    upper.plot(at, [report.alpha for report in reports], color=INK, linestyle=":")
    upper.scatter(at, [report.p_value for report in reports], c=colors, s=20)
    upper.set_ylabel("p-value; dotted: its level")
    lower.axhline(0, color="0.8")
    lower.scatter(at, [100 * report.effect.value for report in reports], c=colors, s=20)
    lower.set_ylabel("effect, % of the mean cost")
    lower.set_xlabel(f"window of {window} rows")
    lower.xaxis.get_major_locator().set_params(integer=True)
    title = f"{reports[0].names[1]} against {reports[0].names[0]}: {int(shifted.sum())} shifted"
    figure.suptitle(fit_title(figure, title, WIDTH - 0.3), x=0.02, ha="left")
    return figure
