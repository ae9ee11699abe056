"""Arguments of the wrong type, at every public entry, and those whose meaning is plain."""

from __future__ import annotations

import importlib
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
from otdd_flash import arguments, checks
from otdd_flash.arguments import values
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
    None,
    "0.1",
    "no",
    object(),
    [],
    {},
    True,
    1.5,
    -1,
    math.nan,
    b"x",
    np.eye(2),
    lambda *_: None,
]

Entry = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Entry] = {
    "LabeledSamples": (
        otdd.LabeledSamples,
        {"features": POINTS, "labels": LABELS, "class_names": "ab", "weights": None}
        | {"class_names": ("a", "b"), "name": "n", "subset_hash": None}
        | {"mass": 1.0},
    ),
    "from_arrays": (
        otdd.LabeledSamples.from_arrays,
        {"features": POINTS, "labels": LABELS, "weights": None, "name": "n"},
    ),
    "to": (ONE.to, {"device": "cpu"}),
    "take": (ONE.take, {"rows": torch.tensor([0]), "subset_hash": None}),
    "keep_classes": (ONE.keep_classes, {"keep": [0]}),
    "load": (
        otdd.load,
        {"name": "blobs", "root": None, "split": "train", "max_samples": 20, "classes": None}
        | {"seed": 0, "weights": None, "download": False}
        | {"samples": 30, "dim": 2, "num_classes": 2, "spread": 0.1},
    ),
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
    "features_file": (otdd.features_file, {"path": "nowhere.npy", "key": None}),
    "embed": (
        otdd.embed,
        {"dataset": otdd.load("blobs", samples=20), "extractor": otdd.extractors.identity()}
        | {"max_samples": 9, "seed": 0, "input": None, "label": None, "weights": None}
        | {"batch_size": 4, "device": "cpu", "mixed_precision": "auto", "cache_dir": None}
        | {"features_path": None, "num_workers": 0, "progress": None, "group": None},
    ),
    "pixels": (otdd.extractors.pixels, {"size": None, "grayscale": False}),
    "timm": (
        otdd.extractors.timm,
        {"model": "nothing", "pretrained": False, "checkpoint": None, "seed": 0, "download": False},
    ),
    "torchvision model": (
        otdd.extractors.torchvision,
        {"model": "nothing", "weights": None, "checkpoint": None, "seed": 0, "download": False},
    ),
    "text": (otdd.extractors.text, {"model": "nothing", "download": False}),
    "from_callable": (otdd.extractors.from_callable, {"path": "nowhere:f"}),
    "from_module": (
        otdd.extractors.from_module,
        {"net": torch.nn.Linear(2, 2), "transform": None, "layer": None, "batch_size": 4}
        | {"device": "cpu"},
    ),
    "build_extractor": (otdd.extractors.build_extractor, {"name": "identity"}),
    "standardize": (standardize, {"source": ONE, "target": TWO}),
    "reduce_pca": (reduce_pca, {"source": ONE, "target": TWO, "k": 2, "seed": 0}),
    "dataset_distance": (
        otdd.dataset_distance,
        {"source": ONE, "target": TWO, "epsilon": 1.0, "epsilon_relative": None}
        | {"labels": "means", "class_distances": None, "class_statistics": None}
        | {"min_class_size": None, "lambda_x": 0.5, "lambda_y": 0.5, "debias": False}
        | {"solver": None, "compute": "cpu", "cache_dir": None, "class_progress": None}
        | {"progress": None},
    ),
    "pairwise_distances": (
        otdd.pairwise_distances,
        {"datasets": [ONE, TWO], "epsilon": 1.0, "epsilon_relative": None, "labels": "means"}
        | {"class_distances": None, "min_class_size": None, "lambda_x": 0.5, "lambda_y": 0.5}
        | {"solver": None, "compute": None, "cache_dir": None, "class_progress": None}
        | {"progress": None},
    ),
    "sliced_distances": (
        otdd.sliced_distances,
        {"datasets": [ONE, TWO], "projections": 2, "seed": 0, "device": "cpu", "progress": None},
    ),
    "Study": (
        otdd.Study,
        {"tasks": {"one": ONE, "two": TWO}, "measures": ["otdd"], "transfer": None}
        | {"measure": "otdd"}
        | {"families": None, "epsilon": 1.0, "epsilon_relative": None, "labels": "means"}
        | {"cost": None, "min_class_size": None, "solver": None, "compute": None}
        | {"projections": 4, "subsample": None, "subsample_size": None, "noise_floor": False}
        | {"seed": 0, "cache_dir": None},
    ),
    "Study.run": (
        otdd.Study({"one": ONE, "two": TWO}, ["frechet"], None).run,
        {"folder": "study", "resume": True, "shard": None, "workers": 1, "threads": 1}
        | {"progress": None, "stop": None},
    ),
    "Transfer": (
        otdd.Transfer,
        {"protocol": "head", "target_samples": None, "seeds": 1, "source_epochs": 1}
        | {"target_epochs": 1, "min_target_steps": 1, "batch_size": 8, "learning_rate": 0.1}
        | {"weight_decay": 0.0, "network": None, "image_shape": None},
    ),
    "class_distances": (
        otdd.class_distances,
        {"datasets": [ONE], "labels": "means", "min_class_size": None, "cache_dir": None}
        | {"progress": None},
    ),
    "gradient_flow": (
        otdd.gradient_flow,
        {"source": ONE, "target": TWO, "flow": otdd.Flow(1), "epsilon": 1.0, "compute": None}
        | {"epsilon_relative": None, "labels": "means", "solver": None, "min_class_size": None}
        | {"cost": None, "cache_dir": None, "callbacks": None},
    ),
    "Flow": (
        otdd.Flow,
        {"steps": 1, "mode": "features", "stepping": otdd.Stepping(), "functionals": ()}
        | {"refresh": 1, "tolerance": None, "keep_moments": False, "seed": 0, "checkpoints": None},
    ),
    "Callbacks": (
        otdd.Callbacks,
        {"progress": None, "solver_progress": None, "class_progress": None, "stop": None},
    ),
    "noise_floor": (otdd.noise_floor, {"source": ONE, "target": TWO, "seed": 0, "progress": None}),
    "subsample_interval": (
        otdd.subsample_interval,
        {"source": ONE, "target": TWO, "value": 1.0, "count": 1, "size": None, "level": 0.95}
        | {"seed": 0, "progress": None},
    ),
    "sinkhorn": (
        otdd.sinkhorn,
        {"source": X, "target": Y, "epsilon": 1.0, "class_table": None, "cost": None}
        | {"options": None, "compute": None, "progress": None},
    ),
    "sinkhorn_divergence": (
        otdd.sinkhorn_divergence,
        {"source": X, "target": Y, "epsilon": 1.0, "debias": False, "start": None},
    ),
    "sinkhorn_loss": (
        otdd.sinkhorn_loss,
        {"x": X, "y": Y, "a": None, "b": None, "epsilon": 1.0, "labels_x": None}
        | {"labels_y": None, "class_table": None, "class_totals": None, "lambda_x": 0.5}
        | {"lambda_y": 0.5, "debias": False, "start": None, "options": None, "compute": None},
    ),
    "sinkhorn_hessian": (
        otdd.sinkhorn_hessian,
        {"x": X, "y": Y, "a": None, "b": None, "epsilon": 1.0, "labels_x": None}
        | {"labels_y": None, "class_table": None, "class_totals": None, "lambda_x": 0.5}
        | {"lambda_y": 0.5, "debias": False, "start": None, "options": None, "compute": None}
        | {"cg": otdd.CGOptions()},
    ),
    "transport_map": (
        otdd.transport_map,
        {"x": X, "y": Y, "a": None, "b": None, "values": None, "epsilon": 1.0, "labels_x": None}
        | {"labels_y": None, "class_table": None, "class_totals": None, "lambda_x": 0.5}
        | {"lambda_y": 0.5, "start": None, "options": None, "compute": None}
        | {"cg": otdd.CGOptions()},
    ),
    "sinkhorn_potentials": (
        otdd.sinkhorn_potentials,
        {"x": X, "y": Y, "a": None, "b": None, "epsilon": 1.0, "labels_x": None}
        | {"labels_y": None, "class_table": None, "class_totals": None, "lambda_x": 0.5}
        | {"lambda_y": 0.5, "start": None, "options": None, "compute": None}
        | {"cg": otdd.CGOptions()},
    ),
    "CGOptions": (otdd.CGOptions, {"tolerance": 1e-5, "max_iterations": 10, "damping": 0.0}),
    "sinkhorn_losses": (
        otdd.sinkhorn_losses,
        {"x": [X], "y": [Y], "a": None, "b": None, "epsilon": 1.0, "labels_x": None}
        | {"labels_y": None, "class_table": None, "class_totals": None, "lambda_x": 0.5}
        | {"lambda_y": 0.5, "debias": False, "options": None, "compute": None},
    ),
    "doubly_stochastic": (
        otdd.doubly_stochastic,
        {"logits": X[:3], "iterations": 2, "tolerance": None, "max_iterations": 5}
        | {"temperature": 1.0, "gradient": "none", "compute": None},
    ),
    "sinkhorn_plans": (
        otdd.sinkhorn_plans,
        {"costs": X[None], "a": None, "b": None, "epsilon": 1.0, "tolerance": 1e-3}
        | {"max_iterations": 5, "gradient": "none", "sizes": None, "compute": None},
    ),
    "matrix_transport": (
        otdd.matrix_transport,
        {"costs": POINTS, "a": None, "b": None, "epsilon": 1.0, "options": None, "compute": None}
        | {"start": None, "progress": None},
    ),
    "matrix_loss": (
        otdd.matrix_loss,
        {"costs": X, "a": None, "b": None, "epsilon": 1.0, "self_costs": None, "options": None}
        | {"compute": None, "start": None},
    ),
    "matrix_plan": (
        otdd.matrix_plan,
        {"costs": X, "a": None, "b": None, "epsilon": 1.0, "options": None, "start": None}
        | {"compute": None, "cg": otdd.CGOptions()},
    ),
    "MatrixTransport.load": (
        otdd.MatrixTransport.load,
        {"path": "nowhere", "costs": POINTS, "compute": None},
    ),
    "CostBlocks": (otdd.CostBlocks, {"n": 12, "m": 3, "block": lambda rows, columns: X[rows]}),
    "ClassDistances": (
        otdd.ClassDistances,
        {"xx": BLOCK, "xy": BLOCK, "yy": BLOCK, "names_x": None, "names_y": None}
        | {"lower": None, "upper": None},
    ),
    "from_full": (
        otdd.ClassDistances.from_full,
        {"full": np.kron(np.ones((2, 2)), BLOCK), "size_x": 2, "names_x": None, "names_y": None},
    ),
    "ClassDistances.load": (otdd.ClassDistances.load, {"path": "nowhere.npz"}),
    "JointClassDistances.load": (otdd.JointClassDistances.load, {"path": "nowhere.npz"}),
    "between": (otdd.class_distances([ONE, TWO], "means").between, {"first": 0, "second": 1}),
    "labels.Gaussian": (otdd.labels.Gaussian, {"unbiased": True, "diagonal": False}),
    "labels.Sinkhorn": (otdd.labels.Sinkhorn, {"epsilon": 1.0, "tolerance": 1e-3}),
    "labels.UpperBound": (otdd.labels.UpperBound, {"unbiased": True}),
    "labels.Given": (otdd.labels.Given, {"table": "nowhere.npz"}),
    "Converged": (
        otdd.Converged,
        {"tolerance": None, "max_iterations": 9, "require_convergence": False}
        | {"bound_width": None, "max_seconds": None},
    ),
    "GeomlossSchedule": (
        otdd.GeomlossSchedule,
        {"scaling": 0.5, "diameter": None, "tolerance": None, "require_convergence": False},
    ),
    "ComputeOptions": (
        otdd.ComputeOptions,
        {"device": "cpu", "backend": "auto", "precision": "fast", "memory_budget": "auto"}
        | {"group": None},
    ),
    "led": (otdd.led, {"work": lambda ranks: 0, "group": None}),
    "GroundCost": (otdd.GroundCost, {"lambda_x": 0.5, "lambda_y": 0.5}),
    "Stepping": (
        otdd.Stepping,
        {"step_size": 0.1, "optimizer": "SGD", "optimizer_options": {}, "schedule": "constant"}
        | {"box": None, "noise": 0.0, "minibatch": None},
    ),
    "Checkpoints": (otdd.Checkpoints, {"folder": "nowhere", "every": 1, "resume": False}),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow(after=16)
@pytest.mark.parametrize("entry", CALLS)
def test_wrong_types_end_in_a_sentence_at_every_public_entry(entry: str) -> None:
    function, good = CALLS[entry]
    sentences = []
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
        (lambda: otdd.GroundCost(True), "lambda_x must be a number, got True"),
        (lambda: otdd.noise_floor(ONE, TWO, seed=-1), "seed must be at least 0, got -1"),
        (lambda: otdd.Flow(steps=1.5), r"flow\.steps must be an integer, got 1.5"),
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
    for source, target in pairs:
        for compute in ("cpu", torch.device("cpu"), otdd.ComputeOptions("cpu")):
            found = otdd.dataset_distance(source, target, epsilon=1, compute=compute)
            assert found.value == expected
    assert otdd.sinkhorn_divergence(POINTS, POINTS + 1, epsilon=1.0).value > 0


@pytest.mark.parametrize("one", [1, 1.0, np.float32(1), np.int64(1), torch.ones(()), Fraction(1)])
def test_numbers_of_any_library_are_numbers(one: Any) -> None:
    options = otdd.Converged(tolerance=one, max_seconds=one)
    assert (options.tolerance, options.max_seconds) == (1.0, 1.0)
    assert type(options.tolerance) is float


def test_integers_of_any_library_are_integers() -> None:
    assert type(otdd.Converged(max_iterations=np.int64(3)).max_iterations) is int
    assert type(otdd.labels.Gaussian(unbiased=np.bool_(False)).unbiased) is bool


def test_classes_that_declarations_name_are_there() -> None:
    named = [name for name in vars(values) if name.endswith("_CLASS")]
    assert len(named) > 5
    for name in named:
        module, _, kind = getattr(values, name).rpartition(".")
        found = getattr(importlib.import_module(module), kind)
        assert f"{found.__module__}.{found.__qualname__}" == getattr(values, name)


def test_declarations_import_no_torch() -> None:
    modules = [name for _, name, _ in pkgutil.iter_modules(arguments.__path__)]
    assert len(modules) > 4
    script = f"import sys; from otdd_flash.arguments import {', '.join(modules)}"
    script += "; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_missing_and_unknown_arguments_are_told_in_pythons_words() -> None:
    with pytest.raises(TypeError, match=r"dataset_distance\(\).*'target'"):
        otdd.dataset_distance(ONE)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilom'"):
        otdd.dataset_distance(ONE, TWO, epsilom=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("argument", "place"),
    [
        ("steps", r"flow=otdd\.Flow\(steps=\.\.\.\)"),
        ("checkpoints", r"flow=otdd\.Flow\(checkpoints="),
        ("space", r"flow=otdd\.Flow\(space="),
        ("lambda_x", r"cost=otdd\.GroundCost\(lambda_x="),
        ("class_distances", r"labels=otdd\.labels\.Given\(table\)"),
        ("stop", r"callbacks=otdd\.Callbacks\(stop="),
    ],
)
def test_an_argument_of_an_option_says_where_to_write_it(argument: str, place: str) -> None:
    message = rf"^gradient_flow takes no {argument}: write {place}"
    with pytest.raises(InputError, match=message):
        otdd.gradient_flow(ONE, TWO, **{argument: 1})


def test_a_flow_takes_few_arguments() -> None:
    parameters = inspect.signature(otdd.gradient_flow).parameters
    assert len(parameters) <= 12
    assert not parameters.keys() & GRADIENT_FLOW_ELSEWHERE.keys()


def test_long_values_are_shown_in_short() -> None:
    text = checks.shown("x" * 100)
    assert text.endswith("… (102 characters)")
    assert len(text) <= checks.LONGEST_SHOWN
    assert checks.shown(np.eye(3)) == "ndarray of shape (3, 3)"
    assert checks.shown([1, 2]) == "list of 2 items"
