"""All files of one flow, in one directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from otdd_flash.flows.dataset_files import (
    ImageShape,
    check_image_shape,
    write_hugging_face,
    write_npz,
)
from otdd_flash.flows.history import StepRecord, Trajectory
from otdd_flash.labels.npz_file import write_arrays
from otdd_flash.report.flow_animation import write_animation
from otdd_flash.report.flow_images import draw_images
from otdd_flash.report.flow_metrics import write_metrics_csv
from otdd_flash.report.flow_objective import draw_objective
from otdd_flash.report.flow_paths import draw_paths
from otdd_flash.samples import LabeledSamples


class Flow(Protocol):
    """What the report reads of a `FlowResult`."""

    @property
    def source(self) -> LabeledSamples:
        """The particles before the first step."""

    @property
    def target(self) -> LabeledSamples:
        """What they moved towards."""

    @property
    def samples(self) -> LabeledSamples:
        """The particles after the last step."""

    @property
    def evaluations(self) -> Sequence[StepRecord]:
        """Records of the start, of every step and of the end."""

    @property
    def trajectory(self) -> Trajectory:
        """Where some particles were on the way."""


def write_flow_report(
    result: Flow, directory: str | Path, *, image_shape: ImageShape | None = None, seed: int = 0
) -> list[Path]:
    """Write the adapted dataset, what was recorded, and pictures.

    These are adapted.npz and the folder adapted (a Hugging Face dataset), metrics.csv,
    trajectory.npz (`rows`, `steps`, `points` in float32 and, of labelled particles, `labels`, as in
    `Trajectory`), objective.png and paths.png; of images also images.png and flow.gif.

    Args:
        result: a `FlowResult`.
        directory: made if it does not exist.
        image_shape: (c, h, w) of the particles, if they are images with pixel values in [0, 1],
            channel after channel.
        seed: of the rows that paths.png draws.

    Returns:
        What was written, the data first.

    Raises:
        InputError: the particles are not images of this shape, or the directory cannot be written.
    """
    directory = Path(directory)
    if image_shape is not None:
        check_image_shape(result.samples.features, image_shape)
    source, target, trajectory = result.source, result.target, result.trajectory
    names = ("adapted.npz", "adapted", "metrics.csv", "trajectory.npz")
    written = [directory / name for name in (*names, "objective.png", "paths.png")]
    write_npz(result.samples, written[0])
    write_hugging_face(result.samples, written[1], image_shape)
    write_metrics_csv(result.evaluations, written[2])
    _write_trajectory(trajectory, written[3])
    draw_objective(result.evaluations, written[4], f"{source.name} on its way to {target.name}")
    draw_paths(source, target, result.samples, trajectory, written[5], seed=seed)
    if image_shape is not None:
        written += [directory / "images.png", directory / "flow.gif"]
        draw_images(source, target, trajectory, image_shape, written[-2])
        write_animation(trajectory, image_shape, written[-1])
    return written


def _write_trajectory(trajectory: Trajectory, path: Path) -> None:
    arrays: dict[str, Any] = {
        "rows": trajectory.rows.cpu(),
        "steps": trajectory.steps.cpu(),
        "points": trajectory.points.float(),
    }
    if trajectory.labels is not None:
        arrays["labels"] = trajectory.labels.cpu()
    write_arrays(path, arrays)
