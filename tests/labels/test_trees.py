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
WAYS = {("cat", "dog"): 2, ("cat", "oak"): 5, ("dog", "oak"): 5}
WAYS |= {("cat", "pet"): 1, ("dog", "pet"): 1}
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 3, generator=DRAW), torch.randn(30, 3, generator=DRAW) + 1
NAMES = np.array(["cat", "dog", "oak"])
SOURCE = X, NAMES[np.arange(40) % 3]
TARGET = Y, np.array(["oak", "pet"])[np.arange(30) % 2]


def way(one, other):
    return 0 if one == other else WAYS.get((one, other)) or WAYS.get((other, one), 4)


def test_distances_are_ways_between_names():
    names = ["cat", "dog", "oak", "pet"]
    found = Tree(PARENTS).by_names(names)
    assert found.tolist() == [[way(a, b) for b in names] for a in names]


def test_lengths_keep_all_their_digits():
    found = Tree({"a": ("b", 0.1), "b": ("c", 1.0), "d": ("c", 1e-9)}).by_names(["a", "b", "d"])
    assert found[0, 1].item() == pytest.approx(0.1, rel=1e-14)
    assert found[1, 2].item() == pytest.approx(1 + 1e-9, rel=1e-14)


def test_a_distance_by_a_tree_is_that_of_its_table():
    found = otdd.dataset_distance(SOURCE, TARGET, labels=Tree(PARENTS), epsilon=0.3)
    names = ["cat", "dog", "oak", "oak", "pet"]
    table = torch.tensor([[way(a, b) for b in names] for a in names])
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
    [("tree.csv", "name,parent\na,b\nc,b\na,c\n"), ("tree.json", '{"a": "b", "c": "b", "a": "c"}')],
)
def test_a_name_that_is_listed_twice_is_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=rf"{name} lists 'a' twice"):
        Tree(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [("tree.csv", "name,parent\na,b\nc,b\n"), ("tree.json", '{"a": "b", "c": "b"}')],
)
def test_files_of_spreadsheets_are_read(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert Tree(tmp_path / name) == Tree({"a": "b", "c": "b"})


def test_a_power_warns():
    with pytest.warns(DataNotice, match="debiased values may be negative"):
        found = Tree(PARENTS, power=2).by_names(list(NAMES))
    assert torch.equal(found, Tree(PARENTS).by_names(list(NAMES)) ** 2)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (None, "needs the parent of every class"),
        ({"a": "b", "b": "a"}, "goes round from 'a'"),
        ({"a": ("b", -1)}, "the edge above 'a' must have a length of 0 or more"),
        ({"a": ("b", "long")}, "the edge above 'a' must have a length of 0 or more"),
        ("nowhere.json", "cannot be read"),
        ({"a": ["b", 1, 2]}, r"'a' must have a parent, or a pair \(parent, length\)"),
        (["a", "b"], "must be the path of a file, or in Python parents a mapping"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(InputError, match=message):
        Tree(parents)


def test_classes_outside_of_the_tree_are_named():
    with pytest.raises(InputError, match="class 'oak' is not in the tree"):
        otdd.dataset_distance(SOURCE, TARGET, labels=Tree({"cat": "pet", "dog": "pet"}))
    with pytest.raises(InputError, match="no way between classes below pet, plant"):
        Tree({"cat": "pet", "oak": "plant"}).by_names(["cat", "oak"])


def test_what_is_added_is_measured():
    with pytest.raises(InputError, match=r"labels\.add must be a method that measures, got none"):
        Tree(PARENTS, add="none")


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
