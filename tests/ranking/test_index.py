"""An index in a folder: what it holds, how it goes on, what is damaged, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from ranking.libraries import library, truth
from spying import calls_of

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.files import atomic, tensor_file
from otdd_flash.ranking import index as module


@pytest.fixture
def given():
    return library(2)


@pytest.fixture
def solved(monkeypatch):
    """Gives the names of the members whose self terms were solved since it was last asked."""
    calls = calls_of(monkeypatch, module, "_solved")

    def names():
        found = [one.name for _, new, _ in calls for one in new.values()]
        calls.clear()
        return found

    return names


def check_same(found, expected):
    """Rankings are one, but for the rounding of self terms, which are solved beside others."""
    assert [row.name for row in found.rows] == [row.name for row in expected.rows]
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row[1:4] == pytest.approx(other[1:4], rel=1e-9)
        assert row.proven == other.proven


def test_a_folder_answers_as_memory_does(given, tmp_path, solved):
    query, members = given
    memory = otdd.index(members)
    stored = otdd.index(members, tmp_path / "lib")
    loaded = otdd.Index.load(tmp_path / "lib")
    assert solved() == [*members] * 2
    assert memory.settings == stored.settings == loaded.settings
    assert loaded.names == tuple(members)
    rankings = [
        otdd.nearest(query, one, 2) for one in (memory, stored, loaded, str(tmp_path / "lib"))
    ]
    assert len({ranking.rows for ranking in rankings}) == 1
    assert solved() == []


def test_it_is_extended_and_nothing_is_solved_twice(given, tmp_path, solved):
    query, members = given
    names = list(members)
    first = otdd.index({name: members[name] for name in names[:2]}, tmp_path)
    solved()
    whole = otdd.index({name: members[name] for name in names[1:]}, tmp_path)
    assert solved() == names[2:]
    # Epsilon is that of the first build.
    assert whole.settings == first.settings
    assert whole.names == tuple(names)
    assert otdd.nearest(query, whole, 2).certified


def test_a_name_that_is_given_with_other_rows_takes_these_in_its_place(given, tmp_path, solved):
    query, members = given
    otdd.index(members, tmp_path)
    solved()
    changed = otdd.index({"m1": query}, tmp_path)
    assert solved() == ["m1"]
    assert changed.names == tuple(members)
    assert otdd.nearest(query, changed, 1).rows[0].name == "m1"


@pytest.mark.parametrize("what", ["cut", "flipped", "removed"])
@pytest.mark.parametrize("again", [False, True])
def test_a_damaged_entry_is_solved_again(given, tmp_path, solved, what, again):
    query, members = given
    before = otdd.nearest(query, otdd.index(members, tmp_path), 2)
    entry = tmp_path / f"{module.digest_of(members['m1'])}.safetensors"
    damage(entry, what)
    solved()
    if what == "removed":
        index = otdd.index(members if again else {}, tmp_path)
    else:
        with pytest.warns(DataNotice, match="the entry of m1 .* is damaged"):
            index = otdd.index(members if again else {}, tmp_path)
    assert solved() == ["m1"]
    check_same(otdd.nearest(query, index, 2), before)


def damage(path: Path, what: str) -> None:
    content = bytearray(path.read_bytes())
    if what == "removed":
        path.unlink()
    elif what == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[-5] ^= 64
        path.write_bytes(content)


@pytest.mark.parametrize("what", ["cut", "flipped", "removed"])
def test_damaged_rows_are_told_and_written_again(given, tmp_path, solved, what):
    query, members = given
    index = otdd.index(members, tmp_path)
    damage(tmp_path / f"{module.digest_of(members['m1'])}.rows.safetensors", what)
    removed = what == "removed"
    with pytest.warns(DataNotice, match=r"the rows of m1 .* missing or damaged; give .* no place"):
        ranking = otdd.nearest(query, index, len(members))
    assert not ranking.certified
    solved()
    notice = nullcontext() if removed else pytest.warns(DataNotice, match="the rows of m1")
    with notice:
        whole = otdd.index({"m1": members["m1"]}, tmp_path)
    assert solved() == ["m1"]
    assert otdd.nearest(query, whole, len(members)).certified


def test_rows_of_another_member_are_not_taken(given, tmp_path):
    query, members = given
    index = otdd.index(members, tmp_path)
    first, second = (
        tmp_path / f"{module.digest_of(members[n])}.rows.safetensors" for n in ("m0", "m1")
    )
    second.write_bytes(first.read_bytes())
    with pytest.warns(DataNotice, match=r"the rows of m1 .* missing or damaged"):
        ranking = otdd.nearest(query, index, len(members))
    assert ranking.details["unread"] == ["m1"]


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", [0, 3])
def test_a_ranking_without_the_rows_of_a_member_proves_what_holds_with_it(seed, ordered, tmp_path):
    """What is damaged is the nearest, the second, or what no place needs."""
    query, members = library(seed)
    index = otdd.index(members, tmp_path)
    values = truth(query, members, index.settings.epsilon)
    places = sorted(values, key=values.get)
    for k in (1, 2, len(members)):
        for damaged in (places[0], places[1], places[-1]):
            path = tmp_path / f"{module.digest_of(members[damaged])}.rows.safetensors"
            content = path.read_bytes()
            path.unlink()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DataNotice)
                ranking = otdd.nearest(query, index, k, ordered=ordered)
            path.write_bytes(content)
            rows, others = ([r.name for r in some] for some in (ranking.rows, ranking.others))
            assert sorted(rows + others) == sorted(places)
            for row in (*ranking.rows, *ranking.others):
                assert row.lower - 1e-7 <= values[row.name] <= row.upper + 1e-7
                assert damaged not in row.tied
            kth = values[places[k - 1]]
            for place, row in enumerate(ranking.rows):
                assert not row.proven or values[row.name] <= kth + 2e-4
                if ordered and row.proven:
                    assert abs(values[row.name] - values[places[place]]) <= 2e-4
            if ranking.details["unread"]:
                assert ranking.details["unread"] == [damaged]
                assert damaged in others
                assert f"take no place: {damaged}; give" in ranking.sentences()[-1]
                left = [name for name in places if name != damaged]
                nearest = [values[name] for name in left[:k]]
                assert [values[name] for name in rows] == pytest.approx(nearest, abs=2e-4)
                assert ranking.stopped_by == "damage"
            # A tie with the last place needs no rows.
            tied = values[damaged] >= values[places[k - 1]] - 1e-4
            assert ranking.details["unread"] or tied or places.index(damaged) >= k
            assert ranking.certified == (not ranking.details["unread"])


@pytest.mark.parametrize("ordered", [False, True])
def test_a_member_that_is_lost_is_told_by_every_ranking(given, tmp_path, ordered):
    """Neither its numbers nor its rows are there: it may be anywhere."""
    query, members = given
    index = otdd.index(members, tmp_path)
    values = truth(query, members, index.settings.epsilon)
    places = sorted(values, key=values.get)
    for path in tmp_path.glob(f"{module.digest_of(members[places[1]])}.*"):
        damage(path, "cut")
    with pytest.warns(DataNotice, match="it is left out of the index"):
        lost = otdd.Index.load(tmp_path)
    assert lost.lost == (places[1],)
    ranking = otdd.nearest(query, lost, 2, ordered=ordered)
    # It may be the first or the second; the third of all is not among the first two.
    assert [row.name for row in ranking.rows] == [places[0], places[2]]
    assert [row.proven for row in ranking.rows] == [not ordered, False]
    assert not ranking.certified
    assert ranking.stopped_by == "damage"
    assert ranking.details["unread"] == [places[1]]
    assert "places are proven, the solve stopped by damage" in ranking.sentences()[0]
    whole = otdd.index({places[1]: members[places[1]]}, tmp_path)
    assert whole.lost == ()
    assert otdd.nearest(query, whole, 2, ordered=ordered).certified


def test_rebuilding_at_another_epsilon_tells_what_cannot_be_read(given, tmp_path):
    query, members = given
    index = otdd.index(members, tmp_path)
    (tmp_path / f"{module.digest_of(members['m1'])}.rows.safetensors").unlink()
    with pytest.warns(DataNotice, match="the rows of m1 .* left out of the index"):
        ranking = otdd.nearest(query, index, 1, epsilon=1.0, rebuild=True)
    assert ranking.details["unread"] == ["m1"]
    assert not ranking.certified


def test_the_sampling_interval_of_the_query_itself_needs_no_rows(given, tmp_path):
    _, members = given
    index = otdd.index(members, tmp_path)
    (tmp_path / f"{module.digest_of(members['m1'])}.rows.safetensors").unlink()
    ranking = otdd.nearest(members["m1"], index, 1, subsample=39)
    assert ranking.certified
    assert [one["name"] for one in ranking.details["sampling"]] == ["m1"]


def test_a_damaged_list_of_members_is_told(given, tmp_path, solved):
    otdd.index(given[1], tmp_path)
    (tmp_path / "index.json").unlink()
    solved()
    # Without the list members have to be given again; what is whole of them is not solved again.
    assert otdd.index(given[1], tmp_path).names == tuple(given[1])
    assert solved() == []
    path = tmp_path / "index.json"
    path.write_text(path.read_text().replace('"unbalanced": null', '"unbalanced": 0.125'))
    with pytest.raises(InputError, match=r"index.json is damaged \(its checksum does not match\)"):
        otdd.Index.load(tmp_path)
    content = json.loads(path.read_text())
    content["index"] = 99
    path.write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        otdd.Index.load(tmp_path)


def test_a_later_format_is_refused(given, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "INDEX_FORMAT", 99)
    index = otdd.index(given[1], tmp_path)
    assert otdd.Index.load(tmp_path).names == index.names
    monkeypatch.undo()
    with pytest.raises(InputError, match="has format 99"):
        otdd.Index.load(tmp_path)


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
sys.path[:0] = [{root!r}, {tests!r}]
from ranking.libraries import library
import otdd_flash as otdd
from otdd_flash.ranking import index as module
from otdd_flash.files import atomic
module.TOGETHER = 1
writes, real = 0, os.replace
def replace(source, target):
    global writes
    writes += 1
    if writes == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
    if -writes == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
otdd.index(library(2)[1], {folder!r})
"""


