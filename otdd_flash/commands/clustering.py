"""Which data a command labels by clusters, as their keys say it: pseudo_labels and k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from otdd_flash.arguments.datasets import CLUSTERING
from otdd_flash.data.pseudo_labels import label_parts
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples

KEYS = ("pseudo_labels", "k")


def without_clustering(node: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a dataset that `load` takes, the others checked.

    Raises:
        InputError: no such way of labelling, or a number of clusters that nothing asks for.
    """
    method, k = (CLUSTERING[key](key, node.get(key)) for key in KEYS)
    if k is not None and method is None:
        raise InputError(f"k={k} needs pseudo_labels=kmeans, which makes so many clusters")
    return {key: value for key, value in node.items() if key not in KEYS}


def clustered(
    parts: Sequence[LabeledSamples], node: Mapping[str, Any], k: int | None, seed: int
) -> list[LabeledSamples]:
    """Parts of one dataset with the labels that its keys ask for: the clusters of the first part.

    Raises:
        InputError: clusters are asked for, and `k` is None or out of its range.
    """
    if node.get("pseudo_labels") is None:
        return list(parts)
    if k is None:
        raise InputError("pseudo_labels needs k=K, the number of clusters")
    return label_parts(parts, k, seed)
