"""The choice between stored and streamed scores, and what the options accept."""

from __future__ import annotations

import sys

import pytest
import torch

from otdd_flash import samples
from otdd_flash.errors import InputError
from otdd_flash.labels.sinkhorn_pairs import kernels_run_on
from otdd_flash.operators import build, memory
from otdd_flash.operators.base import Operator
from otdd_flash.operators.build import ComputeOptions, build_operator, operator_bytes
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.memory import budget_in_bytes, free_memory
from otdd_flash.operators.request import Request, check_resources, cost_size
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.samples import LabeledSamples

CPU, CROSS = torch.device("cpu"), [(0, 1)]
# Where Triton runs: on a GPU, else in its interpreter.
HERE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU


def cloud(n: int) -> LabeledSamples:
    features = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
    return LabeledSamples(features, torch.arange(n) % 2, ("a", "b"))


def built(compute: ComputeOptions, *, keep_scores: bool = True) -> Operator:
    asked = Request.prepare((cloud(50), cloud(40)), GroundCost(), compute, pairs=CROSS)
    return build_operator(asked.inputs((0, 1), torch.ones(2, 2)), keep_scores=keep_scores)


@pytest.mark.parametrize(
    ("budget", "kind"), [(4 * 50 * 40, StoredOperator), (4 * 50 * 40 - 1, StreamedOperator)]
)
def test_scores_are_kept_if_they_fit_the_budget(budget: int, kind: type) -> None:
    compute = ComputeOptions(device="cpu", memory_budget=budget)
    assert type(built(compute)) is kind


def test_double_precision_needs_twice_the_budget() -> None:
    compute = ComputeOptions(device="cpu", precision="double", memory_budget=4 * 50 * 40)
    operator = built(compute)
    assert type(operator) is StreamedOperator
    assert operator.dtype == torch.float64


def test_a_single_pass_is_never_stored() -> None:
    assert type(built(ComputeOptions("cpu"), keep_scores=False)) is StreamedOperator


def fails(*_: object, **__: object) -> object:
    raise AssertionError("never to be called")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("budget", ["auto", "1GiB"])
def test_nothing_small_asks_for_memory_or_is_checked_again(
    backend: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = cloud(50).to(HERE), cloud(40).to(HERE)
    for name in ("_as_features", "_as_class_indices"):
        monkeypatch.setattr(samples, name, fails)
    for module in (memory, build):
        monkeypatch.setattr(module, "free_memory", fails)
    compute = ComputeOptions(str(HERE), backend, memory_budget=budget)
    asked = Request.prepare(sides, GroundCost(), compute)
    build_operator(asked.inputs((0, 1), torch.ones(2, 2)))


def test_a_budget_that_the_device_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, build):
        monkeypatch.setattr(module, "UNASKED", 0)
        monkeypatch.setattr(module, "free_memory", lambda _: 100_000)
    # One block and one tile of scores are held by the streamed operator that comes first.
    monkeypatch.setattr(build, "streamed_bytes", lambda *_: 0)
    scores = 4 * 50 * 40
    assert type(built(ComputeOptions("cpu", memory_budget="auto"))) is StoredOperator
    for module in (memory, build):
        monkeypatch.setattr(module, "free_memory", lambda _: scores - 1)
    pattern = r"memory_budget=1GiB .*7\.8 KiB and 7\.8 KiB are free on cpu; use memory_budget=auto"
    with pytest.raises(InputError, match=pattern):
        built(ComputeOptions("cpu", memory_budget="1GiB"))
    assert type(built(ComputeOptions("cpu", memory_budget="auto"))) is StreamedOperator


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
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_a_gpu_without_triton_is_refused_and_never_replaced(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    with pytest.raises(InputError, match=r"cuda:0 \(Some GPU\) .* 7\.0 .*use backend=torch"):
        built(ComputeOptions(device, backend))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_gpu_whose_triton_cannot_be_imported_is_refused(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InputError, match=r"cuda:0 \(Some GPU\) has no Triton.*use backend=torch"):
        built(ComputeOptions("cuda", backend))


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
@pytest.mark.parametrize(("backend", "precision"), [("torch", "fast"), ("auto", "double")])
def test_what_runs_in_pytorch_needs_no_triton(
    backend: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    compute = ComputeOptions("cuda", backend, precision)
    assert check_resources((cloud(50), cloud(40)), CROSS, compute, torch.device("cuda", 0)) > 0


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
    monkeypatch.setattr(memory, "UNASKED", 0)
    pattern = (
        r"not enough memory on cuda:0 for 50 x 40 points of dimension 3: at least "
        rf"[\d.]+ KiB are needed and 1\.2 KiB are free; use fewer samples .*{ways}"
    )
    with pytest.raises(InputError, match=pattern):
        built(ComputeOptions("cuda", backend, precision))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_points_that_have_to_move_count(backend: str) -> None:
    x, y, there = cloud(50), cloud(40), torch.device("cuda", 0)

    compute = ComputeOptions("cuda", backend)
    moved = [
        check_resources((x, side), CROSS, compute, there)
        - operator_bytes(cost_size(x, side), compute, there)
        for side in (x, y)
    ]
    assert moved == [600, 1080]


def test_triton_outside_of_a_gpu_is_for_its_interpreter_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="backend=triton needs a CUDA device, got device=cpu"):
        built(ComputeOptions("cpu", "triton"))
    with pytest.raises(InputError, match="backend=triton has no double precision"):
        built(ComputeOptions("cpu", "triton", "double"))


@pytest.mark.parametrize("text", ["lots", "4 GiBs", "-1", "1.2.3GiB", ""])
def test_an_unreadable_memory_budget_is_the_users_error(text: str) -> None:
    with pytest.raises(InputError, match="memory_budget must be auto"):
        budget_in_bytes(text, CPU)
    with pytest.raises(InputError, match="memory_budget must be auto"):
        ComputeOptions(memory_budget=text)


def test_the_automatic_budget_is_half_of_what_is_free() -> None:
    assert 0 < budget_in_bytes("auto", CPU) <= 0.6 * free_memory(CPU)


@pytest.mark.parametrize(
    ("bad", "known"), [({"backend": "keops"}, "auto, torch"), ({"precision": "half"}, "fast, high")]
)
def test_unknown_options_list_the_known(bad: dict[str, str], known: str) -> None:
    with pytest.raises(InputError, match=known):
        ComputeOptions(**bad)