def killed_build(count: int, folder: Path) -> None:
    """Have another process build an index, killed at a write, before it or, if negative, after."""
    root = Path(__file__).parents[2]
    given = {"root": str(root), "tests": str(root / "tests"), "folder": str(folder)}
    text = KILLED.format(count=count, **given)
    ended = subprocess.run([sys.executable, "-c", text], check=False, env={**os.environ})
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, -3, 4, -4, 6, 9])
def test_a_killed_build_goes_on_where_it_was(count, given, tmp_path, solved):
    query, members = given
    killed_build(count, tmp_path)
    index = otdd.index(members, tmp_path)
    again = len(members) - len(solved())
    assert max(0, (abs(count) - 2) // 3) <= again <= abs(count) // 3
    check_same(otdd.nearest(query, index, 2), otdd.nearest(query, otdd.index(members), 2))
    assert not list(tmp_path.glob(".*"))


def contents(folder):
    """What all files hold. Texts of safetensors have no order of their own."""
    found = {path.name: tensor_file.read_tensors(path) for path in folder.glob("*.safetensors")}
    found = {name: one.checksum for name, one in found.items()}
    others = {one.name: one.read_bytes() for one in folder.iterdir() if one.name not in found}
    return found | others


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5])
def test_a_build_that_goes_on_ends_in_the_files_of_one_that_was_not_killed(
    count, given, tmp_path, monkeypatch
):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed_build(count, killed)
    assert (killed / ".lock").exists()
    # One member at a time, as there: members solved side by side round differently.
    monkeypatch.setattr(module, "TOGETHER", 1)
    otdd.index(given[1], whole)
    assert contents(killed) != contents(whole)
    otdd.index(given[1], killed)
    assert contents(killed) == contents(whole)
    assert len(contents(whole)) == 1 + 2 * len(given[1])


