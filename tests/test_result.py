"""What a distance result gives: the plan against the dense plan, and save and load."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import otdd_flash.files.result_files
from otdd_flash.distributed.shared import Shared
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.files.result_files import SUMMARY_FILE, TENSOR_FILE
from otdd_flash.labels import Sinkhorn
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.otdd import dataset_distance
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules.converged import Converged


def dataset(size, seed, *, classes=3, weighted=False, labelled=True, dtype=torch.float32):
    rng = np.random.default_rng(seed)
    labels = np.arange(size) % classes
    features = torch.from_numpy(rng.normal(size=(size, 3)) + 2 * labels[:, None]).to(dtype)
    weights = None
    if weighted:
        weights = torch.from_numpy(rng.random(size))
        weights[::4] = 0
    return LabeledSamples(
        features,
        torch.from_numpy(labels) if labelled else None,
        ("á", "b c", "d")[:classes] if labelled else (),
        weights,
        name=f"set {seed}",
        subset_hash=f"hash {seed}",
    )


SETTINGS = {
    "plain": ({}, {}),
    "weights": ({"weighted": True}, {}),
    "unlabelled": ({"labelled": False}, {"labels": "none"}),
    "not debiased": ({}, {"debias": False}),
    "bounded class distances": ({}, {"labels": Sinkhorn(epsilon=1.0)}),
    "double": ({"dtype": torch.float64}, {"compute": ComputeOptions(precision="double")}),
}


def solved(setting, *, identical=False):
    data, arguments = SETTINGS[setting]
    source = dataset(23, 0, **data)
    target = source if identical else dataset(18, 1, **data)
    return dataset_distance(source, target, epsilon=1.0, **arguments)


@pytest.fixture(params=[(name, False) for name in SETTINGS] + [("weights", True)], ids=str)
def result(request):
    name, identical = request.param
    return solved(name, identical=identical)


COMPUTE = {
    "stored": ComputeOptions("cpu", precision="high"),
    "kernels": ComputeOptions("auto", "triton", "high"),
    "rounding kernels": ComputeOptions("auto", "triton", "fast"),
}


def shifted_result(offset, compute, dtype=torch.float32):
    """Points on a grid of 1/512 that float32 holds at 1e4 too, but float16 does not at 0."""
    generator = torch.Generator().manual_seed(0)
    source, target = (
        LabeledSamples(
            (torch.randint(-4096, 4096, (n, 5), generator=generator) / 512).to(dtype) + offset,
            None,
            (),
        )
        for n in (19, 47)
    )
    return dataset_distance(
        source,
        target,
        epsilon=8.0,
        labels="none",
        debias=False,
        compute=compute,
        solver=Converged(1e-2),
    )


def dense_plan(result):
    source, target = result.source, result.target
    labels = [
        torch.zeros(len(side), dtype=torch.int64) if side.labels is None else side.labels
        for side in (source, target)
    ]
    cost = reference.dense_cost(
        source.features, target.features, 0.5, 0.5 * result.class_distances.xy, *labels
    )
    # Those that the plan is of; `potentials` are balanced for the masses of the result.
    f, g = result.divergence.xy.f, result.divergence.xy.g
    return reference.plan(cost, source.masses, target.masses, f, g, result.epsilon)


def assert_near(computed, expected):
    precision = 1e-10 if computed.dtype == torch.float64 else 3e-5
    torch.testing.assert_close(computed.double(), expected, rtol=precision, atol=precision)


def test_the_plan_is_applied_to_vectors_and_matrices(result):
    matrix = torch.randn(len(result.target), 4, generator=torch.Generator().manual_seed(0)).double()
    plan = dense_plan(result)
    assert float(plan.sum()) == pytest.approx(1, abs=2e-3)
    assert_near(result.apply_plan(matrix), plan @ matrix)
    assert_near(result.apply_plan(matrix[:, 0]), plan @ matrix[:, 0])
    assert_near(result.apply_plan(matrix[:, 0].tolist()), plan @ matrix[:, 0])


@pytest.mark.parametrize("shape", [(), (17,), (23, 2), (18, 2, 2)])
def test_values_of_another_shape_are_refused(shape):
    with pytest.raises(InputError, match=r"one row per target sample, \(18,\) or \(18, k\)"):
        solved("plain").apply_plan(torch.zeros(shape))


def test_values_that_are_not_finite_are_refused():
    """On a GPU they have no power of two to be scaled by."""
    values = torch.zeros(18)
    values[3] = torch.inf
    with pytest.raises(InputError, match="finite values"):
        solved("plain").apply_plan(values)


@pytest.mark.parametrize("use", ["class_coupling", "barycentric_map"])
def test_a_plan_that_does_not_fit_is_told_without_a_traceback(use, monkeypatch):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(StreamedOperator, "apply_plan", run_out)
    with pytest.raises(InputError, match=r"an allocation of 2\.00 GiB found .* use fewer samples"):
        getattr(solved("plain"), use)()


def test_class_coupling_sums_the_plan_by_classes(result):
    plan = dense_plan(result)
    sides = (result.source, result.target)
    ones = [
        torch.ones(len(side), 1).double()
        if side.labels is None
        else torch.nn.functional.one_hot(side.labels, side.class_total).double()
        for side in sides
    ]
    coupling = result.class_coupling()
    assert coupling.dtype == torch.float64
    assert float(coupling.sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(coupling, ones[0].T @ plan @ ones[1] / plan.sum(), rtol=0, atol=1e-5)
    assert coupling.shape == tuple(len(names) for names in result.class_names)


def test_the_barycentric_map_is_the_conditional_mean(result):
    """Points without weight are mapped as well: rows do not depend on their masses."""
    features = result.source.features
    even = LabeledSamples(features, result.source.labels, result.source.class_names)
    rows = dense_plan(
        DistanceResult(
            even,
            result.target,
            result.class_distances,
            result.divergence,
            result.cost,
            result.compute,
            method=result.method,
            seconds={},
        )
    )
    expected = rows @ result.target.features.double() / rows.sum(1, keepdim=True)
    moved = result.barycentric_map()
    assert moved.shape == features.shape
    assert_near(moved, expected)
    if result.source.weights is not None:
        assert int((result.source.weights == 0).sum()) >= 3


# Spacing of float32 at the offset: results far from 0 are rounded to half of it.
SPACING = {500.0: 2.0**-15, 1e4: 2.0**-10}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute", "offset"),
    [(COMPUTE[name], 1e4 if name == "kernels" else 500.0) for name in COMPUTE],
    ids=[*COMPUTE],
)
def test_the_barycentric_map_moves_along_with_the_points(offset, compute):
    """A sum of far points would be rounded at every step, and not once in the end."""
    near, far = (shifted_result(by, compute) for by in (0.0, offset))
    # The same potentials: costs do not depend on the origin, on these points to the last bit.
    far = replace(far, divergence=near.divergence)
    means = far.barycentric_map().double().cpu() - offset
    spread = float(far.target.features.std())
    gap = (means - near.barycentric_map().double().cpu()).abs().max()
    assert float(gap) <= SPACING[offset] + 4e-6 * spread
    rows = dense_plan(near)
    expected = rows @ near.target.features.double() / rows.sum(1, keepdim=True)
    assert float((means - expected).abs().max()) <= SPACING[offset] / 2 + 4e-6 * spread


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_double_precision_the_map_is_exact_anywhere(dtype, offset):
    far = shifted_result(offset, ComputeOptions("cpu", precision="double"), dtype)
    rows = dense_plan(far)
    expected = rows @ far.target.features.double() / rows.sum(1, keepdim=True)
    moved = far.barycentric_map()
    assert moved.dtype == torch.float64
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-11)


def assert_same_samples(one, two):
    assert one.fingerprint == two.fingerprint
    assert (one.name, one.subset_hash) == (two.name, two.subset_hash)
    assert (one.labels is None, one.weights is None) == (two.labels is None, two.weights is None)


def test_a_saved_result_loads_as_it_was(result, tmp_path):
    loaded = DistanceResult.load(result.save(tmp_path / "new" / "folder", seed=5))
    assert loaded.to_dict() == result.to_dict()
    for side in ("source", "target"):
        assert_same_samples(getattr(loaded, side), getattr(result, side))
    for key in ("xx", "xy", "yy"):
        one, two = (getattr(it.class_distances, key) for it in (loaded, result))
        assert torch.equal(one, two)
    for key in ("lower", "upper"):
        one, two = (getattr(it.class_distances, key) for it in (loaded, result))
        assert (one is None) == (two is None) == (result.method != "sinkhorn")
        assert one is None or torch.equal(one, two)
    assert loaded.class_names == result.class_names
    assert loaded.divergence.terms.keys() == result.divergence.terms.keys()
    for name, term in result.divergence.terms.items():
        for potential in ("f", "g"):
            one, two = (getattr(it, potential) for it in (loaded.divergence.terms[name], term))
            assert torch.equal(one, two)
            assert one.dtype == two.dtype
    assert (loaded.value, loaded.bounds) == (result.value, result.bounds)
    assert (loaded.cost, loaded.compute) == (result.cost, result.compute)
    assert (loaded.method, loaded.seconds) == (result.method, result.seconds)
    assert torch.equal(loaded.class_coupling(), result.class_coupling())
    assert torch.equal(loaded.barycentric_map(), result.barycentric_map())


@pytest.mark.parametrize(
    "compute",
    [
        ComputeOptions("cpu", "torch", "high", "1MiB"),
        ComputeOptions("cpu", "triton", "fast"),
        ComputeOptions("cuda:7", "triton"),
    ],
    ids=str,
)
def test_a_loaded_result_runs_where_and_how_it_did(compute, tmp_path):
    ran_on = {"device": "cuda:7", "backend": "triton, scores streamed, fast"}
    found = solved("plain")
    there = replace(
        found,
        compute=compute,
        divergence=replace(found.divergence, **ran_on),
        shared=Shared(4, 1 << 20, "ring"),
        streamed={"bytes": 1 << 30, "limited_by_reading": False},
    )
    loaded = DistanceResult.load(there.save(tmp_path))
    assert loaded.compute == compute
    assert (loaded.shared, loaded.streamed) == (there.shared, there.streamed)
    summary = loaded.to_dict()
    assert {key: summary[key] for key in ran_on} == ran_on
    assert summary == there.to_dict()


def test_a_result_of_a_device_that_is_not_here_takes_another(tmp_path):
    found = solved("plain")
    path = replace(found, compute=ComputeOptions("cuda:7")).save(tmp_path)
    away = DistanceResult.load(path)
    assert away.value == found.value
    with pytest.raises(InputError, match=r"no device 'cuda:7' .* DistanceResult.load takes it"):
        away.barycentric_map()
    for compute in ("cpu", ComputeOptions("cpu")):
        here = DistanceResult.load(path, compute)
        assert torch.equal(here.barycentric_map(), found.barycentric_map())
    with pytest.raises(InputError, match="compute must be ComputeOptions or a device's name"):
        DistanceResult.load(path, 7)


def test_a_result_of_an_earlier_version_is_computed_anywhere(tmp_path):
    """It kept the precision and the memory budget alone."""
    found = solved("double")
    tensors = found.save(tmp_path) / TENSOR_FILE
    content = found.to_dict()
    del content["compute"]
    content["memory_budget"] = "1MiB"
    save_file(load_file(tensors), tensors, metadata={"summary": json.dumps(content)})
    with pytest.warns(DataNotice, match="without a checksum"):
        loaded = DistanceResult.load(tmp_path)
    assert loaded.compute == ComputeOptions(precision="double", memory_budget="1MiB")
    assert (loaded.value, loaded.bounds) == (found.value, found.bounds)


def test_the_summary_holds_what_was_computed(result):
    content = result.to_dict(seed=7)
    assert content["value"] == result.value
    assert content["bounds"] == list(result.bounds)
    assert set(content["terms"]) == set(result.divergence.terms)
    for name, term in result.divergence.terms.items():
        keys = ("value", "marginal_error", "iterations", "converged")
        assert {key: content["terms"][name][key] for key in keys} == {
            key: getattr(term, key) for key in keys
        }
    assert (content["n"], content["m"], content["d"]) == (23, len(result.target), 3)
    assert content["fingerprints"]["source"] == result.source.fingerprint
    assert (content["seed"], content["epsilon"]) == (7, 1.0)
    assert content["stopped_by"] == "tolerance"


def test_the_content_is_json_as_it_stands(result):
    content = result.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_infinite_bounds_are_null_in_files_and_come_back(tmp_path):
    found = solved("plain")
    endless = replace(found.divergence.xy, bounds=(-np.inf, np.inf))
    endless = replace(found, divergence=replace(found.divergence, xy=endless))
    assert json.loads(json.dumps(endless.to_dict(), allow_nan=False))["bounds"] == [None, None]
    assert DistanceResult.load(endless.save(tmp_path)).bounds == (-np.inf, np.inf)


def test_the_table_is_one_row(result):
    frame = result.to_frame()
    assert frame.to_dict("records") == [
        {
            "source": "set 0",
            "target": result.target.name,
            "value": result.value,
            "lower": result.bounds[0],
            "upper": result.bounds[1],
            "marginal_error": result.divergence.marginal_error,
            "converged": True,
            "epsilon": 1.0,
            "n": 23,
            "m": len(result.target),
            "d": 3,
            "labels": result.method,
            "seconds": sum(result.seconds.values()),
        }
    ]
    kinds = {name: str(frame[name].dtype) for name in ("value", "upper", "converged", "n")}
    assert kinds == {"value": "float64", "upper": "float64", "converged": "bool", "n": "int64"}


def test_a_name_of_bytes_that_are_no_text_stays_in_the_table():
    found = solved("plain")
    odd = replace(found, source=replace(found.source, name="photos\udcff"))
    assert odd.to_frame().source[0] == "photos\udcff"


def damage(path, how):
    tensors = path / TENSOR_FILE
    with safe_open(tensors, framework="pt") as file:
        content = json.loads(file.metadata()["summary"])
    match how:
        case "no folder":
            return path / "missing"
        case "no tensors":
            tensors.unlink()
        case "cut tensors":
            tensors.write_bytes(tensors.read_bytes()[:-100])
        case "empty tensors":
            tensors.write_bytes(b"")
        case "no summary":
            save_file({"f": torch.zeros(1)}, tensors)
        case "null":
            save_file({"f": torch.zeros(1)}, tensors, metadata={"summary": "null"})
        case "missing key":
            del content["epsilon"]
        case "wrong type":
            content["terms"]["xy"] = 3
        case "short bounds":
            content["terms"]["xy"]["bounds"] = [0.5]
    if how in ("missing key", "wrong type", "short bounds"):
        save_file(load_file(tensors), tensors, metadata={"summary": json.dumps(content)})
    return path


@pytest.mark.parametrize(
    "how",
    [
        *("no folder", "no tensors", "cut tensors", "empty tensors", "no summary"),
        *("null", "missing key", "wrong type", "short bounds"),
    ],
)
def test_a_damaged_result_is_an_input_error(how, tmp_path):
    path = damage(solved("plain").save(tmp_path / "result"), how)
    with pytest.raises(InputError, match=r"no complete result in|result.safetensors is damaged"):
        DistanceResult.load(path)


def test_saving_again_replaces_the_result(tmp_path):
    solved("plain").save(tmp_path)
    other = solved("weights")
    other.save(tmp_path)
    assert DistanceResult.load(tmp_path).value == other.value
    assert sorted(path.name for path in tmp_path.iterdir()) == [SUMMARY_FILE, TENSOR_FILE]


@pytest.mark.parametrize("stage", ["tensors", "summary"])
def test_an_interrupted_save_leaves_one_whole_result(stage, tmp_path, monkeypatch):
    old, new = solved("plain"), solved("weights")
    old.save(tmp_path)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    if stage == "tensors":
        monkeypatch.setattr("safetensors.torch.save_file", interrupt)
    else:
        monkeypatch.setattr(otdd_flash.files.result_files, "write_json", interrupt)
    with pytest.raises(KeyboardInterrupt):
        new.save(tmp_path)
    loaded, expected = DistanceResult.load(tmp_path), old if stage == "tensors" else new
    assert loaded.to_dict() == expected.to_dict()
    assert torch.equal(loaded.potentials[0], expected.potentials[0])
    assert loaded.source.fingerprint == expected.source.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == [SUMMARY_FILE, TENSOR_FILE]


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        solved("plain").save(tmp_path / "file" / "result")
