"""Arguments of the wrong type, at every public entry, and those whose meaning is plain."""

from __future__ import annotations

import inspect
import math
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash import arguments
from otdd_flash.arguments.flows import GRADIENT_FLOW_ELSEWHERE
from otdd_flash.errors import InputError
from otdd_flash.extractors import reduce_pca, standardize

POINTS = np.random.default_rng(0).normal(size=(12, 3))
LABELS = np.arange(12) % 2
ONE = otdd.LabeledSamples.from_arrays(POINTS, LABELS, name="one")
TWO = otdd.LabeledSamples.from_arrays(POINTS[::-1] + 1, LABELS, name="two")
BLOCK = np.array([[0.0, 1.0], [1.0, 0.0]])
X, Y = torch.from_numpy(POINTS), torch.from_numpy(POINTS + 1)

# What no argument that means something else can be.
HOSTILE = [
    *(None, "0.1", "no", object(), [], {}, True, 1.5, -1, math.nan, b"x", np.eye(2)),
    lambda *_: None,
]

PAIR = {"source": ONE, "target": TWO}
CLOUDS = {"x": X, "y": Y, "epsilon": 1.0}
LOAD = {"name": "blobs", "root": None, "split": "train", "max_samples": 20, "classes": None}
LOAD |= {"seed": 0, "weights": None, "download": False}
FEW = {"source_epochs": 1, "target_epochs": 1, "min_target_steps": 1, "batch_size": 8}
# Every public callable, and what it needs to be quick; other arguments have their defaults.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "LabeledSamples": (
        otdd.LabeledSamples,
        {"features": POINTS, "labels": LABELS, "class_names": ("a", "b"), "name": "n"},
    ),
    "from_arrays": (
        otdd.LabeledSamples.from_arrays,
        {"features": POINTS, "labels": LABELS, "name": "n"},
    ),
    "to": (ONE.to, {"device": "cpu"}),
    "take": (ONE.take, {"rows": torch.tensor([0])}),
    "keep_classes": (ONE.keep_classes, {"keep": [0]}),
    "load": (otdd.load, LOAD | {"samples": 30, "dim": 2, "num_classes": 2, "spread": 0.1}),
    "arrays": (
        otdd.load,
        {"name": "arrays", "path": "nowhere.npz", "labels_path": None, "features": None}
        | {"label": None, "drop_unlabelled": False},
    ),
    "huggingface": (
        otdd.load,
        {"name": "huggingface", "path": "./nowhere", "config": None, "input": None, "label": None},
    ),
    "torchvision": (
        otdd.load,
        {"name": "torchvision", "dataset": "KMNIST", "arguments": None, "root": "nowhere"},
    ),
    "digits": (otdd.load, {"name": "digits", "rotate": 1.0}),
    "idx": (otdd.load, {"name": "idx", "images": "nowhere", "labels": None}),
    "image_folder": (otdd.load, {"name": "image_folder", "path": "nowhere"}),
    "features_file": (otdd.features_file, {"path": "nowhere.npy"}),
    "embed": (
        otdd.embed,
        {"dataset": otdd.load("blobs", samples=20), "extractor": otdd.extractors.identity()}
        | {"max_samples": 9, "batch_size": 4, "device": "cpu"},
    ),
    "pixels": (otdd.extractors.pixels, {}),
    "timm": (otdd.extractors.timm, {"model": "nothing"}),
    "torchvision model": (otdd.extractors.torchvision, {"model": "nothing"}),
    "text": (otdd.extractors.text, {"model": "nothing"}),
    "from_callable": (otdd.extractors.from_callable, {"path": "nowhere:f"}),
    "from_module": (
        otdd.extractors.from_module,
        {"net": torch.nn.Linear(2, 2), "batch_size": 4, "device": "cpu"},
    ),
    "build_extractor": (otdd.extractors.build_extractor, {"name": "identity"}),
    "standardize": (standardize, PAIR),
    "reduce_pca": (reduce_pca, PAIR | {"k": 2, "seed": 0}),
    "dataset_distance": (
        otdd.dataset_distance,
        PAIR | {"epsilon": 1.0, "labels": "means", "debias": False, "compute": "cpu"},
    ),
    "pairwise_distances": (
        otdd.pairwise_distances,
        {"datasets": [ONE, TWO], "epsilon": 1.0, "labels": "means"},
    ),
    "sliced_distances": (
        otdd.sliced_distances,
        {"datasets": [ONE, TWO], "projections": 2, "device": "cpu"},
    ),
    "Study": (
        otdd.Study,
        {"tasks": {"one": ONE, "two": TWO}, "measures": ["otdd"], "transfer": None}
        | {"measure": "otdd", "epsilon": 1.0, "labels": "means", "projections": 4},
    ),
    "Study.run": (
        otdd.Study({"one": ONE, "two": TWO}, ["frechet"], None).run,
        {"folder": "study", "resume": True, "workers": 1, "threads": 1},
    ),
    "Transfer": (
        otdd.Transfer,
        {"protocol": "head", "seeds": 1, "learning_rate": 0.1, "weight_decay": 0.0} | FEW,
    ),
    "class_distances": (otdd.class_distances, {"datasets": [ONE], "labels": "means"}),
    "gradient_flow": (
        otdd.gradient_flow,
        PAIR | {"flow": otdd.Flow(1), "epsilon": 1.0, "labels": "means"},
    ),
    "Flow": (otdd.Flow, {"steps": 1, "stepping": otdd.Stepping()}),
    "Callbacks": (otdd.Callbacks, {}),
    "noise_floor": (otdd.noise_floor, PAIR),
    "subsample_interval": (otdd.subsample_interval, PAIR | {"value": 1.0, "count": 1}),
    "sinkhorn": (otdd.sinkhorn, {"source": X, "target": Y, "epsilon": 1.0}),
    "sinkhorn_divergence": (
        otdd.sinkhorn_divergence,
        {"source": X, "target": Y, "epsilon": 1.0, "debias": False},
    ),
    "sinkhorn_loss": (otdd.sinkhorn_loss, CLOUDS | {"debias": False}),
    "sinkhorn_hessian": (otdd.sinkhorn_hessian, CLOUDS | {"debias": False}),
    "transport_map": (otdd.transport_map, CLOUDS),
    "sinkhorn_potentials": (otdd.sinkhorn_potentials, CLOUDS),
    "CGOptions": (otdd.CGOptions, {"max_iterations": 10}),
    "sinkhorn_losses": (otdd.sinkhorn_losses, CLOUDS | {"x": [X], "y": [Y], "debias": False}),
    "doubly_stochastic": (
        otdd.doubly_stochastic,
        {"logits": X[:3], "iterations": 2, "max_iterations": 5, "gradient": "none"},
    ),
    "sinkhorn_plans": (
        otdd.sinkhorn_plans,
        {"costs": X[None], "epsilon": 1.0, "max_iterations": 5, "gradient": "none"},
    ),
    "matrix_transport": (otdd.matrix_transport, {"costs": POINTS, "epsilon": 1.0}),
    "matrix_loss": (otdd.matrix_loss, {"costs": X, "epsilon": 1.0}),
    "matrix_plan": (otdd.matrix_plan, {"costs": X, "epsilon": 1.0}),
    "MatrixTransport.load": (otdd.MatrixTransport.load, {"path": "nowhere", "costs": POINTS}),
    "CostBlocks": (otdd.CostBlocks, {"n": 12, "m": 3, "block": lambda rows, columns: X[rows]}),
    "ClassDistances": (otdd.ClassDistances, {"xx": BLOCK, "xy": BLOCK, "yy": BLOCK}),
    "from_full": (
        otdd.ClassDistances.from_full,
        {"full": np.kron(np.ones((2, 2)), BLOCK), "size_x": 2},
    ),
    "ClassDistances.load": (otdd.ClassDistances.load, {"path": "nowhere.npz"}),
    "JointClassDistances.load": (otdd.JointClassDistances.load, {"path": "nowhere.npz"}),
    "between": (otdd.class_distances([ONE, TWO], "means").between, {"first": 0, "second": 1}),
    "labels.Gaussian": (otdd.labels.Gaussian, {}),
    "labels.Sinkhorn": (otdd.labels.Sinkhorn, {"epsilon": 1.0}),
    "labels.UpperBound": (otdd.labels.UpperBound, {}),
    "labels.Given": (otdd.labels.Given, {"table": "nowhere.npz"}),
    "Converged": (otdd.Converged, {"max_iterations": 9}),
    "GeomlossSchedule": (otdd.GeomlossSchedule, {}),
    "ComputeOptions": (otdd.ComputeOptions, {"device": "cpu"}),
    "led": (otdd.led, {"work": lambda ranks: 0}),
    "GroundCost": (otdd.GroundCost, {}),
    "Stepping": (otdd.Stepping, {"optimizer_options": {}}),
    "Checkpoints": (otdd.Checkpoints, {"folder": "nowhere", "every": 1}),
}