def test_two_processes_do_not_build_one_index(given, tmp_path):
    _, members = given
    otdd.index({"m0": members["m0"]}, tmp_path)
    held = atomic.lock(tmp_path / ".lock")
    with pytest.raises(InputError, match="another process is building the index in"):
        otdd.index(members, tmp_path)
    # It can be read.
    assert otdd.Index.load(tmp_path).names == ("m0",)
    atomic.unlock(tmp_path / ".lock", held)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot read .* Not a directory"):
        otdd.index(members, tmp_path / "file")


def test_what_another_process_has_added_is_not_lost(given, tmp_path, monkeypatch):
    """It built after this one had read the list of members, and before this one wrote its own."""
    _, members = given
    real = module._building

    def building(where):
        monkeypatch.setattr(module, "_building", real)
        otdd.index({"m1": members["m1"]}, tmp_path)
        return real(where)

    monkeypatch.setattr(module, "_building", building)
    with pytest.raises(InputError, match=r"another process has changed the index in .*; try again"):
        otdd.index({"m0": members["m0"]}, tmp_path)
    assert otdd.index({"m0": members["m0"]}, tmp_path).names == ("m1", "m0")


def test_the_precision_is_that_of_the_index(given, tmp_path):
    """Where only a device is given, or nothing; options of another one are refused."""
    query, members = given
    otdd.index(members, tmp_path, compute=otdd.ComputeOptions("cpu", precision="double"))
    loaded = otdd.Index.load(tmp_path, "cpu")
    read = otdd.index({}, tmp_path)
    assert loaded.compute.precision == read.compute.precision == "double"
    assert otdd.nearest(query, tmp_path, 1, compute="cpu").certified
    for ask in (
        lambda compute: otdd.Index.load(tmp_path, compute),
        lambda compute: otdd.index({}, tmp_path, compute=compute),
        lambda compute: otdd.nearest(query, loaded, 1, compute=compute),
    ):
        with pytest.raises(InputError, match="built with precision=double, got fast; give the"):
            ask(otdd.ComputeOptions("cpu"))


