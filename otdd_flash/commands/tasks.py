"""From the settings of tasks to the labelled features of a study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from otdd_flash.commands.clustering import clustered, without_clustering
from otdd_flash.commands.progress import Phases
from otdd_flash.commands.settings import RuntimeSettings
from otdd_flash.commands.sides import blamed, build, embed_side, image_shape_of
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.registry import load
from otdd_flash.data.subset import stratified_rows, subset
from otdd_flash.devices import resolve_device
from otdd_flash.errors import InputError
from otdd_flash.extractors import reduce_pca, standardize
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import hidden

# Sources whose training split has a test split beside it.
SPLIT = ("digits", "blobs", "mnist", "fashion_mnist", "usps", "torchvision", "huggingface")
# Keys of a task that are none of a dataset.
OWN = ("as", "family", "part", "test_split")


@dataclass
class TaskSettings:
    """One choice of conf/tasks."""

    datasets: list[Any]
    size: int | None


@dataclass(frozen=True)
class LoadedTasks:
    """The tasks of a study, embedded.

    Attributes:
        samples: training and test rows by name; test rows may be None.
        families: of the tasks that were given one.
        image_shape: (c, h, w) where features are the pixels of an image, and nothing else.
    """

    samples: dict[str, tuple[LabeledSamples, LabeledSamples | None]]
    families: dict[str, str]
    image_shape: tuple[int, ...] | None


@dataclass
class StudyInputs(RuntimeSettings):
    """What loading reads of the settings of a study."""

    extractor: dict[str, Any]


def load_tasks(
    settings: StudyInputs,
    group: TaskSettings,
    given: Sequence[Mapping[str, Any]] | None,
    phases: Phases,
    *,
    test_fraction: float | None,
) -> LoadedTasks:
    """Load and embed all tasks.

    Features are standardised and projected over all rows that were embedded.

    Args:
        settings: of the run.
        group: the tasks of a choice.
        given: tasks in their place.
        phases: is shown what is going on.
        test_fraction: what to split off tasks without test rows; None splits nothing off.

    Raises:
        InputError: two tasks have one name, or as everything that is called here; of one task's
            data, the message says which.
    """
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise InputError(f"transfer.test_fraction must lie in (0, 1), got {test_fraction:g}")
    resolve_device(settings.device)
    nodes = _named(group.datasets if given is None else given)
    extractor_node = dict(settings.extractor)
    if given is None and extractor_node["name"] == "pixels" and extractor_node["size"] is None:
        extractor_node["size"] = group.size
    extractor, standardised = build(extractor_node, phases)
    embedded: list[LabeledSamples] = []
    places: list[tuple[str, int, int | None]] = []
    shape: tuple[int, ...] | None = None
    for name, node in nodes.items():
        with blamed(f"task {name}"):
            parts = _load(name, node, settings, phases, test_fraction)
            shape = shape or image_shape_of(extractor, parts[0])
        found = [
            replace(
                embed_side(f"task {name}", part, extractor, extractor_node, settings, phases),
                name=name,
            )
            for part in parts
        ]
        with blamed(f"task {name}"):
            embedded += clustered(found, node, node.get("k"), int(node.get("seed", settings.seed)))
        places.append((name, len(embedded) - len(parts), len(parts) - 1 or None))
    if standardised:
        embedded = _together(embedded, standardize)
    if (k := extractor_node.get("pca")) is not None:
        embedded = _together(embedded, lambda one, other: reduce_pca(one, other, k, settings.seed))
    as_they_are = not standardised and k is None
    samples = {
        name: (embedded[first], None if more is None else embedded[first + more])
        for name, first, more in places
    }
    named = {name: node["family"] for name, node in nodes.items() if node.get("family")}
    families = {name: hidden(str(family)) for name, family in named.items()}
    return LoadedTasks(samples, families, shape if as_they_are else None)


def _named(nodes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tasks by what tables call them."""
    for place, node in enumerate(nodes):
        if not isinstance(node, Mapping) or "name" not in node:
            raise InputError(
                f"study.tasks[{place}] must be a mapping with the keys of a dataset such as "
                "{name: mnist}, got " + repr(node)
            )
    names = [hidden(str(node.get("as") or node["name"])) for node in nodes]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"two tasks are called {twice[0]}; give one of them as: NAME")
    return {name: dict(node) for name, node in zip(names, nodes, strict=True)}


def _load(
    name: str,
    node: dict[str, Any],
    settings: StudyInputs,
    phases: Phases,
    test_fraction: float | None,
) -> list[LabeledDataset]:
    """Training rows, and test rows where there are any."""
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
    """One of N disjoint draws, with equal parts of every class."""
    if part is None:
        return dataset
    number, _, count = str(part).partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise InputError(f"part must be I/N with 1 <= I <= N such as 1/5, got {part!r}")
    # A number for every row of the whole: with other classes chosen, draws stay disjoint.
    rank = np.random.default_rng(seed).random(int(dataset.rows.max()) + 1)[dataset.rows]
    labels = np.zeros(len(dataset), dtype=np.int64) if dataset.labels is None else dataset.labels
    place = np.empty(len(dataset), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        place[members[np.argsort(rank[members])]] = np.arange(len(members))
    return dataset.take(np.flatnonzero(place % int(count) == int(number) - 1))


def _split_off(dataset: LabeledDataset, fraction: float, seed: int) -> list[LabeledDataset]:
    """Training rows and, stratified, test rows."""
    count = round(fraction * len(dataset))
    if dataset.labels is None or count < len(dataset.class_names):
        return [dataset]
    rows = stratified_rows(dataset.labels, count, np.random.default_rng(seed))
    rest = np.setdiff1d(np.arange(len(dataset)), rows)
    return [dataset.take(rest), dataset.take(rows)]


def _together(parts: list[LabeledSamples], treat: Any) -> list[LabeledSamples]:
    """What a treatment of two sides makes of all parts, as of one dataset."""
    features = torch.cat([part.features for part in parts])
    both = LabeledSamples(features, None, (), name="all tasks")
    treated, _ = treat(both, both)
    sizes = [len(part) for part in parts]
    return [
        replace(part, features=rows)
        for part, rows in zip(parts, torch.split(treated.features, sizes), strict=True)
    ]
