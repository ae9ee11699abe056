"""Public calls inside of what PyTorch can do around them: modes, defaults, transforms, compilers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from small_tasks import small_study
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.extractors import reduce_pca, standardize

N, M, D = 24, 20, 3


def inputs() -> dict[str, Tensor]:
    """Clouds with two classes each, made where this is called."""
    draw = torch.Generator().manual_seed(0)
    named = {"device": "cpu", "generator": draw, "dtype": torch.float32}
    x = torch.randn(N, D, **named)
    y = torch.randn(M, D, **named) * 1.5 + 1
    return {
        **{"x": x, "y": y},
        "labels_x": torch.arange(N, device="cpu") % 2,
        "labels_y": torch.arange(M, device="cpu") % 2,
        "costs": torch.rand(N, M, **named),
    }


def samples(given: dict[str, Tensor]) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    return tuple(
        otdd.LabeledSamples(given[name], given[f"labels_{name}"], ("0", "1"), name=name)
        for name in "xy"
    )


def flow(mode: str, labels: Any = "gaussian") -> Callable[[dict[str, Tensor]], list[Tensor]]:
    def run(given: dict[str, Tensor]) -> list[Tensor]:
        found = otdd.gradient_flow(
            *samples(given),
            otdd.Flow(mode=mode, steps=2, stepping=otdd.Stepping(step_size=0.1)),
            epsilon=0.5,
            labels=labels,
        )
        return [found.samples.features, found.class_distances.full]

    return run


def contributions(given: dict[str, Tensor]) -> list[Tensor]:
    result = otdd.dataset_distance(*samples(given), epsilon=0.5)
    values = torch.tensor(result.value, dtype=torch.float64, device="cpu")
    return [values, result.contributions().values, result.barycentric_map(), result.class_coupling()]


def flow_map(given: dict[str, Tensor]) -> list[Tensor]:
    one, two = samples(given)
    found = otdd.gradient_flow(one, two, otdd.Flow(steps=2, stepping=otdd.Stepping(step_size=0.1)), epsilon=0.5)
    return [found.map("residual", epochs=3, device="cpu")(one).features]


def study(given: dict[str, Tensor]) -> list[Tensor]:
    """Transfer runs train networks; tasks are made where this is called."""
    with TemporaryDirectory() as folder:
        result = small_study(4).run(folder)
    return [number(*(row.value for row in result.pairs()))]


def number(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def pairwise(given: dict[str, Tensor]) -> list[Tensor]:
    return [otdd.pairwise_distances(samples(given), epsilon=0.5).values]


def sliced(given: dict[str, Tensor]) -> list[Tensor]:
    return [otdd.sliced_distances(samples(given), projections=200).values]


def hessian(given: dict[str, Tensor]) -> list[Tensor]:
    found = otdd.sinkhorn_hessian(given["x"], given["y"], epsilon=0.5)
    direction = torch.ones(N, D, device="cpu", dtype=torch.float32)
    return [found.gradient, found.product(direction).values]


def matrix(given: dict[str, Tensor]) -> list[Tensor]:
    found = otdd.matrix_transport(given["costs"], epsilon=0.1)
    return [number(found.value, *found.bounds), found.plan(), found.apply(given["y"])]


def plans(given: dict[str, Tensor]) -> list[Tensor]:
    found = otdd.sinkhorn_plans(given["costs"][None], epsilon=0.1)
    return [found.plans, found.value, found.bounds, found.f]


def joint(given: dict[str, Tensor]) -> list[Tensor]:
    return [
        otdd.class_distances(samples(given), labels=labels).full
        for labels in ("gaussian", "means", "exact", otdd.labels.Sinkhorn(epsilon=0.1), otdd.labels.Gaussian(diagonal=True))
    ]


def of_loss(**more: Any) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    return lambda given: [otdd.sinkhorn_loss(given["x"], given["y"], epsilon=0.5, **more)]


CALLS: dict[str, Callable[[dict[str, Tensor]], list[Tensor]]] = {
    "flow attached": flow("attached"),
    "flow attached, diagonal": flow("attached", otdd.labels.Gaussian(diagonal=True)),
    "flow attached, means": flow("attached", "means"),
    "flow joint": flow("joint"),
    "flow augmented": flow("augmented"),
    "flow augmented, diagonal": flow("augmented", otdd.labels.Gaussian(diagonal=True)),
    "flow features": flow("features"),
    "flow map": flow_map,
    "dataset_distance": contributions,
    "pairwise_distances": pairwise,
    "sliced_distances": sliced,
    "class_distances": joint,
    "sinkhorn_loss": of_loss(),
    "sinkhorn_loss cosine": of_loss(ground="cosine"),
    "sinkhorn_losses": lambda g: [otdd.sinkhorn_losses([g["x"]], [g["y"]], epsilon=0.5)],
    "sinkhorn_divergence": lambda g: [number(otdd.sinkhorn_divergence(*samples(g), epsilon=0.5).value)],
    "sinkhorn": lambda g: [otdd.sinkhorn(*samples(g), epsilon=0.5).f],
    "sinkhorn_potentials": lambda g: [*otdd.sinkhorn_potentials(g["x"], g["y"], epsilon=0.5)],
    "transport_map": lambda g: [otdd.transport_map(g["x"], g["y"], epsilon=0.5)],
    "sinkhorn_hessian": hessian,
    "matrix_loss": lambda g: [otdd.matrix_loss(g["costs"], epsilon=0.1)],
    "matrix_plan": lambda g: [otdd.matrix_plan(g["costs"], epsilon=0.1)],
    "matrix_transport": matrix,
    "doubly_stochastic": lambda g: [otdd.doubly_stochastic(g["costs"][:M, :M])],
    "doubly_stochastic f64": lambda g: [otdd.doubly_stochastic(g["costs"][:M, :M].double())],
    "sinkhorn_plans": plans,
    "noise_floor": lambda g: [number(otdd.noise_floor(*samples(g), epsilon=0.5).between.value)],
    "subsample_interval": lambda g: [number(otdd.subsample_interval(*samples(g), 1.0, epsilon=0.5).lower)],
    "study": study,
    "standardize": lambda g: [side.features for side in standardize(*samples(g))],
    "reduce_pca": lambda g: [side.features for side in reduce_pca(*samples(g), k=2, seed=0)],
}
