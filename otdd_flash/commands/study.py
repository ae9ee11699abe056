"""The work of `python -m otdd_flash.study`: load the tasks, run the study, write its report.

For the entry point `study.__main__`, `commands.start.run_work` imports this module by name and
`commands.outcome.run_job` calls `study`. `load_tasks` reads and embeds the tasks: their splits,
disjoint parts, clusters as labels, and test rows split off. `experiments.transfer_study` calls
`load_tasks` and `study_of` too.

Settings are checked with an empty study before any data are read, because reading takes long. Draws
must depend on the seed alone, so that shards and resumed runs get the same rows.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from otdd_flash.arguments import count
from otdd_flash.checks import optional
from otdd_flash.commands.messages import Phases, Terminal, interrupts_noted
from otdd_flash.commands.ranks import leading
from otdd_flash.commands.results import track_study
from otdd_flash.commands.settings import (
    ComparisonSettings,
    ReportSettings,
    RuntimeSettings,
    SamplingSettings,
    parse,
    recorded,
)
from otdd_flash.commands.sides import (
    build,
    clustered,
    embed_side,
    image_shape_of,
    listed,
    without_clustering,
)
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.registry import load
from otdd_flash.data.subset import stratified_rows, subset
from otdd_flash.devices import resolve_device
from otdd_flash.errors import (
    BAD_INPUT,
    DEFECT,
    NOT_CONVERGED,
    ConvergenceError,
    InputError,
    placed,
)
from otdd_flash.extractors import reduce_pca, standardize
from otdd_flash.report.study.page import choice_sentences
from otdd_flash.report.study.writing import FILES, study_table, write_study_report
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import hidden
from otdd_flash.study.result import StudyResult
from otdd_flash.study.setup import Transfer
from otdd_flash.study.study import STUDY_FILE, Study
from otdd_flash.study.units import FOLDER, Shard, part_of


@dataclass
class StudyNode:
    """The keys of conf/study.yaml under `study`."""

    tasks: list[Any] | None
    resume: bool
    measure: str | None
    shard: str | None
    workers: int | None
    threads: int | None


@dataclass
class TransferNode:
    """The settings of training; see `Transfer`."""

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


def study(config: DictConfig, directory: Path) -> None:
    """Run a study, or resume one, and write its files into `directory`.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the finished part has been written.
        ConvergenceError: a solve stopped early and convergence is required; the files have been
            written.
    """
    settings = parse(config, StudySettings)
    kept = recorded(settings, config)
    _check(settings, directory)
    node = settings.study
    with Phases() as phases, interrupts_noted() as interrupted:
        tasks = load_tasks(settings, phases)
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
    """Raise an `InputError` for settings that no tasks can meet, before data are read."""
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
    """Return the study that the settings describe, for loaded tasks."""
    options = settings.schedule()
    return Study(
        tasks.samples,
        settings.measures,
        _transfer(settings.transfer, tasks.image_shape),
        families=tasks.families,
        epsilon=settings.epsilon,
        epsilon_relative=settings.epsilon_relative,
        unbalanced=settings.unbalanced,
        unbalanced_relative=settings.unbalanced_relative,
        labels=settings.metric(),
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
    given = {**vars(node)}
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
    # study.json is removed last: without it the rest would look like a foreign folder.
    for pattern in (*FILES, STUDY_FILE):
        for file in directory.glob(pattern):
            file.unlink(missing_ok=True)


def _raise_worst(result: StudyResult) -> None:
    """Raise for failed units, with the highest of their exit codes."""
    if not result.failures:
        return
    worst = max(result.failures, key=lambda failure: int(failure["exit_code"]))
    kinds = {DEFECT: RuntimeError, BAD_INPUT: InputError, NOT_CONVERGED: ConvergenceError}
    raise kinds[int(worst["exit_code"])](
        f"{len(result.failures)} of {result.total} pieces of work failed, the others are written; "
        f"{worst['unit']}: {worst['error']}"
    )


# Datasets that have a test split besides the training split.
SPLIT = ("digits", "blobs", "mnist", "fashion_mnist", "usps", "torchvision", "huggingface")

# Keys of a task that are not keys of a dataset.
OWN = ("family", "part", "test_split")


@dataclass
class TaskSettings:
    """One choice of conf/tasks."""

    datasets: list[Any]
    size: int | None


@dataclass(frozen=True)
class LoadedTasks:
    """The embedded tasks of a study.

    Attributes:
        samples: training and test rows by name; test rows may be None.
        families: of the tasks that were given one.
        image_shape: (c, h, w) if features are exactly the pixels of an image, otherwise None.
    """

    samples: dict[str, tuple[LabeledSamples, LabeledSamples | None]]
    families: dict[str, str]
    image_shape: tuple[int, ...] | None


NO_TASKS = LoadedTasks({}, {}, None)


@dataclass
class StudySettings(ComparisonSettings, SamplingSettings, RuntimeSettings):
    """The settings of conf/study.yaml."""

    extractor: dict[str, Any]
    tasks: TaskSettings
    study: StudyNode
    measures: list[str] | None
    transfer: TransferNode | None
    projections: int
    report: ReportSettings


def load_tasks(settings: StudySettings, phases: Phases) -> LoadedTasks:
    """Load and embed all tasks: those of `study.tasks`, or else of the choice of `tasks`.

    Features are standardised and projected over all embedded rows.

    Args:
        settings: of the run.
        phases: shows the progress.

    Raises:
        InputError: two tasks have the same name, or a called function refuses; errors in the data
            of one task name it.
    """
    fraction = None if settings.transfer is None else settings.transfer.test_fraction
    if fraction is not None and not 0 < fraction < 1:
        raise InputError(f"transfer.test_fraction must lie in (0, 1), got {fraction:g}")
    resolve_device(settings.device)
    given, group = settings.study.tasks, settings.tasks
    nodes = listed("study.tasks", group.datasets if given is None else given)
    extractor_node = dict(settings.extractor)
    if given is None and extractor_node["name"] == "pixels" and extractor_node["size"] is None:
        extractor_node["size"] = group.size
    extractor, standardised = build(extractor_node, phases)
    embedded: list[LabeledSamples] = []
    counts: dict[str, int] = {}
    shape: tuple[int, ...] | None = None
    for name, node in nodes.items():
        with placed(f"task {name}"):
            parts = _load(name, node, settings, phases, fraction)
            shape = shape or image_shape_of(extractor, parts[0])
        found = [
            replace(
                embed_side(f"task {name}", part, extractor, extractor_node, settings, phases),
                name=name,
            )
            for part in parts
        ]
        with placed(f"task {name}"):
            embedded += clustered(found, node, node.get("k"), int(node.get("seed", settings.seed)))
        counts[name] = len(parts)
    if standardised:
        embedded = _together(embedded, standardize)
    if (k := extractor_node.get("pca")) is not None:
        embedded = _together(embedded, lambda one, other: reduce_pca(one, other, k, settings.seed))
    as_they_are = not standardised and k is None
    left = iter(embedded)
    samples = {
        name: (next(left), next(left) if count > 1 else None) for name, count in counts.items()
    }
    named = {name: node["family"] for name, node in nodes.items() if node.get("family")}
    families = {name: hidden(str(family)) for name, family in named.items()}
    return LoadedTasks(samples, families, shape if as_they_are else None)


def _load(
    name: str,
    node: dict[str, Any],
    settings: StudySettings,
    phases: Phases,
    test_fraction: float | None,
) -> list[LabeledDataset]:
    """Return the training rows, and the test rows if there are any."""
    keys = {key: value for key, value in without_clustering(node).items() if key not in OWN}
    rows = keys.pop("max_samples", settings.max_samples)
    shared = {
        "seed": settings.seed,
        "root": settings.data_root,
        "download": settings.download,
    }
    split = keys.pop("split", "train" if keys["name"] in SPLIT else "all")
    test = node.get("test_split", "test" if keys["name"] in SPLIT and split == "train" else None)
    found = []
    for one in (split, test):
        if one is not None:
            with phases.phase("load", f"loading {name}"):
                whole = load(**{**shared, **keys, "split": one})
            found.append(_part(whole, node.get("part"), settings.seed))
    if len(found) == 1 and test_fraction is not None:
        found = _split_off(found[0], test_fraction, settings.seed)
    return [subset(part, None, rows, settings.seed) for part in found]


def _part(dataset: LabeledDataset, part: str | None, seed: int) -> LabeledDataset:
    """Return one of N disjoint draws, with equal shares of every class."""
    if part is None:
        return dataset
    number, count = part_of("part", part, "1/5")
    # Every row of the whole dataset gets a number, so draws stay disjoint for any classes.
    rank = np.random.default_rng(seed).random(int(dataset.rows.max()) + 1)[dataset.rows]
    labels = _labels(dataset)
    place = np.empty(len(dataset), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        place[members[np.argsort(rank[members])]] = np.arange(len(members))
    return dataset.take(np.flatnonzero(place % count == number - 1))


def _split_off(dataset: LabeledDataset, fraction: float, seed: int) -> list[LabeledDataset]:
    """Return training rows and test rows, with equal shares of every class if there are labels.

    Raises:
        InputError: a class would be left without test rows, or nothing to train on.
    """
    count = round(fraction * len(dataset))
    if not max(1, len(dataset.class_names)) <= count < len(dataset):
        raise InputError(
            f"transfer.test_fraction={fraction:g} of {len(dataset)} rows is {count}, which leaves "
            "nothing to train on or some class without a test row; choose another fraction"
        )
    rows = stratified_rows(_labels(dataset), count, np.random.default_rng(seed))
    rest = np.setdiff1d(np.arange(len(dataset)), rows)
    return [dataset.take(rest), dataset.take(rows)]


def _labels(dataset: LabeledDataset) -> NDArray[np.int64]:
    """Return class indices; without labels all rows are of one class."""
    return np.zeros(len(dataset), dtype=np.int64) if dataset.labels is None else dataset.labels


def _together(parts: list[LabeledSamples], treat: Any) -> list[LabeledSamples]:
    """Apply a function of two sides to all parts as one dataset."""
    features = torch.cat([part.features for part in parts])
    halves = (LabeledSamples(half, None, (), name="all tasks") for half in features.chunk(2))
    treated = torch.cat([half.features for half in treat(*halves)])
    sizes = [len(part) for part in parts]
    return [
        replace(part, features=rows)
        for part, rows in zip(parts, torch.split(treated, sizes), strict=True)
    ]
