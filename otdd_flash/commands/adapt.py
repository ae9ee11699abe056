"""The work of `python -m otdd_flash.flow`: one flow and its files.

For the entry point `otdd_flash.flow`, `commands.start.run_work` imports this module by name and
`commands.outcome.run_job` calls `adapt`. It checks settings before any data are read, because
reading and embedding take long: all but the keys of a dataset, which are checked when it is loaded,
and whether gradients pass through the network of `flow.space=pixels`, which depends on the shape of
the images. Then it chooses the space in which particles move, and runs the flow with its progress.
result.json is written and the table printed before data and pictures: an error in drawing then
loses no number. Ctrl-C ends the flow after a step, and the steps so far are written.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from otdd_flash.arguments import count, positive
from otdd_flash.checks import optional
from otdd_flash.commands.messages import Phases, Terminal, interrupts_noted
from otdd_flash.commands.results import track_flow, write_run, write_tensors
from otdd_flash.commands.settings import DatasetPairSettings, FlowNode, parse, recorded, taken
from otdd_flash.commands.sides import Sides, build, prepare_sides
from otdd_flash.errors import ConvergenceError, DataNotice, InputError, choose
from otdd_flash.extractors.embedding import BATCH_SIZE
from otdd_flash.extractors.vision_models import differentiable
from otdd_flash.files.tensor_file import SUMMARY_FILE
from otdd_flash.flows.checkpoint import Checkpoints
from otdd_flash.flows.flow import Callbacks, Flow
from otdd_flash.flows.run import gradient_flow
from otdd_flash.flows.space import FeatureSpace, ImageSpace, Space
from otdd_flash.flows.stepping import Stepping
from otdd_flash.report.flow import flow_table, write_flow_report
from otdd_flash.report.page import Report
from otdd_flash.shown import interval
from otdd_flash.solver.schedules import Exact, needs_zero

logger = logging.getLogger("otdd_flash.flow")

SPACES = ("features", "pixels")
PIXEL_BOX = (0.0, 1.0)


@dataclass
class FlowSettings(DatasetPairSettings):
    """The settings of conf/flow.yaml."""

    flow: FlowNode

    def check(self) -> None:
        """Raise an `InputError` for numbers that are invalid for any data, as an epsilon of 0."""
        for name in ("epsilon", "epsilon_relative"):
            if (value := getattr(self, name)) is not None:
                positive(name, value)
        if isinstance(self.schedule(), Exact):
            raise needs_zero()
        super().check()


def adapt(config: DictConfig, directory: Path) -> None:
    """Run one flow and write its files into `directory`.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed during the flow; its result has been written.
        ConvergenceError: a solve stopped early and convergence is required; the result has been
            written.
    """
    settings = parse(config, FlowSettings)
    kept = recorded(settings, config)
    node = settings.flow
    choose("flow.space", node.space, SPACES)
    arguments = settings.arguments()
    flow = _flow(settings, directory)
    _notice_idle_keys(settings)
    if settings.labels.full:
        raise InputError(
            "labels.full=true has no meaning in a flow, whose classes are where its particles are; "
            "leave it out"
        )
    with Phases() as phases, interrupts_noted() as interrupted:
        sides, space = _sides(settings, phases)
        flow = replace(flow, space=space)
        if node.box == "auto" and sides.image_shape:
            flow = replace(flow, stepping=replace(flow.stepping, box=PIXEL_BOX))
        with (
            phases.flowing(node.steps) as progress,
            phases.solving("solving", arguments["solver"]) as solver_progress,
            phases.counting("class distances") as class_progress,
        ):
            result = gradient_flow(
                sides.source,
                sides.target,
                flow,
                cost=settings.cost(),
                callbacks=Callbacks(progress, solver_progress, class_progress, interrupted),
                **arguments,
            )
    more = {
        "seconds": phases.all_seconds(result.seconds),
        "seed": settings.seed,
        "choices": sides.choices,
        "config": kept,
    }
    summary, content = result.to_dict(**more), settings.report.content

    def draw() -> Report:
        drawn = write_tensors(result, directory, more) if settings.save_result else Report()
        return drawn + write_flow_report(
            result,
            directory,
            image_shape=sides.image_shape,
            seed=settings.seed,
            content=content,
        )

    report = write_run(
        directory / SUMMARY_FILE,
        summary,
        content,
        [interval(summary["value"], *summary["bounds"])],
        lambda: [flow_table(summary)],
        draw,
    )
    report += track_flow(result, settings.log, kept, directory)
    if result.stopped_by == "interrupted":
        Terminal().print(
            f"ended after {result.history[-1].step} steps; the same command with flow.resume=true "
            f"hydra.run.dir={directory} goes on",
            soft_wrap=True,
        )
        raise KeyboardInterrupt
    if settings.solver.require_convergence and not result.converged:
        late = sum(not record.converged for record in result.evaluations)
        raise ConvergenceError(
            f"{late} of {len(result.evaluations)} evaluations of the flow did not reach what the "
            f"solver was asked for; solver.require_convergence is set, and the result was written "
            f"to {directory}"
        )
    report.require_complete()


def _notice_idle_keys(settings: FlowSettings) -> None:
    flow = settings.flow
    idle = {
        f"flow.refresh={flow.refresh} does nothing with flow.mode={flow.mode}, whose class "
        "distances are those of every step": flow.refresh != 1 and flow.mode != "features",
        "flow.keep_moments=true needs save_result=true to be of use: what it keeps is in "
        "result.safetensors": flow.keep_moments and not settings.save_result,
    }
    for message, holds in idle.items():
        if holds:
            warnings.warn(message, DataNotice, stacklevel=2)


def _flow(settings: FlowSettings, directory: Path) -> Flow:
    """Return the options of the flow, except those that depend on the data."""
    node = settings.flow
    options = node.optimizer_options or {}
    box = None if node.box in (None, "auto") else _box(node.box)
    return Flow(
        node.steps,
        node.mode,
        Stepping(**taken(node, Stepping) | {"optimizer_options": options, "box": box}),
        node.functionals,
        refresh=node.refresh,
        tolerance=node.tolerance,
        keep_moments=node.keep_moments,
        seed=settings.seed,
        checkpoints=Checkpoints(directory, node.checkpoint_every, node.resume),
    )


def _box(value: Any) -> tuple[float, float]:
    try:
        low, high = (float(limit) for limit in value)
    except (TypeError, ValueError):
        raise InputError(f"flow.box must be auto, null or [LOWEST,HIGHEST], got {value}") from None
    return low, high


def _sides(settings: FlowSettings, phases: Phases) -> tuple[Sides, Space]:
    """Return both datasets in the space of the particles, and that space."""
    flow = settings.flow
    if flow.image_size is not None and flow.image_size < 1:
        raise InputError(f"flow.image_size must be positive or null, got {flow.image_size}")
    if flow.space == "features":
        if flow.image_size is not None:
            raise InputError(
                f"flow.image_size={flow.image_size} has a meaning with flow.space=pixels only; "
                "leave it out, or resize images with extractor.size"
            )
        return prepare_sides(settings, phases, whole=False), FeatureSpace()
    node = settings.extractor
    if node.get("standardize") or node.get("pca") is not None:
        raise InputError(
            "flow.space=pixels takes the features of a network as they are; leave out "
            "extractor.standardize and extractor.pca"
        )
    extractor, _ = build(node, phases)
    chunk = optional(count)("extractor.batch_size", node.get("batch_size")) or BATCH_SIZE
    pixels = {"name": "pixels", "size": flow.image_size, "grayscale": False}
    sides = prepare_sides(replace(settings, extractor=pixels), phases, whole=False)
    assert sides.image_shape is not None
    network = differentiable(extractor, sides.image_shape)
    return sides, ImageSpace(network, sides.image_shape, chunk, extractor.key)
