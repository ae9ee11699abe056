"""The report of a Hydra multirun: summary.csv, and a picture of the value against a swept setting.

Each job is a mapping with `job` (the name of its folder, which is its number by default),
`directory` and `overrides` (the settings given on the command line, by key). It has those fields of
`COLUMNS`, `SAMPLING` and `error` that are known of the job; any other field becomes a column too.
`commands.outcome` collects the jobs and calls this module after the last one. The columns of
summary.csv are read by users' scripts, so their names must stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from otdd_flash.report.page import (
    SOURCE_COLOR,
    TARGET_COLOR,
    TICK_POINTS,
    fit_title,
    logarithmic,
    new_figure,
    scale_logarithmically,
)
from otdd_flash.report.tables import write_table_csv
from otdd_flash.shown import display, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Jobs = Sequence[Mapping[str, Any]]

# The columns of results, which stand after those of the overrides, and the columns at the end.
COLUMNS = (
    *("source", "target", "value", "lower", "upper", "epsilon", "converged", "stopped_by"),
    *("marginal_error", "seconds"),
)
LAST = ("error", "directory")
# Present only for jobs that measured their sampling error.
SAMPLING = ("sampling_lower", "sampling_upper")

WIDTH, HEIGHT = 7.6, 4.8  # inches
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
    lines = [{**job["overrides"], **job} for job in jobs]
    write_table_csv(path, columns, ([line.get(column) for column in columns] for line in lines))


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
        The two keys, the second None if one setting was swept; or a reason why there is no
        picture, which continues the caller's words "no picture of the sweep: ".
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


def names_drawn(jobs: Jobs) -> list[str]:
    """Return the users' names that the picture may show."""
    sides = [str(job.get(side)) for job in jobs for side in ("source", "target")]
    given = [f"{key}={value}" for job in jobs for key, value in job["overrides"].items()]
    return sides + given


def draw_sweep(jobs: Jobs, number: str, by: str | None) -> Figure:
    """Draw the value and its interval against a swept number, with one line for each value of `by`.

    The interval of each job is its sampling interval if it measured one, otherwise its solver
    bounds; the legend says sampling interval only if all jobs measured it.
    """
    there = [job for job in jobs if job.get("value") is not None]
    pairs = dict.fromkeys(f"{display(job['source'])} → {display(job['target'])}" for job in there)
    title = next(iter(pairs)) if len(pairs) == 1 else f"{len(pairs)} pairs of datasets"
    # By the value of `by`; None is one line for all, or the jobs in which it is not given.
    lines: dict[Any, list[Mapping[str, Any]]] = {}
    for job in there:
        lines.setdefault(None if by is None else _hashable(job["overrides"].get(by)), []).append(
            job
        )
    if all(map(_is_number, lines)):
        lines = dict(sorted(lines.items()))
    labels = {value: shorten(f"{by}={_written(value)}", 40) for value in lines if by is not None}
    figure = new_figure(WIDTH, HEIGHT)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    axes.grid()
    axes.tick_params(labelsize=TICK_POINTS)
    _choose_scale(axes, np.array([job["overrides"][number] for job in there], np.float64))
    for (value, line), color in zip(lines.items(), _colors(len(lines)), strict=True):
        _draw_line(axes, line, number, color, labels.get(value))
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
    kind = "sampling interval" if sampled else "solver bounds"
    axes.plot([], [], color="0.5", linewidth=5, alpha=0.3, label=kind)
    axes.set(xlabel=number, ylabel="value, in units of the cost")
    axes.set_title(fit_title(figure, title, 0.85 * WIDTH))
    axes.legend(fontsize=8)
    return figure


def _choose_scale(axes: Any, at: Any) -> None:
    """Choose the scale of the swept number, and put ticks at its values if they are few."""
    if logarithmic(at):
        scale_logarithmically(axes, "x")
    if len(values := np.unique(at)) <= MOST_TICKS:
        axes.set_xticks(values, [f"{value:g}" for value in values])


def _draw_line(axes: Any, jobs: Jobs, number: str, color: Any, label: str | None) -> None:
    jobs = sorted(jobs, key=lambda job: float(job["overrides"][number]))
    at = [job["overrides"][number] for job in jobs]
    values = [job["value"] for job in jobs]
    axes.plot(at, values, color=color, marker="o", markersize=4, label=label)
    for x, job in zip(at, jobs, strict=True):
        ends = [job.get(key) for key in SAMPLING]
        ends = [job["lower"], job["upper"]] if None in ends else ends
        axes.vlines(x, *ends, color=color, linewidth=5, alpha=0.3)
        axes.plot([x, x], ends, color=color, linestyle="", marker="_", markersize=8)


def _colors(count: int) -> list[Any]:
    if count <= 2:
        return [SOURCE_COLOR, TARGET_COLOR][:count]
    from matplotlib import colormaps

    # The palest end cannot be seen on white.
    return [colormaps["viridis"](place) for place in np.linspace(0, 0.9, count)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)


def _written(value: Any) -> str:
    return f"{value:g}" if _is_number(value) else "not given" if value is None else str(value)
