"""Unregularised squared 2-Wasserstein distance between the points of all class pairs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.gaussian import Progress

# The network simplex needs time like (n m)^1.5 and some 50 bytes per pair of points: this many take
# about a minute and 1.2 GiB.
MAX_PAIRS_OF_POINTS = 25_000_000
MAX_PIVOTS = 100_000_000


def exact_distances(clouds: Sequence[ClassCloud], *, progress: Progress | None = None) -> Tensor:
    """Network-simplex table of squared 2-Wasserstein distances (POT's `emd2`).

    Args:
        clouds: V classes.
        progress: called with the number of class pairs done and their total.

    Returns:
        (V, V) float64, symmetric, with a zero diagonal.

    Raises:
        InputError: two classes are too large, or the simplex does not end.
    """
    _check_sizes(clouds)
    count = len(clouds)
    table = torch.zeros(count, count, dtype=torch.float64)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    for done, (i, j) in enumerate(pairs, 1):
        table[i, j] = table[j, i] = _squared_wasserstein(clouds[i], clouds[j])
        if progress is not None:
            progress(done, len(pairs))
    return table


def _check_sizes(clouds: Sequence[ClassCloud]) -> None:
    largest = sorted(clouds, key=len)[-2:]
    if len(largest) == 2 and len(largest[0]) * len(largest[1]) > MAX_PAIRS_OF_POINTS:
        sizes = " and ".join(f"{cloud.name} ({len(cloud)} samples)" for cloud in largest)
        raise InputError(
            f"labels=exact is too slow for classes as large as {sizes}: it takes at most "
            f"{MAX_PAIRS_OF_POINTS:,} pairs of points; use labels=gaussian or labels=sinkhorn, or "
            "fewer samples (max_samples)"
        )


def _squared_wasserstein(one: ClassCloud, two: ClassCloud) -> float:
    import ot

    points_one, points_two = (
        cloud.points.detach().to("cpu", torch.float64) for cloud in (one, two)
    )
    cost = torch.cdist(points_one, points_two, compute_mode="donot_use_mm_for_euclid_dist").square()
    with warnings.catch_warnings():
        # The log says the same as POT's warnings, which would name none of the classes.
        warnings.simplefilter("ignore")
        value, log = ot.emd2(
            one.masses.cpu().numpy(),
            two.masses.cpu().numpy(),
            cost.numpy(),
            numItermax=MAX_PIVOTS,
            log=True,
        )
    if log["warning"] is not None:
        raise InputError(
            f"exact transport between class {one.name} and class {two.name} did not end well "
            f"({log['warning']}); use labels=gaussian or labels=sinkhorn"
        )
    return float(value)
