"""Sources of rows with several labels, and of numbers."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import otdd_flash as otdd
from otdd_flash.data import LabeledDataset, load, with_pseudo_labels
from otdd_flash.data.writing import write_hugging_face, write_npz
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.extractors import embed, pixels
from otdd_flash.samples import LabeledSamples

TAGS = [["cat"], ["dog", "cat"], [], ["dog"], ["bird", "dog"]]
INDICATOR = np.array([[name in tags for name in ("bird", "cat", "dog")] for tags in TAGS])
X = np.arange(10.0).reshape(5, 2) / 8
PRICES = np.array([1.5, 2, 8, 3.25, 2])


def table(**more):
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], **more})


def shares(rows=(0, 1, 3, 4), columns=(0, 1, 2)):
    kept = INDICATOR[list(rows)][:, list(columns)].astype(float)
    return (kept / kept.sum(1, keepdims=True)).tolist()


def tagged(suffix, folder):
    """A file with tags in one column of text."""
    path = folder / f"tagged.{suffix}"
    frame = table(tags=[" | ".join(tags) for tags in TAGS])
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    return path


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_text_with_a_separator(suffix, tmp_path):
    options = {"path": tagged(suffix, tmp_path), "label": "tags", "label_separator": "|"}
    with pytest.raises(InputError, match="1 label is missing, at row 2; drop_unlabelled=true"):
        load("arrays", **options)
    with pytest.warns(DataNotice, match="1 of 5 rows have no label"):
        found = embed(load("arrays", **options, drop_unlabelled=True))
    assert found.label_names == ("bird", "cat", "dog")
    assert found.shares.tolist() == shares()
    assert found.dim == 2


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_of_0_and_1(suffix, tmp_path):
    path = tmp_path / f"columns.{suffix}"
    frame = table(cat=INDICATOR[:, 1].astype(int), dog=INDICATOR[:, 2])
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    found = embed(load("arrays", path=path, label=["cat", "dog"], drop_unlabelled=True))
    assert found.label_names == ("cat", "dog")
    assert found.shares.tolist() == shares(columns=(1, 2))
    assert found.dim == 2


def test_numbers_of_tables(tmp_path):
    path = tmp_path / "houses.csv"
    table(price=PRICES, rooms=[1, 2, 3, 2, 4]).to_csv(path, index=False)
    found = embed(load("arrays", path=path, label="price", features=["a", "b"]))
    assert found.targets.tolist() == PRICES[:, None].tolist()
    assert found.labels is None
    both = embed(load("arrays", path=path, label=["price", "rooms"]))
    assert both.targets[:, 1].tolist() == [1, 2, 3, 2, 4]
    assert both.dim == 2
    # Whole numbers are classes until they are compared as numbers.
    whole = embed(load("arrays", path=path, label="rooms", features=["a", "b"]))
    settings = {"labels": otdd.labels.Continuous(None), "epsilon": 0.5}
    values = [
        otdd.dataset_distance(side, both, **settings).value
        for side in (LabeledSamples(both.features, None, (), targets=both.targets),)
    ]
    assert values == [0]
    assert otdd.dataset_distance(whole, found, **settings).value > 0


def test_some_labels_are_kept(tmp_path):
    options = {"path": tagged("csv", tmp_path), "label": "tags", "label_separator": "|"}
    found = load("arrays", **options, drop_unlabelled=True, classes=["dog", "cat"])
    assert found.label_sets.names == ("dog", "cat")
    assert embed(found).shares.tolist() == shares(columns=(2, 1))
    few = load("arrays", **options, drop_unlabelled=True, max_samples=2)
    assert len(few) == 2


def test_sequences_of_class_labels():
    datasets = pytest.importorskip("datasets")
    names = ["bird", "cat", "dog"]
    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32"), length=2),
            "tags": datasets.Sequence(datasets.ClassLabel(names=names)),
        }
    )
    rows = {"x": X, "tags": [[names.index(tag) for tag in tags] or [0] for tags in TAGS]}
    found = otdd.embed(datasets.Dataset.from_dict(rows, features=features))
    assert found.label_names == tuple(names)
    assert found.shares[1].tolist() == [0, 0.5, 0.5]
    # Indices of labels are not taken for an indicator.
    for tags, kept in (([0, 1], 2), ([0, 1, 1], 2), ([2, 1], 3)):
        rows["tags"] = [[0, 1]] * 4 + [tags]
        pairs = otdd.embed(datasets.Dataset.from_dict(rows, features=features))
        assert pairs.label_names == tuple(names[:kept])
        assert pairs.shares[0].tolist() == [0.5, 0.5, 0][:kept]
    features["tags"] = datasets.Sequence(datasets.ClassLabel(names=names[:2]))
    rows["tags"] = [[0, 1]] * 4 + [[1, 1]]
    both = otdd.embed(datasets.Dataset.from_dict(rows, features=features))
    assert both.shares.tolist() == [[0.5, 0.5]] * 4 + [[0, 1]]


def test_a_folder_of_tagged_images(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "photos"
    folder.mkdir()
    lines = []
    for row, tags in enumerate(TAGS):
        Image.fromarray(np.full((4, 4), 40 * row, np.uint8)).save(folder / f"{row}.png")
        lines.append(json.dumps({"file_name": f"{row}.png", "tags": tags}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    found = embed(
        load("huggingface", path=str(folder), label="tags", drop_unlabelled=True), pixels()
    )
    assert found.label_names == ("bird", "cat", "dog")
    assert found.shares.tolist() == shares()


def test_items_of_a_users_dataset():
    kept = [0, 1, 3, 4]
    x, hot = torch.from_numpy(X[kept]), torch.from_numpy(INDICATOR[kept].astype(int))
    lists = [(row, TAGS[place]) for row, place in zip(x, kept, strict=True)]
    read = [
        otdd.embed(TensorDataset(x, hot)),
        otdd.embed(torch.utils.data.DataLoader(TensorDataset(x, hot), 2)),
    ]

    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return len(lists)

        def __getitem__(self, row):
            return lists[row]

    read.append(otdd.embed(Pairs()))
    assert [one.shares.tolist() for one in read] == [shares()] * 3
    assert read[-1].label_names == ("bird", "cat", "dog")


@pytest.mark.parametrize("form", ["npz", "folder"])
def test_what_was_written_is_read_back(form, tmp_path):
    kept = INDICATOR[[0, 1, 3, 4]]
    several = LabeledSamples(torch.rand(4, 2), kept, ("bird", "cat", "dog"))
    numbers = LabeledSamples(torch.rand(4, 2), None, (), targets=torch.rand(4, 2))
    for place, samples in enumerate((several, numbers)):
        path = tmp_path / f"written{place}"
        if form == "npz":
            write_npz(samples, path.with_suffix(".npz"))
            read = embed(load("arrays", path=path.with_suffix(".npz")))
        else:
            pytest.importorskip("datasets")
            write_hugging_face(samples, path)
            read = embed(load("huggingface", path=str(path), input="features", label="label"))
        assert read.label_names == samples.label_names
        assert torch.equal(read.shares, samples.shares)
        if samples.targets is not None:
            assert torch.equal(read.targets, samples.targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": ["a", "tags"]}, r"columns a, tags of labels must hold 0 and 1, or numbers"),
        ({"label": ["a", "cat"]}, "has no column 'cat'"),
        ({"label": "tags", "label_separator": ""}, "label_separator"),
        ({"label_separator": "|"}, "^several columns of labels, and label_separator"),
        (
            {"label": ["tags", "a"], "label_separator": "|"},
            "^several columns of labels, and label_separator",
        ),
    ],
)
def test_what_columns_cannot_be_is_said(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        load("arrays", path=tagged("csv", tmp_path), **options)


def test_other_files_have_one_column_of_labels(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=[0, 1, 0, 1, 0])
    for options in ({"label": ["y", "z"]}, {"label": "y", "label_separator": "|"}):
        with pytest.raises(InputError, match=r"^several columns of labels, and label_separator"):
            load("arrays", path=tmp_path / "a.npz", **options)


HOT = [[1, 0, 0], [0, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1]]
PARTS = [[1, 0, 0], [0, 0.5, 0.5], [0, 1, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 1]]


@pytest.mark.parametrize(
    "labels",
    [
        HOT,
        [tuple(row) for row in HOT],
        [np.array(row) for row in HOT],
        [[float(entry) for entry in row] for row in HOT],
        [[bool(entry) for entry in row] for row in HOT],
        pd.Series(HOT),
    ],
)
def test_lists_of_0_and_1_are_an_indicator(labels):
    found = LabeledSamples.from_arrays(X, labels)
    assert found.label_names == ("0", "1", "2")
    assert found.shares.tolist() == PARTS


def test_lists_of_0_and_1_with_names():
    found = LabeledSamples(X, HOT, ("bird", "cat", "dog"))
    assert found.label_names == ("bird", "cat", "dog")
    assert found.shares.tolist() == PARTS
    pairs = LabeledSamples(X, [[True, False]] * 4 + [[False, True]], ("cat", "dog"))
    assert pairs.shares.tolist() == [[1, 0]] * 4 + [[0, 1]]


def test_items_and_columns_of_0_and_1():
    datasets = pytest.importorskip("datasets")

    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return len(HOT)

        def __getitem__(self, row):
            return torch.from_numpy(X[row]), HOT[row]

    columns = datasets.Dataset.from_dict({"x": X, "label": HOT})
    for given in (Pairs(), columns, (X, columns["label"])):
        found = otdd.embed(given)
        assert found.label_names == ("0", "1", "2")
        assert found.shares.tolist() == PARTS


def test_lists_that_could_be_both_are_refused():
    labels = [[0, 1], [1, 0], [0, 1], [0, 1], [1, 0]]
    with pytest.raises(InputError, match=r"\[0, 1\] are labels or an indicator; .*np\.array.*sets"):
        LabeledSamples.from_arrays(X, labels)
    with pytest.raises(InputError, match="labels or an indicator of 2 names"):
        LabeledSamples(X, labels, ("cat", "dog"))
    with pytest.raises(InputError, match="labels or an indicator of 4 names"):
        LabeledSamples(X, HOT, ("cat", "dog", "bird", "horse"))
    assert LabeledSamples.from_arrays(X, np.array(labels)).shares[1].tolist() == [1, 0]
    sets = LabeledSamples.from_arrays(X, [set(row) for row in labels])
    assert sets.shares.tolist() == [[0.5, 0.5]] * 5
    # Fewer labels than names are no indicator.
    few = LabeledSamples(X, labels, ("cat", "dog", "bird"))
    assert few.shares.tolist() == [[0.5, 0.5, 0]] * 5


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_row_with_an_empty_cell_has_no_label(suffix, tmp_path):
    path = tmp_path / f"gaps.{suffix}"
    frame = table(cat=[1, None, 0, 1, 1], dog=[0, 1, 1, 0, 1]).astype({"cat": "Int64"})
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    with pytest.raises(InputError, match="1 label is missing, at row 1; drop_unlabelled=true"):
        load("arrays", path=path, label=["cat", "dog"])
    found = embed(load("arrays", path=path, label=["cat", "dog"], drop_unlabelled=True))
    assert found.shares.tolist() == [[1, 0], [0, 1], [1, 0], [0.5, 0.5]]


@pytest.mark.parametrize(
    "targets", [[[0, 1], [1, 1]], [[0.25, 0.75], [0.5, 0.5]], [1, 2], [[1.5, 2], [3, 4]]]
)
def test_numbers_of_npz_files_stay_numbers(targets, tmp_path):
    samples = LabeledSamples(X[:2], None, (), targets=torch.tensor(targets).double())
    write_npz(samples, tmp_path / "a.npz")
    for options in ({}, {"label": "targets"}):
        read = embed(load("arrays", path=tmp_path / "a.npz", **options))
        assert read.labels is None
        assert torch.equal(read.targets, samples.targets)


def test_what_targets_of_npz_files_cannot_be_is_said(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, targets=np.ones((5, 1, 1)))
    with pytest.raises(InputError, match=r"targets must be \(n,\) or \(n, q\), got shape"):
        load("arrays", path=tmp_path / "a.npz")
    # Integers of that name are no numbers, and may be labels under a name of the user's.
    np.savez(tmp_path / "a.npz", x=X, targets=[0, 1, 0, 1, 1])
    with pytest.warns(DataNotice, match="taken as unlabelled.*not read: targets"):
        assert load("arrays", path=tmp_path / "a.npz").targets is None
    assert load("arrays", path=tmp_path / "a.npz", label="targets").class_names == ("0", "1")


def test_rows_have_labels_or_numbers():
    numbers = torch.arange(5.0)
    with pytest.raises(InputError, match=r"^rows have labels or targets, and not both"):
        LabeledSamples(X, [0, 1, 0, 1, 0], ("a", "b"), targets=numbers)
    with pytest.raises(InputError, match=r"^houses: rows have labels or targets, and not both"):
        LabeledDataset(
            X, np.zeros(5, int), ("a",), None, "array", "houses", targets=np.ones((5, 1))
        )
    priced = LabeledSamples(X, None, (), targets=numbers, name="houses")
    with pytest.warns(DataNotice, match="houses: its numbers are replaced by labels of 2 clusters"):
        found = with_pseudo_labels(priced, 2)
    assert found.targets is None
    assert found.class_names == ("cluster 0", "cluster 1")


def test_samples_point_to_the_reader_of_lists():
    with pytest.raises(InputError, match=r"lists of several lengths; LabeledSamples\.from_arrays"):
        LabeledSamples(X, TAGS, ("bird", "cat", "dog"))


@pytest.mark.parametrize("labels", [[1.5, 2, np.inf, 3, -np.inf], np.full((5, 2), -np.inf)])
def test_infinite_numbers_are_named(labels):
    ways = (
        lambda: LabeledSamples.from_arrays(X, labels),
        lambda: otdd.embed((X, np.array(labels))),
    )
    for way in ways:
        with pytest.raises(InputError, match=r"targets must be finite, got -?inf at rows [02], "):
            way()


@pytest.mark.parametrize(("entry", "said"), [(-1, "-1"), (np.int64(3), "3"), ("cat", "'cat'")])
def test_lists_beyond_their_names_are_named(entry, said):
    labels = [[0], [1, 2], [], [1, entry], [entry]]
    with pytest.raises(InputError, match=rf"of 3 names, from 0, got {said} at row 3; leave out"):
        LabeledDataset.from_raw(
            X, labels, modality="array", name="tagged", class_names=("bird", "cat", "dog")
        )


def test_datasets_say_what_their_labels_are(tmp_path):
    path = tmp_path / "houses.csv"
    table(price=PRICES).to_csv(path, index=False)
    houses = load("arrays", path=path, label="price")
    assert houses.kind_of_labels == "1 number a row"
    with pytest.raises(InputError, match=r"houses has numbers and no classes; leave classes out"):
        load("arrays", path=path, label="price", classes=[0])
    options = {"path": tagged("csv", tmp_path), "label": "tags", "label_separator": "|"}
    found = load("arrays", **options, drop_unlabelled=True)
    assert found.kind_of_labels == "3 labels in 4 sets"


@pytest.mark.parametrize("ragged", [True, False])
def test_columns_of_class_labels_in_lists_are_named(ragged):
    datasets = pytest.importorskip("datasets")
    kind = datasets.Sequence(datasets.ClassLabel(names=["bird", "cat", "dog"]))
    tags = [[1], [2, 1], [0], [2], [0, 2]] if ragged else [[1, 0], [0, 1], [0, 1], [1, 2], [0, 1]]
    column = datasets.Dataset.from_dict({"tags": tags}, features=datasets.Features({"tags": kind}))
    found = LabeledSamples.from_arrays(X, column["tags"])
    assert found.label_names == ("bird", "cat", "dog")
    assert [set(row.nonzero().ravel().tolist()) for row in found.shares] == list(map(set, tags))
    tags[3] = [0, -1]
    column = datasets.Dataset.from_dict({"tags": tags}, features=datasets.Features({"tags": kind}))
    with pytest.raises(InputError, match="labels in lists are missing, at row 3; leave those rows"):
        LabeledSamples.from_arrays(X, column["tags"])
    tags[3] = None
    column = datasets.Dataset.from_dict({"tags": tags}, features=datasets.Features({"tags": kind}))
    with pytest.raises(InputError, match="1 row has no label, at row 3; leave those rows"):
        LabeledSamples.from_arrays(X, column["tags"])
