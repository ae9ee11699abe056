"""Small mixture problems, and their values by dense float64 formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.labels import metric_of
from otdd_flash.mixing.mixture import mixture
from otdd_flash.mixing.sources import Sources, compared
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples
from tests.reference import dense_cost, entropic_transport

Vector = NDArray[np.float64]


def problem(
    seed: int, most: int = 5, rows: int = 14
) -> tuple[LabeledSamples, list[LabeledSamples]]:
    """A target and 2 to `most` sources without labels: near, far, narrow, copies, with masses."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return float(low + (high - low) * torch.rand((), generator=draw))

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    sources = []
    for k in range(whole(2, most)):
        n, wide = whole(2, rows), 10 ** uniform(-1.5, 0.5)
        x = torch.randn(n, 2, generator=draw) * wide + torch.randn(2, generator=draw)
        masses = None
        if uniform(0, 1) < 0.3:
            masses = torch.rand(n, generator=draw, dtype=torch.float64)
            masses[0] *= whole(0, 1)
        if k and uniform(0, 1) < 0.15:
            x, masses = sources[0].features.clone(), None
        sources.append(LabeledSamples(x, None, (), masses, name=f"s{k}"))
    y = torch.randn(whole(3, rows), 2, generator=draw)
    return LabeledSamples(y, None, (), name="target"), sources


def value(target: LabeledSamples, sources: list[LabeledSamples], w: Any, epsilon: float) -> float:
    """OT_epsilon of the mixture, dense."""
    masses = torch.cat([float(wk) * one.masses for wk, one in zip(w, sources, strict=True)])
    points = torch.cat([one.features for one in sources]).double()
    cost = dense_cost(points, target.features)
    return entropic_transport(cost, masses / masses.sum(), target.masses, epsilon)[0]


def prepared(
    target: LabeledSamples, sources: list[LabeledSamples], epsilon: float, precision: str = "fast"
) -> tuple[Sources, Comparison]:
    """Sources and comparison, as `mixture` makes them."""
    names = [f"s{k}" for k in range(len(sources))]
    return compared(
        names,
        [*sources, target],
        debias=False,
        metric=metric_of("none"),
        cost=GroundCost(),
        compute=ComputeOptions("cpu", precision=precision),
        epsilon=epsilon,
    )


def mixed(target: LabeledSamples, sources: list[LabeledSamples], **given: Any) -> Any:
    """The mixture without labels."""
    given.setdefault("labels", "none")
    return mixture(target, dict(zip((s.name for s in sources), sources, strict=True)), **given)


def weights(mixture: Any) -> Vector:
    """Its weights (K,)."""
    return np.array(list(mixture.weights.values()))
