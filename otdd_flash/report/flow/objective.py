"""objective.png: a flow's divergence and solver bounds, gradient norm and iterations at each step.

`report.flow.writing` calls `draw_objective`, for the report of a flow and for `FlowResult.plot`;
`report.sweep`, which draws a multirun, uses `logarithmic`. Steps that used part of the points, or
added noise to them, have records with an estimate of the divergence, which has no bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.flows.history import StepRecord
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
WIDTH, HEIGHT = 7.6, 7.6  # inches
LEFT = 0.12
# The colour of solver bounds: a lighter shade of the source's colour.
BAND_COLOR = "#9CC7E0"
TITLE_POINTS, LABEL_POINTS = 12.0, 9.0
# A range this wide is easier to read on a logarithmic scale.
LOGARITHMIC_FROM = 10.0
# With more steps, dots would run into a thick line.
MOST_DOTS, MOST_TICKS = 60, 16
# Bounds beyond this factor of the lines are cut; in their own panel, those beyond this multiple of
# the median width.
FARTHEST_FACTOR, FARTHEST_USUAL = 3.0, 8.0


def draw_objective(history: Sequence[StepRecord], path: str | Path | None, title: str) -> Figure:
    """Draw divergence and solver bounds against the step, with gradient norm and iterations below.

    Solver bounds are often nearer to the divergence than the width of its line, so a second panel
    shows their differences from it, enlarged. Axes name their unit and their scale.

    If the flow also lowers functionals, the objective, distance plus functionals, is drawn too.
    Estimates, from steps that used part of the points or added noise to them, are separate dots
    without a line or bounds. A scale is logarithmic if its values are positive and span a factor of
    ten. Bounds far outside the range of the lines are cut.

    Args:
        history: the records, at least one of them over all points. If the first step used fewer
            points, there are two records of step 0: one over all points, then that of the step.
        path: the PNG file; None writes no file.
        title: the title of the picture.

    Raises:
        InputError: the file cannot be written.
    """
    figure = new_figure(WIDTH, HEIGHT)
    shape = {"height_ratios": (4.2, 1.2, 1.2, 1.2), "hspace": 0.16}
    place = {"left": LEFT, "right": 0.975, "top": 0.935, "bottom": 0.075}
    panels = figure.subplots(4, 1, sharex=True, gridspec_kw=shape | place)
    for axes in panels:
        axes.spines[:].set_color("0.8")
        axes.grid(color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, color="0.6", labelcolor=INK, length=3)
        axes.yaxis.set_label_coords(-0.09, 0.5)
    _draw_divergence(panels[0], history)
    # Of two records of step 0 the later one stays, that of the step itself.
    stepwise = list({record.step: record for record in history}.values())
    steps = np.array([record.step for record in stepwise])
    _draw_bounds(panels[1], history)
    _draw_gradient(panels[2], steps, stepwise)
    _draw_iterations(panels[3], steps, stepwise)
    text = fit(title, 0.85 * WIDTH, lambda shown: measure(figure, shown, TITLE_POINTS)[0])
    figure.text(LEFT, 0.975, text, fontsize=TITLE_POINTS, color=INK, va="top", **name_style(text))
    save_picture(figure, path)
    return figure


def logarithmic(values: Array) -> bool:
    """Return whether the finite values are positive and span a factor of `LOGARITHMIC_FROM`."""
    finite = values[np.isfinite(values)]
    if not len(finite) or finite.min() <= 0:
        return False
    return bool(finite.max() >= LOGARITHMIC_FROM * finite.min())


def _draw_divergence(axes: Axes, history: Sequence[StepRecord]) -> None:
    whole = [record for record in history if record.estimate is None]
    estimates = [record for record in history if record.estimate is not None]
    divergence, objective, lower, upper = (
        np.array([getattr(record, name) for record in whole], dtype=np.float64)
        for name in ("divergence", "objective", "lower", "upper")
    )
    guesses = np.array([record.estimate for record in estimates], dtype=np.float64)
    functionals = dict.fromkeys(name for record in history for name in record.functionals)
    lines = np.concatenate([divergence, guesses, objective if functionals else divergence])
    lower, upper = _choose_scale(axes, lines, lower, upper)
    at = np.array([record.step for record in whole])
    # A flow of estimates evaluates all points only at start and end: no line between them.
    unknown_between: dict[str, Any] = {"linestyle": "", "marker": "o"} if estimates else {}
    text = f"dataset distance to the target: {divergence[0]:.4g} → {divergence[-1]:.4g}"
    axes.plot(at, divergence, color=SOURCE_COLOR, label=text, **_line(len(at)) | unknown_between)
    if estimates:
        text = f"estimates on {estimates[0].estimated_on:,} points"
        style = _line(1) | {"marker": ".", "color": "0.6", "linestyle": ""}
        axes.plot([record.step for record in estimates], guesses, label=text, **style)
    if functionals:
        text = f"objective: distance + {' + '.join(functionals)}"
        style = {"linewidth": 1.8, "linestyle": "--", **unknown_between}
        axes.plot(at, objective, color=TARGET_COLOR, label=text, **style)
    early = ~np.array([record.converged for record in whole])
    if early.any():
        text = "not converged: only the solver bounds hold"
        style = _line(1) | {"markerfacecolor": "white", "markersize": 6, "linestyle": ""}
        axes.plot(at[early], divergence[early], color=SOURCE_COLOR, label=text, **style)
    _draw_band(
        axes, at, lower, upper, apart=bool(estimates), label="solver bounds, by themselves below"
    )
    unit = f"in units of the cost, {axes.get_yscale()} scale"
    axes.set_ylabel(unit, fontsize=LABEL_POINTS, color=INK)
    legend = axes.legend(fontsize=LABEL_POINTS, labelcolor=INK, framealpha=0.9, edgecolor="none")
    for shown in legend.get_texts():
        shown.set(**name_style(shown.get_text()))


def _draw_bounds(axes: Axes, history: Sequence[StepRecord]) -> None:
    """Draw the differences between solver bounds and divergence, at a scale of their own."""
    whole = [record for record in history if record.estimate is None]
    divergence, lower, upper = (
        np.array([getattr(record, name) for record in whole], dtype=np.float64)
        for name in ("divergence", "lower", "upper")
    )
    at = np.array([record.step for record in whole])
    below, above = lower - divergence, upper - divergence
    sizes = np.maximum(np.abs(below), np.abs(above))
    usual = float(np.median(sizes[np.isfinite(sizes)])) if np.isfinite(sizes).any() else 0.0
    # Without a limit, one solve that stopped early would flatten the others.
    most = FARTHEST_USUAL * usual or 1.0
    below, above = np.clip(below, -most, most), np.clip(above, -most, most)
    _draw_band(axes, at, below, above, apart=len(whole) < len(history))
    axes.axhline(0, color=SOURCE_COLOR, linewidth=1.0)
    low, high = np.nanmin(below, initial=0.0), np.nanmax(above, initial=0.0)
    room = 0.12 * (high - low) or 1e-3 * abs(divergence[0]) or 1.0
    axes.set_ylim(low - room, high + room)
    axes.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
    axes.yaxis.get_offset_text().set(fontsize=8, color=INK)
    axes.set_ylabel("bounds −\ndistance", fontsize=LABEL_POINTS, color=INK)


def _draw_band(
    axes: Axes, at: Array, lower: Array, upper: Array, *, apart: bool, label: str = ""
) -> None:
    """Draw solver bounds as a band, or as one bar per step if the steps are `apart`."""
    band: dict[str, Any] = {"color": BAND_COLOR, "label": label, "zorder": 1.5}
    if apart or len(at) == 1:
        axes.vlines(at, lower, upper, linewidth=6, **band)
    else:
        axes.fill_between(at, lower, upper, linewidth=0, **band)


def _draw_gradient(axes: Axes, steps: Array, history: Sequence[StepRecord]) -> None:
    norms = np.array([record.gradient_norm for record in history], dtype=np.float64)
    _choose_scale(axes, norms, norms, norms)
    axes.plot(steps, norms, color=INK, **_line(len(steps)))
    scale = ", log" if axes.get_yscale() == "log" else ""
    axes.set_ylabel(f"gradient\nnorm{scale}", fontsize=LABEL_POINTS, color=INK)


def _draw_iterations(axes: Axes, steps: Array, history: Sequence[StepRecord]) -> None:
    from matplotlib.ticker import MaxNLocator

    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    axes.stairs([record.iterations for record in history], edges, fill=True, color="0.65")
    axes.set_ylabel("solver\niterations", fontsize=LABEL_POINTS, color=INK)
    axes.set_xlabel("step", fontsize=LABEL_POINTS, color=INK)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    if len(steps) <= MOST_TICKS:
        axes.set_xticks(steps)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True))
    room = max(0.02 * (steps[-1] - steps[0]), 0.6)
    axes.set_xlim(steps[0] - room, steps[-1] + room)


def _line(count: int) -> dict[str, Any]:
    return {"linewidth": 1.8, "markersize": 4, "marker": "o" if count <= MOST_DOTS else ""}


def _choose_scale(axes: Axes, lines: Array, lower: Array, upper: Array) -> tuple[Array, Array]:
    """Choose scale and limits by the lines, and return the bounds cut to these limits.

    A lower bound near or below 0 on a logarithmic scale, or the upper bound of a solve that stopped
    early, would otherwise flatten the lines.
    """
    finite = lines[np.isfinite(lines)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    if logarithmic(lines):
        axes.set_yscale("log")
        _label_decades(axes, low, high)
        least, most = low / FARTHEST_FACTOR, high * FARTHEST_FACTOR
    else:
        reach = 0.5 * (high - low) or 0.1 * abs(high) or 1.0
        least, most = low - reach, high + reach
    lower, upper = np.clip(lower, least, most), np.clip(upper, least, most)
    scale = axes.yaxis.get_transform()
    ends = scale.transform(np.array([min(low, np.nanmin(lower)), max(high, np.nanmax(upper))]))
    # Added in the units of the scale, so that it looks equal above and below. In a far narrower
    # range matplotlib writes ticks relative to an offset, which would run into the title.
    room = max(0.06 * (ends[1] - ends[0]), 0.01 * abs(ends).max()) or 1.0
    axes.set_ylim(*scale.inverted().transform(ends + np.array([-room, room])))
    return lower, upper


def _label_decades(axes: Axes, low: float, high: float) -> None:
    """Write plain numbers at powers of ten, in a narrow range also at 2 and 5 times these."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    between = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
