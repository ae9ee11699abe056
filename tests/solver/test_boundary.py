"""Where requests enter: strides, labels, devices and memory, checked before or around a solve."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import otdd_flash as otdd
from otdd_flash import memory
from otdd_flash.errors import InputError
from otdd_flash.operators import comparison
from otdd_flash.operators.point_scores import CentredProducts
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.operators.torch_pool import TorchPool, TorchTerm
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.small import route
from tests.refusals import naming

# Kernels on a GPU, else in the interpreter.
COMPUTES = {
    "stored": otdd.ComputeOptions("cpu"),
    "streamed": otdd.ComputeOptions("cpu", memory_budget=0),
    "triton": otdd.ComputeOptions("auto", "triton"),
}
STORED = COMPUTES["stored"]
TABLE = torch.tensor([[0.0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])

Pair = tuple[LabeledSamples, LabeledSamples]


def labelled(n: int, seed: int, classes: int = 2) -> LabeledSamples:
    features = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)) + seed
    names = tuple("abcdefgh"[:classes])
    return LabeledSamples(features, torch.arange(n) % classes, names, torch.arange(1.0, n + 1))


@pytest.fixture
def pair() -> Pair:
    return labelled(40, 0), labelled(33, 1)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, every second along the first dimension of something larger."""
    return tensor.repeat_interleave(2, 0)[::2]


def strided(side: LabeledSamples) -> LabeledSamples:
    columns_first = side.features.T.contiguous().T
    features = every_other(torch.cat((columns_first, columns_first), 1))[:, :3]
    if len(side) % 2:
        features = columns_first
    assert not features.is_contiguous()
    return LabeledSamples(
        features, every_other(side.labels), side.class_names, every_other(side.weights)
    )


