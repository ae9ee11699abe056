"""The loading of both datasets of a command, from their settings to the features that are compared.

`prepare_sides` loads, embeds, standardises, projects and clusters both sides; `commands.compare`,
`commands.adapt` and `commands.shift` call it; `commands.adapt`, `commands.study`, `commands.mix`
and `commands.nearest` call its steps. The functions after `KEYS` read the keys with which a side
asks for clusters as labels (`pseudo_labels`, `k`).

`standardize` and `pca` of the extractor are one map, fitted to all embedded rows of both sides:
after two different maps their distance would mean nothing. So a change must not fit a side by
itself. Errors name the side whose data are at fault.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from otdd_flash.arguments import count
from otdd_flash.checks import LONGEST_SHOWN, choice, optional
from otdd_flash.commands.messages import Phases
from otdd_flash.commands.ranks import leading
from otdd_flash.commands.settings import EmbeddingSettings, RuntimeSettings
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.registry import load
from otdd_flash.data.subset import label_parts, subset
from otdd_flash.devices import resolve_device
from otdd_flash.errors import InputError, placed
from otdd_flash.extractors import build_extractor, embed, reduce_pca, standardize
from otdd_flash.extractors.network import Extractor
from otdd_flash.extractors.plain import PixelValues
from otdd_flash.labels import Continuous
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import display, hidden

# Keys of an extractor's configuration that are arguments of `embed`.
EMBEDDING = ("batch_size", "mixed_precision", "num_workers")

# Libraries that an extractor imports when it is built, which takes seconds.
LIBRARIES = {"timm": "timm", "torchvision": "torchvision", "text": "sentence_transformers"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sides:
    """Both datasets, embedded.

    Attributes:
        source: the source samples.
        target: the target samples.
        whole: both datasets, embedded, before `max_samples` was applied, for class statistics; None
            unless asked for.
        image_shape: (c, h, w) if features are exactly the pixels of an image, otherwise None.
        choices: by side, what its reader chose for keys that were not given
            (`data.dataset.chosen`), such as the label column.
    """

    source: LabeledSamples
    target: LabeledSamples
    whole: tuple[LabeledSamples, LabeledSamples] | None
    image_shape: tuple[int, int, int] | None
    choices: dict[str, list[str]]


def prepare_sides(
    settings: EmbeddingSettings,
    phases: Phases,
    *,
    whole: bool,
    roles: tuple[str, str] = ("source", "target"),
) -> Sides:
    """Load and embed both datasets; with `whole`, also the rows that max_samples leaves out.

    Features are standardised and projected over all embedded rows. `roles` are the settings that
    hold the datasets.

    Raises:
        InputError: a called function refuses; errors in the data of one side name it.
    """
    # These are defaults: the yaml of another package's dataset may lack keys that those of this
    # package have.
    shared = {
        "max_samples": settings.max_samples,
        "seed": settings.seed,
        "root": settings.data_root,
        "download": settings.download,
    }
    nodes = {role: {**shared, **getattr(settings, role)} for role in roles}
    numbers = settings.labels.method == Continuous.name
    extractor, standardised = build(settings.extractor, phases)
    logger.info("networks run on %s", resolve_device(settings.device))
    # All rows are kept in memory only if they are asked for.
    found = {
        side: load_side(side, node, phases, numbers)[: 1 + whole] for side, node in nodes.items()
    }
    chosen, loaded = ({side: kept[k] for side, kept in found.items()} for k in (0, -1))
    source, target = (
        embed_side(side, dataset, extractor, settings.extractor, settings, phases)
        for side, dataset in loaded.items()
    )
    if standardised:
        source, target = standardize(source, target)
    if (pca := settings.extractor.get("pca")) is not None:
        source, target = reduce_pca(source, target, pca, settings.seed)
    source, target = _label(nodes, source, target)
    as_they_are = not standardised and pca is None
    shape = image_shape_of(extractor, loaded[roles[0]]) if as_they_are else None
    choices = {side: [*dataset.choices] for side, dataset in loaded.items() if dataset.choices}
    both = (source, target)
    if whole:
        source, target = (
            _subset(samples, loaded[side], chosen[side])
            for side, samples in zip(nodes, both, strict=True)
        )
    return Sides(source, target, both if whole else None, shape, choices)


def build(node: dict[str, Any], phases: Phases) -> tuple[Extractor, bool]:
    """Return the extractor of both sides, and whether to standardise its features."""
    standardised = node.get("standardize", False)
    if not isinstance(standardised, bool):
        raise InputError(f"extractor.standardize must be true or false, got {standardised!r}")
    # The data decide only how large it may be.
    optional(count)("extractor.pca", node.get("pca"))
    name = named(node, "extractor")
    library = LIBRARIES.get(name)
    new = library is not None and library not in sys.modules
    with phases.phase("import", f"importing {library}") if new else nullcontext():
        return build_extractor(**{**node, "name": name}), standardised


def named(node: dict[str, Any], group: str) -> str:
    """Return the name that a choice of a group holds.

    Raises:
        InputError: the choice, which may come from other folders or packages, holds none.
    """
    if node.get("name") is None:
        raise InputError(f"this choice of {group} has no name; its yaml must hold name: NAME")
    return str(node["name"])


def listed(
    key: str, nodes: Any, otherwise: str = "", *, empty: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the keys of each dataset of a list by its name, which `as` gives or else `name`.

    Args:
        key: the setting that holds the list.
        nodes: its value.
        otherwise: what else the setting may be, for messages.
        empty: whether the list may be empty.

    Raises:
        InputError: it is no list, it is empty, an item names no dataset, or two have the same name.
    """
    if not isinstance(nodes, list) or not (nodes or empty):
        raise InputError(
            f"{key} must be a list of datasets such as [{{name: mnist}}]{otherwise}, got "
            f"{display(repr(nodes), LONGEST_SHOWN)}"
        )
    found: dict[str, dict[str, Any]] = {}
    for place, given in enumerate(nodes):
        node = keys_of(f"{key}[{place}]", given)
        name = hidden(str(node.pop("as", None) or node["name"]))
        if name in found:
            raise InputError(f"two datasets of {key} are called {name}; give one of them as: NAME")
        found[name] = node
    return found


