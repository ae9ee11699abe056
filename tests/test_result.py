"""What a distance result gives: the plan against the dense plan, and save and load."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import reference
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import otdd_flash.files.tensor_file
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.distributed.exchange import Shared
from otdd_flash.errors import InputError
from otdd_flash.files.tensor_file import SUMMARY_FILE, TENSOR_FILE, save_tensors
from otdd_flash.labels import Sinkhorn
from otdd_flash.operators.torch_operator import TiledPlan
from otdd_flash.otdd import dataset_distance
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules import Converged
from tests.refusals import naming


def dataset(size, seed, *, weighted=False, labelled=True, dtype=np.float32):
    rng = np.random.default_rng(seed)
    labels = np.arange(size) % 3
    features = (rng.normal(size=(size, 3)) + 2 * labels[:, None]).astype(dtype)
    weights = rng.random(size) * (np.arange(size) % 4 > 0) if weighted else None
    names = {"name": f"set {seed}", "subset_hash": f"hash {seed}"}
    names |= {"feature_names": ("p", "q", "r")} if weighted else {}
    if not labelled:
        return LabeledSamples(features, None, (), weights, **names)
    return LabeledSamples(features, labels, ("á", "b c", "d"), weights, **names)


SETTINGS = {
    "plain": ({}, {}),
    "weights": ({"weighted": True}, {}),
    "unlabelled": ({"labelled": False}, {"labels": "none"}),
    "not debiased": ({}, {"debias": False}),
    "bounded class distances": ({}, {"labels": Sinkhorn(epsilon=1.0)}),
    "double": ({"dtype": np.float64}, {"compute": ComputeOptions(precision="double")}),
}


@cache
def solved(setting="plain"):
    data, arguments = SETTINGS[setting]
    return dataset_distance(
        dataset(23, 0, **data), dataset(18, 1, **data), epsilon=1.0, **arguments
    )


def dense_plan(result, masses=None):
    sides = result.source, result.target
    labels = [side.labels if side.class_names else torch.zeros(len(side)).long() for side in sides]
    cost = reference.dense_cost(
        *(side.features for side in sides), 0.5, 0.5 * result.class_distances.xy, *labels
    )
    # Those that the plan is of; `potentials` are balanced for the masses of the result.
    f, g = result.divergence.xy.f, result.divergence.xy.g
    masses = result.source.masses if masses is None else masses
    return reference.plan(cost, masses, result.target.masses, f, g, result.epsilon)


def conditional_means(result):
    """Points without weight are mapped as well: rows do not depend on their masses."""
    rows = dense_plan(result, torch.ones(len(result.source), dtype=torch.float64))
    return rows @ result.target.features.double() / rows.sum(1, keepdim=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_plan_the_map_and_the_coupling_are_those_of_the_dense_plan(setting):
    result = solved(setting)

    def assert_near(computed, expected):
        precision = 1e-10 if computed.dtype == torch.float64 else 3e-5
        torch.testing.assert_close(computed.double(), expected, rtol=precision, atol=precision)

    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(len(result.target), 4, generator=draw).double()
    plan = dense_plan(result)
    assert float(plan.sum()) == pytest.approx(1, abs=2e-3)
    assert_near(result.apply_plan(matrix), plan @ matrix)
    assert_near(result.apply_plan(matrix[:, 0].tolist()), plan @ matrix[:, 0])

    moved = result.barycentric_map()
    assert moved.shape == result.source.features.shape
    assert_near(moved, conditional_means(result))

    ones = [
        torch.eye(side.class_total).double()[side.labels if side.class_names else [0] * len(side)]
        for side in (result.source, result.target)
    ]
    coupling = result.class_coupling()
    assert coupling.dtype == torch.float64
    assert float(coupling.sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(coupling, ones[0].T @ plan @ ones[1] / plan.sum(), rtol=0, atol=1e-5)
    assert coupling.shape == tuple(len(names) for names in result.class_names)


def test_values_that_a_plan_cannot_take_are_refused():
    for shape in ((), (17,), (23, 2), (18, 2, 2)):
        with naming(shape), pytest.raises(InputError, match="one row per target"):
            solved().apply_plan(torch.zeros(shape))
    # On a GPU they have no power of two to be scaled by.
    with pytest.raises(InputError, match="finite values"):
        solved().apply_plan(torch.tensor([torch.inf] + 17 * [0.0]))


def test_a_plan_that_does_not_fit_is_told_without_a_traceback(monkeypatch):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(TiledPlan, "applied", run_out)
    for use in ("class_coupling", "barycentric_map"):
        with pytest.raises(InputError, match=r"an allocation of 2\.00 GiB .* use fewer samples"):
            getattr(replace(solved()), use)()


def shifted_result(offset):
    """Points on a grid of 1/512 that float32 holds at 500 too, but float16 does not at 0."""
    draw = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(-4096, 4096, (n, 5), generator=draw) / 512 + offset for n in (19, 47)
    )
    settings = {"epsilon": 8.0, "labels": "none", "debias": False, "solver": Converged(1e-2)}
    return dataset_distance(source, target, compute=ComputeOptions("cpu"), **settings)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("backend", "precision"), [("torch", "high"), ("triton", "high"), ("triton", "fast")]
)
def test_the_barycentric_map_moves_along_with_the_points(backend, precision):
    """A sum of far points would be rounded at every step, and not once in the end."""
    # Spaces of float32 at the offset: results far from 0 are rounded to half of it.
    offset, spacing = 500.0, 2.0**-15
    solved = [shifted_result(by) for by in (0.0, offset)]
    # The same potentials: costs do not depend on the origin, on these points to the last bit.
    compute = ComputeOptions("auto" if backend == "triton" else "cpu", backend, precision)
    near, far = (replace(one, divergence=solved[0].divergence, compute=compute) for one in solved)
    means = far.barycentric_map().double().cpu() - offset
    spread = float(far.target.features.std())
    gap = (means - near.barycentric_map().double().cpu()).abs().max()
    assert float(gap) <= spacing + 4e-6 * spread
    assert float((means - conditional_means(near)).abs().max()) <= spacing / 2 + 4e-6 * spread


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_saved_result_loads_as_it_was(setting, tmp_path):
    result = solved(setting)
    loaded = DistanceResult.load(result.save(tmp_path / "new" / "folder", seed=5))
    assert loaded.to_dict() == result.to_dict()
    for side in ("source", "target"):
        one, two = getattr(loaded, side), getattr(result, side)
        for field in ("fingerprint", "name", "subset_hash", "feature_names"):
            assert getattr(one, field) == getattr(two, field), (side, field)
    for key in ("xx", "xy", "yy", "lower", "upper"):
        one, two = (getattr(it.class_distances, key) for it in (loaded, result))
        assert (one is None) == (two is None)
        assert (two is None) == (key in ("lower", "upper") and result.method != "sinkhorn")
        assert one is None or torch.equal(one, two), key
    assert loaded.divergence.terms.keys() == result.divergence.terms.keys()
    for name, term in result.divergence.terms.items():
        again = loaded.divergence.terms[name]
        for one, two in ((again.f, term.f), (again.g, term.g)):
            assert torch.equal(one, two), name
            assert one.dtype == two.dtype
    for field in ("class_names", "value", "bounds", "cost", "compute", "method", "seconds"):
        assert getattr(loaded, field) == getattr(result, field), field
    assert torch.equal(loaded.class_coupling(), result.class_coupling())
    assert torch.equal(loaded.barycentric_map(), result.barycentric_map())


def test_a_loaded_result_runs_where_and_how_it_did_or_on_another_device(tmp_path):
    found, compute = solved(), ComputeOptions("cuda:7", "triton", "fast", "1MiB")
    shared, streamed = Shared(4, 1 << 20, "ring"), {"bytes": 1 << 30, "limited_by_reading": False}
    there = replace(found, compute=compute, shared=shared, streamed=streamed)
    path = there.save(tmp_path)
    away = DistanceResult.load(path)
    assert (away.compute, away.shared, away.streamed) == (compute, shared, streamed)
    assert away.to_dict() == there.to_dict()
    with pytest.raises(InputError, match=r"no device 'cuda:7' .* DistanceResult.load takes it"):
        away.barycentric_map()
    for compute in ("cpu", ComputeOptions("cpu")):
        here = DistanceResult.load(path, compute)
        assert torch.equal(here.barycentric_map(), found.barycentric_map())
    with pytest.raises(InputError, match="compute must be ComputeOptions or a device's name"):
        DistanceResult.load(path, 7)


def test_summary_and_table_hold_what_was_computed():
    result = solved("weights")
    content = result.to_dict(seed=7)
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    term = result.divergence.xy
    expected = {"value": term.value, "iterations": term.iterations, "converged": True}
    assert content["terms"]["xy"].items() >= expected.items()
    assert (content["n"], content["m"], content["d"]) == (23, 18, 3)
    assert (content["seed"], content["epsilon"], content["stopped_by"]) == (7, 1.0, "tolerance")
    frame = result.to_frame()
    lower, upper = result.bounds
    row = {"source": "set 0", "target": "set 1", "value": result.value, "lower": lower}
    row |= {"upper": upper, "marginal_error": result.divergence.marginal_error, "converged": True}
    row |= {"epsilon": 1.0, "n": 23, "m": 18, "d": 3, "labels": "gaussian"}
    assert frame.to_dict("records") == [row | {"seconds": sum(result.seconds.values())}]
    kinds = {name: str(frame[name].dtype) for name in ("value", "upper", "converged", "n")}
    assert kinds == {"value": "float64", "upper": "float64", "converged": "bool", "n": "int64"}


def test_the_device_asked_for_is_the_one_used_or_an_error(monkeypatch):
    pair = solved().source, solved().target
    found = dataset_distance(*pair, compute=ComputeOptions("cpu", memory_budget=1)).to_dict()
    assert (found["device"], found["backend"]) == ("cpu", "torch, scores streamed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="cuda"):
        dataset_distance(*pair, compute="cuda")


def test_infinite_bounds_are_null_in_files_and_come_back(tmp_path):
    found = solved()
    endless = replace(found.divergence.xy, bounds=(-np.inf, np.inf))
    endless = replace(found, divergence=replace(found.divergence, xy=endless))
    assert json.loads(json.dumps(endless.to_dict(), allow_nan=False))["bounds"] == [None, None]
    assert DistanceResult.load(endless.save(tmp_path)).bounds == (-np.inf, np.inf)


def test_a_damaged_result_is_an_input_error(tmp_path):
    tensors = solved().save(tmp_path) / TENSOR_FILE
    whole, parts = tensors.read_bytes(), load_file(tensors)
    with safe_open(tensors, framework="pt") as file:
        said = json.loads(file.metadata()["summary"])
    terms = said["terms"]
    xy = {**terms["xy"], "bounds": [0.5]}
    summaries = {
        "no object": None,
        "missing key": {key: said[key] for key in said if key != "epsilon"},
        "short bounds": {**said, "terms": {**terms, "xy": xy}},
    }
    for how in ("no tensors", "cut", "of another program", "no summary", *summaries):
        tensors.unlink(missing_ok=True)
        if how in summaries:
            save_tensors(tensors, parts, {"summary": json.dumps(summaries[how])})
        elif how == "no summary":
            save_tensors(tensors, parts, {})
        elif how == "of another program":
            save_file(parts, tensors)
        elif how == "cut":
            tensors.write_bytes(whole[:-100])
        sentence = r"no complete result in|result.safetensors is damaged"
        with naming(how), pytest.raises(InputError, match=sentence):
            DistanceResult.load(tmp_path)


@pytest.mark.parametrize("stage", ["tensors", "summary", "afterwards"])
def test_a_save_that_is_interrupted_leaves_one_whole_result(stage, tmp_path, monkeypatch):
    old, new = solved(), solved("weights")
    old.save(tmp_path)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    if stage == "tensors":
        monkeypatch.setattr("safetensors.torch.save_file", interrupt)
    elif stage == "summary":
        monkeypatch.setattr(otdd_flash.files.tensor_file, "write_json", interrupt)
    with nullcontext() if stage == "afterwards" else pytest.raises(KeyboardInterrupt):
        new.save(tmp_path)
    loaded, expected = DistanceResult.load(tmp_path), old if stage == "tensors" else new
    assert loaded.to_dict() == expected.to_dict()
    assert torch.equal(loaded.potentials[0], expected.potentials[0])
    assert loaded.source.fingerprint == expected.source.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == [SUMMARY_FILE, TENSOR_FILE]


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        solved().save(tmp_path / "file" / "result")
