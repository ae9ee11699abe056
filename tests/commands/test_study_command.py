"""`python -m otdd_flash.study`: files, resumption, refusals and exit codes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from otdd_flash.commands.messages import Phases
from otdd_flash.commands.settings import parse
from otdd_flash.commands.study import OWN, StudySettings, _together, load_tasks
from otdd_flash.data.registry import known_options
from otdd_flash.errors import InputError
from otdd_flash.extractors import reduce_pca
from otdd_flash.report import page as report_page
from otdd_flash.report.study import writing
from otdd_flash.samples import LabeledSamples
from otdd_flash.study import training
from otdd_flash.study.__main__ import main
from otdd_flash.study.measures import MEASURES

TASKS = ", ".join(
    f"{{name: blobs, samples: 60, num_classes: 3, spread: 1.5, seed: {k}, as: b{k}}}"
    for k in range(4)
)
# Those that take least, of which one needs trained sources.
FEW = "measures=[frechet,knn]"
SMALL = {
    "study.tasks": f"[{TASKS}]",
    "study.workers": "1",
    "extractor": "identity",
    "projections": "40",
    "transfer.seeds": "1",
    "transfer.target_samples": "6",
    "transfer.source_epochs": "2",
    "transfer.min_target_steps": "5",
    "cache_dir": "null",
    "hydra.run.dir": "run",
}
TABLES = ("choices.csv", "pairs.csv", "transfer.csv", "correlations.csv")


@pytest.fixture
def study(ended: Callable) -> Callable:
    """`study(*arguments)` runs the command on small tasks."""

    def run(*arguments: str):
        given = {argument.partition("=")[0] for argument in arguments}
        # transfer=null has no keys below it.
        plain = {
            key: value
            for key, value in SMALL.items()
            if key not in given and not ("transfer=null" in arguments and "transfer." in key)
        }
        return ended(main, *(f"{key}={value}" for key, value in plain.items()), *arguments)

    return run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture is drawn."""
    for name in ("draw_measure", "draw_gains", "draw_gains_against"):
        monkeypatch.setattr(writing, name, lambda *_, **__: None)
    monkeypatch.setattr(report_page, "save_picture", lambda *_: None)


@pytest.mark.slow
def test_a_study_writes_tables_pictures_and_a_page(study, rows) -> None:
    measures = ("otdd", "frechet", "logme")
    ended = study(f"measures=[{','.join(measures)}]")
    assert ended.code == 0
    assert "chosen by" in ended.out
    assert "OTDD was fixed as the measure that chooses before any gain was known." in ended.out
    assert "Rank correlation of OTDD with the gain over the sources of each target" in ended.out
    assert "written to" in ended.out
    assert len(rows("run/pairs.csv")) == 3 * 12
    assert len(rows("run/transfer.csv")) == 12
    # Every measure and target, with and without sources of the target's own family.
    assert len(rows("run/choices.csv")) == 2 * 3 * 4
    assert {row["statistic"] for row in rows("run/correlations.csv")} >= {"spearman", "regret"}
    page = (Path("run") / "report.html").read_text(encoding="utf-8")
    assert len(page) < 5_000_000
    pictures = sorted(path.name for path in Path("run").glob("*.png"))
    assert pictures[:2] == ["distances.png", "gains.png"]
    drawn = {name[len("gains_against_") : -len(".png")] for name in pictures[2:]}
    flat = set(re.findall(r"<li>(\w+) chooses no source, and is left out", page))
    assert drawn | flat == {*measures}
    assert not drawn & flat
    assert page.count("data:image/png;base64,") == len(pictures)
    # Nothing is fetched, and without scripts all is there.
    assert not re.search(r'(src|href)="?(https?:)?//', page)
    body = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    for name in ("b0", "b3", "OTDD", "LogME", "projections", "torch", "Nearest sources"):
        assert name in body
    assert "Rank correlation of OTDD with the gain over the sources of each target" in body
    for picture in pictures:
        assert (Path("run") / picture).stat().st_size > 1000


@pytest.mark.slow
def test_a_study_goes_on_and_its_tables_stay(study, undrawn) -> None:
    assert study(FEW, "study.measure=knn").code == 0
    before = {name: (Path("run") / name).read_bytes() for name in TABLES}
    refused = study(FEW)
    assert refused.code == 2
    assert "study.resume=true" in refused.error
    units = sorted((Path("run") / "units").glob("*.safetensors"))
    for unit in units[::3]:
        unit.unlink()
    kept = {unit: unit.stat().st_mtime_ns for unit in units if unit.exists()}
    assert study(FEW, "study.measure=knn", "study.resume=true").code == 0
    assert {name: (Path("run") / name).read_bytes() for name in TABLES} == before
    # The measure that chooses is fixed when a study begins.
    said = "k-nearest-neighbour accuracy was fixed as the measure that chooses"
    assert said in (Path("run") / "report.html").read_text(encoding="utf-8")
    refused = study(FEW, "study.measure=frechet", "study.resume=true")
    assert refused.code == 2
    assert "other settings: measure differ" in refused.error
    assert all(unit.stat().st_mtime_ns == written for unit, written in kept.items())
    # Of a measure that another package adds.
    Path("run/gains_against_theirs.png").write_bytes(b"")
    assert study("measures=[frechet]", "overwrite=true", "epsilon=0.3", "transfer=null").code == 0
    assert not Path("run/gains_against_theirs.png").exists()
    assert json.loads((Path("run") / "study.json").read_text())["epsilon"] == 0.3


