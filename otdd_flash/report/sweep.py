"""The report of a Hydra multirun: summary.csv, and a picture of the value against a swept setting.

Each job is a mapping with `job` (its number), `directory`, `overrides` (the settings given on the
command line, by key) and the fields of its result that `COLUMNS` and `SAMPLING` name.
`commands.outcome` collects the jobs and calls this module after the last one. The columns of
summary.csv are read by users' scripts, so their names must stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from otdd_flash.report.csv_tables import write_table_csv
from otdd_flash.report.figures.page import (
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    fit,
    measure,
    name_style,
    new_figure,
    save_picture,
)
from otdd_flash.report.flow.objective import logarithmic
from otdd_flash.shown import display, shorten

Jobs = Sequence[Mapping[str, Any]]

# Result columns, which follow the overrides, and the last columns.
COLUMNS = (
    *("source", "target", "value", "lower", "upper", "epsilon", "converged", "stopped_by"),
    *("marginal_error", "seconds"),
)
LAST = ("error", "directory")
# Present only for jobs that measured their sampling error.
SAMPLING = ("sampling_lower", "sampling_upper")

WIDTH, HEIGHT = 7.6, 4.8  # inches
LEFT = 0.12
TITLE_POINTS, LABEL_POINTS = 12.0, 9.0
# More lines than this cannot be told apart.
MOST_LINES = 12
# With more values, matplotlib chooses the ticks.
MOST_TICKS = 10


def summary_csv(jobs: Jobs, path: str | Path) -> None:
    """Write one line per job, with a column for each setting given on the command line.

    A setting that is also a result column (`source`, `target`, `epsilon`) gets one column; it holds
    the job's result, or the given value if the job has no result.

    Raises:
        InputError: the file cannot be written.
    """
    keys = dict.fromkeys(key for job in jobs for key in job["overrides"] if key not in COLUMNS)
    known = {"job", "overrides", *COLUMNS, *LAST}
    more = dict.fromkeys(key for job in jobs for key in job if key not in known)
    columns = ["job", *keys, *COLUMNS, *(key for key in more if key not in keys), *LAST]
    rows = []
    for job in jobs:
        line = {**job["overrides"], **job}
        rows.append([line.get(column) for column in columns])
    write_table_csv(path, columns, rows)


def swept(jobs: Jobs) -> dict[str, list[Any]]:
    """Return the settings that differ between jobs, each with its values in order of appearance."""
    keys = dict.fromkeys(key for job in jobs for key in job["overrides"])
    values = {
        key: list(dict.fromkeys(_hashable(job["overrides"].get(key)) for job in jobs))
        for key in keys
    }
    return {key: found for key, found in values.items() if len(found) > 1}


def axes_of(jobs: Jobs) -> tuple[str, str | None] | str:
    """Return the swept number for the horizontal axis and the setting that distinguishes lines.

    Args:
        jobs: the jobs of the multirun.

    Returns:
        The two keys, the second None if one setting was swept; or a reason why there is no picture.
    """
    found = swept(jobs)
    numbers = [key for key, values in found.items() if all(map(_is_number, values))]
    if sum(job.get("value") is not None for job in jobs) < 2:
        return "fewer than two jobs have a value"
    if not numbers:
        return f"{' and '.join(found) or 'nothing'} is swept, which is no number"
    if len(found) > 2:
        return f"{len(found)} settings are swept ({', '.join(found)}), and it shows one or two"
    by = next((key for key in found if key != numbers[0]), None)
    if by is not None and len(found[by]) > MOST_LINES:
        return f"{by} takes {len(found[by])} values, and it shows {MOST_LINES} lines at most"
    return numbers[0], by


def draw_sweep(jobs: Jobs, number: str, by: str | None, path: str | Path) -> None:
    """Draw the value and its interval against a swept number, with one line for each value of `by`.

    The interval is the sampling interval if jobs measured it, otherwise the solver bounds.

    Raises:
        InputError: the file cannot be written.
    """
    there = [job for job in jobs if job.get("value") is not None]
    figure = new_figure(WIDTH, HEIGHT)
    place = {"left": LEFT, "right": 0.975, "top": 0.9, "bottom": 0.12}
    axes = figure.subplots(gridspec_kw=place)
    axes.spines[:].set_color("0.8")
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color="0.6", labelcolor=INK, length=3)
    at = np.array([job["overrides"][number] for job in there], dtype=np.float64)
    if logarithmic(at):
        axes.set_xscale("log")
    if len(values := np.unique(at)) <= MOST_TICKS:
        axes.minorticks_off()
        axes.set_xticks(values, [f"{value:g}" for value in values])
    lines = {None: there} if by is None else _by_value(there, by)
    for line, color in zip(lines.items(), _colors(len(lines)), strict=True):
        label = None if by is None else shorten(f"{by}={_written(line[0])}", 40)
        _draw_line(axes, line[1], number, color, label)
    early = [job for job in there if not job.get("converged", True)]
    if early:
        axes.plot(
            [job["overrides"][number] for job in early],
            [job["value"] for job in early],
            marker="o",
            linestyle="",
            markersize=7,
            markerfacecolor="none",
            color="0.4",
            label="not converged: only the bounds hold",
        )
    sampled = all(job.get(SAMPLING[0]) is not None for job in there)
    axes.plot([], [], color="0.5", linewidth=5, alpha=0.3, label=_interval_name(sampled))
    axes.set_xlabel(number, fontsize=LABEL_POINTS, color=INK, **name_style(number))
    axes.set_ylabel("value, in units of the cost", fontsize=LABEL_POINTS, color=INK)
    legend = axes.legend(fontsize=8, labelcolor=INK, framealpha=0.9, edgecolor="none")
    for shown in legend.get_texts():
        shown.set(**name_style(shown.get_text()))
    pairs = dict.fromkeys(f"{display(job['source'])} → {display(job['target'])}" for job in there)
    title = next(iter(pairs)) if len(pairs) == 1 else f"{len(pairs)} pairs of datasets"
    text = fit(title, 0.85 * WIDTH, lambda shown: measure(figure, shown, TITLE_POINTS)[0])
    figure.text(LEFT, 0.965, text, fontsize=TITLE_POINTS, color=INK, va="top", **name_style(text))
    save_picture(figure, path)


def _draw_line(axes: Any, jobs: Jobs, number: str, color: Any, label: str | None) -> None:
    jobs = sorted(jobs, key=lambda job: float(job["overrides"][number]))
    at = [job["overrides"][number] for job in jobs]
    axes.plot(
        at, [job["value"] for job in jobs], color=color, marker="o", markersize=4, label=label
    )
    for job in jobs:
        ends = [job.get(key) for key in SAMPLING]
        lower, upper = (job["lower"], job["upper"]) if None in ends else ends
        x = job["overrides"][number]
        axes.vlines(x, lower, upper, color=color, linewidth=5, alpha=0.3)
        axes.plot([x, x], [lower, upper], color=color, linestyle="", marker="_", markersize=8)


def _by_value(jobs: Jobs, key: str) -> dict[Any, list[Mapping[str, Any]]]:
    lines: dict[Any, list[Mapping[str, Any]]] = {}
    for job in jobs:
        lines.setdefault(_hashable(job["overrides"].get(key)), []).append(job)
    if all(map(_is_number, lines)):
        return dict(sorted(lines.items()))
    return lines


def _colors(count: int) -> list[Any]:
    if count <= 2:
        return [SOURCE_COLOR, TARGET_COLOR][:count]
    from matplotlib import colormaps

    # The palest end cannot be seen on white.
    return [colormaps["viridis"](place) for place in np.linspace(0, 0.9, count)]


def _interval_name(sampled: bool) -> str:
    return "sampling interval" if sampled else "solver bounds"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)


def _written(value: Any) -> str:
    return f"{value:g}" if _is_number(value) else "not given" if value is None else str(value)
