"""Class distances of a hierarchy."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.labels import Tree, metric_named

PARENTS = {"cat": "pet", "dog": "pet", "pet": ("animal", 2.0), "oak": "plant", "plant": "animal"}
PATHS = {("cat", "dog"): 2, ("cat", "oak"): 5, ("dog", "oak"): 5}
PATHS |= {("cat", "pet"): 1, ("dog", "pet"): 1}
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 3, generator=DRAW), torch.randn(30, 3, generator=DRAW) + 1
NAMES = np.array(["cat", "dog", "oak"])
SOURCE = X, NAMES[np.arange(40) % 3]
TARGET = Y, np.array(["oak", "pet"])[np.arange(30) % 2]


def path_length(one, other):
    return 0 if one == other else PATHS.get((one, other)) or PATHS.get((other, one), 4)


def test_distances_are_lengths_of_paths_between_names():
    names = ["cat", "dog", "oak", "pet"]
    found = Tree(PARENTS).by_names(names)
    assert found.tolist() == [[path_length(a, b) for b in names] for a in names]


def test_lengths_keep_all_their_digits():
    found = Tree({"a": ("b", 0.1), "b": ("c", 1.0), "d": ("c", 1e-9)}).by_names(["a", "b", "d"])
    assert found[0, 1].item() == pytest.approx(0.1, rel=1e-14)
    assert found[1, 2].item() == pytest.approx(1 + 1e-9, rel=1e-14)


def test_a_distance_by_a_tree_is_that_of_its_table():
    found = otdd.dataset_distance(SOURCE, TARGET, labels=Tree(PARENTS), epsilon=0.3)
    names = ["cat", "dog", "oak", "oak", "pet"]
    table = torch.tensor([[path_length(a, b) for b in names] for a in names])
    given = otdd.ClassDistances.from_full(table, 3)
    expected = otdd.dataset_distance(SOURCE, TARGET, class_distances=given, epsilon=0.3)
    assert torch.equal(found.class_distances.full, table.double())
    assert found.value == expected.value
    assert found.method == "tree"


def test_measured_distances_are_added():
    tables = [
        otdd.class_distances([SOURCE, TARGET], labels).full
        for labels in (Tree(PARENTS, add="gaussian"), Tree(PARENTS), "gaussian")
    ]
    torch.testing.assert_close(tables[0], tables[1] + tables[2])


@pytest.mark.parametrize("form", ["json", "csv"])
def test_trees_are_read_from_files(form, tmp_path):
    path = tmp_path / f"tree.{form}"
    if form == "json":
        path.write_text(json.dumps(PARENTS))
    else:
        rows = ["name,parent,length", "cat,pet,", "dog,pet,1", "pet,animal,2", "oak,plant,1"]
        path.write_text("\n".join([*rows, "plant,animal,", "animal,,"]))
    found = metric_named("tree", {"parents": str(path)}).by_names(list(NAMES))
    assert torch.equal(found, Tree(PARENTS).by_names(list(NAMES)))


@pytest.mark.parametrize(
    ("name", "text"),
    [("tree.csv", "name,parent\na,b\nc,b\n"), ("tree.json", '{"a": "b", "c": "b"}')],
)
def test_files_of_spreadsheets_are_read(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert Tree(tmp_path / name) == Tree({"a": "b", "c": "b"})


@pytest.mark.parametrize("add", [None, "sinkhorn"])
def test_a_power_warns_once(add, recwarn):
    """Where the tree is made, whatever is computed with it."""
    tree = Tree(PARENTS, power=2, add=add)
    found = tree.by_names(list(NAMES))
    assert torch.equal(found, Tree(PARENTS).by_names(list(NAMES)) ** 2)
    otdd.dataset_distance(SOURCE, TARGET, labels=tree, epsilon=0.5)
    flow = otdd.Flow(stepping=otdd.Stepping(step_size=0.5), steps=2)
    otdd.gradient_flow(SOURCE, TARGET, flow, labels=tree, epsilon=0.5)
    said = [one for one in recwarn if "debiased values may be negative" in str(one.message)]
    assert [one.category for one in said] == [DataNotice]
    assert said[0].filename == __file__


def test_blanks_around_names_are_none(tmp_path):
    path = tmp_path / "tree.csv"
    path.write_text("name , parent ,length \ncat , pet ,1\n dog, pet,2 \n\npet, ,\n")
    assert Tree(path) == Tree({"cat": "pet", "dog": ("pet", 2), "pet": None})
    assert Tree({"cat": " pet", "dog ": {"parent": "pet", "length": 2}, "pet": ""}) == Tree(path)
    path.write_text('name,parent\n"a cat","big\npet"\ndog,"big\npet"\n')
    assert Tree(path).parents["dog"] == ("big\npet", 1.0)


def test_parents_in_a_mapping_of_their_own(tmp_path):
    given = {"cat": {"parent": "pet", "length": 2}, "dog": {"parent": "pet"}, "pet": None}
    expected = Tree({"cat": ("pet", 2), "dog": "pet", "pet": None})
    assert Tree(given) == expected
    (tmp_path / "tree.json").write_text(json.dumps(given))
    assert Tree(tmp_path / "tree.json") == expected


def test_trees_have_a_hash():
    trees = [Tree(PARENTS), Tree(dict(reversed(PARENTS.items()))), Tree(PARENTS, add="means")]
    assert len({*trees}) == 2
    assert trees[0] in {*trees}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '{"animal": {"pet": ["cat", "dog"]}}',
            "'animal' must have a parent, a pair .* the names below it; .* such as 'pet': 'animal'",
        ),
        ("a.json", '[["cat", "pet"]]', "must be json, the parent of every class by its name"),
        ("a.json", '[{"name": "cat", "parent": "pet"}]', "must be json, the parent of every class"),
        ("a.json", '{"a": {"parent": "b", "parent": "c"}}', "lists 'parent' twice"),
        ("a.json", '{"a": "b", "c": "b", "a": "c"}', r"a\.json lists 'a' twice"),
        ("a.csv", "name,parent\na,b\nc,b\na,c\n", r"a\.csv lists 'a' twice"),
        ("a.csv", "name,parent\n,pet\ncat,pet\n", "has a row without a name"),
        ("a.csv", "name,parent\ncat,pet,1\n", "has rows of more fields than its first line"),
    ],
)
def test_what_files_of_trees_cannot_be_is_said(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        Tree(tmp_path / name)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (None, "needs the parent of every class"),
        ({"a": "b", "b": "a"}, "has a cycle through 'a'"),
        ({"a": ("b", -1)}, "the edge above 'a' must have a length of 0 or more"),
        ({"a": ("b", "long")}, "the edge above 'a' must have a length of 0 or more"),
        ("nowhere.json", "cannot be read"),
        ({"a": ("b", True)}, "the edge above 'a' must have a length of 0 or more"),
        ({"a": {"parent": "b", "size": 2}}, r"'a' must have a parent"),
        ({"a": "b", "a ": "c"}, "'a' is in the tree of labels=tree twice"),
        ({" ": "b"}, "a name in the tree of labels=tree is empty"),
        ({"a": ["b", 1, 2]}, r"'a' must have a parent, a pair \(parent, length\) or"),
        (["a", "b"], "must be the path of a file, or in Python parents a mapping"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(InputError, match=message):
        Tree(parents)


def test_classes_outside_of_the_tree_are_named():
    with pytest.raises(InputError, match="class 'oak' is not in the tree"):
        otdd.dataset_distance(SOURCE, TARGET, labels=Tree({"cat": "pet", "dog": "pet"}))
    with pytest.raises(InputError, match="no path between classes below pet, plant"):
        Tree({"cat": "pet", "oak": "plant"}).by_names(["cat", "oak"])


def test_what_is_added_is_measured():
    with pytest.raises(InputError, match=r"labels\.add must be a method that measures, got none"):
        Tree(PARENTS, add="none")
    for name in ("given", "tree"):
        with pytest.raises(InputError, match=rf"add must be a method that measures, got {name}"):
            Tree(PARENTS, add=name)


@pytest.mark.parametrize("add", [None, "means"])
def test_a_flow_keeps_its_tree(add):
    flow = otdd.Flow(stepping=otdd.Stepping(step_size=0.5), steps=2)
    found = otdd.gradient_flow(SOURCE, TARGET, flow, labels=Tree(PARENTS, add=add), epsilon=0.5)
    moved = (found.samples.features, SOURCE[1])
    expected = otdd.class_distances([moved, TARGET], Tree(PARENTS, add=add)).full
    torch.testing.assert_close(found.class_distances.full, expected)


def test_the_epsilon_of_what_is_added_is_that_of_the_result():
    tree = Tree(PARENTS, add="sinkhorn")
    found = otdd.dataset_distance(SOURCE, TARGET, labels=tree, epsilon=0.5)
    assert found.labels_epsilon == 0.5
    assert found.to_dict()["labels_epsilon"] == 0.5
    matrix = otdd.pairwise_distances([SOURCE, TARGET], labels=tree, epsilon=0.5)
    assert matrix.details["labels_epsilon"] == 0.5
