"""The report of one flow: all its files in one directory, and the table that the command prints.

The files are the adapted dataset (adapted.npz and a Hugging Face dataset), metrics.csv,
trajectory.npz and pictures. `FlowResult` and the flow command call it. The data are written before
the pictures. `flow_table` reads result.json, so it must accept the fields of that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otdd_flash.arguments import takes
from otdd_flash.data.writing import (
    ImageShape,
    check_image_shape,
    write_hugging_face,
    write_npz,
)
from otdd_flash.errors import choose
from otdd_flash.files.tensor_file import write_arrays
from otdd_flash.flows.history import StepRecord, Trajectory
from otdd_flash.flows.result import FlowResult
from otdd_flash.report.csv_tables import write_table_csv
from otdd_flash.report.figures.page import (
    CONTENTS,
    Report,
    Writers,
    figure_of,
    notice_missing_glyphs,
    write_each,
)
from otdd_flash.report.flow.animation import write_animation
from otdd_flash.report.flow.images import draw_images
from otdd_flash.report.flow.objective import draw_objective
from otdd_flash.report.flow.paths import draw_paths
from otdd_flash.shown import bounded, display, epsilon_shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


@takes()
def write_flow_report(
    result: FlowResult,
    directory: str | Path,
    *,
    image_shape: ImageShape | None = None,
    seed: int = 0,
    content: str = "full",
) -> Report:
    """Write the adapted dataset, the records of all steps, and pictures.

    These are adapted.npz and the folder adapted (a Hugging Face dataset), metrics.csv,
    trajectory.npz (`rows`, `steps`, `points` in float32 and, for labelled particles, `labels`, as
    in `Trajectory`), objective.png and paths.png, and for images also images.png and flow.gif.

    Args:
        result: the result of `gradient_flow`.
        directory: created if it does not exist.
        image_shape: (c, h, w) of the particles, if they are images with pixel values in [0, 1],
            channel after channel.
        seed: of the rows that paths.png draws.
        content: `full`; `table` and `none` draw no pictures.

    Returns:
        The files written, the data first, and the files that could not be written.

    Raises:
        InputError: the particles are not images of this shape, or `content` is not a choice.

    Warns:
        MissingFileNotice: a file could not be written; the others are written.
    """
    choose("report", content, CONTENTS)
    directory, samples = Path(directory), result.samples
    if image_shape is not None:
        check_image_shape(samples.features, image_shape)
    writers: Writers = {
        directory / "adapted.npz": lambda path: write_npz(samples, path),
        directory / "adapted": lambda path: write_hugging_face(samples, path, image_shape),
        directory / "metrics.csv": lambda path: write_metrics_csv(result.evaluations, path),
        directory / "trajectory.npz": lambda path: _write_trajectory(result.trajectory, path),
    }
    if content == "full":
        writers |= _pictures(result, directory, image_shape, seed)
    return write_each(writers)


def _pictures(
    result: FlowResult, directory: Path, image_shape: ImageShape | None, seed: int
) -> Writers:
    source, target, trajectory = result.source, result.target, result.trajectory
    named = [*source.class_names, *target.class_names]
    notice_missing_glyphs([source.name, target.name, *named])
    title = _title(result)
    writers: Writers = {
        directory / "objective.png": lambda path: draw_objective(result.evaluations, path, title),
        directory / "paths.png": lambda path: draw_paths(
            source, target, result.samples, trajectory, path, seed=seed
        ),
    }
    if image_shape is not None:
        shape = image_shape
        writers |= {
            directory / "images.png": lambda path: draw_images(
                source, target, trajectory, shape, path
            ),
            directory / "flow.gif": lambda path: write_animation(
                source, target, trajectory, shape, path
            ),
        }
    return writers


def plot_flow(result: FlowResult, image_shape: ImageShape | None) -> Figure:
    """Draw the images of particles at several steps or, without an image shape, the objective."""
    source, target = result.source, result.target

    def draw() -> Figure:
        if image_shape is not None:
            return draw_images(source, target, result.trajectory, image_shape, None)
        return draw_objective(result.evaluations, None, _title(result))

    if image_shape is not None:
        check_image_shape(result.samples.features, image_shape)
    names = [source.name, target.name, *source.class_names, *target.class_names]
    return figure_of(draw, names)


def _title(result: FlowResult) -> str:
    return f"{result.source.name} on its way to {result.target.name}"


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
    from rich.table import Table
    from rich.text import Text

    title = f"{display(summary['source'])} → {display(summary['target'])}"
    table = Table(show_header=False, title=Text(title, style="table.title"), title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    start = summary["start"]
    table.add_row("distance before", bounded(start["value"], *start["bounds"]))
    table.add_row("distance after", bounded(summary["value"], *summary["bounds"]))
    if not summary["converged"]:
        table.add_row(
            "NOT CONVERGED",
            "in every step; only solver bounds can be trusted",
            style="bold red",
        )
    for name, text in _details(summary):
        table.add_row(name, Text(text))
    return table


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
    """Return what steps used instead of all points, or "" if they used all points unchanged."""
    sizes = [record["estimated_on"] for record in summary["history"] if record.get("estimated_on")]
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
