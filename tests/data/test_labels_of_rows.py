"""Sources of rows with several labels, and of numbers."""

from __future__ import annotations

import json
import warnings

import datasets
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
from otdd_flash.label_sets import LabelSets
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


def items(labels, classes=None):
    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return len(labels)

        def __getitem__(self, row):
            return torch.from_numpy(X[row]), labels[row]

    given = Items()
    if classes is not None:
        given.classes = classes
    return given


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
@pytest.mark.parametrize(
    "rows",
    [
        [[0], [1, 2], [2], [0, 1], [1]],
        [[0, 1], [1, 2], [2, 0], [0, 1], [1, 2]],
        # Two of three labels, as an indicator has a column for each name.
        [[0, 1], [1, 0], [0, 1], [0, 1], [1, 0]],
        [[0, 1, 2], [2, 1, 0], [0, 1, 2], [1, 1, 1], [0, 0, 1]],
        [[0], [2], [1], [0], [2]],
    ],
)
def test_items_with_indices_of_names(form, rows):
    found = otdd.embed(items([form(row) for row in rows], ["bird", "cat", "dog"]))
    names = [
        {name for name, part in zip(found.label_names, row, strict=True) if part}
        for row in found.shares.tolist()
    ]
    assert names == [{("bird", "cat", "dog")[label] for label in row} for row in rows]


def test_items_of_named_indicators_and_of_named_labels():
    hot = otdd.embed(items([np.array(row) for row in HOT], ["bird", "cat", "dog"]))
    assert hot.label_names == ("bird", "cat", "dog")
    assert hot.shares.tolist() == PARTS
    numbers = otdd.embed(items([np.array([0.5, row]) for row in range(5)], ["price", "rooms"]))
    assert numbers.targets[:, 1].tolist() == [0, 1, 2, 3, 4]
    texts = [["cat"], ["dog", "cat"], ["dog"], ["dog"], ["bird", "dog"]]
    for form in (list, np.array):
        assert otdd.embed(items(list(map(form, texts)), ["dog", "cat"])).label_names == (
            "bird",
            "cat",
            "dog",
        )
    with pytest.raises(InputError, match="must be indices of 2 names, from 0, got 5 at row 1"):
        otdd.embed(items([np.array(row) for row in ([0], [1, 5], [1], [0], [0])], ["a", "b"]))
    with pytest.raises(InputError, match="1 label is missing, at row 1"):
        otdd.embed(items([np.array(row, int) for row in ([0], [], [1], [0], [0])], ["a", "b"]))


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
            write_hugging_face(samples, path)
            label = "label" if samples.targets is None else "targets"
            read = embed(load("huggingface", path=str(path), input="features", label=label))
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
    write_hugging_face(samples, tmp_path / "folder")
    for options in ({}, {"label": "targets"}):
        read = embed(load("huggingface", path=str(tmp_path / "folder"), **options))
        assert read.labels is None
        assert read.dim == 2
        assert torch.equal(read.targets, samples.targets)


def test_numbers_of_a_folder_are_chosen_by_their_name(tmp_path):
    table = {"x": X, "targets": PRICES}
    with pytest.warns(DataNotice, match=r"numbers are its column 'targets', by its name; .* x;"):
        found = otdd.embed(datasets.Dataset.from_dict(table))
    assert found.targets.ravel().tolist() == PRICES.tolist()
    # Whole numbers may be labels under a name of the user's, and a column of labels comes first.
    whole = datasets.Dataset.from_dict({"x": X, "targets": [0, 1, 0, 1, 1]})
    assert LabeledSamples.of(otdd.embed(whole, label="targets")).class_names == ("0", "1")
    both = otdd.embed(datasets.Dataset.from_dict({**table, "label": [0, 1, 0, 1, 1]}), input="x")
    assert both.class_names == ("0", "1")
    for prices in ([1.5, None, 2.5, 1.5, 1], [[1.5], None, [2.5], [1.5], [1]]):
        gaps = datasets.Dataset.from_dict({"x": X, "targets": prices})
        with pytest.raises(InputError, match="1 label is missing, at row 1"):
            otdd.embed(gaps)
        gaps.save_to_disk(str(tmp_path / "gaps"))
        options = {"path": str(tmp_path / "gaps"), "drop_unlabelled": True}
        with pytest.warns(DataNotice, match="1 of 5 rows have no label"):
            assert embed(load("huggingface", **options)).targets.tolist() == [
                [1.5],
                [2.5],
                [1.5],
                [1],
            ]
    np.savez(tmp_path / "gaps.npz", x=X, targets=[1.5, np.nan, 2, 1, 1])
    with pytest.raises(InputError, match="1 label is missing, at row 1; drop_unlabelled=true"):
        load("arrays", path=tmp_path / "gaps.npz")
    assert len(load("arrays", path=tmp_path / "gaps.npz", drop_unlabelled=True)) == 4


def test_one_label_in_all_is_read_back(tmp_path):
    alone = LabelSets(("cat",), torch.ones(1, 1, dtype=torch.bool))
    samples = LabeledSamples(X, torch.zeros(5), alone.set_names, label_sets=alone)
    write_npz(samples, tmp_path / "a.npz")
    write_hugging_face(samples, tmp_path / "folder")
    for read in (
        load("arrays", path=tmp_path / "a.npz"),
        load("huggingface", path=str(tmp_path / "folder"), input="features"),
    ):
        assert read.class_names == ("cat",)
        assert read.labels.tolist() == [0] * 5


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
    with pytest.raises(InputError, match="1 label is missing, at row 3; leave those rows"):
        LabeledSamples.from_arrays(X, column["tags"])


