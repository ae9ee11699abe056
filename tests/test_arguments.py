"""Arguments of the wrong type, at every public entry, and those whose meaning is plain."""

from __future__ import annotations

import inspect
import math
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
from otdd_flash.checks import number
from otdd_flash.errors import InputError
from otdd_flash.extractors import reduce_pca, standardize
from otdd_flash.flows.run import ELSEWHERE
from tests.refusals import naming

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

# By its name, an argument that makes a call quick; others have their defaults.
GOOD: dict[str, Any] = {
    **{"source": ONE, "target": TWO, "datasets": [ONE, TWO], "x": X, "y": Y, "costs": X},
    **{"epsilon": 1.0, "labels": "means", "debias": False, "device": "cpu", "projections": 2},
    **{"features": POINTS, "class_names": ("a", "b"), "xx": BLOCK, "xy": BLOCK, "yy": BLOCK},
    **{"path": "nowhere.npz", "folder": "nowhere", "tasks": {"one": ONE, "two": TWO}, "steps": 1},
    **{"measures": ["otdd"], "transfer": None, "max_iterations": 9, "value": 1.0, "count": 1},
    **{"n": 12, "m": 3, "block": lambda rows, columns: X[rows, columns], "work": lambda ranks: 0},
    **{"flow": otdd.Flow(1), "gradient": "none", "iterations": 2, "batch_size": 4, "k": 2},
    **{"reference": ONE, "sample": TWO, "permutations": 19, "window": 6, "query": ONE},
    **{"library": {"one": ONE, "two": TWO}, "sources": {"one": ONE, "two": TWO}},
    **{"source_epochs": 1, "target_epochs": 1, "min_target_steps": 1, "seeds": 1, "seed": 0},
}
LOAD = {"root": None, "split": "train", "max_samples": 20, "classes": None, "seed": 0}
LOAD |= {"weights": None, "download": False}
OF_FILE = {"path": "nowhere.npz", "label": None}
LOADED: dict[str, dict[str, Any]] = {
    "blobs": LOAD | {"samples": 30, "dim": 2, "num_classes": 2, "spread": 0.1},
    "arrays": OF_FILE | {"labels_path": None, "features": None, "drop_unlabelled": False},
    "huggingface": {"path": "./nowhere", "config": None, "input": None, "label": None},
    "torchvision": {"dataset": "KMNIST", "arguments": None, "root": "nowhere"},
    "digits": {"rotate": 1.0},
    "idx": {"images": "nowhere", "labels": None},
    "image_folder": {"path": "nowhere"},
}
BLOBS = otdd.load("blobs", samples=20)
# Results, which calls return.
RESULTS = {
    *(otdd.FlowResult, otdd.DistanceResult, otdd.PairwiseResult, otdd.SlicedResult),
    *(otdd.NoiseFloor, otdd.SubsampleInterval, otdd.JointClassDistances, otdd.StudyResult),
    *(otdd.SinkhornHessian, otdd.HessianProduct, otdd.SmallPlans, otdd.MatrixTransport),
    *(otdd.Index, otdd.Ranking, otdd.ShiftReport, otdd.Mixture),
}
# Every public callable, and arguments of its own.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    name: (getattr(otdd, name), {})
    for name in sorted(otdd.__all__)
    if callable(getattr(otdd, name)) and getattr(otdd, name) not in RESULTS | {otdd.load}
    if not (isinstance(getattr(otdd, name), type) and issubclass(getattr(otdd, name), Exception))
}
CALLS |= {f"load {name}": (otdd.load, {"name": name, **given}) for name, given in LOADED.items()}
OWN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "LabeledSamples": (otdd.LabeledSamples, {"labels": LABELS}),
    "from_arrays": (otdd.LabeledSamples.from_arrays, {"labels": LABELS}),
    "to": (ONE.to, {}),
    "take": (ONE.take, {"rows": torch.tensor([0])}),
    "keep_classes": (ONE.keep_classes, {"keep": [0]}),
    "embed": (
        otdd.embed,
        {"dataset": BLOBS, "extractor": otdd.extractors.identity(), "max_samples": 9},
    ),
    "pixels": (otdd.extractors.pixels, {}),
    "timm": (otdd.extractors.timm, {"model": "nothing"}),
    "torchvision model": (otdd.extractors.torchvision, {"model": "nothing"}),
    "text": (otdd.extractors.text, {"model": "nothing"}),
    "from_callable": (otdd.extractors.from_callable, {"path": "nowhere:f"}),
    "from_module": (otdd.extractors.from_module, {"net": torch.nn.Linear(2, 2)}),
    "build_extractor": (otdd.extractors.build_extractor, {"name": "identity"}),
    "standardize": (standardize, {}),
    "reduce_pca": (reduce_pca, {}),
    "Study": (otdd.Study, {"measure": "otdd"}),
    "Study.run": (
        otdd.Study({"one": ONE, "two": TWO}, ["frechet"], None).run,
        {"folder": "study", "resume": True, "workers": 1, "threads": 1},
    ),
    "sinkhorn": (otdd.sinkhorn, {"source": X, "target": Y}),
    "sinkhorn_divergence": (otdd.sinkhorn_divergence, {"source": X, "target": Y}),
    "sinkhorn_losses": (otdd.sinkhorn_losses, {"x": [X], "y": [Y]}),
    "doubly_stochastic": (otdd.doubly_stochastic, {"logits": X[:3]}),
    "sinkhorn_plans": (otdd.sinkhorn_plans, {"costs": X[None]}),
    "MatrixTransport.load": (otdd.MatrixTransport.load, {"costs": POINTS}),
    "from_full": (
        otdd.ClassDistances.from_full,
        {"full": np.kron(np.ones((2, 2)), BLOCK), "size_x": 2},
    ),
    "ClassDistances.load": (otdd.ClassDistances.load, {}),
    "JointClassDistances.load": (otdd.JointClassDistances.load, {}),
    "between": (otdd.class_distances([ONE, TWO], "means").between, {"first": 0, "second": 1}),
    "labels.Gaussian": (otdd.labels.Gaussian, {}),
    "labels.Sinkhorn": (otdd.labels.Sinkhorn, {}),
    "labels.UpperBound": (otdd.labels.UpperBound, {}),
    "labels.Given": (otdd.labels.Given, {"table": "nowhere.npz"}),
}
CALLS |= OWN


def whole(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What is given, and good arguments or the defaults of all others but of those of `load`."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return given
    good = {
        one.name: GOOD.get(one.name, one.default)
        for one in parameters
        if "factory" not in repr(one.default)
    }
    found = {name: value for name, value in good.items() if value is not inspect.Parameter.empty}
    return found | given


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow(after=10)
@pytest.mark.parametrize("entry", CALLS)
def test_wrong_types_end_in_a_sentence_at_every_public_entry(entry: str) -> None:
    function, given = CALLS[entry]
    good, sentences = whole(function, given), []
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


def test_numbers_beyond_floats_are_infinite_on_their_own_side() -> None:
    at_most = number("be at most 1", lambda value: value <= 1)
    for huge in (10**400, Fraction(10**400)):
        with naming(huge), pytest.raises(InputError, match=r"^it must be at most 1, got 1000"):
            at_most("it", huge)
        assert at_most("it", -huge) == -math.inf


def test_declarations_import_no_torch() -> None:
    script = "import sys, otdd_flash.arguments; print('torch' in sys.modules)"
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
    assert len(parameters) <= 14
    assert not parameters.keys() & ELSEWHERE.keys()
