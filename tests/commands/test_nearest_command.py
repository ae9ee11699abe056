"""`python -m otdd_flash.nearest`: files, an index in a folder, refusals and exit codes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest
from command_runs import Ended

import otdd_flash as otdd
from otdd_flash.nearest import main
from otdd_flash.ranking import index as index_module

ROOT = str(Path(__file__).parents[2])
BLOBS = "name: blobs, samples: 60, num_classes: 3"
LIBRARY = ", ".join(f"{{{BLOBS}, seed: {k}, as: b{k}}}" for k in range(4))
QUERY = f"query={{{BLOBS}, seed: 2, spread: 1.5}}"
COMMON = ("extractor=identity", "cache_dir=null", "hydra.run.dir=run", "overwrite=true", "k=2")


@pytest.fixture
def nearest(ended: Callable) -> Callable:
    """`nearest(*arguments)` runs the command on small datasets."""

    def run(*arguments: str) -> Ended:
        query = () if any(one.startswith("query=") for one in arguments) else (QUERY,)
        keys = {one.partition("=")[0] for one in arguments}
        common = (one for one in COMMON if one.partition("=")[0] not in keys)
        return ended(main, *query, *common, *arguments)

    return run


def read(name: str = "ranking.json") -> dict:
    return json.loads(Path("run", name).read_text(encoding="utf-8"))


def test_the_files_of_a_run(nearest):
    said = nearest(f"library=[{LIBRARY}]")
    assert said.code == 0, said.err
    assert {"ranking.json", "ranking.csv", "ranking.html", "ranking.png"} <= {
        path.name for path in Path("run").iterdir()
    }
    content = read()
    assert content["rows"][0]["name"] == "b2"
    assert content["certified"] is True
    assert content["config"]["k"] == 2
    assert set(content["seconds"]) >= {"load", "extract", "index", "race"}
    with Path("run/ranking.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["place", "name", "value", "lower", "upper", "proven", "tied"]
    assert [row["place"] for row in rows] == ["1", "2", "", ""]
    assert float(rows[0]["value"]) == content["rows"][0]["value"]
    page = Path("run/ranking.html").read_text(encoding="utf-8")
    assert page.count("<rect") == 4
    assert "all 2 places are proven" in page
    assert "all 2 places are proven" in said.out
    assert "b2" in said.out


def test_an_index_in_a_folder_is_asked_again(nearest):
    assert nearest(f"library=[{LIBRARY}]", "index=lib").code == 0
    before = read()["rows"]
    said = nearest("library=lib", "report=none")
    assert said.code == 0, said.err
    assert read()["rows"] == before
    assert said.out.split() == [row["name"] for row in before]
    more = f"library=[{{{BLOBS}, seed: 9, as: b9}}]"
    assert nearest(more, "index=lib", "report=table", "k=5").code == 0
    content = read()
    assert {row["name"] for row in content["rows"]} == {"b0", "b1", "b2", "b3", "b9"}
    assert otdd.Index.load("lib").names == ("b0", "b1", "b2", "b3", "b9")
    # Features by another map do not compare.
    said = nearest("library=lib", "extractor=callable", "extractor.path=features:embed")
    assert said.code == 2
    assert "the index in lib was built with extractor." in said.error
    for other in ("labels=means", "lambda_y=2", "epsilon=0.5"):
        said = nearest("library=lib", other)
        assert said.code == 2
        assert "the index was built with" in said.error
    said = nearest(more, "index=lib", "epsilon=3")
    assert said.code == 2
    assert "rebuild=true" in said.error
    assert nearest(more, "index=lib", "epsilon=3", "rebuild=true").code == 0
    assert read()["epsilon"] == 3


def test_what_does_not_change_features_does_not_count_and_queries_write_no_extractor(nearest):
    assert nearest(f"library=[{LIBRARY}]", "index=lib").code == 0
    built = Path("lib/extractor.json")
    built.write_text(json.dumps({**json.loads(built.read_text()), "download": True}))
    said = nearest("library=lib")
    assert said.code == 0, said.err
    # As if it were built from Python, where users embed: a query must not claim its own extractor.
    built.unlink()
    assert nearest("library=lib").code == 0
    assert not built.exists()


@pytest.fixture
def archives() -> list[str]:
    """Members of two classes by path: an archive, arrays beside labels, a table."""
    rng = np.random.default_rng(0)
    labels = np.arange(30) % 2
    parts = [rng.normal(size=(30, 2)).astype("f4") + 2 * k for k in range(3)]
    np.savez("one.npz", x=parts[0], y=labels)
    np.save("two.npy", parts[1])
    np.save("labels.npy", labels)
    frame = pandas.DataFrame(parts[2], columns=["u", "v"]).assign(label=labels)
    frame.to_csv("three.csv", index=False)
    return [
        "{name: arrays, path: one.npz, as: one}",
        "{name: arrays, path: two.npy, labels_path: labels.npy, as: two}",
        "{name: arrays, path: three.csv, as: three}",
    ]


def test_members_by_path(nearest, archives):
    query = "query={name: arrays, path: two.npy, labels_path: labels.npy}"
    said = nearest(query, f"library=[{', '.join(archives)}]", "index=lib", "ordered=true")
    assert said.code == 0, said.err
    rows = read()["rows"]
    assert rows[0]["name"] == "two"
    assert rows[0]["value"] == 0
    # The folder has rows of its own.
    for path in ("one.npz", "three.csv"):
        Path(path).unlink()
    assert nearest(query, "library=lib", "ordered=true").code == 0
    assert read()["rows"] == rows
    said = nearest("query={name: arrays, path: one.npz}", f"library=[{archives[1]}]", "k=1")
    assert said.code == 2
    assert "one.npz" in said.error
    said = nearest(query, f"library=[{', '.join(archives)}]", "k=1")
    assert said.code == 2
    assert "one: " in said.error


def test_members_of_another_dimension_than_the_query_are_skipped(nearest, archives):
    np.savez("wide.npz", x=np.random.default_rng(1).normal(size=(30, 3)), y=np.arange(30) % 2)
    wide = "{name: arrays, path: wide.npz, as: wide}"
    library = f"library=[{', '.join([wide, *archives])}]"
    query = "query={name: arrays, path: one.npz}"
    said = nearest(query, library, "k=1")
    assert said.code == 2
    assert "wide has 3 features, and the index compares 2" in said.error
    said = nearest(query, library, "k=3", "skip=true")
    assert said.code == 0, said.err
    assert {row["name"] for row in read()["rows"]} == {"one", "two", "three"}
    assert "wide has 3 features" in said.err
    said = nearest("query={name: arrays, path: wide.npz}", library, "k=1", "skip=true")
    assert said.code == 0, said.err
    assert read()["rows"][0]["name"] == "wide"


def test_the_extractor_of_an_index_that_was_killed_while_it_was_built_is_known(
    nearest, monkeypatch
):
    def killed(*_):
        assert Path("lib/index.json").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(index_module, "_solved", killed)
        assert nearest(f"library=[{LIBRARY}]", "index=lib").code == 130
    other = ("extractor=callable", "extractor.path=features:embed")
    said = nearest(f"library=[{LIBRARY}]", "index=lib", *other)
    assert said.code == 2
    assert "the index in lib was built with extractor." in said.error
    assert nearest(f"library=[{LIBRARY}]", "index=lib").code == 0


def test_a_damaged_member_is_named_and_the_ranking_not_certified(nearest):
    assert nearest(f"library=[{LIBRARY}]", "index=lib").code == 0
    first = read()["rows"][0]["name"]
    (entry,) = (one for one in otdd.Index.load("lib").entries if one.name == first)
    Path("lib", f"{entry.digest}.rows.safetensors").unlink()
    said = nearest("library=lib")
    assert said.code == 0, said.err
    assert f"members that cannot be read take no place: {first}; give them" in said.out
    content = read()
    assert content["unread"] == [first]
    assert not content["certified"]
    assert content["stopped_by"] == "damage"
    # Given again it is written again.
    assert nearest(f"library=[{LIBRARY}]", "index=lib").code == 0
    assert read()["certified"]


REFUSED = {
    "library=3": "[{name: mnist}], or the folder of an index, got 3",
    "library=nowhere": "library=nowhere is no index; build one with",
    "library=[{samples: 3}]": "library[0] must be a dataset's name, or its keys",
    f"library=[{{{BLOBS}}}, {{{BLOBS}}}]": "two datasets of library are called blobs",
    "query=no_such": "no_such",
    "library=[]": "the library is empty",
    "k=0": "k must be",
    "tie=-1": "tie must",
    "extractor.standardize=true": "an index has to take queries to come",
    "labels=given labels.path=W.npz": "cannot be stored for that",
    "labels.full=true": "no meaning in a ranking",
    "ground=gromov query=no_such": "unknown ground 'gromov'",
    "epsilon=1 epsilon_relative=1": "one of them",
    "unbalanced=1 epsilon=0": "takes exact marginals",
    "solver=exact": "solver",
}


@pytest.mark.parametrize("given", REFUSED)
def test_refusals(given, nearest):
    arguments = [given] if "[" in given else given.split()
    if not any(one.startswith("library=") for one in arguments):
        arguments.append(f"library=[{LIBRARY}]")
    said = nearest(*arguments)
    assert said.code == 2, said.out
    assert REFUSED[given] in said.err
    assert not Path("run/ranking.json").exists()


def test_places_that_are_not_proven_are_told(nearest):
    said = nearest(f"library=[{LIBRARY}]", "max_seconds=1e-9")
    assert said.code == 0
    assert "0 of 2 places are proven, the solve stopped by max_seconds" in said.out
    content = read()
    assert content["rows"][0]["value"] is None
    assert content["rows"][0]["upper"] is None


def test_hostile_names_stay_text(nearest):
    name = "<script>alert(1)</script>=cmd()"
    node = f"{{{BLOBS}, seed: 5, as: '{name}'}}"
    assert nearest(f"library=[{node}, {{{BLOBS}}}]").code == 0
    page = Path("run/ranking.html").read_text(encoding="utf-8")
    # The page's own script, which sorts its table, is the only one.
    assert page.count("<script") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;=cmd()" in page


@pytest.mark.slow
def test_the_public_name_is_the_function_where_the_command_is_not_imported():
    text = (
        "import inspect, otdd_flash as otdd; from otdd_flash.ranking.race import nearest; "
        "assert otdd.nearest is nearest and 'k' in inspect.signature(otdd.nearest).parameters; "
        "import otdd_flash.nearest; assert callable(otdd.nearest)"
    )
    subprocess.run([sys.executable, "-c", text], check=True, env={**os.environ, "PYTHONPATH": ROOT})


def test_the_module_is_the_function_too():
    """Importing the command leaves `otdd.nearest` callable."""
    import otdd_flash.nearest as command

    samples = otdd.LabeledSamples([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1], ("a", "b"))
    other = otdd.LabeledSamples([[0.5], [1.0], [2.0], [3.0]], [0, 0, 1, 1], ("a", "b"))
    assert command(samples, {"same": samples, "other": other}, 1).rows[0].name == "same"
    assert otdd.nearest(samples, {"same": samples, "other": other}, 1).certified
