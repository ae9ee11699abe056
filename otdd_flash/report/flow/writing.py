"""All files of one flow, in one directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from otdd_flash.arguments.values import FOLDER
from otdd_flash.checks import takes
from otdd_flash.data.writing import (
    ImageShape,
    check_image_shape,
    write_hugging_face,
    write_npz,
)
from otdd_flash.errors import choose
from otdd_flash.files.npz_file import write_arrays
from otdd_flash.flows.history import Trajectory
from otdd_flash.flows.result import FlowResult
from otdd_flash.report.figures.drawing import CONTENTS, Report, Writers, write_each
from otdd_flash.report.figures.fonts import notice_missing_glyphs
from otdd_flash.report.figures.page import figure_of
from otdd_flash.report.flow.animation import write_animation
from otdd_flash.report.flow.images import draw_images
from otdd_flash.report.flow.metrics import write_metrics_csv
from otdd_flash.report.flow.objective import draw_objective
from otdd_flash.report.flow.paths import draw_paths

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@takes(FOLDER)
def write_flow_report(
    result: FlowResult,
    directory: str | Path,
    *,
    image_shape: ImageShape | None = None,
    seed: int = 0,
    content: str = "full",
) -> Report:
    """Write the adapted dataset, what was recorded, and pictures.

    These are adapted.npz and the folder adapted (a Hugging Face dataset), metrics.csv,
    trajectory.npz (`rows`, `steps`, `points` in float32 and, of labelled particles, `labels`, as in
    `Trajectory`), objective.png and paths.png; of images also images.png and flow.gif.

    Args:
        result: of `gradient_flow`.
        directory: made if it does not exist.
        image_shape: (c, h, w) of the particles, if they are images with pixel values in [0, 1],
            channel after channel.
        seed: of the rows that paths.png draws.
        content: `full`; `table` and `none` draw no pictures.

    Returns:
        The files written, the data first, and those that could not be.

    Raises:
        InputError: the particles are not images of this shape, or no such content.

    Warns:
        MissingFileNotice: a file could not be written; the others are.
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
    """Draw particles that are images on their way, or else the objective."""
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