@pytest.mark.slow
def test_without_transfer_shards_share_a_folder_and_late_solves_end_with_3(
    study, undrawn, rows
) -> None:
    few = ("transfer=null", "measures=[frechet]", "study.shard=1/1")
    ended = study(*few)
    assert ended.code == 0
    assert "b0" in ended.out
    assert rows("run/transfer.csv") == []
    page = (Path("run") / "report.html").read_text(encoding="utf-8")
    assert "Nothing was transferred" in page
    whole = (Path("run") / "pairs.csv").read_bytes()
    assert study(*few).code == 0
    assert (Path("run") / "pairs.csv").read_bytes() == whole
    late = ("solver.max_iterations=1", "solver.require_convergence=true", "overwrite=true")
    ended = study("transfer=null", "measures=[otdd]", *late)
    assert ended.code == 3
    assert "NOT CONVERGED" in ended.out
    assert (Path("run") / "report.html").exists()


@pytest.mark.slow
def test_penalties_reach_the_terms(study, rows) -> None:
    few = ("transfer=null", "measures=[otdd]", "overwrite=true", "epsilon=0.1")
    values = []
    for given in ([], ["unbalanced=0.5"], ["unbalanced_relative=1e+06"]):
        assert study(*few, *given).code == 0
        kept = json.loads((Path("run") / "study.json").read_text())
        assert [f"{key}={kept[key]:g}" for key in kept if "unbal" in key] == given
        assert all(each in (Path("run") / "report.html").read_text() for each in given)
        values.append([float(row["value"]) for row in rows("run/pairs.csv")])
    exact, relaxed, nearly = values
    assert all(0 < one < other for one, other in zip(relaxed, exact, strict=True))
    assert nearly == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
