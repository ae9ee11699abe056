"""What belongs to a comparison is done once, whatever is asked of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import otdd_flash as otdd
from otdd_flash import samples as samples_module
from otdd_flash.samples import LabeledSamples

CPU = otdd.ComputeOptions("cpu")


def cloud(count: int, seed: int) -> LabeledSamples:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    points = torch.randn(count, 3, generator=draw) + labels[:, None] + 1
    return LabeledSamples(points, labels, ("a", "b"), name=f"set {seed}")


def copied(side: LabeledSamples) -> LabeledSamples:
    return LabeledSamples(side.features.clone(), side.labels, side.class_names, name="a copy")


SOURCE, TARGET = cloud(12, 0), cloud(10, 1)


def distance(source: LabeledSamples = SOURCE, target: LabeledSamples = TARGET, **more: Any) -> Any:
    """A distance, and all that can be asked of its result, twice."""
    result = otdd.dataset_distance(source, target, epsilon_relative=0.5, compute=CPU, **more)
    for _ in range(2):
        result.class_coupling()
        result.barycentric_map()
        result.apply_plan(torch.ones(len(target)))
        result.to_dict()
    return result


def pairwise(**more: Any) -> Any:
    datasets = SOURCE, TARGET, cloud(9, 2)
    return otdd.pairwise_distances(datasets, epsilon_relative=0.5, compute=CPU, **more)


def flow(steps: int = 3, **more: Any) -> Any:
    moves = otdd.Flow(steps, stepping=otdd.Stepping(step_size=0.1))
    return otdd.gradient_flow(SOURCE, TARGET, moves, epsilon=2.0, compute=CPU, **more)


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The positional arguments of every call, from here on."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def counts(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return original(*given, **named)

    monkeypatch.setattr(owner, name, counts)
    return calls


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[LabeledSamples]:
    """What was moved, where the device holds copies and a move within it is none."""
    there: list[LabeledSamples] = []
    moved: list[LabeledSamples] = []

    def move(side: LabeledSamples, device: torch.device | str) -> LabeledSamples:
        if any(side is one for one in there):
            return side
        moved.append(side)
        there.append(copy.copy(side))
        return there[-1]

    monkeypatch.setattr(LabeledSamples, "to", move)
    return moved


@pytest.mark.parametrize(("compare", "datasets"), [(distance, 2), (pairwise, 3)])
def test_features_are_moved_and_seen_once(
    compare: Callable[..., Any],
    datasets: int,
    moves: list[LabeledSamples],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = counted(monkeypatch, otdd.operators.ground, "directions")
    compare(ground="cosine")
    assert len(moves) == len(seen) == datasets


def test_a_dataset_against_itself_is_moved_once(moves: list[LabeledSamples]) -> None:
    distance(SOURCE, SOURCE)
    assert len(moves) == 1


@pytest.mark.slow
def test_steps_of_a_flow_move_nothing(moves: list[LabeledSamples]) -> None:
    counts = []
    for steps in (1, 4):
        moves.clear()
        flow(steps)
        counts.append(len(moves))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("compare", [distance, pairwise, flow])
def test_resources_are_checked_once(
    compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = counted(monkeypatch, otdd.operators.request, "check_resources")
    compare()
    assert len(checks) == 1


def test_content_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = counted(monkeypatch, samples_module, "fingerprint")
    result = distance(cloud(12, 3), copied(cloud(12, 3)), labels="none")
    assert result.bounds == (0, 0)
    assert len(hashed) == 2


@pytest.mark.parametrize("weighted", [False, True])
def test_a_result_packs_the_plans_cost_once(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCE
    if weighted:
        masses = torch.linspace(0, 1, len(SOURCE))
        source = LabeledSamples(SOURCE.features, SOURCE.labels, SOURCE.class_names, masses)
    built = counted(monkeypatch, otdd.result, "build_operator")
    result = distance(source)
    # Equal masses, which a map is made with, are another cost.
    assert len(built) == (3 if weighted else 1)
    parts = result.source, result.target, result.class_distances, result.divergence, result.cost
    measured = {"method": result.method, "seconds": result.seconds}
    loaded = otdd.DistanceResult(*parts, result.compute, **measured)
    assert torch.equal(loaded.barycentric_map(), result.barycentric_map())
    assert torch.equal(loaded.class_coupling(), result.class_coupling())