def test_separators_that_cut_nothing(tmp_path):
    lists = tmp_path / "lists.parquet"
    table(tags=[tags or ["cat"] for tags in TAGS]).to_parquet(lists)
    with pytest.raises(InputError, match=r"'tags' of .* holds lists, .*; leave label_sep"):
        load("arrays", path=lists, label="tags", label_separator="|")
    path = tmp_path / "tagged.csv"
    table(tags=["cat;dog", "cat", "dog", "cat", "dog"]).to_csv(path, index=False)
    with pytest.warns(DataNotice, match=r"tagged.csv: no text has label_separator='\|', such as"):
        load("arrays", path=path, label="tags", label_separator="|")


@pytest.mark.parametrize("options", [{}, {"label_separator": ","}])
def test_texts_that_look_like_lists_are_told(options, tmp_path):
    path = tmp_path / "tagged.csv"
    table(tags=["['cat', 'dog']", "['cat']", "['dog']", "[]", "['dog']"]).to_csv(path, index=False)
    with pytest.warns(
        DataNotice, match=r"column 'tags' .* texts such as .* are read as they stand"
    ):
        load("arrays", path=path, label="tags", **options)
    table(tags=["[cat]", "dog", "[cat]", "dog", "dog"]).to_csv(path, index=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataNotice)
        load("arrays", path=path, label="tags", features=["a", "b"])


def test_a_column_of_labels_is_named_once(tmp_path):
    path = tmp_path / "hot.csv"
    table(cat=[0, 1, 1, 0, 1], dog=[1, 1, 0, 1, 1]).to_csv(path, index=False)
    with pytest.raises(InputError, match=r"label=\['cat', 'cat'\] names a column twice"):
        load("arrays", path=path, label=["cat", "cat"])


def test_lists_of_floats_are_numbers_whatever_they_are():
    rows = [[0.0, 1.0], [2.0, 3.0], [1.0, 1.0], [0.0, 0.0], [4.0, 2.0]]
    columns = datasets.Dataset.from_dict({"x": X, "score": rows})
    frame = pd.DataFrame(rows)
    for found in (
        LabeledSamples.from_arrays(X, rows),
        LabeledSamples.from_arrays(X, frame),
        otdd.embed(columns, input="x", label="score"),
    ):
        assert found.targets.tolist() == rows
    # Of classes they were integers, and stay so.
    assert LabeledSamples.from_arrays(X, [0.0, 1, 1.0, 0, 2]).class_names == ("0", "1", "2")
    gaps = datasets.Dataset.from_dict({"x": X, "score": [*rows[:4], None]})
    with pytest.raises(InputError, match="1 label is missing, at row 4"):
        otdd.embed(gaps, input="x", label="score")


def test_numbers_that_fill_lists_up_are_no_labels():
    with pytest.raises(InputError, match="got -1 at rows 1, 4; leave out numbers that fill"):
        LabeledSamples.from_arrays(X, [[0, 1], [2, -1], [1, 2], [0, 2], [0, -1]])


def test_which_lists_of_class_labels_are_chosen():
    kind = datasets.ClassLabel(names=["bird", "cat", "dog"])
    features = {
        "x": datasets.Sequence(datasets.Value("float32"), length=2),
        "species": kind,
        "tags": datasets.Sequence(kind),
    }
    rows = {"x": X, "species": [0, 1, 2, 0, 1], "tags": [[0, 1]] * 4 + [[2]]}

    def read(*names, **options):
        kinds = datasets.Features({name: features[name] for name in names})
        columns = {name: rows[name] for name in names}
        return otdd.embed(datasets.Dataset.from_dict(columns, features=kinds), **options)

    assert read("x", "species", "tags").class_names == ("bird", "cat", "dog")
    assert read("x", "tags").label_sets is not None
    # The tags of the words of a text.
    features["tokens"] = datasets.Sequence(datasets.Value("string"))
    rows["tokens"] = [["a", "b"]] * 4 + [["c"]]
    with pytest.warns(DataNotice, match="no column that looks like labels"):
        assert read("x", "tokens", "tags", input="x").labels is None
    assert read("x", "tokens", "tags", input="x", label="tags").label_sets is not None


def test_content_decides_fingerprints():
    one, other = (LabeledSamples(X, None, (), targets=[zero] * 5) for zero in (0.0, -0.0))
    assert one.fingerprint == other.fingerprint
    several = LabeledSamples(X, HOT, ("bird", "cat", "dog"))
    rows = torch.tensor([0, 1, 3])
    taken = several.take(rows)
    again = LabeledSamples(X[rows], np.array(HOT)[rows], ("bird", "cat", "dog"))
    assert taken.fingerprint == again.fingerprint
    assert torch.equal(taken.shares, again.shares)


def test_names_of_sets_do_not_depend_on_the_order_of_labels():
    turned = LabeledSamples(X, np.array(HOT)[:, [2, 0, 1]], ("dog", "bird", "cat"))
    several = LabeledSamples(X, HOT, ("bird", "cat", "dog"))
    names = [[one.class_names[label] for label in one.labels] for one in (turned, several)]
    assert names[0] == names[1]
    assert "cat+dog" in names[0]
    plus = LabelSets(("a", "b", "a+b"), torch.tensor([[1, 1, 0], [0, 0, 1], [1, 0, 1]]).bool())
    assert plus.set_names == ("a+b", r"a\+b", r"a+a\+b")
