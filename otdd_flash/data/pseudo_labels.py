"""Labels for unlabelled data: k-means clusters of the features.

`otdd_flash.data` exports `with_pseudo_labels`; `commands.sides` calls `label_parts` for a training
and a test part. scikit-learn is imported in the function that uses it, because few runs need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.samples import LabeledSamples


def with_pseudo_labels(samples: LabeledSamples, k: int, seed: int = 0) -> LabeledSamples:
    """Label samples by their k-means cluster, replacing labels or numbers that they have.

    Clusters are weighted by the samples' masses, and numbered by their number of rows, the largest
    first.

    Args:
        samples: n feature vectors.
        k: number of clusters, 1 <= k <= n. Fewer distinct points give fewer clusters.
        seed: seed of the initial centres.

    Raises:
        InputError: k is not in [1, n].
    """
    return label_parts([samples], k, seed)[0]


def label_parts(parts: Sequence[LabeledSamples], k: int, seed: int) -> list[LabeledSamples]:
    """Label the parts of one dataset by the clusters of the first part.

    Clusters are weighted by the masses of the first part, and numbered by their number of its rows,
    the largest first. Rows of the other parts, such as test rows, get the nearest cluster. A notice
    says that labels or numbers are replaced if the first part has any.

    Args:
        parts: feature vectors; the first part has n rows.
        k: number of clusters, 1 <= k <= n. Fewer distinct points give fewer clusters.
        seed: seed of the initial centres.

    Raises:
        InputError: k is not in [1, n].
    """
    from sklearn.cluster import KMeans

    samples = parts[0]
    n = len(samples)
    if samples.labels is not None or samples.targets is not None:
        what = "labels" if samples.targets is None else "numbers"
        warn(f"{samples.name}: its {what} are replaced by labels of {k} clusters", DataNotice)
    if not 1 <= k <= n:
        raise InputError(
            f"pseudo_labels needs k from 1 to {n}, the rows of {samples.name}; got {k}"
        )
    points, *others = (part.features.detach().cpu().numpy() for part in parts)
    distinct = len(np.unique(points, axis=0)) if k > 1 else 1
    clustering = KMeans(n_clusters=min(k, distinct), n_init=4, random_state=seed)
    clusters = clustering.fit_predict(points, sample_weight=samples.masses.cpu().numpy())
    found, clusters, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    # rank[c]: the place of cluster c when they are sorted by size.
    rank = np.argsort(np.argsort(-sizes, kind="stable"), kind="stable")
    names = tuple(f"cluster {cluster}" for cluster in range(len(found)))
    # Points that differ by rounding may leave clusters without rows, which have no number.
    clustering.cluster_centers_ = clustering.cluster_centers_[found]
    every = [clusters, *(clustering.predict(some.astype(points.dtype)) for some in others)]
    of_clusters: dict[str, Any] = {"class_names": names, "label_sets": None, "targets": None}
    return [
        replace(part, labels=torch.from_numpy(rank[ones]), **of_clusters)
        for part, ones in zip(parts, every, strict=True)
    ]