def _whole(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What is given, and the defaults of all other arguments but of those of `load`."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return given
    lazy = {one.name for one in parameters if "factory" in repr(one.default)}
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    return {name: value for name, value in defaults.items() if name not in lazy} | given


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow(after=10)
@pytest.mark.parametrize("entry", CALLS)
def test_wrong_types_end_in_a_sentence_at_every_public_entry(entry: str) -> None:
    function, given = CALLS[entry]
    good, sentences = _whole(function, given), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in good:
            for value in HOSTILE:
                try:
                    function(**{**good, name: value})
                except InputError as error:
                    sentences.append(str(error))
                except Exception as error:
                    raise AssertionError(f"{entry}({name}={value!r}) raised {error!r}") from error
    assert len(sentences) >= 3 * len(good)
    assert not [sentence for sentence in sentences if "\n" in sentence]


def test_every_callable_that_is_public_is_called_here() -> None:
    called = {function for function, _ in CALLS.values()}
    made_here = {otdd.FlowResult, otdd.DistanceResult, otdd.PairwiseResult}
    made_here |= {otdd.NoiseFloor, otdd.SubsampleInterval, otdd.JointClassDistances}
    made_here |= {otdd.SlicedResult, otdd.StudyResult}
    made_here |= {otdd.SinkhornHessian, otdd.HessianProduct, otdd.SmallPlans}
    made_here |= {otdd.MatrixTransport}
    for name in otdd.__all__:
        value = getattr(otdd, name)
        error = isinstance(value, type) and issubclass(value, Exception)
        if callable(value) and not error and value not in made_here:
            assert value in called, name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: otdd.dataset_distance(otdd.load("digits"), ONE),
            r"source is a dataset .*otdd.embed\(source, extractor\)",
        ),
        (lambda: otdd.dataset_distance(ONE, TWO, epsilon="0.1"), "epsilon must be a number"),
        (lambda: otdd.dataset_distance(ONE, TWO, debias="no"), "debias must be true or false"),
        (lambda: otdd.dataset_distance(ONE, None), "target must be LabeledSamples, .* got None"),
        (lambda: otdd.Converged(max_iterations=1.5), "max_iterations must be an integer, got"),
        (lambda: otdd.Converged(max_iterations=True), "must be an integer, got True"),
        (
            lambda: otdd.dataset_distance(ONE, TWO, epsilon=torch.ones((), requires_grad=True)),
            "epsilon must be a number, got Tensor",
        ),
    ],
)
def test_messages_name_the_argument_what_was_given_and_what_is_accepted(call, message) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_arrays_with_labels_and_a_devices_name_just_work() -> None:
    expected = otdd.dataset_distance(ONE, TWO, epsilon=1.0).value
    pairs = [
        ((POINTS, LABELS), (POINTS[::-1] + 1, LABELS)),
        ((torch.from_numpy(POINTS), LABELS), (torch.from_numpy(POINTS[::-1] + 1), LABELS)),
    ]
    computes = "cpu", torch.device("cpu")
    for (source, target), compute in zip(pairs, computes, strict=True):
        found = otdd.dataset_distance(source, target, epsilon=1, compute=compute)
        assert found.value == expected
    assert otdd.sinkhorn_divergence(POINTS, POINTS + 1, epsilon=1.0).value > 0


