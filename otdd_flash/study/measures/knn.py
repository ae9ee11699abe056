"""`knn`: how well the nearest rows of the target tell a row's class, in the source's features."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.study.measures.base import NetworkView
from otdd_flash.study.measures.network import NetworkMeasure

NEIGHBOURS = 5


class Knn(NetworkMeasure):
    """Leave-one-out accuracy of the vote of the `NEIGHBOURS` nearest rows."""

    name = "knn"
    title = "k-nearest-neighbour accuracy"

    def score(self, view: NetworkView) -> float:
        return knn_accuracy(view.features, view.labels)


def knn_accuracy(features: Tensor, labels: Tensor, k: int = NEIGHBOURS) -> float:
    """The share of rows whose class has most votes among the k nearest others.

    Of classes with equally many votes, the one of the nearest row wins; of rows at one distance,
    the earlier. With fewer than k others, all vote.

    Args:
        features: (n, d), n >= 2.
        labels: (n,) class indices.
        k: how many rows vote.
    """
    n = len(features)
    points = features.double()
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    distances.fill_diagonal_(torch.inf)
    # A stable sort: rows at one distance keep their order.
    order = torch.sort(distances, dim=1, stable=True).indices
    nearest = labels[order[:, : min(k, n - 1)]]
    votes = torch.nn.functional.one_hot(nearest, int(labels.max()) + 1)
    counts = votes.sum(1).gather(1, nearest)
    # The first of the highest counts, in the order of distance.
    winner = nearest.gather(1, counts.argmax(1, keepdim=True)).squeeze(1)
    return float((winner == labels).double().mean())
