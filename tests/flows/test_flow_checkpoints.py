"""A flow that was interrupted goes on as if it had not been, from files that are safe to read."""

import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import naming
from small_flows import CASES, CPU, assert_same_flow, blobs, flow, names, shards

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.files.tensor_file import save_tensors
from otdd_flash.flows import checkpoint as nest
from otdd_flash.flows.functionals import WeightedFunctional
from otdd_flash.flows.stepping import Stepping

# Of numbers that float32 holds.
SOURCE, TARGET = replace(blobs(9), features=blobs(9).features.float().double()), blobs(11, seed=1)
# Loose solves: where a solve starts then shows in where it ends.
LOOSE = {"solver": otdd.Converged(tolerance=1e-2), "steps": 4}
ONE_STEP = {**LOOSE, "steps": 1}


class Stop:
    """Asks to end a flow before step `step`."""

    def __init__(self, step):
        self.left = step

    def __call__(self):
        self.left -= 1
        return self.left < 0


def stopped_and_resumed(folder, step, **options):
    options = {**LOOSE, **options}
    first = flow(SOURCE, TARGET, checkpoints=otdd.Checkpoints(folder), stop=Stop(step), **options)
    assert first.stopped_by == "interrupted"
    assert first.history[-1].step == step
    steps = []
    resumed = flow(
        SOURCE,
        TARGET,
        checkpoints=otdd.Checkpoints(folder, resume=True),
        progress=lambda record: steps.append(record.step),
        **options,
    )
    assert steps[0] == step
    return resumed


