"""The work of `python -m otdd_flash.study`: a study of some tasks, and its page."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from otdd_flash.arguments.values import count
from otdd_flash.checks import optional
from otdd_flash.commands.exit_codes import BAD_INPUT, DEFECT, NOT_CONVERGED
from otdd_flash.commands.interrupts import interrupts_noted
from otdd_flash.commands.messages import Terminal
from otdd_flash.commands.progress import Phases
from otdd_flash.commands.ranks import leading
from otdd_flash.commands.settings import (
    ComparisonSettings,
    ReportSettings,
    SamplingSettings,
    parse,
    recorded,
)
from otdd_flash.commands.tasks import LoadedTasks, StudyInputs, TaskSettings, load_tasks
from otdd_flash.commands.tracked import track_study
from otdd_flash.errors import ConvergenceError, InputError
from otdd_flash.report.study.console import study_table
from otdd_flash.report.study.sentences import choice_sentences
from otdd_flash.report.study.writing import FILES, write_study_report
from otdd_flash.study.folder import STUDY_FILE
from otdd_flash.study.result import StudyResult
from otdd_flash.study.study import Study
from otdd_flash.study.transfer.settings import Transfer
from otdd_flash.study.units.store import FOLDER
from otdd_flash.study.units.work import Shard

NO_TASKS = LoadedTasks({}, {}, None)


@dataclass
class StudyNode:
    """What the run is about."""

    tasks: list[Any] | None
    resume: bool
    measure: str | None
    shard: str | None
    workers: int | None
    threads: int | None


@dataclass
class TransferNode:
    """How networks are trained; see `Transfer`."""

    protocol: str
    target_samples: int | None
    seeds: int
    source_epochs: int
    target_epochs: int
    min_target_steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    network: dict[str, Any] | None
    test_fraction: float | None


@dataclass
class StudySettings(ComparisonSettings, SamplingSettings, StudyInputs):
    """What conf/study.yaml holds."""

    tasks: TaskSettings
    study: StudyNode
    measures: list[str] | None
    transfer: TransferNode | None
    projections: int
    report: ReportSettings


def study(config: DictConfig, directory: Path) -> None:
    """Carry out a study, or go on with one, and write everything about it into `directory`.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; what is there is written.
        ConvergenceError: a solve stopped early and convergence is required; likewise.
    """
    settings = parse(config, StudySettings)
    kept = recorded(settings, config)
    _check(settings, directory)
    node = settings.study
    fraction = None if settings.transfer is None else settings.transfer.test_fraction
    with Phases() as phases, interrupts_noted() as interrupted:
        tasks = load_tasks(settings, settings.tasks, node.tasks, phases, test_fraction=fraction)
        whole = study_of(settings, tasks)
        if settings.overwrite and not (node.resume or node.shard):
            _remove(directory)
        with phases.phase("study", "computing") as progress:
            result = whole.run(
                directory,
                resume=node.resume,
                shard=node.shard,
                workers=os.cpu_count() or 1 if node.workers is None else node.workers,
                threads=node.threads,
                progress=progress,
                stop=interrupted,
            )
        with phases.phase("report", "drawing"):
            report = write_study_report(result, directory, content=settings.report.content)
    console = Terminal()
    if settings.report.content != "none":
        console.print(study_table(result))
        for line in choice_sentences(result):
            console.print(line, soft_wrap=True)
        for note in result.notes():
            console.print(note, soft_wrap=True)
    console.print(f"written to {directory}", soft_wrap=True)
    report += track_study(result, settings.log, kept, directory)
    if interrupted():
        raise KeyboardInterrupt
    _raise_worst(result)
    if settings.solver.require_convergence and not result.converged:
        raise ConvergenceError(
            "transport behind some of the numbers did not reach what the solver was asked for; "
            f"solver.require_convergence is set, and the study was written to {directory}"
        )
    report.require_complete()


def _check(settings: StudySettings, directory: Path) -> None:
    """Raise an `InputError` for what no tasks can meet, before time is spent on reading these."""
    settings.report.check()
    if leading() is not None:
        raise InputError(
            "a study is shared by jobs that each do a part of its work: leave torchrun out, and "
            "start the command with study.shard=1/4, 2/4, ... and one hydra.run.dir"
        )
    if settings.labels.full:
        raise InputError("labels.full=true has no meaning in a study; leave it out")
    settings.log.check()
    study_of(settings, NO_TASKS)
    node = settings.study
    Shard.parse(node.shard)
    for name in ("workers", "threads"):
        optional(count)(f"study.{name}", getattr(node, name))
    if node.resume and node.shard is None and not (directory / STUDY_FILE).exists():
        raise InputError(
            f"study.resume=true, but there is no {directory / STUDY_FILE}; give the folder of the "
            "study to go on with as hydra.run.dir=FOLDER, or leave study.resume out"
        )


def study_of(settings: StudySettings, tasks: LoadedTasks) -> Study:
    """The study that is asked for, of tasks that have been loaded."""
    options = settings.solver.options()
    return Study(
        tasks.samples,
        settings.measures,
        _transfer(settings.transfer, tasks.image_shape),
        families=tasks.families,
        epsilon=settings.epsilon,
        epsilon_relative=settings.epsilon_relative,
        labels=settings.labels.metric(options.asked_tolerance, settings.epsilon),
        cost=settings.cost(),
        min_class_size=settings.min_class_size,
        solver=options,
        compute=settings.compute_options(),
        projections=settings.projections,
        subsample=settings.subsample,
        subsample_size=settings.subsample_size,
        noise_floor=settings.noise_floor,
        seed=settings.seed,
        cache_dir=settings.cache_dir,
        measure=settings.study.measure,
    )


def _transfer(node: TransferNode | None, image_shape: tuple[int, ...] | None) -> Transfer | None:
    if node is None:
        return None
    given = {field.name: getattr(node, field.name) for field in fields(node)}
    del given["test_fraction"]
    network = given.pop("network")
    if network is not None and set(network) != {"path"}:
        raise InputError("transfer.network must be {path: module:function} or null")
    path = None if network is None else network["path"]
    return Transfer(**given, network=path, image_shape=image_shape)


def _remove(directory: Path) -> None:
    if not (directory / STUDY_FILE).exists():
        return
    shutil.rmtree(directory / FOLDER, ignore_errors=True)
    # The file that says what it is goes last: without it the rest would be a foreign folder's.
    for pattern in (*FILES, STUDY_FILE):
        for file in directory.glob(pattern):
            file.unlink(missing_ok=True)


def _raise_worst(result: StudyResult) -> None:
    """Raise for the pieces of work that failed, with the highest of their exit codes."""
    if not result.failures:
        return
    worst = max(result.failures, key=lambda failure: int(failure["exit_code"]))
    kinds = {DEFECT: RuntimeError, BAD_INPUT: InputError, NOT_CONVERGED: ConvergenceError}
    raise kinds[int(worst["exit_code"])](
        f"{len(result.failures)} of {result.total} pieces of work failed, the others are written; "
        f"{worst['unit']}: {worst['error']}"
    )
