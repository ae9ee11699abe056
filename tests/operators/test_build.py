"""The choice between stored and streamed scores, and what the options accept."""

from __future__ import annotations

import sys

import pytest
import torch

from otdd_flash import memory, samples
from otdd_flash.cost import compute as compute_options
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import InputError
from otdd_flash.labels.sinkhorn_pairs import kernels_run_on
from otdd_flash.operators import build
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison, check_resources
from otdd_flash.operators.point_scores import StoredScores, StreamedScores
from otdd_flash.samples import LabeledSamples

CPU, CROSS = torch.device("cpu"), [(0, 1)]
# Where Triton runs: on a GPU, else in its interpreter.
HERE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU


def cloud(n: int) -> LabeledSamples:
    features = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
    return LabeledSamples(features, torch.arange(n) % 2, ("a", "b"))


def built(compute: ComputeOptions) -> Operator:
    asked = Comparison.prepare((cloud(50), cloud(40)), GroundCost(), compute, debias=False)
    return asked.with_classes(torch.ones(4, 4)).operator("xy")


@pytest.mark.parametrize(
    ("budget", "kind"), [(4 * 50 * 40, StoredScores), (4 * 50 * 40 - 1, StreamedScores)]
)
def test_scores_are_kept_if_they_fit_the_budget(budget: int, kind: type) -> None:
    compute = ComputeOptions(device="cpu", memory_budget=budget)
    assert type(built(compute).source) is kind


def fails(*_: object, **__: object) -> object:
    raise AssertionError("never to be called")


@pytest.mark.parametrize(("backend", "budget"), [("torch", "auto"), ("triton", "1GiB")])
def test_nothing_small_asks_for_memory_or_is_checked_again(
    backend: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = cloud(50).to(HERE), cloud(40).to(HERE)
    for name in ("_as_features", "_as_class_indices"):
        monkeypatch.setattr(samples, name, fails)
    for module in (memory, compute_options):
        monkeypatch.setattr(module, "free_memory", fails)
    compute = ComputeOptions(str(HERE), backend, memory_budget=budget)
    asked = Comparison.prepare(sides, GroundCost(), compute)
    asked.with_classes(torch.ones(4, 4)).operator("xy")


def test_a_budget_that_the_device_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, compute_options):
        monkeypatch.setattr(module, "ASSUMED_FREE", 0)
        monkeypatch.setattr(module, "free_memory", lambda _: 100_000)
    # One block and one tile of scores are held by the streamed operator that comes first.
    monkeypatch.setattr(build, "streamed_bytes", lambda *_: 0)
    scores = 4 * 50 * 40
    assert type(built(ComputeOptions("cpu", memory_budget="auto")).source) is StoredScores
    for module in (memory, compute_options):
        monkeypatch.setattr(module, "free_memory", lambda _: scores - 1)
    pattern = r"memory_budget=1GiB .*7\.8 KiB and 7\.8 KiB are free on cpu; use memory_budget=auto"
    with pytest.raises(InputError, match=pattern):
        built(ComputeOptions("cpu", memory_budget="1GiB"))
    assert type(built(ComputeOptions("cpu", memory_budget="auto")).source) is StreamedScores


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that can be asked about and never used."""
    for name, answer in (
        ("is_available", True),
        ("device_count", 1),
        ("current_device", 0),
        ("get_device_capability", (9, 0)),
        ("get_device_name", "Some GPU"),
        ("mem_get_info", (1000, 10_000)),
        (
            "memory_stats_as_nested_dict",
            {
                "reserved_bytes": {"all": {"current": 300}},
                "allocated_bytes": {"all": {"current": 100}},
            },
        ),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(LabeledSamples, "to", fails)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_a_gpu_without_triton_is_refused_and_never_replaced(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = ComputeOptions(device, backend)
    with monkeypatch.context() as without:
        without.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
        with pytest.raises(InputError, match=r"cuda:0 \(Some GPU\) .* 7\.0 .*use backend=torch"):
            built(compute)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InputError, match=r"cuda:0 \(Some GPU\) has no Triton.*use backend=torch"):
        built(compute)
    for elsewhere in (("torch", "fast"), ("auto", "double")):
        compute = ComputeOptions("cuda", *elsewhere)
        assert check_resources((cloud(50), cloud(40)), CROSS, compute, torch.device("cuda", 0)) > 0


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("precision", ["fast", "high", "double"])
def test_an_amd_card_runs_pytorch_and_nothing_else(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(build, "kernel_bytes", fails)
    # What it answers is not what NVIDIA's numbers mean.
    monkeypatch.setattr(torch.cuda, "get_device_capability", fails)
    card = torch.device("cuda", 0)
    for backend in ("auto", "torch"):
        compute = ComputeOptions("cuda", backend, precision)
        assert check_resources((cloud(50), cloud(40)), CROSS, compute, card) > 0
    with pytest.raises(InputError, match=r"AMD card.*NVIDIA.*use backend=torch|no double"):
        built(ComputeOptions("cuda", "triton", precision))
    assert not kernels_run_on(card)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("backend", "precision", "ways"),
    [
        ("auto", "fast", r"\(max_samples\), fewer dimensions \(extractor\.pca\) or device=cpu"),
        ("torch", "double", r"\(extractor\.pca\), precision=high or device=cpu"),
    ],
)
def test_a_full_gpu_is_refused_before_anything_is_allocated(
    backend: str, precision: str, ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "ASSUMED_FREE", 0)
    pattern = (
        r"not enough memory on cuda:0 for 50 x 40 points of dimension 3: at least "
        rf"[\d.]+ KiB are needed and 1\.2 KiB are free; use fewer samples .*{ways}"
    )
    with pytest.raises(InputError, match=pattern):
        built(ComputeOptions("cuda", backend, precision))


def test_triton_outside_of_a_gpu_is_for_its_interpreter_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="backend=triton needs a CUDA device, got device=cpu"):
        built(ComputeOptions("cpu", "triton"))
    with pytest.raises(InputError, match="backend=triton has no double precision"):
        built(ComputeOptions("cpu", "triton", "double"))


@pytest.mark.parametrize(
    ("bad", "known"),
    [
        ({"backend": "keops"}, "auto, torch"),
        ({"precision": "half"}, "fast, high"),
        *(({"memory_budget": text}, "memory_budget must be auto") for text in ("4 GiBs", "-1", "")),
    ],
)
def test_unknown_options_list_the_known(bad: dict[str, str], known: str) -> None:
    with pytest.raises(InputError, match=known):
        ComputeOptions(**bad)
