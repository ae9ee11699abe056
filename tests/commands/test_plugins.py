"""Parts that installed packages add: the package of docs/extending.md, and worse ones."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ring_package import PAGE, install, other, shown_files

import otdd_flash as otdd
from otdd_flash import plugins
from otdd_flash.errors import InputError
from otdd_flash.extractors import build_extractor
from otdd_flash.study.measures import measures_named

# How each kind of part is used by its name.
USES: dict[str, Callable[[str], object]] = {
    "datasets": otdd.load,
    "extractors": build_extractor,
    "labels": lambda name: otdd.labels.metric_of(name),
    "measures": lambda name: measures_named([name], transfer=False),
}
# Names of this package, by kind.
OURS = {"datasets": "digits", "extractors": "pixels", "labels": "means", "measures": "frechet"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`installed(files, ...)` puts packages into a folder of sys.path."""
    site, before = tmp_path / "site", {*sys.modules}
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def run(*packages: dict[str, str]) -> Path:
        for files in packages:
            install(site, files)
        return site

    yield run
    for name in {*sys.modules} - before:
        if Path(str(getattr(sys.modules[name], "__file__", ""))).is_relative_to(site):
            del sys.modules[name]


@pytest.fixture
def ring(installed: Callable[..., Path]) -> Path:
    return installed(shown_files())


def _used() -> str:
    return PAGE.read_text(encoding="utf-8").partition("With the package installed")[2]


@pytest.mark.slow
def test_the_example_of_the_page_runs_and_so_does_its_study(ring: Path, folder: Path) -> None:
    namespace: dict[str, object] = {}
    exec(re.search(r"```python\n(.*?)```", _used(), re.S)[1], namespace)
    study = namespace["study"]
    result = study.run(folder / "study")
    assert not result.failures
    found = {(r.source, r.target): r.value for r in result.pairs() if r.measure == "overlap"}
    (a, one), (b, two), *_ = study.tasks.items()
    x, y = one.features.numpy(), two.features.numpy()
    inside = ((x >= y.min(0)) & (x <= y.max(0))).all(1).mean()
    assert found[a, b] == pytest.approx(inside)
    assert study.run(folder / "study", resume=True).pairs() == result.pairs()


@pytest.mark.slow
def test_the_commands_of_the_page_run(ring: Path, ended, folder: Path) -> None:
    from otdd_flash.distance import main as distance
    from otdd_flash.study.__main__ import main as study

    lines = re.findall(r"^otdd-(\w+) (.*)$", _used(), re.M)
    assert [name for name, _ in lines] == ["distance", "study"]
    for main, (name, line) in zip((distance, study), lines, strict=True):
        more = ["cache_dir=null", f"hydra.run.dir={name}", "report=table"]
        shown = ended(main, *shlex.split(line), *more)
        assert shown.code == 0, shown.err
    assert "box overlap" in Path("study/report.html").read_text(encoding="utf-8")
    kept = json.loads(Path("distance/result.json").read_text(encoding="utf-8"))["config"]
    assert kept["labels"]["exponent"] == 1
    assert kept["source"]["noise"] == 0.2


@pytest.mark.slow
def test_choices_of_a_package_are_composed_without_importing_it(ring: Path, command) -> None:
    shown = command("--cfg=job", "source=ring", "source.noise=0.5", "labels=power", "max_samples=7")
    assert shown.code == 0, shown.err
    assert "noise: 0.5" in shown.out
    assert "exponent: 2.0" in shown.out
    assert command("source=ringg").error.startswith(
        "source has no choice 'ringg' (did you mean ring?); choose one of: arrays, blobs"
    )
    assert "polar" in command("extractor=null").error
    assert "choose source=ring" in command("source.rows=3").error
    with pytest.raises(
        InputError, match=r"unknown dataset 'rong'; choose one of: digits, .*, ring"
    ):
        otdd.load("rong")
    assert "ring_data" not in sys.modules


@pytest.mark.slow
def test_a_packages_metric_keeps_its_own_keys(ring: Path, command, read, monkeypatch) -> None:
    """Of the results, too, where one comes from the environment."""
    monkeypatch.setenv("EXPONENT", "3")
    (ring / "ring_data/conf/source/bare.yaml").write_text("name: ring\n")
    ended = command(
        *("source=bare", "target=ring", "max_samples=9"),
        *("labels=power", "labels.exponent='${oc.decode:${oc.env:EXPONENT}}'", "report=none"),
    )
    assert ended.code == 0, ended.err
    result = read("run/result.json")
    assert result["n"] == result["m"] == 9
    labels = result["config"]["labels"]
    assert labels["exponent"] == "${oc.decode:${oc.env:EXPONENT}}"
    assert "parameters" not in labels
    assert (
        "labels.exponents (did you mean labels.exponent?)"
        in command("labels=power", "labels.exponents=3").error
    )
    refused = command("labels=power", "+labels.parameters={exponent: 3}").error
    assert refused.startswith("labels=power has no labels.")
    ended = command("labels=power", "labels.exponent=much")
    assert (ended.code, ended.error) == (2, "labels.exponent must be a number, got 'much'")


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_a_package_that_does_not_import_costs_its_own_names_alone(ring, installed, kind) -> None:
    installed(other("sick-data", "sick", "import no_such_module", **{kind: {"ill": "sick:part"}}))
    with pytest.raises(InputError) as refused:
        USES[kind]("ill")
    said = str(refused.value)
    assert "ill of package sick-data 2.0 does not import: it raised ModuleNotFoundError: " in said
    assert said.endswith("'no_such_module'; mend or remove that package")
    USES[kind](OURS[kind])
    with pytest.raises(InputError, match="ill"):
        USES[kind]("no such name")
    assert "sick" not in sys.modules


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_a_name_of_two_packages_is_refused_and_names_both(installed, kind) -> None:
    parts = {kind: {"theirs": "one:part", OURS[kind]: "one:part"}}
    installed(
        other("one-data", "one", "raise RuntimeError", **parts),
        other("two-data", "two", "raise RuntimeError", **{kind: {"theirs": "two:part"}}),
    )
    for name, first, second in (
        ("theirs", "one-data 2.0", "two-data 2.0"),
        (OURS[kind], "otdd-flash", "one-data 2.0"),
    ):
        with pytest.raises(InputError, match=f"{name} is a name of package") as refused:
            USES[kind](name)
        assert first in str(refused.value)
        assert second in str(refused.value)
    assert not {"one", "two"} & {*sys.modules}


