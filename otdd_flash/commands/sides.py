"""From the settings of both sides to the labelled features that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from otdd_flash.commands.progress import Phases
from otdd_flash.commands.settings import DatasetPairSettings
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.pseudo_labels import with_pseudo_labels
from otdd_flash.data.registry import load
from otdd_flash.errors import InputError
from otdd_flash.extractors import build_extractor, embed, reduce_pca, standardize
from otdd_flash.samples import LabeledSamples

# Keys of an extractor's configuration that are arguments of `embed`.
EMBEDDING = ("batch_size", "mixed_precision", "num_workers")


@dataclass(frozen=True)
class Sides:
    """Both datasets, embedded.

    Attributes:
        source: the samples that are compared.
        target: what they are compared with.
        whole: both datasets before `max_samples`, for class statistics; None unless asked for.
    """

    source: LabeledSamples
    target: LabeledSamples
    whole: tuple[LabeledSamples, LabeledSamples] | None


def prepare_sides(settings: DatasetPairSettings, phases: Phases, *, whole: bool) -> Sides:
    """Load and embed both datasets; with `whole`, also all the rows that max_samples left out.

    Features are standardised and projected over all rows that were embedded.
    """
    nodes = {"source": settings.source, "target": settings.target}
    chosen = {side: _load(node, phases) for side, node in nodes.items()}
    loaded = chosen
    if whole:
        loaded = {
            side: _load({**node, "max_samples": None}, phases) for side, node in nodes.items()
        }
    source, target = (_embed(dataset, settings, phases) for dataset in loaded.values())
    if settings.extractor.get("standardize"):
        source, target = standardize(source, target)
    if settings.extractor.get("pca") is not None:
        source, target = reduce_pca(source, target, settings.extractor["pca"], settings.seed)
    source, target = _label(nodes, source, target)
    if not whole:
        return Sides(source, target, None)
    return Sides(
        _subset(source, loaded["source"], chosen["source"]),
        _subset(target, loaded["target"], chosen["target"]),
        (source, target),
    )


def _load(node: dict[str, Any], phases: Phases) -> LabeledDataset:
    with phases.phase("load", f"loading {node['name']}"):
        return load(**node)


def _embed(
    dataset: LabeledDataset, settings: DatasetPairSettings, phases: Phases
) -> LabeledSamples:
    extractor = build_extractor(**settings.extractor)
    embedding = {key: settings.extractor[key] for key in EMBEDDING if key in settings.extractor}
    with phases.phase("extract", f"embedding {dataset.name}") as progress:
        return embed(
            dataset,
            extractor,
            device=settings.device,
            cache_dir=settings.cache_dir,
            progress=progress,
            **embedding,
        )


def _label(
    nodes: dict[str, dict[str, Any]], source: LabeledSamples, target: LabeledSamples
) -> tuple[LabeledSamples, LabeledSamples]:
    """Cluster the sides that ask for pseudo labels; k is given or that of the other side."""
    sides = {"source": source, "target": target}
    for side, other in (("source", target), ("target", source)):
        node = nodes[side]
        if node["pseudo_labels"] is None:
            continue
        k = node["k"] or (other.class_total if other.labels is not None else None)
        if k is None:
            raise InputError(
                f"{side}.pseudo_labels needs {side}.k=K, as the other side has no labels to count"
            )
        sides[side] = with_pseudo_labels(sides[side], k, node["seed"])
    return sides["source"], sides["target"]


def _subset(
    samples: LabeledSamples, loaded: LabeledDataset, chosen: LabeledDataset
) -> LabeledSamples:
    """The rows of `samples`, which embed `loaded`, that `chosen` holds."""
    order = np.argsort(loaded.rows, kind="stable")
    positions = order[np.searchsorted(loaded.rows, chosen.rows, sorter=order)]
    return samples.take(torch.from_numpy(positions), subset_hash=chosen.subset_hash)