def test_numbers_of_any_library_are_numbers() -> None:
    for one in (1, 1.0, np.float32(1), np.int64(1), torch.ones(()), Fraction(1)):
        options = otdd.Converged(tolerance=one, max_seconds=one)
        assert (options.tolerance, options.max_seconds) == (1.0, 1.0), one
        assert type(options.tolerance) is float, one
    assert type(otdd.Converged(max_iterations=np.int64(3)).max_iterations) is int
    assert type(otdd.labels.Gaussian(unbiased=np.bool_(False)).unbiased) is bool


def test_declarations_import_no_torch() -> None:
    modules = [name for _, name, _ in pkgutil.iter_modules(arguments.__path__)]
    assert len(modules) > 4
    script = f"import sys; from otdd_flash.arguments import {', '.join(modules)}"
    script += "; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_an_argument_of_an_option_says_where_to_write_it() -> None:
    for argument, place in (
        ("steps", r"flow=otdd\.Flow\(steps=\.\.\.\)"),
        ("checkpoints", r"flow=otdd\.Flow\(checkpoints="),
        ("space", r"flow=otdd\.Flow\(space="),
        ("lambda_x", r"cost=otdd\.GroundCost\(lambda_x="),
        ("class_distances", r"labels=otdd\.labels\.Given\(table\)"),
        ("stop", r"callbacks=otdd\.Callbacks\(stop="),
    ):
        message = rf"^gradient_flow takes no {argument}: write {place}"
        with pytest.raises(InputError, match=message):
            otdd.gradient_flow(ONE, TWO, **{argument: 1})
    parameters = inspect.signature(otdd.gradient_flow).parameters
    assert len(parameters) <= 12
    assert not parameters.keys() & GRADIENT_FLOW_ELSEWHERE.keys()