def keys_of(key: str, given: Any) -> dict[str, Any]:
    """Return the keys of a dataset, of which its name alone may be given.

    Raises:
        InputError: `given`, under the setting `key`, names no dataset.
    """
    if isinstance(given, str):
        return {"name": given}
    if not isinstance(given, Mapping) or "name" not in given:
        raise InputError(
            f"{key} must be a dataset's name, or its keys such as {{name: mnist}}, got "
            f"{display(repr(given), LONGEST_SHOWN)}"
        )
    return dict(given)


def load_side(
    side: str, node: dict[str, Any], phases: Phases, numbers: bool
) -> tuple[LabeledDataset, LabeledDataset]:
    """Load one dataset; return the rows that max_samples draws, and all rows.

    Args:
        side: the name of the dataset, for messages.
        node: its name and its keys.
        phases: shows the progress.
        numbers: whether labels are numbers, of which whole ones are read as classes.
    """
    with phases.phase("load", f"loading {side}: {named(node, side)}"), placed(side):
        keys = without_clustering(node)
        limit = optional(count)("max_samples", keys.pop("max_samples"))
        dataset = load(**keys)
        if numbers:
            dataset = dataset.numbered()
        # A dataset may be named after its file, whose path may come from the environment.
        dataset = replace(dataset, name=hidden(dataset.name))
        drawn = subset(dataset, None, limit, keys["seed"])
    logger.info("%s: %s, %d rows, %s", side, drawn.name, len(drawn), drawn.kind_of_labels)
    return drawn, dataset


def listed_side(
    name: str,
    node: dict[str, Any],
    extractor: Extractor,
    settings: EmbeddingSettings,
    phases: Phases,
) -> tuple[LabeledSamples, LabeledDataset]:
    """Load and embed one dataset of a list, whose keys have the settings as defaults."""
    shared = ("max_samples", "seed", "download")
    node = {key: getattr(settings, key) for key in shared} | {"root": settings.data_root} | node
    dataset, _ = load_side(name, node, phases, settings.labels.method == Continuous.name)
    samples = embed_side(name, dataset, extractor, settings.extractor, settings, phases)
    with placed(name):
        (found,) = clustered([samples], node, node.get("k"), int(node["seed"]))
    return found, dataset


