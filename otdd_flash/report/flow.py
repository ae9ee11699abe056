"""The report of one flow: its files, the table that the command prints, and objective.png.

The files are the adapted dataset (adapted.npz and a Hugging Face dataset), metrics.csv,
trajectory.npz and pictures. objective.png shows divergence and solver bounds, gradient norm and
iterations at each step. `commands.adapt` calls `flow_table` and `write_flow_report`, and
`FlowResult.plot` calls `plot_flow`. A change must respect that the data are written before the
pictures (`tests/report/test_flow_report.py`), and that `flow_table` takes the fields of
result.json, which `FlowResult.to_dict` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.arguments import takes
from otdd_flash.data.writing import (
    ImageShape,
    check_image_shape,
    write_hugging_face,
    write_npz,
)
from otdd_flash.errors import choose
from otdd_flash.files.tensor_file import write_arrays
from otdd_flash.flows.result import FlowResult, StepRecord, Trajectory
from otdd_flash.report.flow_pictures import draw_images, draw_paths, write_animation
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
    fit_title,
    logarithmic,
    new_figure,
    scale_logarithmically,
    write_each,
)
from otdd_flash.report.tables import facts_table, write_table_csv
from otdd_flash.shown import bounded, display, epsilon_shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table


# `takes` checks arguments by their annotations.
@takes()
def write_flow_report(
    result: FlowResult,
    directory: str | Path,
    *,
    image_shape: ImageShape | None = None,
    seed: int = 0,
    content: str = "full",
) -> Report:
    """Write the adapted dataset, the records of all evaluations, and pictures.

    These are adapted.npz and the folder adapted (a Hugging Face dataset), metrics.csv,
    trajectory.npz (`rows`, `steps`, `points` in float32 and, for labelled particles, `labels`, as
    in `Trajectory`), objective.png and paths.png, and for images also images.png and flow.gif.

    Args:
        result: the result of `gradient_flow`.
        directory: created if it does not exist.
        image_shape: (c, h, w) of the particles, if they are images with pixel values in [0, 1],
            channel after channel.
        seed: of the draw of the rows that paths.png shows.
        content: `full` draws pictures. `table` and `none` draw none; they differ only in what the
            command prints.

    Returns:
        The files written, the data first, and the files that could not be written.

    Raises:
        InputError: the particles are not images of this shape, or `content` is not a choice.

    Warns:
        MissingFileNotice: a file could not be written; the others are written.
    """
    # The command line calls this setting `report`.
    choose("report", content, CONTENTS)
    directory, samples, source, target = (
        Path(directory),
        result.samples,
        result.source,
        result.target,
    )
    trajectory, title = result.trajectory, _title(result)
    writers: Writers = {
        directory / "adapted.npz": lambda path: write_npz(samples, path),
        directory / "adapted": lambda path: write_hugging_face(samples, path, image_shape),
        directory / "metrics.csv": lambda path: write_metrics_csv(result.evaluations, path),
        directory / "trajectory.npz": lambda path: _write_trajectory(trajectory, path),
    }
    pictures: Pictures = {
        directory / "objective.png": lambda: draw_objective(result.evaluations, title),
        directory / "paths.png": lambda: draw_paths(source, target, samples, trajectory, seed=seed),
    }
    animations: Writers = {}
    if image_shape is not None:
        check_image_shape(samples.features, image_shape)
        moved = source, target, trajectory, image_shape
        pictures[directory / "images.png"] = lambda: draw_images(*moved)
        animations[directory / "flow.gif"] = lambda path: write_animation(*moved, path)
    if content != "full":
        return write_each(writers)
    return write_each(writers, pictures, _names(result)) + write_each(animations)


def plot_flow(result: FlowResult, image_shape: ImageShape | None) -> Figure:
    """Draw the images of particles at several steps or, without an image shape, the objective."""

    def draw() -> Figure:
        if image_shape is None:
            return draw_objective(result.evaluations, _title(result))
        return draw_images(result.source, result.target, result.trajectory, image_shape)

    if image_shape is not None:
        check_image_shape(result.samples.features, image_shape)
    return figure_of(draw, _names(result))


def _title(result: FlowResult) -> str:
    return f"{result.source.name} on its way to {result.target.name}"


def _names(result: FlowResult) -> list[str]:
    """Return the users' names that pictures of the flow show."""
    functionals = dict.fromkeys(name for one in result.evaluations for name in one.functionals)
    sides = (result.source, result.target)
    return [*functionals, *(name for side in sides for name in (side.name, *side.class_names))]