def test_other_settings_are_refused_or_rebuilt(given, tmp_path, solved):
    query, members = given
    otdd.index(members, tmp_path, epsilon=0.5)
    one = {"m0": members["m0"]}
    for name, settings in {
        "epsilon=0.5, not 1.0": {"epsilon": 1.0},
        "unbalanced=None, not 2.0": {"unbalanced": 2.0},
        "cost={'lambda_x': 0.5, .*not {'lambda_x': 1.0": {"lambda_x": 1.0},
        "cost=.*'sqeuclidean'}, not .*'cosine'}": {"ground": "cosine"},
        r"labels=Gaussian\(.*\), not Means\(\)": {"labels": "means"},
        r"labels=Gaussian\(.*\), not .*diagonal=True\)": {
            "labels": otdd.labels.Gaussian(diagonal=True)
        },
        "min_class_size=None, not 2": {"min_class_size": 2},
    }.items():
        with pytest.raises(InputError, match=f"built with {name}.*rebuild=true"):
            otdd.index(one, tmp_path, **settings)
    solved()
    rebuilt = otdd.index(one, tmp_path, epsilon=1.0, rebuild=True)
    # Those that are not given again have their rows in the folder.
    assert solved() == list(members)
    assert rebuilt.settings.epsilon == 1.0
    expected = otdd.nearest(query, otdd.index(members, epsilon=1.0), 2)
    check_same(otdd.nearest(query, otdd.Index.load(tmp_path), 2), expected)


