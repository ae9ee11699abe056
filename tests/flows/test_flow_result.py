"""What a flow returns: kept, read back, and followed by maps."""

import json
import resource
from dataclasses import replace

import pytest
import torch
from refusals import naming
from small_flows import assert_same_flow, blobs, flow, rough_flow

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows.functionals import Norm, WeightedFunctional
from otdd_flash.flows.stepping import Stepping

SOURCE, TARGET = blobs(9), blobs(11, seed=1)


AUTO = otdd.ComputeOptions(precision="double")
NORM = {"name": "norm", "weight": 0.1, "centre": torch.ones(3)}
MINE = WeightedFunctional("mine", 0.1, Norm(SOURCE))
KINDS = {
    "functionals": {"functionals": [NORM, MINE], "keep_moments": True},
    "augmented in a box": {"mode": "augmented", "stepping": Stepping(0.3, box=(-1.0, 1.0))},
    "unlabelled": {"labels": "none", "source": replace(SOURCE, labels=None)},
}


@pytest.fixture(scope="module")
def plain():
    options = {"functionals": [NORM], "stepping": Stepping(0.3, box=(-1.0, 1.0))}
    return rough_flow(SOURCE, TARGET, compute=AUTO, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_comes_back_from_disk(kind, tmp_path):
    options = {"source": SOURCE, "target": TARGET, "compute": AUTO, **KINDS[kind]}
    weights = torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    source = replace(options["source"], weights=weights, name="mine", subset_hash="ab")
    result = rough_flow(**{**options, "source": source})
    assert result.save(tmp_path / "kept", config={"a": 1}) == tmp_path / "kept"
    loaded = otdd.FlowResult.load(tmp_path / "kept")
    assert_same_flow(loaded, result, seconds=True)
    assert dict(loaded.seconds) == dict(result.seconds)
    summary = json.loads((tmp_path / "kept" / "result.json").read_text())
    assert summary["config"] == {"a": 1}
    assert summary["value"] == result.history[-1].divergence
    assert summary["start"]["value"] == result.history[0].divergence
    assert (summary["steps"], summary["n"], summary["m"]) == (2, 9, 11)
    # Samples are the particles in their rows.
    assert result.source.fingerprint == source.fingerprint
    assert result.target.fingerprint == TARGET.fingerprint
    assert torch.equal(result.samples.weights, source.weights)
    assert result.samples.class_names == source.class_names
    assert result.samples.name == "mine"
    end = result.trajectory.points[-1]
    assert torch.equal(end, result.samples.features[result.trajectory.rows])
    assert torch.equal(result.trajectory.points[0], source.features)


def test_the_content_is_json_and_the_table_has_a_row_a_step(plain):
    content = plain.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    frame = plain.to_frame()
    assert frame.step.tolist() == [0, 1, 2]
    for name in ("objective", "divergence", "lower", "upper", "step_size", "iterations"):
        assert frame[name].tolist() == [getattr(record, name) for record in plain.history]
    weighted = [record.functionals["norm"] for record in plain.history]
    assert frame["functional.norm"].tolist() == weighted
    # Nothing was estimated: the columns are there and have their types.
    assert frame.estimate.isna().all()
    types = {name: str(frame[name].dtype) for name in ("estimate", "estimated_on", "converged")}
    assert types == {"estimate": "float64", "estimated_on": "Int64", "converged": "bool"}


def test_a_full_disk_and_what_is_no_result_are_clear_errors(tmp_path, plain):
    distance = otdd.dataset_distance(SOURCE, TARGET, epsilon=4.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    full = r"cannot write .*result.safetensors.*File too large"
    try:
        for result in (plain, distance):
            with naming(type(result)), pytest.raises(InputError, match=full):
                result.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="no complete result in"):
        otdd.FlowResult.load(tmp_path)
    distance.save(tmp_path)
    with pytest.raises(InputError, match="no complete result in"):
        otdd.FlowResult.load(tmp_path)
    plain.save(tmp_path)
    file = tmp_path / "result.safetensors"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(InputError, match=r"result\.safetensors is damaged"):
        otdd.FlowResult.load(tmp_path)


@pytest.mark.slow
def test_the_entropic_map_takes_particles_where_the_flow_did(tmp_path):
    """Also through schedules, class distances that are measured again, and a box."""
    for options in (
        {"stepping": Stepping(0.3, schedule="inverse_sqrt"), "refresh": 2},
        {"stepping": Stepping(0.5, box=(-0.5, 1.0)), "labels": "none"},
    ):
        result = flow(SOURCE, TARGET, keep_moments=True, steps=3, epsilon=2.0, **options)
        loaded = otdd.FlowResult.load(result.save(tmp_path / str(len(options))))
        moved = loaded.map("entropic", mass=0.0)(SOURCE)
        with naming(options):
            torch.testing.assert_close(moved.features, result.samples.features, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_nearest_map_follows_any_flow_and_the_entropic_map_says_which_it_cannot():
    for options, reason in (
        ({"keep_moments": False}, "keep_moments=true"),
        ({"mode": "attached"}, "flow.mode=attached moves more than points"),
        ({"stepping": Stepping(0.1, "adam")}, "only flow.optimizer=sgd without options"),
        ({"stepping": Stepping(0.1, noise=0.1)}, "only flow.optimizer=sgd"),
        ({"functionals": [{"name": "entropy", "weight": 0.1}]}, "flow.functionals move particles"),
    ):
        result = rough_flow(SOURCE, TARGET, **{"keep_moments": True, "steps": 1, **options})
        sentence = f"cannot follow this flow: {reason}.*nearest"
        with naming(options), pytest.raises(InputError, match=sentence):
            result.map("entropic")
    mapped = result.map("nearest")(SOURCE)
    torch.testing.assert_close(mapped.features, result.samples.features, rtol=0, atol=1e-10)
    with pytest.raises(InputError, match=r"map 'next'.*entropic, nearest, residual"):
        result.map("next")


@pytest.mark.slow
def test_at_most_two_hundred_particles_are_followed_all_classes_in_proportion():
    mixed, target = blobs(400, classes=4), blobs(5, seed=1)
    source = mixed.take(torch.argsort(mixed.labels, stable=True))
    for labels, goal in ((source.labels, target), (None, replace(target, labels=None))):
        side = replace(source, labels=labels)
        result = rough_flow(side, goal, labels="none", epsilon=9.0, steps=1)
        rows = result.trajectory.rows
        assert len(rows) == 200
        assert bool((rows.diff() > 0).all())
        if labels is not None:
            assert torch.equal(result.trajectory.labels[0], labels[rows])
            assert torch.bincount(labels[rows]).tolist() == [50, 50, 50, 50]
