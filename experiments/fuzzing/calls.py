"""Calls of the public functions, of which one argument is of another type or value."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
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


# What holds integers: of a column as features, and as labels.
HOLDERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "list with a float": lambda values: [*values, 1.0],
    "int64": lambda values: np.array(values, np.int64),
    "uint64": lambda values: np.array(values, np.uint64),
    "long long": lambda values: np.array(values, np.longlong),
    "big-endian": lambda values: np.array(values, ">i8"),
    "tensor": torch.tensor,
    "longdouble": lambda values: np.array(values, np.int64).astype(np.longdouble),
    "object": lambda values: np.array(values, object),
    "Decimal": lambda values: [Decimal(value) for value in values],
    "Fraction": lambda values: [Fraction(value) for value in values],
    "Int64": lambda values: pd.Series(values, dtype="Int64"),
    "Arrow-backed": lambda values: pd.Series(values, dtype="int64[pyarrow]"),
    "category": lambda values: pd.Series(values, dtype="category"),
    "Arrow": pa.array,
}


def held(random: np.random.Generator) -> Attempt:
    """Integers of up to 70 bits in some container: exact as features or labels, or refused."""
    holder = list(HOLDERS)[int(random.integers(len(HOLDERS)))]
    base = int(random.choice([-1, 1])) * (1 << int(random.integers(20, 71)))
    values = [base + int(step) for step in random.integers(-2, 3, 3)]
    as_labels = bool(random.random() < 0.5)
    what = f"{values} in {holder} as {'labels' if as_labels else 'features'}"
    try:
        given = HOLDERS[holder](values)
    except (OverflowError, TypeError, ValueError):
        # The container does not hold them.
        return Attempt("held", what, "not held")
    kept: list[int]
    try:
        if as_labels:
            samples = otdd.LabeledSamples.from_arrays(np.zeros((len(given), 1)), given)
            assert samples.labels is not None
            kept = [int(samples.class_names[k]) for k in samples.labels.tolist()]
        else:
            features = otdd.LabeledSamples(_column(given), None, ()).features
            kept = [int(value) for value in features[:, 0].tolist()]
    except otdd.InputError as error:
        needless = not as_labels and all(float(value) == value for value in values)
        return Attempt("held", what, "refused", f"needless: {error}" if needless else None)
    except Exception as error:
        return Attempt("held", what, "raised", f"{type(error).__name__}: {error}"[:300])
    wrong = kept[: len(values)] != values
    return Attempt("held", what, "done", f"became {kept}" if wrong else None)


def _column(given: Any) -> Any:
    """What a container of numbers is as features (n, 1)."""
    if isinstance(given, list):
        return [[value] for value in given]
    if isinstance(given, pd.Series):
        return given.to_frame("x")
    return pa.table({"x": given}) if isinstance(given, pa.Array) else given.reshape(-1, 1)


def call(random: np.random.Generator) -> Attempt:
    """One call, with one of its arguments replaced; two of a hundred are as they should be."""
    if random.random() < 0.2:
        return held(random)
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
