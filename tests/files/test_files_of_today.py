"""Files that earlier commits wrote are read, or refused in a sentence that names the versions.

tests/fixtures holds a file of every kind that the package keeps; `python -m tests.fixtures.write`
writes them anew. They depend on these names, which a change of the code has to translate:

- Checkpoints (`otdd_flash.flows.checkpoint`): the names in its `TYPES` and the fields of
  `otdd_flash.labels.ClassDistances`, `otdd_flash.flows.result.Moment` and `StepRecord`, and
  `otdd_flash.solver.term.TransportTerm`; the keys of `state` of `otdd_flash.flows.run`,
  `.stepping`, `.modes` and of its recorder; the state names of torch's optimizers;
  the fields of `otdd_flash.flows.checkpoint.Shard`. Their settings, which must be those of now,
  have the fields of `otdd_flash.flows.stepping.Stepping`, `otdd_flash.cost.ground.GroundCost`,
  `otdd_flash.solver.schedules.Converged` and of the metric in `otdd_flash.labels`.
- Results: keys of `to_dict` of `otdd_flash.result.DistanceResult`, `.flows.result.FlowResult`,
  `.pairwise.PairwiseResult`, `.solver.matrix.result.MatrixTransport` and of
  `.solver.divergence.Divergence`; fields of `TransportTerm`, `StepRecord`, `Moment`, `GroundCost`,
  `otdd_flash.cost.compute.ComputeOptions` and `otdd_flash.distributed.exchange.Shared`; names of
  the tensors of a plan, `PLAN_TENSORS` of `otdd_flash.solver.term`.
- Maps: layers of `otdd_flash.flows.residual_map.build_network` by their places.
- Class distances: fields of `otdd_flash.labels.ClassDistances` and `JointClassDistances`.
- Caches of class distances: the name of the file, and the text that `recipe` of a metric in
  `otdd_flash.labels.metrics` returns. Numbers are found whatever the version of torch or Python is.
- Caches of features: the file's name, hashed of the inputs, the extractor's `key`, the kind of
  device and the type of autocast. A `key` of `from_module` has the versions of torch and of Python
  where the module's code comes from there; those of `timm`, `torchvision`, `text` and `wordllama`
  the version of their package; others none.
- Features written to a file: fields of `otdd_flash.extractors.feature_store.Note`.
- Studies: `kind` and `key` of every unit below `otdd_flash.study`, hashed with the versions of
  otdd_flash, torch, Python and the system: what another version computes is another study.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import otdd_flash as otdd
from otdd_flash.errors import InputError
from tests.fixtures.cases import (
    FLOWS,
    FOLDER,
    METRICS,
    SAVED,
    STEPS,
    STOPPED_AT,
    Squares,
    embedded,
    flow_numbers,
    measured,
    run_flow,
    study,
    study_numbers,
)

# As `python -m tests.fixtures.write` printed them: of flows that nothing stopped.
ENDS = {
    "features": [3.101889794732832, 0.48388621006284405, 160.53759394277407, 15.595724298847975],
    "attached": [2.730505006522012, 0.9585429859373189, 151.99161507488245, 9.37171683589489],
    "joint": [3.1018897947328314, 2.042237160860796, 143.13501366033208, 17.347109263726562],
    "augmented": [3.101889794732832, 2.2800368294502684, 139.8294684373431, 21.78469369176239],
    "langevin": [1.5016578462002046, 1.1307739318202488, 140.26938255124034, 0.0],
    "ranks": [3.1018897947328314, 1.036394568071068, 149.81971539045531, 15.421915875831553],
}
READ = {
    "distance": [
        *(5.323187967225008, 5.32318796722471, 5.323187967711581),
        *(204.62816122806368, 1.289772727261019, 1.0),
    ],
    "exact": [
        *(4.004133793300942, 4.0041337933008005, 4.004133793300942),
        *(88.49209350161368, 1.289772727272727, 0.0),
    ],
    "flow": [
        *(3.2531427275351463, 1.3198791611228433, 149.51861769270923, 19.032731755713442),
        *(214.42721591131365, 9.316663505923318, 12.19834026200655, 13.4823296591421),
        *(9.274475781052164, 12.174267785636136, 13.503926170539206),
    ],
    "map.safetensors": [8.501422385685146, 11.588934441795573, 12.313091681338847],
    "matrix": [
        *(1.1639694212823422, 1.4466511138001439, 0.0, 0.3506694883261951, 0.3269118575967044),
        *(0.482720800878668, 0.34968448380840866, 0.3400133693920919),
    ],
    "pairwise": [64.12777750524704, 64.1277775052452, 561.24643060536],
    "class_distances.npz": [204.62816122806368, 204.6263679835293, 204.76930818017627],
    "joint_class_distances.npz": [196.49828136842575, 196.49660671449186, 196.56565327857362],
    "samples.npz": [19.4375, 22.3125, 25.125],
}
TABLES = {
    "gaussian": 176.59310161281553,
    "sinkhorn": 195.78283448690186,
    "exact": 199.19010416666663,
}
STUDY = [
    *(2.8470310163415196, 13.899194413787152, 33.32105757286709, 3378.470175130759),
    *(1.8832595837633432, 12.546908173509545, -0.9937910905935093),
    *(3.0, 3.0, 3.0, 3.0),
]
ROWS, BATCH = 9, 4
# What processors may round otherwise, in solves to 1e-9 and in networks of float32.
CLOSE: dict[str, float] = {"rel": 2e-6, "abs": 1e-9}


def copied(name: str, folder: Path) -> Path:
    """A fixture where it may be written, as nobody else may."""
    source, copy = FOLDER / name, folder / Path(name).name
    shutil.copytree(source, copy)
    copy.chmod(0o700)
    return copy


def test_saved_files_are_read() -> None:
    later = {path.name for path in (FOLDER / "later/saved").iterdir()}
    assert READ.keys() == SAVED.keys() == later | {"samples.npz"}
    for name, numbers in READ.items():
        assert SAVED[name].read(FOLDER / "saved" / name) == pytest.approx(numbers, **CLOSE), name


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOWS)
def test_a_checkpoint_goes_on_to_the_end_of_the_whole_flow(name: str, tmp_path: Path) -> None:
    """Also one of two processes, by one."""
    folder, seen = copied(f"checkpoints/{name}", tmp_path), list[int]()
    result = run_flow(name, folder, resume=True, stop=-1, seen=seen)
    assert seen == [*range(STOPPED_AT, STEPS + 1)]
    assert [record.step for record in result.history] == [*range(STEPS + 1)]
    assert flow_numbers(result) == pytest.approx(ENDS[name], **CLOSE)
    assert len(result.moments) == (STEPS if name == "features" else 0)


def test_fixtures_hold_every_class_and_field_of_checkpoints() -> None:
    """A name that is not here is in no fixture, and could change unseen."""
    found: dict[str, set[str]] = {}

    def look(part: Any) -> None:
        if isinstance(part, list):
            for each in part:
                look(each)
        elif isinstance(part, dict) and "tensor" not in part:
            ((kind, held),) = part.items()
            if kind not in ("dict", "tuple", "list"):
                found.setdefault(kind, set()).update(held)
            look([*held.values()] if isinstance(held, dict) else held)

    for path in (FOLDER / "checkpoints").rglob("*.safetensors"):
        if ".rank-0." in path.name:
            look(json.loads(load_file(path)["outline.json"].numpy().tobytes()))
    from otdd_flash.flows import checkpoint as nest

    assert found.keys() == nest.TYPES.keys()
    for name, kind in nest.TYPES.items():
        fields = getattr(kind, "_fields", None) or kind.__dataclass_fields__
        assert found[name] == {*fields}, name


def test_caches_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured or extracted, whatever the version of torch."""
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.99.0"))
    folder = copied("caches", tmp_path)
    for name in METRICS:
        table, told = measured(name, folder)
        assert told == [(10, 10)], name
        assert float(table.full.sum()) == pytest.approx(TABLES[name], **CLOSE)
    expected = embedded(Squares())
    for where, rows in (
        ({"cache_dir": folder}, 0),
        ({"features_path": folder / "features.npy"}, 0),
        # Two batches were written when it was interrupted.
        ({"features_path": folder / "begun.npy"}, ROWS - 2 * BATCH),
    ):
        extractor = Squares()
        found = embedded(extractor, **where)
        assert extractor.rows == rows, where
        assert torch.equal(found.features, expected.features)


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Files of a folder, with what changes where they are written."""
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def test_a_study_is_there_for_its_own_versions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("study", tmp_path)
    then = json.loads((folder / "study.json").read_text("utf-8"))["versions"]
    monkeypatch.setattr(platform, "platform", lambda *_, **__: "elsewhere")
    said = r"versions\.platform \(Linux then, elsewhere now\).* differ; give it the same, or"
    with pytest.raises(InputError, match=said):
        study().run(folder, resume=True)
    monkeypatch.setattr(platform, "platform", lambda *_, **__: then["platform"])
    monkeypatch.setattr(platform, "python_version", lambda: then["python"])
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(then["torch"]))
    if then["otdd_flash"] != otdd.__version__:
        with pytest.raises(InputError, match=rf"{then['otdd_flash']} then, {otdd.__version__} now"):
            study().run(folder, resume=True)
        monkeypatch.setattr("otdd_flash.result.__version__", then["otdd_flash"])
    before = state_of(folder / "units")
    result = study().run(folder, resume=True)
    assert result.complete
    assert state_of(folder / "units") == before
    assert study_numbers(result) == pytest.approx(STUDY, **CLOSE)


def refusal(call: Callable[[], Any]) -> str:
    """The one sentence of an error."""
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


OURS = f"otdd_flash {otdd.__version__}"
OF_LATER = f"format 2, which otdd_flash 9.0.0 wrote and {OURS} does not know"


def test_what_another_version_wrote_is_refused_by_its_version(tmp_path: Path) -> None:
    """Saved files, checkpoints and studies of a later format, and with names of an earlier one."""

    def resumed(age: str) -> Any:
        folder = copied(f"{age}/checkpoints/attached", tmp_path / age)
        return run_flow("attached", folder, resume=True)

    def studied(age: str) -> Any:
        return study().run(copied(f"{age}/study", tmp_path / age), resume=True)

    names = [path.name for path in (FOLDER / "later/saved").iterdir()]
    saved = [(partial(SAVED[name].read, FOLDER / "later/saved" / name), OF_LATER) for name in names]
    earlier = FOLDER / "earlier/saved/distance"
    for call, said in (
        *saved,
        (
            lambda: SAVED["distance"].read(earlier),
            f"('terms'; otdd_flash 0.0.1 wrote it, and this is {OURS})",
        ),
        (lambda: resumed("later"), OF_LATER),
        (
            lambda: resumed("earlier"),
            f"is of otdd_flash 0.0.1, whose states are others than those of {OURS}",
        ),
        (lambda: studied("later"), f"versions.otdd_flash (9.0.0 then, {otdd.__version__} now)"),
        (lambda: studied("earlier"), f"versions.otdd_flash (0.0.1 then, {otdd.__version__} now)"),
    ):
        assert said in refusal(call)


@pytest.mark.parametrize(
    ("age", "pairs", "entries"),
    [
        ("later", "class_distances.4.sqlite3", OF_LATER),
        ("earlier", "class_distances.2.sqlite3", f"has format 1, and {OURS} reads format 2"),
    ],
)
def test_caches_of_other_formats_are_said_to_be_and_computed_again(
    age: str, pairs: str, entries: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, extractor = copied(f"{age}/caches", tmp_path), Squares()
    with caplog.at_level(logging.WARNING):
        table, told = measured("gaussian", folder)
        embedded(extractor, cache_dir=folder)
    assert told[0] == (0, 10)
    assert float(table.full.sum()) == pytest.approx(TABLES["gaussian"], **CLOSE)
    assert extractor.rows == ROWS
    first, second = caplog.messages
    assert pairs in first
    assert f"{OURS} reads class_distances.3.sqlite3" in first
    assert entries in second
    # What is computed takes its place.
    caplog.clear()
    embedded(extractor, cache_dir=folder)
    assert measured("gaussian", folder)[1] == [(10, 10)]
    assert (extractor.rows, caplog.messages) == (ROWS, [])


def test_features_in_a_file_are_gone_on_with_unless_format_or_network_differ(
    tmp_path: Path,
) -> None:
    later, then = copied("later/caches", tmp_path / "later"), copied("earlier/caches", tmp_path)
    for name, rows in (("features.npy", 0), ("begun.npy", ROWS - 2 * BATCH)):
        of_later = partial(embedded, Squares(), features_path=later / name)
        assert OF_LATER in refusal(of_later), name
        extractor = Squares()
        embedded(extractor, features_path=then / name)
        assert extractor.rows == rows, name
    extractor, now = Squares(), tmp_path / "features.npy"
    embedded(Squares(), features_path=now)
    extractor.key = "cubes"
    for path, said in (
        (now, "of another network; choose another features_path"),
        (
            then / "features.npy",
            f"of another network; otdd_flash 0.0.1 wrote it, and this is {OURS}; choose",
        ),
    ):
        assert said in refusal(partial(embedded, extractor, features_path=path))


def test_fixtures_are_small_and_hold_nothing_of_the_machine_that_wrote_them() -> None:
    paths = [path for path in FOLDER.rglob("*") if path.is_file()]
    contents = {p: p.read_bytes() for p in paths if p.suffix not in (".py", ".pyc")}
    assert sum(map(len, contents.values())) < 1_000_000
    for path, content in contents.items():
        assert not path.name.endswith((".lock", "-journal", "-wal"))
        for place in ("/home/", "/root/", "/tmp/", "/work/", "/var/", "Linux-"):
            assert place.encode() not in content, path