def test_rebuilding_drops_small_classes_of_stored_rows_too(tmp_path):
    rng = np.random.default_rng(0)
    labels = [0] * 10 + [1] * 9 + [2] * 2
    members = {
        name: otdd.LabeledSamples(rng.normal(size=(21, 2)), labels, ("a", "b", "c"))
        for name in "xy"
    }
    otdd.index(members, tmp_path)
    with pytest.warns(DataNotice, match="dropped classes of x"):
        index = otdd.index({}, tmp_path, min_class_size=5, rebuild=True)
    assert [len(index.rows(entry)) for entry in index.entries] == [19, 19]
    with pytest.warns(DataNotice, match="dropped classes of samples"):
        row = otdd.nearest(members["x"], tmp_path, 1).rows[0]
    assert row[:3] == ("x", 0.0, 0.0)
    # What was dropped is not there any more.
    with pytest.raises(InputError, match=r"min_class_size=5; give those again .*: y"):
        otdd.index({"x": members["x"]}, tmp_path, min_class_size=2, rebuild=True)
    again = otdd.index(members, tmp_path, min_class_size=2, rebuild=True)
    assert [len(again.rows(entry)) for entry in again.entries] == [21, 21]


@pytest.mark.parametrize("stored", [False, True])
def test_a_member_without_a_self_term_is_named_or_skipped(given, tmp_path, stored):
    """Its costs are too large for the epsilon of the others."""
    query, members = given
    one = members["m0"]
    huge = otdd.LabeledSamples(one.features * 1e5, one.labels, one.class_names)
    folder = tmp_path if stored else None
    with pytest.raises(InputError, match=r"huge has no self term in the index: .* too small"):
        otdd.index({**members, "huge": huge}, folder, epsilon=0.01)
    with pytest.warns(DataNotice, match="huge has no self term .* it is left out of the index"):
        index = otdd.index({**members, "huge": huge}, folder, epsilon=0.01, skip=True)
    assert index.names == tuple(members)
    assert otdd.nearest(query, index, 1).rows
    if stored:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DataNotice)
            assert otdd.Index.load(folder).names == tuple(members)


def test_members_of_equal_content_are_told_and_ranked_once(given):
    query, members = given
    with pytest.warns(DataNotice, match="ranked once: copy is m0"):
        index = otdd.index({**members, "copy": members["m0"]})
    assert index.names == tuple(members)
    assert index.duplicates == {"copy": "m0"}
    assert otdd.nearest(query, index, 2).details["duplicates"] == {"copy": "m0"}


def test_members_that_cannot_be_are_refused_or_skipped(given):
    query, members = given
    wide = otdd.LabeledSamples(torch.zeros(4, 9), [0, 0, 1, 1], ("a", "b"))
    bare = query.features
    for bad, message in (
        (wide, r"bad has 9 features, and the index compares \d"),
        (bare, "bad has no labels, which labels=gaussian"),
        ([[float("nan")]], "bad"),
        ("no_such_dataset.npz", "no_such_dataset"),
        ("no_such_name", "unknown dataset 'no_such_name'"),
    ):
        with pytest.raises(InputError, match=message):
            otdd.index({**members, "bad": bad})
        with pytest.warns(DataNotice, match="it is left out of the index"):
            index = otdd.index({**members, "bad": bad}, skip=True)
        assert index.names == tuple(members)
    with pytest.raises(InputError, match=r"no dataset of the library can be a member.*no labels"):
        otdd.index({"bad": bare}, skip=True)


def plane(dim, seed=0):
    rng = np.random.default_rng(seed)
    return otdd.LabeledSamples(rng.normal(size=(8, dim)), [0, 1] * 4, ("a", "b"))


