"""One dataset of a projection: its sampled points, class means and masses in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from otdd_flash.report.figures.principal_plane import PrincipalPlane
from otdd_flash.samples import LabeledSamples

ROWS_DRAWN = 2000


@dataclass(frozen=True)
class ProjectedSide:
    """One dataset as drawn.

    `points` (k, 2) are a sample; `centroids` (V, 2), NaN for a class without mass, and `masses`
    (V,) come from all rows. `class_names` are V, empty where there is nothing to name.
    """

    name: str
    size: int
    points: NDArray[np.float64]
    centroids: NDArray[np.float64]
    masses: NDArray[np.float64]
    class_names: Sequence[str]
    color: str
    marker: str


def side_of(
    samples: LabeledSamples, classes: int, plane: PrincipalPlane, seed: int, color: str, marker: str
) -> ProjectedSide:
    """Project a dataset that the coupling divides into `classes`; one class needs no labels.

    Raises:
        ValueError: the dataset has another number of classes.
    """
    labels, names = samples.labels, samples.class_names
    if classes == 1 and (labels is None or len(names) != 1):
        labels, names = torch.zeros(len(samples), dtype=torch.int64), ("",)
    if labels is None or classes != len(names):
        known = "no labels" if labels is None else f"{len(names)} classes"
        raise ValueError(f"the coupling has {classes} classes, {samples.name} has {known}")
    index, weights = labels.cpu().numpy(), samples.masses.cpu().numpy()
    places = plane.project(samples.features).numpy()
    masses = np.bincount(index, weights, minlength=classes).astype(np.float64)
    sums = [np.bincount(index, weights * places[:, k], minlength=classes) for k in range(2)]
    with np.errstate(invalid="ignore"):
        centroids = np.stack(sums, axis=1) / masses[:, None]
    return ProjectedSide(
        name=samples.name,
        size=len(samples),
        points=places[rows_with_mass(samples, ROWS_DRAWN, seed)],
        centroids=centroids,
        masses=masses,
        class_names=names,
        color=color,
        marker=marker,
    )


def rows_with_mass(samples: LabeledSamples, limit: int, seed: int) -> NDArray[np.int64]:
    """Indices of at most `limit` rows, drawn among those that carry mass."""
    rows: NDArray[np.int64] = np.flatnonzero(samples.masses.cpu().numpy() > 0)
    if len(rows) > limit:
        rows = np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))
    return rows
