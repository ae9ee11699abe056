"""Labels for unlabelled data: k-means clusters among the features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples


def with_pseudo_labels(samples: LabeledSamples, k: int, seed: int) -> LabeledSamples:
    """Label samples by their k-means cluster; labels that are there are replaced.

    Clusters are weighted by the samples' masses and numbered from the largest to the smallest.

    Args:
        samples: n feature vectors.
        k: number of clusters, 1 <= k <= n. Fewer distinct points give fewer clusters.
        seed: of the initial centres.

    Raises:
        InputError: k is not in [1, n].
    """
    from sklearn.cluster import KMeans

    n = len(samples)
    if not 1 <= k <= n:
        raise InputError(
            f"pseudo_labels needs k from 1 to {n}, the rows of {samples.name}; got {k}"
        )
    points = samples.features.detach().cpu().numpy()
    distinct = len(np.unique(points, axis=0)) if k > 1 else 1
    clustering = KMeans(n_clusters=min(k, distinct), n_init=4, random_state=seed)
    clusters = clustering.fit_predict(points, sample_weight=samples.masses.cpu().numpy())
    found, indices, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    rank = np.argsort(np.argsort(-sizes, kind="stable"), kind="stable")
    names = tuple(f"cluster {cluster}" for cluster in range(len(found)))
    return replace(samples, labels=torch.from_numpy(rank[indices]), class_names=names)
