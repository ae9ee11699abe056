"""The order in which pictures show classes: as the datasets list them, or like beside like."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from torch import Tensor

ORDERS = ("given", "hierarchical")


def class_orders(table: Tensor, sizes: Sequence[int], order: str) -> list[list[int]]:
    """For each dataset the order in which to show its classes.

    Args:
        table: (V, V) squared distances between all classes, dataset after dataset.
        sizes: how many classes each dataset has.
        order: one of `ORDERS`. hierarchical: as the leaves of average linkage of the distances
            between all classes, such that neighbours are as near as they can be (Bar-Joseph et al.
            2001, Fast optimal leaf ordering for hierarchical clustering). One tree for all
            datasets: classes that are near each other have like places in theirs.
    """
    if order == "given" or len(table) < 3:
        return [list(range(size)) for size in sizes]
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    distances = table.detach().cpu().double().clamp_min(0).sqrt().numpy()
    # Rounding may have left some asymmetry, and something on the diagonal.
    distances = (distances + distances.T) / 2
    np.fill_diagonal(distances, 0.0)
    leaves = leaves_list(
        linkage(squareform(distances), method="average", optimal_ordering=True)
    ).tolist()
    ends = pairwise(accumulate(sizes, initial=0))
    return [[leaf - start for leaf in leaves if start <= leaf < end] for start, end in ends]
