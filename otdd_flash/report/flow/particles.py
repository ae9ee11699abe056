"""Which of many particles and steps a picture shows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]


def evenly(total: int, count: int) -> Indices:
    """At most `count` of 0 ... total - 1, evenly apart; the first and, with two, the last."""
    places: Indices = np.linspace(0, total - 1, min(total, count)).round().astype(np.int64)
    return places


def evenly_over_classes(labels: Tensor | None, total: int, count: int) -> Indices:
    """At most `count` of `total` particles, class after class, as many of each as there are.

    Args:
        labels: (total,) class indices, or None for particles of one class.
        total: how many particles there are.
        count: how many to choose; with fewer than classes, some classes evenly apart.
    """
    if labels is None:
        return evenly(total, count)
    index = labels.cpu().numpy()
    members = [np.flatnonzero(index == label) for label in np.unique(index)]
    members = [members[k] for k in evenly(len(members), count)]
    sizes = np.array([len(rows) for rows in members])
    quotas = np.zeros_like(sizes)
    while quotas.sum() < min(count, sizes.sum()):
        # One more for each class that has one, the first classes first.
        open_classes = np.flatnonzero(quotas < sizes)
        quotas[open_classes[: count - quotas.sum()]] += 1
    chosen = [rows[evenly(len(rows), q)] for rows, q in zip(members, quotas, strict=True)]
    return np.concatenate(chosen)