def embed_side(
    side: str,
    dataset: LabeledDataset,
    extractor: Extractor,
    node: dict[str, Any],
    settings: RuntimeSettings,
    phases: Phases,
) -> LabeledSamples:
    """Return the features of one dataset; `node` is the extractor's configuration."""
    embedding = {key: node[key] for key in EMBEDDING if key in node}
    with (
        phases.phase("extract", f"embedding {side}: {dataset.name}") as progress,
        placed(side),
    ):
        samples = embed(
            dataset,
            extractor,
            device=settings.device,
            cache_dir=settings.cache_dir,
            progress=progress,
            # The processes of torchrun that this one leads, or None.
            group=leading(),
            **embedding,
        )
    logger.info("%s: %d features by %s", side, samples.dim, node["name"])
    return samples


def _label(
    nodes: dict[str, dict[str, Any]], source: LabeledSamples, target: LabeledSamples
) -> tuple[LabeledSamples, LabeledSamples]:
    """Cluster the sides that ask for pseudo labels.

    k is the one given, the k of the other side, or its number of classes.
    """
    first, second = nodes
    sides = {first: source, second: target}
    labelled = dict(sides)
    for side, other in ((first, second), (second, first)):
        node = nodes[side]
        if node.get("pseudo_labels") is None:
            continue
        k = node.get("k") or nodes[other].get("k")
        if k is None and sides[other].labels is not None:
            k = sides[other].class_total
        if k is None:
            raise InputError(
                f"{side}.pseudo_labels needs {side}.k=K, the number of clusters, as the {other} "
                "has no labels to count either"
            )
        with placed(side):
            (labelled[side],) = clustered([sides[side]], node, k, node["seed"])
        logger.info("%s: labelled by k-means, %d clusters", side, labelled[side].class_total)
    return labelled[first], labelled[second]


def image_shape_of(extractor: Extractor, dataset: LabeledDataset) -> tuple[int, int, int] | None:
    """Return (c, h, w) of the features of the pixels extractor; None for any other."""
    if not isinstance(extractor, PixelValues):
        return None
    first = extractor.suited_to(dataset.inputs).images(dataset.inputs[:1])
    channels, height, width = first.shape[1:]
    return channels, height, width


def _subset(
    samples: LabeledSamples, loaded: LabeledDataset, chosen: LabeledDataset
) -> LabeledSamples:
    """Return the rows of `samples`, which embed `loaded`, that `chosen` holds."""
    order = np.argsort(loaded.rows, kind="stable")
    positions = order[np.searchsorted(loaded.rows, chosen.rows, sorter=order)]
    return samples.take(torch.from_numpy(positions), subset_hash=chosen.subset_hash)


KEYS = ("pseudo_labels", "k")


def without_clustering(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a dataset that `load` accepts, after checking the others.

    Raises:
        InputError: an unknown method, or a number of clusters without a method.
    """
    method = optional(choice("kmeans"))("pseudo_labels", node.get("pseudo_labels"))
    k = optional(count)("k", node.get("k"))
    if k is not None and method is None:
        raise InputError(f"k={k} needs pseudo_labels=kmeans, which makes so many clusters")
    return {key: value for key, value in node.items() if key not in KEYS}


def clustered(
    parts: Sequence[LabeledSamples], node: Mapping[str, Any], k: int | None, seed: int
) -> list[LabeledSamples]:
    """Return the parts of one dataset, with clusters of the first part as labels if asked for.

    Raises:
        InputError: clusters are asked for, and `k` is None or out of its range.
    """
    if node.get("pseudo_labels") is None:
        return list(parts)
    if k is None:
        raise InputError("pseudo_labels needs k=K, the number of clusters")
    return label_parts(parts, k, seed)
