"""Several labels a row, numbers and trees on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import otdd_flash as otdd

DRAW = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def tables(folder):
    """Two tables with tags, as text and as columns, and a price."""
    for name, rows in (("one", 40), ("two", 30)):
        x = DRAW.normal(size=(rows, 2))
        cat, dog = DRAW.random((2, rows)) < 0.6
        cat |= ~dog
        pairs = zip(cat.tolist(), dog.tolist(), strict=True)
        tags = ["|".join(["cat"] * c + ["dog"] * d) for c, d in pairs]
        price = 100 * DRAW.normal(size=rows).round(3)
        frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "tags": tags, "price": price})
        frame["cat"], frame["dog"] = cat.astype(int), dog.astype(int)
        frame.to_csv(f"{name}.csv", index=False)
    Path("tree.json").write_text(json.dumps({"cat": "pet", "dog": "pet", "pet": None}))


def both(**keys):
    sides = {"source": "one.csv", "target": "two.csv"}
    return [
        part
        for side, path in sides.items()
        for part in (
            f"{side}=arrays",
            f"{side}.path={path}",
            f"{side}.features=[a,b]",
            *(f"{side}.{key}={value}" for key, value in keys.items()),
        )
    ]


@pytest.mark.parametrize(
    "keys", [{"label": "tags", "label_separator": "'|'"}, {"label": "[cat,dog]"}]
)
def test_several_labels(command, read, rows, keys, undrawn):
    assert command(*both(**keys), "epsilon=0.3").complaints == []
    result = read("run/result.json")
    assert result["classes"] == {"source": ["cat", "dog"], "target": ["cat", "dog"]}
    coupling = rows("run/class_coupling.csv")
    total = sum(float(row[name]) for row in coupling for name in ("cat", "dog"))
    assert total == pytest.approx(1)
    assert len(rows("run/nearest_classes.csv")) == 4


def test_pictures_of_several_labels(command):
    assert command(*both(label="[cat,dog]"), "epsilon=0.3").complaints == []
    pictures = {path.name for path in Path("run").glob("*.png")}
    assert pictures == {"projection.png", "class_distances.png", "class_coupling.png"}


def test_numbers(command, read, rows):
    ended = command(*both(label="price"), "labels=continuous", "epsilon=0.3", "save_result=true")
    assert ended.complaints == []
    result = read("run/result.json")
    tables = [pd.read_csv(f"{name}.csv") for name in ("one", "two")]
    prices = np.concatenate([table["price"] for table in tables])
    assert result["target_scale"] == pytest.approx([prices.std()])
    (change,) = result["target_changes"]
    assert f"{change:.4g} (scale {prices.std():.4g})" in ended.out
    gaps = np.abs(tables[0]["price"].to_numpy()[:, None] - tables[1]["price"].to_numpy())
    plan = otdd.DistanceResult.load("run").apply_plan(np.eye(30)).numpy()
    assert change == pytest.approx(float((plan * gaps).sum() / plan.sum()), rel=1e-3)
    masses = pd.read_csv("run/target_histogram.csv", index_col=0)
    assert masses.to_numpy().sum() == pytest.approx(1)
    assert Path("run/target_histogram.png").is_file()
    assert Path("run/projection.png").is_file()


@pytest.mark.parametrize("scale", ["null", "[50]"])
def test_a_scale_of_ones_own(command, read, scale, undrawn):
    settings = (f"labels.scale={scale}", "epsilon=100", "report=none")
    assert command(*both(label="price"), "labels=continuous", *settings).complaints == []
    assert read("run/result.json")["target_scale"] == [1.0 if scale == "null" else 50.0]


def test_several_columns_of_numbers(command, read, undrawn):
    keys = both(label="[price,a]")
    assert command(*keys, "labels=continuous", "epsilon=0.3").complaints == []
    assert len(read("run/result.json")["target_changes"]) == 2
    assert Path("run/target_histogram_1.csv").is_file()


@pytest.mark.parametrize("add", ["null", "gaussian"])
def test_trees(command, read, rows, add, undrawn):
    settings = ("labels=tree", "labels.path=tree.json", f"labels.add={add}", "epsilon=0.3")
    assert command(*both(label="[cat,dog]"), *settings).complaints == []
    assert read("run/result.json")["labels"] == "tree"
    found = rows("run/class_distances.csv")[0]
    apart = float(found["source:dog"])
    assert apart == 2 if add == "null" else apart > 2


def test_sampling_errors_of_trees(command, read, undrawn):
    settings = ("labels=tree", "labels.path=tree.json", "labels.add=sinkhorn", "epsilon=0.3")
    asked = ("noise_floor=true", "report=none")
    assert command(*both(label="[cat,dog]"), *settings, *asked).complaints == []
    result = read("run/result.json")
    assert result["labels_epsilon"] == 0.3
    assert result["noise_floor"]["size"] == 15


def test_sampling_errors_of_numbers(command, read, undrawn):
    settings = ("labels=continuous", "epsilon=0.3", "subsample=40", "noise_floor=true")
    assert command(*both(label="price"), *settings, "report=none").complaints == []
    result = read("run/result.json")
    assert result["subsample"]["lower"] < result["value"] < result["subsample"]["upper"]
    assert result["noise_floor"]["size"] == 15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("labels=tree",), "labels=tree needs the parent of every class: labels.path=FILE"),
        (("labels=continuous", "labels.scale=wide"), "labels.scale must be pooled, null, or"),
        (("labels=gaussian",), "one has numbers and no classes; labels=continuous compares them"),
    ],
)
def test_what_cannot_be_is_said(command, settings, message):
    ended = command(*both(label="price"), *settings, "epsilon=0.3")
    assert ended.code == 2
    assert message in ended.error


@pytest.mark.parametrize(("label", "labels"), [("price", "continuous"), ("[cat,dog]", "gaussian")])
def test_flows(flow_command, read, label, labels, undrawn):
    keys = both(label=label)
    assert flow_command(*keys, f"labels={labels}", "epsilon=0.3").complaints == []
    assert read("run/result.json")["steps"] == 2


def test_whole_numbers_are_drawn_whatever_they_are(command, read, undrawn):
    """As classes there are more of them than rows to draw."""
    for name in ("one", "two"):
        frame = pd.read_csv(f"{name}.csv")
        frame["price"] = np.arange(len(frame)) * 3
        frame.to_csv(f"{name}.csv", index=False)
    settings = ("labels=continuous", "max_samples=20", "epsilon=0.3", "report=none")
    assert command(*both(label="price"), *settings).complaints == []
    result = read("run/result.json")
    assert (result["n"], result["classes"]["source"]) == (20, ["all"])
