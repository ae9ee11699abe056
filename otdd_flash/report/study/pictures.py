"""Pictures of a study: heat maps over all tasks, and gains against a measure for each target.

`report.study.writing` calls it. Matrices have sources as rows and targets as columns. All pictures
show the tasks in the order of `task_order`, so that they can be compared, but for the panels of
gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from otdd_flash.report.figures.heat_maps import class_orders, heat_map
from otdd_flash.report.figures.page import (
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    name_style,
    new_figure,
    save_picture,
)
from otdd_flash.report.figures.point_names import PointName, draw_names
from otdd_flash.report.pairwise import bounds_text, rows_text
from otdd_flash.shown import epsilon_shown, shorten
from otdd_flash.study.measures import MEASURES, Reading
from otdd_flash.study.result import StudyResult
from otdd_flash.study.statistics import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches of one panel of gains.
PANEL_WIDTH, PANEL_HEIGHT = 4.4, 3.5
MARGINS = (0.75, 0.5, 0.1, 0.3)  # left, bottom, right, top
PANELS_ACROSS = 3
LABEL_POINTS = 9.0
LONGEST_TARGET = 40
MOST_TICKS = 5


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


def draw_measure(result: StudyResult, measure: str, path: Path | None) -> Figure:
    """Draw one measure between all tasks as a heat map: sources are rows, targets are columns."""
    title = MEASURES[measure].title
    notes = _notes(result, measure)
    return _draw_tasks(result, result.matrix(measure), path, title=title, label=title, notes=notes)


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


def draw_gains(result: StudyResult, path: Path) -> None:
    """Draw the gains of all transfers as a heat map."""
    title = "Gain by transfer, sources down and targets across"
    _draw_tasks(
        result, result.gains, path, title=title, label="errors spared, %", decimals=0, signed=True
    )


def draw_gains_against(result: StudyResult, measure: str, path: Path | None) -> Figure:
    """Draw gains against a measure: one panel per target, and one named point per source.

    Sources of the target's own family are italic. Axes are directed so that sources further to the
    right are predicted to gain more.
    """
    table = result.table(measure)
    targets = [j for j in range(len(result.names)) if table.present[:, j].any()]
    across = min(PANELS_ACROSS, len(targets))
    down = math.ceil(len(targets) / across)
    width, height = PANEL_WIDTH * across, PANEL_HEIGHT * down
    figure = new_figure(width, height)
    left, bottom, right, top = MARGINS
    figure.subplots_adjust(
        left / width,
        bottom / height,
        1 - right / width,
        1 - top / height,
        (left + right) / (PANEL_WIDTH - left - right),
        (bottom + top) / (PANEL_HEIGHT - bottom - top),
    )
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(targets) :]:
        axes.set_visible(False)
    drawn = [
        _draw_panel(axes, result, measure, j) for axes, j in zip(panels, targets, strict=False)
    ]
    for axes, names in zip(panels, drawn, strict=False):
        draw_names(figure, axes, names, np.zeros((0, 2, 2)))
    save_picture(figure, path)
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
    label = kind.title
    if kind.nearer < 0:
        axes.invert_xaxis()
        label += " (falls to the right)"
    title = f"target {shorten(result.names[j], LONGEST_TARGET)}"
    axes.set_title(title, fontsize=LABEL_POINTS + 1, color=INK, loc="left", **name_style(title))
    axes.set_xlabel(label, fontsize=LABEL_POINTS, color=INK)
    axes.set_ylabel("gain, %", fontsize=LABEL_POINTS, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(MOST_TICKS))
    axes.tick_params(labelsize=8, color="0.6", labelcolor=INK, length=3)
    axes.spines[:].set_color("0.8")
    if x.min() > 0 and x.max() > 30 * x.min():
        axes.set_xscale("log")
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


def _draw_tasks(
    result: StudyResult,
    matrix: Numbers,
    path: Path | None,
    *,
    title: str,
    label: str,
    decimals: int | None = None,
    signed: bool = False,
    notes: Sequence[str] = (),
) -> Figure:
    order = task_order(result)
    names: Sequence[str] = [result.names[place] for place in order]
    return heat_map(
        torch.from_numpy(matrix[np.ix_(order, order)]),
        names,
        names,
        path,
        title=title,
        value_label=label,
        row_groups=[("sources", len(names))],
        column_groups=[("targets", len(names))],
        row_colors=[INK],
        column_colors=[INK],
        decimals=decimals,
        signed=signed,
        notes=notes,
    )
