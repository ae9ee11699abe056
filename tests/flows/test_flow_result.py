"""What a flow returns: kept, read back, and followed by maps."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_flows import TIGHT, blobs, digits, flow, rough_flow

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows.functionals import WeightedFunctional
from otdd_flash.flows.functionals.potentials import Norm
from otdd_flash.flows.stepping import Stepping

SOURCE, TARGET = blobs(9), blobs(11, seed=1)


def assert_same_result(one: otdd.FlowResult, other: otdd.FlowResult) -> None:
    for side in ("source", "target", "samples"):
        mine, theirs = getattr(one, side), getattr(other, side)
        assert mine.fingerprint == theirs.fingerprint
        assert (mine.name, mine.subset_hash) == (theirs.name, theirs.subset_hash)
    assert one.history == other.history
    assert one.settings == other.settings
    assert dict(one.seconds) == dict(other.seconds)
    assert (one.stopped_by, one.compute) == (other.stopped_by, other.compute)
    assert torch.equal(one.class_distances.full, other.class_distances.full)
    assert one.class_distances.names_x == other.class_distances.names_x
    for key in ("rows", "steps", "points", "labels"):
        mine, theirs = getattr(one.trajectory, key), getattr(other.trajectory, key)
        assert (mine is theirs is None) or torch.equal(mine, theirs)
    for moment, twin in zip(one.moments, other.moments, strict=True):
        assert moment.step_size == twin.step_size
        assert all(torch.equal(*parts) for parts in zip(moment[1:], twin[1:], strict=True))


AUTO = otdd.ComputeOptions(precision="double")
NORM = {"name": "norm", "weight": 0.1, "centre": torch.ones(3)}
MINE = WeightedFunctional("mine", 0.1, Norm(None))
KINDS: dict[str, dict[str, Any]] = {
    "functionals": {"functionals": [NORM, MINE], "keep_moments": True},
    "augmented": {"mode": "augmented"},
    "joint in a box": {"mode": "joint", "stepping": Stepping(0.3, box=(-1.0, 1.0))},
    "unlabelled": {"labels": "none", "source": replace(SOURCE, labels=None)},
}


@pytest.fixture(scope="module")
def plain() -> otdd.FlowResult:
    return rough_flow(SOURCE, TARGET)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_comes_back_from_disk(kind: str, tmp_path: Path) -> None:
    options = {"source": SOURCE, "target": TARGET, "compute": AUTO, **KINDS[kind]}
    weights = torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options["source"] = replace(options["source"], weights=weights, name="mine", subset_hash="ab")
    result = rough_flow(**options)
    assert result.save(tmp_path / "kept", config={"a": 1}) == tmp_path / "kept"
    assert_same_result(otdd.FlowResult.load(tmp_path / "kept"), result)
    summary = json.loads((tmp_path / "kept" / "result.json").read_text())
    assert summary["config"] == {"a": 1}
    assert summary["value"] == result.history[-1].divergence
    assert summary["start"]["value"] == result.history[0].divergence
    assert summary["steps"] == 2
    assert summary["n"] == 9
    assert summary["m"] == 11


def test_the_content_is_json_and_the_table_has_a_row_a_step() -> None:
    norm = {"name": "norm", "weight": 0.1, "centre": torch.ones(3)}
    stepping = Stepping(0.3, box=(-1.0, 1.0))
    result = rough_flow(SOURCE, TARGET, functionals=[norm], stepping=stepping)
    content = result.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    frame = result.to_frame()
    assert frame.step.tolist() == [0, 1, 2]
    for name in ("objective", "divergence", "lower", "upper", "step_size", "iterations"):
        assert frame[name].tolist() == [getattr(record, name) for record in result.history]
    weighted = [record.functionals["norm"] for record in result.history]
    assert frame["functional.norm"].tolist() == weighted
    # Nothing was estimated: the columns are there and have their types.
    assert frame.estimate.isna().all()
    assert frame.estimated_on.isna().all()
    types = {name: str(frame[name].dtype) for name in ("estimate", "estimated_on", "converged")}
    assert types == {"estimate": "float64", "estimated_on": "Int64", "converged": "bool"}


@pytest.mark.slow
def test_steps_of_a_part_have_estimates_in_the_table_and_the_start_a_row_of_its_own() -> None:
    frame = rough_flow(SOURCE, TARGET, stepping=Stepping(0.3, minibatch=4)).to_frame()
    assert frame.step.tolist() == [0, 0, 1, 2]
    assert frame.divergence.isna().tolist() == [False, True, True, False]
    assert frame.estimated_on.fillna(0).tolist() == [0, 4, 4, 0]
    assert {str(frame[name].dtype) for name in ("divergence", "estimate")} == {"float64"}


@pytest.mark.parametrize("kind", ["flow", "distance"])
def test_a_full_disk_is_a_clear_error(kind: str, tmp_path: Path, plain: otdd.FlowResult) -> None:
    result = plain if kind == "flow" else otdd.dataset_distance(SOURCE, TARGET, epsilon=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(InputError, match=r"cannot write .*result.safetensors.*File too large"):
            result.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_arrays_of_functionals_are_told_by_their_hash() -> None:
    def setting(centre: Any) -> Any:
        spec = {"name": "norm", "weight": 0.1, "centre": centre}
        return rough_flow(SOURCE, TARGET, functionals=[spec]).settings["flow.functionals"][0][
            "centre"
        ]

    ones = setting(torch.ones(3))
    assert isinstance(ones, str)
    assert ones == setting(torch.ones(3).numpy()) != setting(torch.zeros(3))
    assert setting([1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]


def test_no_result_is_a_clear_error(tmp_path: Path, plain: otdd.FlowResult) -> None:
    with pytest.raises(InputError, match="no complete result in"):
        otdd.FlowResult.load(tmp_path)
    otdd.dataset_distance(SOURCE, TARGET).save(tmp_path)
    with pytest.raises(InputError, match="no complete result in"):
        otdd.FlowResult.load(tmp_path)
    plain.save(tmp_path)
    file = tmp_path / "result.safetensors"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(InputError, match=r"result\.safetensors is damaged"):
        otdd.FlowResult.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"stepping": Stepping(0.3, schedule="inverse_sqrt"), "refresh": 2},
        {"stepping": Stepping(0.5, box=(0.1, 0.8)), "labels": "means"},
        {"labels": "none"},
    ],
    ids=["schedule and refresh", "box", "no labels"],
)
def test_the_entropic_map_takes_particles_where_the_flow_did(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source, target = digits("train", 20), digits("test", 20, rotate=60)
    result = flow(source, target, keep_moments=True, steps=3, epsilon=2.0, solver=TIGHT, **options)
    result.save(tmp_path)
    for kept in (result, otdd.FlowResult.load(tmp_path)):
        mapped = kept.map("entropic", mass=0.0)(source)
        torch.testing.assert_close(mapped.features, result.samples.features, rtol=0, atol=1e-6)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"keep_moments": False}, "keep_moments=true"),
        ({"mode": "attached"}, "flow.mode=attached moves more than points"),
        ({"stepping": Stepping(0.1, "adam")}, "only flow.optimizer=sgd without options"),
        ({"stepping": Stepping(0.1, noise=0.1)}, "only flow.optimizer=sgd"),
        ({"functionals": [{"name": "entropy", "weight": 0.1}]}, "flow.functionals move particles"),
    ],
)
def test_the_entropic_map_refuses_what_it_cannot_follow(options: Any, reason: str) -> None:
    result = rough_flow(SOURCE, TARGET, **{"keep_moments": True, **options})
    with pytest.raises(InputError, match=f"cannot follow this flow: {reason}.*nearest"):
        result.map("entropic")


@pytest.mark.slow
def test_the_nearest_map_takes_particles_where_the_flow_did() -> None:
    result = rough_flow(SOURCE, TARGET, mode="joint")
    mapped = result.map("nearest")(SOURCE)
    torch.testing.assert_close(mapped.features, result.samples.features, rtol=0, atol=1e-10)
    with pytest.raises(InputError, match=r"map 'next'.*entropic, nearest, residual"):
        result.map("next")


def test_samples_are_the_particles_in_their_rows() -> None:
    source = replace(SOURCE, name="mine", weights=torch.arange(1, 10).double())
    result = rough_flow(source, TARGET)
    assert result.source.fingerprint == source.fingerprint
    assert result.target.fingerprint == TARGET.fingerprint
    assert torch.equal(result.samples.weights, source.weights)
    assert result.samples.class_names == source.class_names
    assert result.samples.name == "mine"
    end = result.trajectory.points[-1]
    assert torch.equal(end, result.samples.features[result.trajectory.rows])
    assert torch.equal(result.trajectory.points[0], source.features)
    assert math.isfinite(sum(result.seconds.values()))


@pytest.mark.slow
def test_at_most_two_hundred_particles_are_followed_all_classes_in_proportion() -> None:
    mixed, target = blobs(400, classes=4), blobs(5, seed=1)
    assert mixed.labels is not None
    source = mixed.take(torch.argsort(mixed.labels, stable=True))
    for labels in (source.labels, None):
        sides = [replace(source, labels=labels), replace(target, labels=None)]
        if labels is not None:
            sides[1] = target
        result = rough_flow(*sides, labels="none", epsilon=5.0, steps=1)
        rows = result.trajectory.rows
        assert len(rows) == 200
        assert bool((rows.diff() > 0).all())
        if labels is not None:
            assert torch.equal(result.trajectory.labels[0], labels[rows])
            assert torch.bincount(labels[rows]).tolist() == [50, 50, 50, 50]