@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTES)
def test_strides_change_nothing(pair: Pair, compute: str) -> None:
    settings: dict[str, Any] = {"epsilon": 20.0, "compute": COMPUTES[compute]}
    other = tuple(map(strided, pair))
    plain = otdd.sinkhorn(*pair, class_table=TABLE, **settings)
    found = otdd.sinkhorn(*other, class_table=TABLE.repeat(1, 2)[:, :4], **settings)
    torch.testing.assert_close(found.f, plain.f, rtol=1e-5, atol=1e-5)
    assert found.value == pytest.approx(plain.value, rel=1e-5)
    # A few steps: the interpreter is slow.
    settings |= {"solver": otdd.Converged(1e-2), "debias": False}
    one, two = (otdd.dataset_distance(*sides, **settings) for sides in (pair, other))
    assert two.value == pytest.approx(one.value, rel=1e-4)
    torch.testing.assert_close(two.class_coupling(), one.class_coupling(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(two.barycentric_map(), one.barycentric_map(), rtol=1e-3, atol=1e-3)


def test_a_start_is_refused_by_the_term_that_it_is_not_good_for(pair: Pair) -> None:
    x, y = (side.features for side in pair)
    sizes = {"xy": len(y), "xx": len(x), "yy": len(y)}
    solves: list[Callable[..., Any]] = [otdd.sinkhorn_divergence, otdd.sinkhorn_loss]
    solves += [otdd.sinkhorn_potentials, otdd.transport_map]
    for solve, value in product(solves, (math.nan, math.inf)):
        for name, size in sizes.items():
            start = {name: torch.zeros(size).index_fill(0, torch.tensor(size - 1), value)}
            message = rf"^start\['{name}'\] holds NaN or infinite entries; leave it out"
            with naming((solve, start)), pytest.raises(InputError, match=message):
                solve(x, y, epsilon=0.5, start=start)
            message = rf"^start\['{name}'\] must have shape \({size},\), got .*{size + 1}"
            with naming((solve, name)), pytest.raises(InputError, match=message):
                solve(x, y, epsilon=0.5, start={name: torch.zeros(size + 1)})
        with naming(solve), pytest.raises(InputError, match="by term, xy, xx or yy, got 'x'"):
            solve(x, y, epsilon=0.5, start={"x": torch.zeros(len(x))})


def test_a_table_smaller_than_the_labels_is_refused_with_both_numbers(pair: Pair) -> None:
    source, target = pair[0], labelled(33, 1, classes=3)
    small = torch.zeros(4, 4)
    for solve in (otdd.sinkhorn, otdd.sinkhorn_divergence):
        with pytest.raises(InputError, match=r"\(5, 5\) for 2 \+ 3 classes, got \(4, 4\)"):
            solve(source, target, epsilon=1.0, class_table=small)
    x, y = source.features, target.features
    labels = {"labels_x": source.labels, "labels_y": target.labels}
    with pytest.raises(InputError, match=r"\(4, 4\), but the labels tell of 2 \+ 3 classes"):
        otdd.sinkhorn_loss(x, y, epsilon=1.0, class_table=small, **labels)
    with pytest.raises(InputError, match=r"labels must lie in \[0, 2\), .*got 0 to 2"):
        otdd.sinkhorn_loss(x, y, epsilon=1.0, class_table=small, class_totals=(2, 2), **labels)
    given = otdd.ClassDistances(*(torch.zeros(2, 2) for _ in range(3)))
    with pytest.raises(InputError, match=r"about 2 target classes, but the target has 3"):
        otdd.dataset_distance(source, target, class_distances=given)


def fails(*_: object, **__: object) -> Any:
    raise AssertionError("never to be called")


def elsewhere(side: LabeledSamples) -> LabeledSamples:
    """The samples on a device that holds no numbers."""
    twin = copy.copy(side)
    for key in ("features", "labels", "weights"):
        object.__setattr__(twin, key, getattr(side, key).to("meta"))
    return twin


def test_sides_on_two_devices_are_refused(pair: Pair) -> None:
    for solve in (otdd.sinkhorn, otdd.sinkhorn_divergence, otdd.dataset_distance):
        for compute in (None, STORED):
            message = r"source is on cpu and target on meta; .*\.to\(\)"
            with naming((solve, compute)), pytest.raises(InputError, match=message):
                solve(pair[0], elsewhere(pair[1]), epsilon=0.5, compute=compute)
        with pytest.raises(InputError, match=r"source is on meta and target on cpu"):
            solve(elsewhere(pair[0]), pair[1], epsilon=0.5)


@pytest.mark.gpu
def test_tables_follow_silently_and_auto_moves_data_to_the_gpu(pair: Pair) -> None:
    here = otdd.sinkhorn(*pair, epsilon=0.5, class_table=TABLE.cuda(), compute=STORED)
    assert here.f.device.type == "cpu"
    for sides in (pair, [side.to("cuda") for side in pair]):
        there = otdd.sinkhorn(*sides, epsilon=0.5, class_table=TABLE)
        assert there.f.device.type == "cuda"
        assert there.value == pytest.approx(here.value, rel=1e-3)


READERS: dict[str, Callable[[LabeledSamples, LabeledSamples], object]] = {
    "sinkhorn": lambda x, y: otdd.sinkhorn(x, y, epsilon=0.5),
    "sinkhorn_divergence": lambda x, y: otdd.sinkhorn_divergence(x, y, epsilon=0.5),
    "dataset_distance": lambda x, y: otdd.dataset_distance(x, y),
    "pairwise_distances": lambda x, y: otdd.pairwise_distances([x, y]),
    "statistics": lambda x, y: otdd.dataset_distance(
        *(labelled(20, 0), labelled(20, 1)), class_statistics=(x, y)
    ),
    "class_distances": lambda x, y: otdd.class_distances([x, y]),
    "gradient_flow": lambda x, y: otdd.gradient_flow(x, y, otdd.Flow(steps=1)),
    "reduce_pca": lambda x, y: otdd.extractors.reduce_pca(x, y, 2, 0),
    "subsample_interval": lambda x, y: otdd.subsample_interval(x, y, 1.0, epsilon=0.5),
    "noise_floor": lambda x, y: otdd.noise_floor(x, y, epsilon=0.5),
}


def test_features_that_became_nan_after_samples_were_made_are_refused(pair: Pair) -> None:
    message = r"^samples: features hold 1 NaN or .* \(first at row 7, column 1\); rem"
    for bad in (float("nan"), float("-inf")):
        pair[1].features[7, 1] = bad
        for name, reader in READERS.items():
            with naming((name, bad)), pytest.raises(InputError, match=message):
                reader(*pair)
    x, y = (side.features for side in pair)
    y[7, 1] = float("nan")
    with pytest.raises(InputError, match=r"^y: features hold 1 NaN .* row 7, column 1\)"):
        otdd.sinkhorn_loss(x.requires_grad_(), y, epsilon=0.5)


def test_a_sparse_tensor_is_the_dense_one(pair: Pair) -> None:
    x, y = (side.features for side in pair)
    settings: dict[str, Any] = {"epsilon": 5.0, "debias": False}
    hessians = [otdd.sinkhorn_hessian(x, given, **settings) for given in (y, y.to_sparse())]
    assert hessians[0].value == hessians[1].value
    leaves = [x.clone().requires_grad_(), x.to_sparse().requires_grad_()]
    losses = [otdd.sinkhorn_loss(leaf, y, **settings) for leaf in leaves]
    assert losses[0] == losses[1]
    dense, sparse = (torch.autograd.grad(*each)[0] for each in zip(losses, leaves, strict=True))
    torch.testing.assert_close(sparse.to_dense(), dense)


def entries(pair: Pair, **settings: Any) -> dict[str, Callable[[], Any]]:
    """The public functions that solve."""
    x, y = (side.features for side in pair)
    return {
        "term": lambda: otdd.sinkhorn(*pair, epsilon=0.5, **settings),
        "divergence": lambda: otdd.sinkhorn_divergence(*pair, epsilon=0.5, **settings),
        "loss": lambda: otdd.sinkhorn_loss(x, y, epsilon=0.5, **settings),
        "distance": lambda: otdd.dataset_distance(*pair, epsilon=0.5, **settings),
        "of itself": lambda: otdd.dataset_distance(pair[0], pair[0], epsilon=0.5, **settings),
    }


@pytest.mark.parametrize("compute", COMPUTES)
def test_too_little_memory_is_refused_before_any_work(
    pair: Pair, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "ASSUMED_FREE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda _: 1200)
    monkeypatch.setattr(comparison, "LabelledCost", fails)
    monkeypatch.setattr("otdd_flash.otdd.measure_classes", fails)
    pattern = (
        r"not enough memory on (cpu|cuda:0) for 40 x (33|40) points of dimension 3: at least "
        r"[\d.]+ KiB are needed and 1\.2 KiB are free; use fewer samples \(max_samples\)"
    )
    for name, solve in entries(pair, compute=COMPUTES[compute]).items():
        with naming(name), pytest.raises(InputError, match=pattern):
            solve()


@pytest.mark.slow
def test_a_self_term_that_will_not_fit_is_seen_before_the_cross_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sums of a self term grow with n^2, so that it can need more than the cross term."""
    sides = torch.randn(1000, 1), torch.ones(1, 1)
    settings = {"epsilon": 1.0, "compute": COMPUTES["triton"]}
    monkeypatch.setattr(memory, "ASSUMED_FREE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda _: 50_000)
    otdd.sinkhorn(*sides, **settings)
    with pytest.raises(InputError, match="for 1,000 x 1,000 points of dimension 1"):
        otdd.sinkhorn_divergence(*sides, progress=fails, **settings)


BROKEN: dict[str, tuple[type, str]] = {
    "building": (CentredProducts, "add"),
    "passing": (TorchOperator, "softmin_rows"),
    "building side by side": (TorchPool, "_store"),
    "passing side by side": (TorchTerm, "marginals"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_memory_that_runs_out_is_said_without_a_traceback(
    pair: Pair, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    holder, method = BROKEN[broken]
    monkeypatch.setattr(holder, method, run_out)
    several = "side by side" in broken
    if not several:
        monkeypatch.setattr(route, "MOST_POINTS", 0)
    pattern = (
        r"out of memory on cpu: an allocation of 2\.00 GiB found [\d.]+ GiB free, and 40 x (33|40) "
        r"points of dimension 3 need at least [\d.]+ KiB in all; use fewer samples"
    )
    for name, solve in entries(pair, compute=STORED).items():
        if several and name == "of itself":
            # It has one term.
            continue
        with naming(name), pytest.raises(InputError, match=pattern) as raised:
            solve()
        # Nothing holds the frames of the solve, and with them its tensors.
        assert raised.value.__context__ is None, name


def test_other_failures_are_defects(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object, **__: object) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(TorchTerm, "marginals", break_down)
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        otdd.sinkhorn(*pair, epsilon=0.5, compute=STORED)
    assert not isinstance(raised.value, InputError)