# Every mode, optimiser state and source of chance; tests/files goes on with files of each.
WAYS = {
    "attached, noise in a minibatch": {
        **CASES["attached, diagonal"],
        "stepping": Stepping(0.1, noise=0.2, minibatch=5),
    },
    "langevin, momentum, refresh": {
        "stepping": Stepping(
            0.1, schedule="cosine", box=(-3.0, 3.0), optimizer_options={"momentum": 0.9}
        ),
        "functionals": [{"name": "entropy", "weight": 0.01}],
        "refresh": 3,
    },
    "features, moments": {"keep_moments": True},
    "joint, adam": {**CASES["joint, means"], "stepping": Stepping(0.1, "adam")},
    "augmented": CASES["augmented, full"],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_interrupted_flow_ends_where_it_would_have(way, tmp_path):
    whole = flow(SOURCE, TARGET, **{**LOOSE, **way})
    assert_same_flow(stopped_and_resumed(tmp_path, 3, **way), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [*WAYS.values()][:4:3], ids=[*WAYS][:4:3])
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")], ids="-".join)
def test_another_device_goes_on(way, devices, tmp_path):
    """In float64 it ends where one device would have, but for rounding."""
    options = {**way, "steps": 5}
    whole = flow(SOURCE, TARGET, **options)
    for device, settings in zip(devices, ({"stop": Stop(2)}, {}), strict=True):
        compute = otdd.ComputeOptions(device, precision="double")
        kept = otdd.Checkpoints(tmp_path, resume=not settings)
        found = flow(SOURCE, TARGET, compute=compute, checkpoints=kept, **options, **settings)
    assert len(found.history) == len(whole.history)
    assert found.ran_on.startswith(devices[1])
    torch.testing.assert_close(found.samples.features, whole.samples.features, rtol=1e-7, atol=1e-8)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What a flow of `ONE_STEP` has left, only to be read."""
    folder = tmp_path_factory.mktemp("kept")
    flow(SOURCE, TARGET, checkpoints=otdd.Checkpoints(folder), **ONE_STEP)
    return folder


@pytest.mark.slow
def test_a_finished_flow_may_be_continued_and_repeated(tmp_path):
    options = {**LOOSE, "steps": 2, "stepping": Stepping(0.1, "adam")}
    flow(SOURCE, TARGET, checkpoints=otdd.Checkpoints(tmp_path), **options)
    again = otdd.Checkpoints(tmp_path, resume=True)
    short = flow(SOURCE, TARGET, checkpoints=again, **options)
    assert_same_flow(short, flow(SOURCE, TARGET, **options))
    longer = {**options, "steps": 5}
    assert_same_flow(
        flow(SOURCE, TARGET, checkpoints=again, **longer), flow(SOURCE, TARGET, **longer)
    )
    with pytest.raises(InputError, match=r"taken 5 steps already.*flow.steps.*got 4"):
        flow(SOURCE, TARGET, checkpoints=again, **{**options, "steps": 4})
    # A schedule that ends with the flow fixes its length.
    linear = {**ONE_STEP, "stepping": Stepping(0.1, schedule="linear")}
    flow(SOURCE, TARGET, checkpoints=otdd.Checkpoints(tmp_path), **linear)
    with pytest.raises(InputError, match=r"flow.steps was 1 .* and is 9 now"):
        flow(SOURCE, TARGET, checkpoints=again, **{**linear, "steps": 9})


CHANGES = {
    "source": {"source": blobs(9, seed=5)},
    "labels.method": {"labels": "means"},
    "epsilon": {"epsilon": 2.0},
    "lambda_x": {"cost": otdd.GroundCost(lambda_x=0.6)},
    "solver.tolerance": {"solver": otdd.Converged(tolerance=2e-2)},
    "solver.schedule": {"solver": otdd.GeomlossSchedule(tolerance=1e-2)},
    "precision": {"compute": otdd.ComputeOptions(device="cpu", precision="high")},
    "seed": {"seed": 1},
    "flow.mode": {"mode": "joint"},
    "flow.step_size": {"stepping": Stepping(0.2)},
    "flow.optimizer": {"stepping": Stepping(0.3, "adam")},
    "flow.optimizer_options": {"stepping": Stepping(0.3, optimizer_options={"momentum": 0.1})},
    "flow.box": {"stepping": Stepping(0.3, box=(0.0, 1.0))},
    "flow.refresh": {"refresh": 2},
    "flow.keep_moments": {"keep_moments": True},
    # The same numbers have one fingerprint in both types; steps have not.
    "source.type": {"source": replace(SOURCE, features=SOURCE.features.float())},
}


@pytest.mark.slow
def test_a_changed_setting_is_named_and_refused(kept):
    options = {**ONE_STEP, "source": SOURCE, "target": TARGET}
    options["checkpoints"] = otdd.Checkpoints(kept, resume=True)
    for key, change in CHANGES.items():
        message = rf"flow.resume=true, but {key} was .* and is .* now"
        with naming(key), pytest.raises(InputError, match=message):
            flow(**{**options, **change})


def table(factor):
    found = otdd.class_distances([SOURCE, TARGET]).between(0, 1)
    return otdd.labels.Given(replace(found, xy=factor * found.xy))


def norm(centre):
    return {"functionals": [{"name": "norm", "weight": 0.1, "centre": centre}]}


def own_energy(factor):
    """A function is known by its path, and a flow went on by what had become of it."""

    def energy(points, labels, masses):
        return factor * points.square().sum()

    return {"functionals": [WeightedFunctional("energy", 0.1, energy)]}


# What a flow began with, the same given once more, another, and what is said of these.
SAME_OR_NOT = {
    "a table": ({"labels": table(1)}, {"labels": table(1)}, {"labels": table(2)}, "labels.given"),
    "arrays": (
        norm(torch.zeros(3)),
        norm(torch.zeros(3).numpy()),
        norm(torch.ones(3)),
        "flow.functionals was",
    ),
    "a function": (
        own_energy(1.0),
        own_energy(1.0 + 1e-9),
        own_energy(1.01),
        "functional energy at the start was .* something else",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SAME_OR_NOT)
def test_what_is_given_as_an_object_is_compared_by_content(what, tmp_path):
    first, same, other, sentence = SAME_OR_NOT[what]
    flow(SOURCE, TARGET, checkpoints=otdd.Checkpoints(tmp_path), **{**ONE_STEP, **first})
    again = otdd.Checkpoints(tmp_path, resume=True)
    flow(SOURCE, TARGET, checkpoints=again, **{**ONE_STEP, **same})
    with pytest.raises(InputError, match=sentence):
        flow(SOURCE, TARGET, checkpoints=again, **{**ONE_STEP, **other})


def test_resuming_needs_a_whole_checkpoint_of_this_version(tmp_path, kept):
    def refused(message, folder):
        with naming(message), pytest.raises(InputError, match=message):
            flow(SOURCE, TARGET, checkpoints=otdd.Checkpoints(folder, resume=True), **ONE_STEP)

    folder = tmp_path / "kept"
    refused(r"flow.resume=true, but there is no .*checkpoint.json", folder)
    shutil.copytree(kept, folder)
    file = folder / "checkpoint.json"
    content = file.read_bytes()
    changed = content.replace(b'"step": 1', b'"step": 2')
    for damaged in (content[: len(content) // 2], b"", b"[]", changed):
        file.write_bytes(damaged)
        refused(r"checkpoint.json is damaged.*leave flow.resume", folder)
    # One of other fingerprints would be said to be of another source.
    file.write_bytes(content)
    again = otdd.Checkpoints(folder, resume=True)
    manifest = again._manifest()
    assert manifest is not None
    del manifest["fingerprints"]
    manifest["settings"]["source"] = "0" * 64
    again._put_in_place(manifest)
    refused(r"is of another version .* leave flow\.resume out", folder)


HARM = {
    "missing": lambda path: path.unlink(),
    "damaged": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"),
    "of another run": lambda path: save_tensors(path, {"state": torch.zeros(2)}, {}),
}


@pytest.mark.slow
def test_a_harmed_shard_is_said_and_the_checkpoint_before_taken(tmp_path):
    whole = flow(SOURCE, TARGET, **LOOSE)
    first = otdd.Checkpoints(tmp_path / "first", every=2)
    flow(SOURCE, TARGET, checkpoints=first, stop=Stop(3), **LOOSE)
    for harm, way in HARM.items():
        folder = shutil.copytree(tmp_path / "first", tmp_path / harm)
        again = otdd.Checkpoints(folder, resume=True)
        (last,) = shards(folder, 3)
        way(last)
        word = "missing" if harm == "missing" else "damaged"
        said = rf"is {word}; going on .* before it, of step 2"
        with naming(harm), pytest.warns(otdd.DataNotice, match=said):
            assert_same_flow(flow(SOURCE, TARGET, checkpoints=again, **LOOSE), whole)
        for path in (folder / "checkpoint").iterdir():
            way(path)
        sentence = rf"is {word}, and the .* before it does not help; leave"
        with naming(harm), pytest.raises(InputError, match=sentence):
            flow(SOURCE, TARGET, checkpoints=again, **LOOSE)


def save(folder, state, settings):
    """A checkpoint of a state without rows."""

    def alone(*given):
        return [nest.write_shard(*given, {}, {})]

    folder.save(state, settings, (), alone)


def moved_out(folder, manifest, to):
    (shard,) = manifest["shards"]
    outside = folder / "checkpoint" / to
    outside.parent.mkdir(exist_ok=True)
    (folder / "checkpoint" / shard["file"]).rename(outside)
    shard["file"] = to


# Manifests with a checksum of their own that no run has written, or another version.
FORGED = {
    "outside": lambda folder, manifest: moved_out(folder, manifest, "../x.safetensors"),
    "absolute": lambda folder, manifest: moved_out(folder, manifest, f"{folder}/x.safetensors"),
    "no rows": lambda folder, manifest: manifest["shards"][0].update(rows={}),
    "rows left out": lambda folder, manifest: manifest["shards"][0]["rows"].update(points=[2, 11]),
}


@pytest.mark.slow
def test_a_manifest_of_another_form_is_a_clear_error(tmp_path, kept):
    for forged, change in FORGED.items():
        folder = shutil.copytree(kept, tmp_path / forged)
        again = otdd.Checkpoints(folder, resume=True)
        manifest = again._manifest()
        assert manifest is not None
        change(folder, manifest)
        again._put_in_place(manifest)
        with (
            naming(forged),
            pytest.raises(InputError, match=r"whose states are others; leave flow.resume out"),
        ):
            flow(SOURCE, TARGET, checkpoints=again, **ONE_STEP)


@pytest.mark.slow
@pytest.mark.parametrize("resume", [False, True])
def test_two_flows_in_one_folder_are_refused(resume, tmp_path):
    """Each would remove what the other has just written, or is about to read."""
    refusals = []
    folder, other = otdd.Checkpoints(tmp_path), otdd.Checkpoints(tmp_path, resume=resume)
    flow(SOURCE, TARGET, checkpoints=folder, **ONE_STEP)

    def another(_):
        for path in shards(tmp_path, 1):
            path.unlink()
        with pytest.raises(InputError, match=r"another flow that has not ended") as refusal:
            flow(SOURCE, TARGET, checkpoints=other, **ONE_STEP)
        refusals.append(str(refusal.value))

    flow(SOURCE, TARGET, checkpoints=folder, progress=another, **ONE_STEP)
    assert len(refusals) == 2
    flow(SOURCE, TARGET, checkpoints=other, **ONE_STEP)
    assert not (tmp_path / "checkpoint" / ".lock").exists()


def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch):
    folder = otdd.Checkpoints(tmp_path)
    with monkeypatch.context() as patched:
        patched.setitem(nest.TYPES, "Path", type(Path()))
        patched.setattr(nest, "_fields", lambda part: {"path": str(part)})
        save(folder, {"step": 0, "state": Path("/")}, {})
    with pytest.raises(InputError, match=r"whose states are others"):
        folder.load({}, CPU)


# Bytes of a file that the disk takes: none of the shard, half of it, the shard but no manifest.
@pytest.mark.parametrize("limit", [1_000, 500_000, 4_100_000])
def test_a_full_disk_is_a_clear_error_and_leaves_the_last_checkpoint(limit, tmp_path):
    folder, settings = otdd.Checkpoints(tmp_path), {"seed": 0}
    save(folder, {"step": 3}, settings)
    before = names(tmp_path)
    state = {"step": 4, "points": torch.zeros(1_000_000)}
    long = {**settings, "text": "x" * 5_000_000} if limit > 4_000_000 else settings
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(InputError, match=r"cannot write .*checkpoint.*File too large.*; free"):
            save(folder, state, long)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == before
    assert folder.load(settings, CPU) == {"step": 3, "rows": {}}


def test_the_last_two_checkpoints_are_kept_and_nothing_else_of_ours(tmp_path):
    """What others keep there stays and hinders nobody, also a folder."""
    folder = tmp_path / "checkpoint"
    (folder / "step-100.a.rows-0-9.safetensors").mkdir(parents=True)
    (folder / "step-7.ckpt").touch()
    for step in range(4):
        # As of a write that was killed.
        (folder / "step-0.dead.rank-0.rows-0-9.safetensors").touch()
        save(otdd.Checkpoints(tmp_path), {"step": step}, {})
    ours = [str(path.relative_to(tmp_path)) for k in (2, 3) for path in shards(tmp_path, k)]
    assert len(ours) == 2
    assert names(tmp_path) == sorted(["checkpoint.json", "checkpoint/step-7.ckpt", *ours])


def test_a_checkpoint_of_other_settings_takes_the_place_of_none(tmp_path):
    folder = otdd.Checkpoints(tmp_path)
    save(folder, {"step": 8}, {"seed": 0})
    save(folder, {"step": 2}, {"seed": 1})
    (last,) = shards(tmp_path, 2)
    last.unlink()
    with pytest.raises(InputError, match=r"is missing, and the checkpoint before it does not help"):
        folder.load({"seed": 1}, CPU)


def test_all_is_on_the_disk_before_the_manifest_takes_its_place(tmp_path, monkeypatch):
    """With `checkpoint` a link to another disk; no file is renamed from one disk to another."""
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoint").symlink_to(tmp_path / "disk")
    done = []
    fsync, replaced = os.fsync, os.replace

    def reached(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def replace_file(source, target):
        assert source.resolve().parent == target.resolve().parent
        done.append(f"{source.name} is {target.name}")
        replaced(source, target)

    monkeypatch.setattr(os, "fsync", reached)
    monkeypatch.setattr(os, "replace", replace_file)
    folder = otdd.Checkpoints(tmp_path / "run")
    save(folder, {"step": 0}, {})
    (shard,) = (tmp_path / "disk").iterdir()
    manifest = "checkpoint.json.partial"
    assert done == [shard.name, "disk", manifest, f"{manifest} is checkpoint.json", "run"]
    assert folder.load({}, CPU)["step"] == 0
