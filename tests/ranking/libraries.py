"""Random libraries of small datasets, and their distances by dense float64 formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import reference
import torch
from torch import Tensor

import otdd_flash as otdd


def dataset(rng: np.random.Generator, dim: int, *, weighted: bool = False) -> otdd.LabeledSamples:
    """At least two rows of every class, near or far from the others."""
    size, classes = int(rng.integers(6, 20)), int(rng.integers(1, 4))
    scale, shift = rng.uniform(0.3, 1.5), rng.normal(size=dim) * rng.choice([0, 0.3, 2])
    features = rng.normal(size=(size, dim)) * scale + shift
    labels = np.arange(size) % classes
    weights = rng.uniform(0.2, 1, size) if weighted else None
    names = tuple("abc"[:classes])
    return otdd.LabeledSamples(features.astype("f4"), labels, names, weights)


def library(seed: int) -> tuple[otdd.LabeledSamples, dict[str, otdd.LabeledSamples]]:
    """A query and three to seven members; in every fifth library two of them are equally near."""
    rng = np.random.default_rng(seed)
    dim = int(rng.integers(1, 4))
    query = dataset(rng, dim)
    found = {
        f"m{k}": dataset(rng, dim, weighted=rng.random() < 0.3)
        for k in range(int(rng.integers(3, 8)))
    }
    if seed % 5 == 0:
        # The same rows in another order are as near, and of another fingerprint.
        order = torch.arange(len(found["m0"]) - 1, -1, -1)
        found["turned"] = found["m0"].take(order)
    return query, found


def class_costs(x: otdd.LabeledSamples, y: otdd.LabeledSamples) -> Tensor:
    """Squared Bures-Wasserstein distances between classes (V_x, V_y)."""

    def parts(side: otdd.LabeledSamples) -> list[tuple[Tensor, Tensor]]:
        found = []
        for label in range(side.class_total):
            rows = side.labels == label
            masses = side.masses[rows]
            found.append((side.features[rows].double(), masses / masses.sum()))
        return found

    table = [[reference.bures_wasserstein(*one, *other) for other in parts(y)] for one in parts(x)]
    return torch.tensor(table, dtype=torch.float64)


def cost(x: otdd.LabeledSamples, y: otdd.LabeledSamples) -> Tensor:
    """The cost (n, m) with lambda_x = lambda_y = 1/2."""
    classes = class_costs(x, y) / 2
    if x is y:
        classes = (classes - torch.diag(classes.diagonal())).clamp_min(0)
    return reference.dense_cost(x.features, y.features, 0.5, classes, x.labels, y.labels)


def term(x: otdd.LabeledSamples, y: otdd.LabeledSamples, epsilon: float, rho: Any = None) -> float:
    """OT_epsilon of two datasets."""
    given = cost(x, y), x.masses, y.masses, epsilon
    if rho is not None:
        return reference.unbalanced_transport(*given, (rho, rho))[0]
    return reference.entropic_transport(*given)[0]


def truth(
    query: otdd.LabeledSamples,
    members: dict[str, otdd.LabeledSamples],
    epsilon: float,
    term: Callable[..., float] = term,
    **how: Any,
) -> dict[str, float]:
    """The distance of every member, by terms that are computed in some way."""

    @cache
    def own(side: otdd.LabeledSamples) -> float:
        return term(side, side, epsilon, **how)

    return {
        name: term(query, one, epsilon, **how) - (own(query) + own(one)) / 2
        for name, one in members.items()
    }