def _write_trajectory(trajectory: Trajectory, path: Path) -> None:
    arrays: dict[str, Any] = {
        "rows": trajectory.rows.cpu(),
        "steps": trajectory.steps.cpu(),
        "points": trajectory.points.float(),
    }
    if trajectory.labels is not None:
        arrays["labels"] = trajectory.labels.cpu()
    write_arrays(path, arrays)


def flow_table(summary: Mapping[str, Any]) -> Table:
    """Make a table of two columns with the main fields of a flow's result.json.

    Args:
        summary: the content of result.json.
    """
    start, late = summary["start"], None
    distances = [
        ("distance before", bounded(start["value"], *start["bounds"])),
        ("distance after", bounded(summary["value"], *summary["bounds"])),
    ]
    if not summary["converged"]:
        late = "some step stopped early; only solver bounds can be trusted"
    title = f"{display(summary['source'])} → {display(summary['target'])}"
    return facts_table(title, distances, late, _details(summary))


def _details(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings, seconds = summary["settings"], summary["seconds"]
    spent = ", ".join(f"{phase} {took:.2f}" for phase, took in seconds.items())
    details = [
        (
            "sampling error",
            "not measured; of the distance before, otdd_flash.distance with subsample=50 gives an "
            "interval",
        ),
        ("mode", str(settings["flow.mode"])),
        ("steps", f"{summary['steps']}, stopped by {summary['stopped_by']}"),
        ("step", f"{settings['flow.optimizer']}, {settings['flow.step_size']:g}"),
    ]
    if seen := _seen_by_steps(summary):
        details.append(("steps saw", seen))
    if settings["flow.functionals"]:
        objective = summary["objective"]
        details.append(("objective", f"{objective['start']:.5g} → {objective['end']:.5g}"))
    return [
        *details,
        ("epsilon", epsilon_shown(summary["epsilon"], summary.get("mean_cost"))),
        ("samples", f"{summary['n']} × {summary['m']}, {summary['d']} coordinates"),
        ("class distances", _class_distances(settings)),
        ("marginal error", f"{summary['marginal_error']:.2g}"),
        ("seconds", f"{sum(seconds.values()):.2f} ({spent})"),
        ("computed on", f"{summary['ran_on']}, {summary['compute']['precision']}"),
    ]


def _seen_by_steps(summary: Mapping[str, Any]) -> str:
    """Return which points steps used, or "" if all steps used all points unchanged."""
    sizes = [record["estimated_on"] for record in summary["history"] if record.get("estimated_on")]
    # Steps that used all points unchanged have no such number.
    if not sizes:
        return ""
    noise = summary["settings"]["flow.noise"]
    moved = f", moved by noise of {noise:g}" if noise else ""
    return f"{sizes[0]:,} points{moved}: their distances are estimates on {sizes[0]:,} points"


def _class_distances(settings: Mapping[str, Any]) -> str:
    method = str(settings["labels.method"])
    if (epsilon := settings.get("labels.epsilon")) is not None:
        method += f", epsilon {epsilon:.6g}"
    if settings["flow.mode"] not in ("joint", "augmented"):
        return method
    return f"{method}, of classes that moved beside the points"


def write_metrics_csv(history: Sequence[StepRecord], path: str | Path) -> None:
    """Write one line per record; a functional that a record lacks is an empty cell.

    Raises:
        InputError: the file cannot be written.
    """
    rows = [record.row() for record in history]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    write_table_csv(path, columns, ([row.get(column) for column in columns] for row in rows))


Array = NDArray[np.float64]

SIDE = 7.6  # inches

# The colour of solver bounds: a lighter shade of the source's colour.
BAND_COLOR = "#9CC7E0"

# With more steps, dots would run into a thick line.
MOST_DOTS, MOST_TICKS = 60, 16

# Bounds beyond this factor of the lines are cut; in their own panel, those beyond this multiple of
# the median width.
FARTHEST_FACTOR, FARTHEST_USUAL = 3.0, 8.0


def draw_objective(history: Sequence[StepRecord], title: str) -> Figure:
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
        title: the title of the picture.
    """
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(SIDE, SIDE)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(4, 1, sharex=True, height_ratios=(4.2, 1.2, 1.2, 1.2))
    for axes in panels:
        axes.grid()
        axes.tick_params(labelsize=TICK_POINTS)
    figure.align_ylabels()
    _draw_divergence(panels[0], history)
    # The later of two records of step 0 stays, that of the step itself.
    stepwise = list({record.step: record for record in history}.values())
    steps, norms, iterations = _columns(stepwise, "step", "gradient_norm", "iterations")
    _draw_bounds(panels[1], history)
    _choose_scale(panels[2], norms, norms, norms)
    panels[2].plot(steps, norms, color=INK, **_line(len(steps)))
    scale = ", log" if panels[2].get_yscale() == "log" else ""
    panels[2].set_ylabel(f"gradient\nnorm{scale}")
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    panels[3].stairs(iterations, edges, fill=True, color="0.65")
    panels[3].set(xlabel="step", ylabel="solver\niterations")
    panels[3].yaxis.set_major_locator(MaxNLocator(4, integer=True))
    panels[3].xaxis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True))
    if len(steps) <= MOST_TICKS:
        panels[3].set_xticks(steps)
    room = max(0.02 * (steps[-1] - steps[0]), 0.6)
    panels[3].set_xlim(steps[0] - room, steps[-1] + room)
    panels[0].set_title(fit_title(figure, title, 0.85 * SIDE))
    return figure


def _draw_divergence(axes: Axes, history: Sequence[StepRecord]) -> None:
    whole, estimates = _split(history)
    at, divergence, objective, lower, upper = _columns(
        whole, "step", "divergence", "objective", "lower", "upper"
    )
    at_estimates, guesses = _columns(estimates, "step", "estimate")
    functionals = dict.fromkeys(name for record in history for name in record.functionals)
    lines = np.concatenate([divergence, guesses, objective if functionals else divergence])
    lower, upper = _choose_scale(axes, lines, lower, upper)
    # A flow of estimates evaluates all points only at start and end: no line between them.
    unknown_between: dict[str, Any] = {"linestyle": "", "marker": "o"} if estimates else {}
    text = f"dataset distance to the target: {divergence[0]:.4g} → {divergence[-1]:.4g}"
    axes.plot(at, divergence, color=SOURCE_COLOR, label=text, **_line(len(at)) | unknown_between)
    if estimates:
        text = f"estimates on {estimates[0].estimated_on:,} points"
        style = _line(1) | {"marker": ".", "color": "0.6", "linestyle": ""}
        axes.plot(at_estimates, guesses, label=text, **style)
    if functionals:
        text = f"objective: distance + {' + '.join(functionals)}"
        style = {"linewidth": 1.8, "linestyle": "--", **unknown_between}
        axes.plot(at, objective, color=TARGET_COLOR, label=text, **style)
    early = [record for record in whole if not record.converged]
    if early:
        text = "not converged: only the solver bounds hold"
        style = _line(1) | {"markerfacecolor": "white", "markersize": 6, "linestyle": ""}
        axes.plot(*_columns(early, "step", "divergence"), color=SOURCE_COLOR, label=text, **style)
    text = "solver bounds, by themselves below"
    _draw_band(axes, at, lower, upper, apart=bool(estimates), label=text)
    axes.set_ylabel(f"in units of the cost, {axes.get_yscale()} scale")
    axes.legend()


def _split(history: Sequence[StepRecord]) -> tuple[list[StepRecord], list[StepRecord]]:
    """Return the records over all points, and those of steps that estimated the divergence."""
    whole = [record for record in history if record.estimate is None]
    return whole, [record for record in history if record.estimate is not None]


def _columns(records: Sequence[StepRecord], *names: str) -> list[Array]:
    return [np.array([getattr(one, name) for one in records], np.float64) for name in names]


def _draw_bounds(axes: Axes, history: Sequence[StepRecord]) -> None:
    """Draw the differences between solver bounds and divergence, at a scale of their own."""
    whole, estimates = _split(history)
    at, divergence, lower, upper = _columns(whole, "step", "divergence", "lower", "upper")
    below, above = lower - divergence, upper - divergence
    sizes = np.maximum(np.abs(below), np.abs(above))
    usual = float(np.median(sizes[np.isfinite(sizes)])) if np.isfinite(sizes).any() else 0.0
    # Without a limit, one solve that stopped early would flatten the others.
    most = FARTHEST_USUAL * usual or 1.0
    below, above = np.clip(below, -most, most), np.clip(above, -most, most)
    _draw_band(axes, at, below, above, apart=bool(estimates))
    axes.axhline(0, color=SOURCE_COLOR, linewidth=1.0)
    low, high = np.nanmin(below, initial=0.0), np.nanmax(above, initial=0.0)
    room = 0.12 * (high - low) or 1e-3 * abs(divergence[0]) or 1.0
    axes.set(ylim=(low - room, high + room), ylabel="bounds −\ndistance")


def _draw_band(
    axes: Axes, at: Array, lower: Array, upper: Array, *, apart: bool, label: str = ""
) -> None:
    """Draw solver bounds as a band, or as one bar per step if the steps are `apart`."""
    band: dict[str, Any] = {"color": BAND_COLOR, "label": label, "zorder": 1.5}
    if apart or len(at) == 1:
        axes.vlines(at, lower, upper, linewidth=6, **band)
    else:
        axes.fill_between(at, lower, upper, linewidth=0, **band)


def _line(count: int) -> dict[str, Any]:
    return {"linewidth": 1.8, "markersize": 4, "marker": "o" if count <= MOST_DOTS else ""}


def _choose_scale(axes: Axes, lines: Array, lower: Array, upper: Array) -> tuple[Array, Array]:
    """Choose scale and limits by the lines, and return the bounds cut to these limits.

    A lower bound near or below 0 on a logarithmic scale, or the upper bound of a solve that stopped
    early, would otherwise flatten the lines.
    """
    from matplotlib.ticker import LogLocator

    finite = lines[np.isfinite(lines)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    if logarithmic(lines):
        # Plain numbers at powers of ten, in a narrow range also at 2 and 5 times these.
        scale_logarithmically(axes, "y")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        least, most = low / FARTHEST_FACTOR, high * FARTHEST_FACTOR
    else:
        reach = 0.5 * (high - low) or 0.1 * abs(high) or 1.0
        least, most = low - reach, high + reach
    lower, upper = np.clip(lower, least, most), np.clip(upper, least, most)
    scale = axes.yaxis.get_transform()
    ends = scale.transform(np.array([min(low, np.nanmin(lower)), max(high, np.nanmax(upper))]))
    # Room is added in the units of the scale, so that it looks equal above and below. In a far
    # narrower range matplotlib writes ticks relative to an offset, which would run into the title.
    room = max(0.06 * (ends[1] - ends[0]), 0.01 * abs(ends).max()) or 1.0
    axes.set_ylim(*scale.inverted().transform(ends + np.array([-room, room])))
    return lower, upper