def test_the_number_of_features_is_that_of_most_members_or_the_one_given(tmp_path):
    """Not that of the first."""
    members = {"z": plane(3), **{f"m{k}": plane(2, k) for k in range(4)}}
    with pytest.warns(DataNotice, match="z has 3 features, and the index compares 2.*left out"):
        index = otdd.index(members, tmp_path, skip=True)
    assert index.names == ("m0", "m1", "m2", "m3")
    with pytest.raises(InputError, match="z has 3 features, and the index compares 2; leave"):
        otdd.index(members)
    with pytest.warns(DataNotice, match="m3 has 2 features, and the index compares 3"):
        assert otdd.index(members, dim=3, skip=True).names == ("z",)
    # A folder has its own.
    with pytest.raises(InputError, match=r"the index was built with dim=2, not 3"):
        otdd.index({"z": plane(3)}, tmp_path, dim=3)
    with pytest.warns(DataNotice, match="z has 3 features, and the index compares 2"):
        assert len(otdd.index({"z": plane(3)}, tmp_path, skip=True)) == 4
    # Also where nothing of its members is left.
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.warns(DataNotice, match="z has 3 features, and the index compares 2"):
        assert otdd.index(members, tmp_path, skip=True).names == ("m0", "m1", "m2", "m3")


def test_a_ranking_of_datasets_by_name_takes_the_number_of_features_of_the_query():
    members = {"z": plane(3), **{f"m{k}": plane(2, k) for k in range(4)}}
    query = plane(3, seed=9)
    with pytest.raises(InputError, match="m0 has 2 features, and the index compares 3"):
        otdd.nearest(query, members, 1)
    with pytest.warns(DataNotice, match="m0 has 2 features, and the index compares 3"):
        ranking = otdd.nearest(query, members, 1, skip=True)
    assert [row.name for row in ranking.rows] == ["z"]
    assert ranking.certified


def test_members_by_path_and_by_name_and_in_files(given, tmp_path):
    query, members = given
    one = members["m0"]
    np.savez(tmp_path / "m0.npz", x=one.features.numpy(), y=one.labels.numpy())
    np.save(tmp_path / "m1.npy", members["m1"].features.numpy())
    in_file = otdd.LabeledSamples(
        otdd.features_file(tmp_path / "m1.npy"), members["m1"].labels, members["m1"].class_names
    )
    index = otdd.index({"m0": tmp_path / "m0.npz", "m1": in_file}, tmp_path / "lib")
    assert [len(index.rows(entry)) for entry in index.entries] == [len(one), len(members["m1"])]
    assert index.entries[1].digest == module.digest_of(in_file)
    assert otdd.nearest(query, index, 2).certified


def test_a_member_that_is_left_out_is_told_once(given):
    _, members = given
    wide = otdd.LabeledSamples(torch.zeros(4, 9), [0, 0, 1, 1], ("a", "b"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", DataNotice)
        otdd.index({**members, "wide": wide}, skip=True)
    assert sum("wide has 9 features" in str(one.message) for one in said) == 1


def test_what_cannot_be_stored_is_refused(given, tmp_path):
    _, members = given
    with pytest.raises(InputError, match="cannot be stored for that: take a named method"):
        otdd.index(members, tmp_path, labels=lambda x, y: (x.mean(0) - y.mean(0)).square().sum())
    with pytest.raises(InputError, match=r"the library is empty: .* there is no index in"):
        otdd.index({}, tmp_path / "none")


def test_the_default_epsilon_is_of_the_mean_cost_over_pairs_of_members(given):
    _, members = given
    two = {name: members[name] for name in ("m0", "m1")}
    index = otdd.index(two)
    assert index.settings.mean_cost == pytest.approx(
        otdd.dataset_distance(*two.values()).mean_cost, rel=1e-6
    )
    assert index.settings.epsilon == pytest.approx(0.01 * index.settings.mean_cost)
    relative = otdd.index(two, epsilon_relative=0.1, unbalanced_relative=0.3)
    assert relative.settings.epsilon == pytest.approx(10 * index.settings.epsilon)
    assert relative.settings.unbalanced == pytest.approx(0.3 * index.settings.mean_cost)