@pytest.mark.slow
def test_a_choice_of_two_packages_is_refused_and_names_both(installed, command) -> None:
    yaml = "defaults:\n  - /dataset/mnist@_here_\n  - _self_\n"
    for place, name in enumerate(("one", "two")):
        files = other(f"{name}-data", name, "", datasets={f"{name}s": f"{name}:part"})
        for choice in ("both", "usps")[: 2 - place]:
            files[f"{name}/conf/source/{choice}.yaml"] = yaml
        installed(files)
    for choice, owners in (
        ("both", ("one-data 2.0", "two-data 2.0")),
        ("usps", ("otdd-flash", "one-data 2.0")),
    ):
        error = command(f"source={choice}").error
        assert error.startswith(f"source={choice} is a choice of package ")
        assert all(owner in error for owner in owners)
    # Without a yaml there is no choice.
    error = command("source=ones").error
    assert error.startswith("package one-data 2.0 has ones, but no conf/source/ones.yaml")


BASE = """
import torch
from otdd_flash.data import LabeledDataset
from otdd_flash.labels import LabelMetric

def lists(request):
    return [1, 2]

def raises(request, *, deep=1):
    raise OSError("the disk is gone")

def no_extractor():
    return "pixels"

class Wide:
    key, modalities, cacheable = "wide", frozenset({"image"}), False
    def __call__(self, batch):
        return torch.zeros(3, 4)

class Needs(LabelMetric):
    name = "needs"
    def __init__(self, more):
        self.more = more
    def measure(self, clouds, pairs, progress=None):
        raise AssertionError

NUMBER = 3
"""


@pytest.mark.parametrize(
    ("kind", "name", "value", "error"),
    [
        ("datasets", "n", "NUMBER", "dataset n of package bad-data 2.0, bad:NUMBER, must be a fu"),
        ("datasets", "n", "no module!", "n of package bad-data 2.0 does not import: it raised "),
        ("datasets", "n", "lists", "dataset n of package bad-data 2.0 must return a LabeledDatas"),
        ("datasets", "n", "raises", "dataset n raised OSError: the disk is gone"),
        ("extractors", "n", "no_extractor", "must be a callable with key, modalities and cachea"),
        ("labels", "n", "NUMBER", "bad:NUMBER, must be a type of LabelMetric, or a function f(x"),
        ("labels", "needs", "Needs", "labels=needs of package bad-data 2.0 raised TypeError"),
        ("measures", "n", "lists", "must be a type of Measure, such as one of PairMeasure"),
    ],
)
def test_what_is_no_such_part_is_refused_with_its_package(
    installed, kind, name, value, error
) -> None:
    entry = value if " " in value else f"bad:{value}"
    installed(other("bad-data", "bad", BASE, **{kind: {name: entry}}))
    assert not plugins.folders()
    with pytest.raises(InputError) as refused:
        USES[kind](name)
    assert error in str(refused.value)


@pytest.mark.slow
def test_features_that_do_not_fit_are_refused_with_their_package(installed) -> None:
    installed(other("bad-data", "bad", BASE, extractors={"wide": "bad:Wide"}))
    with pytest.raises(InputError, match=r"of package bad-data 2.0 must return a tensor \(256"):
        otdd.embed(otdd.load("digits"), otdd.extractors.wide())


def test_the_working_directory_is_no_place_for_packages(folder: Path, monkeypatch) -> None:
    """Not even once a function of it has been named, which puts it at the end of sys.path."""
    install(folder, shown_files())
    monkeypatch.delitem(sys.modules, "ring_data", raising=False)
    (folder / "function_of_here.py").write_text("def embed(batch):\n    return batch\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(otdd, "_started_in", str(folder))
    monkeypatch.setattr(otdd, "_appended", [])
    otdd.extractors.from_callable("function_of_here:embed")
    assert sys.path[-1] == str(folder)
    assert not plugins.folders()
    for kind, name in (("datasets", "ring"), ("extractors", "polar"), ("labels", "medians")):
        with pytest.raises(InputError, match=f"unknown .* '{name}'; choose one of: "):
            USES[kind](name)
    assert "ring_data" not in sys.modules