def test_ctrl_c_leaves_a_page_and_130(study, undrawn, monkeypatch) -> None:
    from otdd_flash.commands import study as command

    class Pressed:
        def __enter__(self):
            # After a while: as a person would.
            return lambda: len(list(Path("run").glob("units/*.safetensors"))) >= 9

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(command, "interrupts_noted", Pressed)
    assert study(FEW).code == 130
    assert "9 of" in (Path("run") / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_work_that_fails_is_told_and_the_highest_code_wins(
    study, undrawn, monkeypatch, rows
) -> None:
    def fails(setup, i, repetition, store):
        raise ArithmeticError("a defect")

    monkeypatch.setattr(training, "_train_source", fails)
    ended = study(FEW)
    assert ended.code == 1
    assert "a defect" in ended.err
    assert "4 of " in json.loads((Path("run") / "error.json").read_text())["error"]
    assert len(list(Path("run").glob("units/*.error.json"))) == 4
    # Of the measure that needs none of them.
    assert len(rows("run/pairs.csv")) == 12


NOWHERE = "study.tasks=[{name: arrays, path: nowhere.npz}]"
# What is given, and what the sentence matches. Those of NOWHERE are found before a task is read.
REFUSED = r"""
    'study.tasks=[{name: blobs}]' -> compares at least 2 tasks .* got 1: add tasks
    'study.tasks=[{name: blobs}, {name: blobs, dim: 5, as: b}]' transfer=null -> blobs has 2 feature
    'study.tasks=[{name: blobs}, {name: blobs, seed: 1}]' -> two datasets of study.tasks are called
    study.tasks=[3] -> study.tasks\[0\] must be a dataset's name, or its keys
    'study.tasks=[{a: 1}]' -> study.tasks\[0\] must be .* such as \{name: mnist\}, got \{'a': 1\}
    study.tasks=[] -> study.tasks must be a list of datasets such as \[\{name: mnist\}\], got \[\]
    'study.tasks=[{name: mnist}, {name: digits}]' transfer=null -> task mnist: .*set data_root=DIR
    'study.tasks=[{name: blobs, part: 3/2}, {name: digits}]' -> task blobs: part must be I/N
    measures=[knn] transfer=null -> knn need trained sources: drop them or set transfer
    measures=[otdd,sliced] study.measure=knn -> measure=knn \(study.measure\) .* add knn to measures
    'study.tasks=[{name: arrays, path: a.npz}]' transfer.test_fraction=0.03 -> 0.03 of 60 rows is 2,
    transfer.protocol=all -> unknown transfer.protocol 'all'; .* finetune, head
    transfer.target_samples=2 -> must lie between the 3 classes and the 60 training rows
    'transfer.network={file: x}' -> transfer.network must be \{path: module:function\}
    labels.full=true -> labels.full=true has no meaning in a study
    tasks=null -> tasks must be one of digits, images, got null
    NOWHERE measures=[oddt] -> unknown measure 'oddt'; choose one of
    NOWHERE unbalanced=1 unbalanced_relative=2 -> got both, unbalanced=1 and unbalanced_relative=2
    NOWHERE unbalanced=1 epsilon=0 -> epsilon=0.* exact marginals; leave out unbalanced
    NOWHERE study.workers=0 -> study.workers must be at least 1, got 0
    NOWHERE study.shard=2/1 -> study.shard must be I/N
    NOWHERE study.resume=true -> study.resume=true, but there is no .*study.json; give the folder
    NOWHERE device=cuda:99 -> ^there is no device 'cuda:99' on this machine
"""


@pytest.mark.slow
@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_bad_input_ends_in_a_sentence_and_2(study, row) -> None:
    arguments, _, message = row.strip().partition(" -> ")
    given = [NOWHERE if each == "NOWHERE" else each for each in shlex.split(arguments)]
    ended = study(*given)
    assert ended.code == 2
    assert re.search(message, ended.error), ended.error


@pytest.mark.slow
def test_tasks_of_arrays_have_test_rows_split_off_where_asked_for(study, undrawn, rows) -> None:
    tasks = ", ".join(
        f"{{name: arrays, path: {name}.npz, as: {name}{k}, part: {k}/2}}"
        for name in "ab"
        for k in (1, 2)
    )
    small = ("transfer.target_samples=3", "measures=[knn]")
    refused = study(f"study.tasks=[{tasks}]", *small)
    assert refused.code == 2
    assert "has no test rows" in refused.error
    assert "transfer.test_fraction=0.2" in refused.error
    assert study(f"study.tasks=[{tasks}]", "transfer.test_fraction=0.3", *small).code == 0
    assert {row["test_rows"] for row in rows("run/transfer.csv")} == {"9"}
    # Rows without labels have some split off too, before they are clustered.
    np.savez("b.npz", x=np.load("b.npz")["x"])
    clusters = ", pseudo_labels: kmeans, k: 2}"
    tasks = ", ".join(
        f"{{name: arrays, path: {name}.npz, as: {name}{k}, part: {k}/2{clusters}"
        for name in "ab"
        for k in (1, 2)
    )
    more = ("transfer.test_fraction=0.3", "overwrite=true")
    assert study(f"study.tasks=[{tasks}]", *more, *small).code == 0
    assert {row["test_rows"] for row in rows("run/transfer.csv")} == {"9"}


@pytest.mark.parametrize("choice", ["digits", "images"])
def test_every_choice_of_tasks_fits_the_settings(composed, choice) -> None:
    settings = parse(composed(f"tasks={choice}", name="study"), StudySettings)
    names = [node["as"] for node in settings.tasks.datasets]
    assert len({*names}) == len(names) == {"digits": 6, "images": 12}[choice]
    for node in settings.tasks.datasets:
        assert {*node} - {*OWN, "as"} <= {*known_options(node["name"]), "name"}


@pytest.mark.slow
def test_help_names_every_setting_measure_and_task(study, composed) -> None:
    text = study("--help").out
    described = text[: text.index("DEFAULTS")]
    config = composed(name="study")
    for name in (*MEASURES, *config.study, "part", "family", "test_split", "digits", "images"):
        assert re.search(rf"(?<![\w.]){name}(?![\w])", described), name
    for name in config.transfer:
        assert name in text


@pytest.mark.slow
def test_the_bundled_tasks_are_disjoint_draws(composed) -> None:
    settings = parse(composed(name="study"), StudySettings)
    with Phases() as phases:
        loaded = load_tasks(settings, phases)
    assert list(loaded.samples) == [
        *("upright", "turned 15", "turned 30", "turned 60", "even", "odd")
    ]
    assert loaded.image_shape == (1, 8, 8)
    seen: set[bytes] = set()
    for name in ("upright", "even", "odd"):
        for part in loaded.samples[name]:
            images = {row.numpy().tobytes() for row in part.features}
            assert not images & seen
            seen |= images


@pytest.mark.parametrize("sizes", [(3, 3), (1, 4, 2)])
def test_components_of_all_tasks_are_no_more_than_their_rows(sizes):
    draw = torch.Generator().manual_seed(0)
    parts = [LabeledSamples(torch.randn(n, 20, generator=draw), None, ()) for n in sizes]
    total = sum(sizes)
    with pytest.raises(InputError, match=rf"extractor.pca must be an integer from 1 to {total}"):
        _together(parts, lambda one, other: reduce_pca(one, other, total + 1, 0))
    found = _together(parts, lambda one, other: reduce_pca(one, other, 2, 0))
    assert [len(part) for part in found] == [*sizes]
    every = torch.cat([part.features for part in parts]).numpy()
    expected = PCA(n_components=2, random_state=0).fit_transform(every)
    assert np.allclose(torch.cat([part.features for part in found]), expected, atol=1e-5)
