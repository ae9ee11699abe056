"""Calls of the public functions, of which one argument is of another type or value."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import otdd_flash as otdd
from experiments.fuzzing.verdict import Attempt

Arguments = dict[str, Any]


def _samples(seed: int, classes: int = 2) -> otdd.LabeledSamples:
    draw = torch.Generator().manual_seed(seed)
    names = tuple(map(str, range(classes)))
    points = torch.randn(12, 3, generator=draw) + seed
    return otdd.LabeledSamples(points, torch.arange(12) % classes, names)


def _functions() -> dict[str, tuple[Callable[..., Any], Arguments]]:
    """Public functions with arguments that they take."""
    x, y = _samples(0), _samples(1)
    pair: Arguments = {"source": x, "target": y}
    clouds: Arguments = {"x": torch.randn(8, 2), "y": torch.randn(9, 2), "epsilon": 0.5}
    points = {"features": np.zeros((4, 2)), "labels": np.array([0, 1, 0, 1])}
    return {
        "dataset_distance": (otdd.dataset_distance, {
            **pair, "epsilon": 0.5, "labels": "means", "lambda_x": 0.5, "lambda_y": 0.5,
            "debias": True, "min_class_size": None, "solver": None, "compute": None,
        }),
        "pairwise_distances": (otdd.pairwise_distances, {
            "datasets": [x, y], "epsilon": 0.5, "labels": "means", "lambda_x": 0.5,
        }),
        "class_distances": (otdd.class_distances, {"datasets": [x, y], "labels": "means"}),
        "gradient_flow": (otdd.gradient_flow, {
            **pair, "flow": otdd.Flow(1), "epsilon": 0.5, "labels": "means", "cost": None,
            "callbacks": None,
        }),
        "Flow": (otdd.Flow, {
            "steps": 1, "mode": "features", "seed": 0, "refresh": 1, "functionals": (),
        }),
        "sinkhorn": (otdd.sinkhorn, {**pair, "epsilon": 0.5, "options": None, "compute": None}),
        "sinkhorn_divergence": (otdd.sinkhorn_divergence, {**pair, "epsilon": 0.5, "cost": None}),
        "sinkhorn_loss": (otdd.sinkhorn_loss, {**clouds, "debias": True}),
        "load": (otdd.load, {"name": "blobs", "split": "train", "max_samples": 10, "seed": 0}),
        "from_arrays": (otdd.LabeledSamples.from_arrays, {**points, "weights": None}),
        "LabeledSamples": (otdd.LabeledSamples, {
            "features": torch.zeros(4, 2), "labels": torch.tensor([0, 1, 0, 1]),
            "class_names": ("a", "b"),
        }),
        "Converged": (otdd.Converged, {
            "tolerance": 1e-2, "max_iterations": 10, "bound_width": None, "max_seconds": None,
        }),
        "ComputeOptions": (otdd.ComputeOptions, {
            "device": "cpu", "backend": "auto", "precision": "fast", "memory_budget": "auto",
        }),
        "GroundCost": (otdd.GroundCost, {"lambda_x": 0.5, "lambda_y": 0.5, "ground": "cosine"}),
        "Stepping": (otdd.Stepping, {"step_size": 0.1, "optimizer": "sgd"}),
        "pixels": (otdd.extractors.pixels, {"size": None, "grayscale": False}),
    }  # fmt: skip


def _values() -> list[Any]:
    return [
        None, True, -1, 0, 1.5, float("nan"), float("inf"), 1e300, 1e-300, 1 + 2j, "", "abc", "cpu",
        "0.1", b"x", [], [1, 2], (), {}, {"a": 1}, object(), print, Path("nosuch"),
        np.zeros((3, 2)), np.array(["a", "b"]), np.zeros(0), np.float32(0.5), np.int64(3),
        torch.zeros(4, 2), torch.zeros(0, 2), torch.full((4, 2), torch.nan), torch.tensor(0.5),
        torch.zeros(4, 2, dtype=torch.complex64), torch.zeros(4, dtype=torch.bool), _samples(2),
        [_samples(0)], [None, None], otdd.Converged(), otdd.ComputeOptions(device="cpu"),
    ]  # fmt: skip


def call(random: np.random.Generator) -> Attempt:
    """One call, with one of its arguments replaced; two of a hundred are as they should be."""
    functions, values = _functions(), _values()
    name = list(functions)[int(random.integers(len(functions)))]
    function, arguments = functions[name]
    what = f"{name}()"
    if random.random() > 0.02:
        key = list(arguments)[int(random.integers(len(arguments)))]
        value = values[int(random.integers(len(values)))]
        arguments = {**arguments, key: value}
        what = f"{name}({key}={_shown(value)})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**arguments)
    except otdd.InputError as error:
        several = "\n" in str(error).strip()
        return Attempt("call", what, "refused", f"several lines: {error}" if several else None)
    except Exception as error:
        return Attempt("call", what, "raised", f"{type(error).__name__}: {error}"[:300])
    return Attempt("call", what, "done")


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__}{tuple(value.shape)} {value.dtype}"
    return type(value).__name__ if "object at" in repr(value) else repr(value)[:60]
