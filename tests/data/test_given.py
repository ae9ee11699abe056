"""What people hold is a dataset: of PyTorch, loaders, streams, of Hugging Face, arrays, lists."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)
from torchvision import transforms
from torchvision.datasets import FakeData, ImageFolder

import otdd_flash as otdd
from otdd_flash import real_numbers
from otdd_flash.data import given as given_module
from otdd_flash.errors import DataNotice, InputError

X = torch.from_numpy(np.random.default_rng(0).normal(size=(30, 4)))
Y = torch.arange(30) % 3
IMAGES = np.random.default_rng(1).integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)
NAMES = ["cat", "dog", "eel"]
EXPECTED = otdd.LabeledSamples.from_arrays(X, Y)
PIXELS = otdd.extractors.pixels()


class Pairs(Dataset[Any]):
    """Items made by a function of their row."""

    def __init__(self, item: Callable[[int], Any], count: int = 30) -> None:
        self.item, self.count, self.read = item, count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        self.read.append(row)
        return self.item(row)


class Stream(IterableDataset[Any]):
    """Items one after the other, without an end where the function makes none."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


class Rows:
    """A dataset by its methods alone."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, row: int) -> Any:
        return X[row], Y[row]


def vector(row: int) -> Any:
    return X[row], Y[row]


def collated(batch: list[Any]) -> list[Any]:
    return [[x for x, _ in batch], [y for _, y in batch]]


def one_buffer() -> Iterator[Any]:
    buffer = np.empty(4)
    for row in range(30):
        buffer[:] = X[row]
        yield buffer, Y[row]


def rows() -> Iterator[dict[str, Any]]:
    for row in range(30):
        yield {"x": X[row].tolist(), "label": int(Y[row])}


def table() -> datasets.Dataset:
    return datasets.Dataset.from_list(list(rows()))


WHOLE = TensorDataset(X, Y)
VECTORS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (X.numpy(), Y.tolist()),
    "TensorDataset": lambda: WHOLE,
    "Subset": lambda: Subset(WHOLE, range(30)),
    "ConcatDataset": lambda: ConcatDataset(
        [Subset(WHOLE, range(9)), Pairs(lambda i: vector(i + 9), 21)]
    ),
    "Dataset": lambda: Pairs(vector),
    "lists": lambda: Pairs(lambda row: [X[row].tolist(), np.int16(Y[row])]),
    "no class of PyTorch": Rows,
    "DataLoader": lambda: DataLoader(WHOLE, batch_size=7),
    "loader of items": lambda: DataLoader(Pairs(vector), batch_size=None),
    "loader of batches": lambda: DataLoader(
        Stream(lambda: zip(X.split(8), Y.split(8), strict=True)), batch_size=None
    ),
    "loader with a worker": lambda: DataLoader(Pairs(vector), batch_size=7, num_workers=1),
    "collated by hand": lambda: DataLoader(Pairs(vector), 4, collate_fn=collated),
    "IterableDataset": lambda: Stream(lambda: map(vector, range(30))),
    "one buffer": lambda: Stream(one_buffer),
    "Hugging Face": table,
    "its stream": lambda: datasets.IterableDataset.from_generator(rows),
    "mapped stream": lambda: table().to_iterable_dataset().map(lambda row: {"x": row["x"]}),
}


def workers_are_slow(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(c, marks=pytest.mark.slow if "worker" in c else ()) for c in cases]


@pytest.mark.parametrize("kind", workers_are_slow(VECTORS))
def test_every_kind_of_dataset_gives_the_samples_of_its_arrays(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNotice)
        found = otdd.embed(VECTORS[kind]())
        assert found.fingerprint == EXPECTED.fingerprint
        result = otdd.dataset_distance(VECTORS[kind](), (X, Y), epsilon=1.0)
    assert (result.value, result.bounds) == (0, (0, 0))


@pytest.mark.slow
def test_workers_read_items() -> None:
    dataset = Pairs(vector)
    assert otdd.embed(dataset, num_workers=2).fingerprint == EXPECTED.fingerprint
    assert dataset.read == []


@pytest.mark.slow
def test_every_entry_point_takes_datasets_of_vectors() -> None:
    other = TensorDataset(X + 1, Y)
    expected = otdd.dataset_distance((X, Y), (X + 1, Y), epsilon=1.0).value
    assert otdd.dataset_distance(WHOLE, DataLoader(other), epsilon=1.0).value == expected
    pairs = otdd.pairwise_distances([WHOLE, Pairs(vector), other], epsilon=1.0)
    assert pairs.values[0, 2] == pairs.values[1, 2] == pytest.approx(expected, rel=1e-3)
    assert otdd.class_distances([WHOLE, other]).full.shape == (6, 6)
    assert otdd.sliced_distances([WHOLE, other], projections=8).values[0, 1] > 0
    assert otdd.sinkhorn_divergence(WHOLE, other, epsilon=1.0, debias=True).value > 0
    assert otdd.noise_floor(WHOLE, other, epsilon=1.0).source is not None
    scaled, _ = otdd.extractors.standardize(WHOLE, other)
    assert scaled.features.std() < 2
    moved = otdd.gradient_flow(WHOLE, other, otdd.Flow(1), epsilon=1.0)
    same = otdd.gradient_flow((X, Y), (X + 1, Y), otdd.Flow(1), epsilon=1.0)
    assert moved.samples.fingerprint == same.samples.fingerprint


def test_a_study_reads_its_datasets_once(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(X + 1, Y), batch_size=4, shuffle=True)
    tasks = {"one": (WHOLE, (X + 0.1, Y)), "two": loader, "three": (Pairs(vector, 12), None)}
    study = otdd.Study(tasks, ["frechet"], None)
    for resume in (False, True):
        assert study.run(tmp_path / "study", resume=resume).complete


def test_a_task_may_be_two_pairs_of_features_and_labels(tmp_path: Path) -> None:
    pairs = {"one": ((X, Y), (X + 0.1, Y)), "two": (X + 1, tuple(Y.tolist()))}
    result = otdd.Study(pairs, ["frechet"], None).run(tmp_path / "study")
    one, two = result.setup.tasks
    assert one.test is not None
    assert len(one.test) == len(X)
    assert two.test is None
    assert repr(result) == "StudyResult(2 tasks: one, two; frechet; 1 of 1 pieces of work done)"


@pytest.mark.parametrize(
    "labels",
    [
        Y.tolist(),
        tuple(Y.tolist()),
        np.array(NAMES)[Y],
        [NAMES[y] for y in Y],
        pd.Series(Y.numpy()),
        pd.Series([NAMES[y] for y in Y], dtype="category"),
        pa.array(Y.tolist()),
        pa.chunked_array([Y.tolist()[:9], Y.tolist()[9:]]),
        table()["label"],
        table().cast_column("label", datasets.ClassLabel(names=NAMES))["label"],
    ],
    ids=lambda labels: type(labels).__name__,
)
def test_labels_are_of_any_container(labels: Any) -> None:
    result = otdd.dataset_distance((X, labels), (table()["x"], Y), epsilon=1.0)
    assert result.source.labels.tolist() == Y.tolist()
    assert result.source.class_names == (tuple(NAMES) if _is_named(labels) else ("0", "1", "2"))
    assert result.value == pytest.approx(0, abs=1e-3)


def _is_named(labels: Any) -> bool:
    column = isinstance(labels, datasets.arrow_dataset.Column)
    return isinstance(labels[0], str) or (column and "cat" in str(labels.source.features))


def test_a_missing_class_label_of_a_column_is_missing() -> None:
    kind = datasets.ClassLabel(names=NAMES)
    column = datasets.Dataset.from_dict({"y": [0, -1, 2]}).cast_column("y", kind)["y"]
    with pytest.raises(InputError, match="1 label is missing, at row 1"):
        otdd.dataset_distance((X[:3], column), (X, Y))


@pytest.mark.parametrize(
    "sparse",
    [
        scipy.sparse.csr_matrix(X.numpy()),
        scipy.sparse.coo_array(X.numpy()),
        X.to_sparse(),
        X.to_sparse_csr(),
    ],
    ids=lambda matrix: f"{type(matrix).__name__} {getattr(matrix, 'layout', '')}",
)
def test_sparse_features_are_made_dense(sparse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert otdd.dataset_distance((sparse, Y), (X, Y), epsilon=1.0).bounds == (0, 0)
    assert otdd.embed((sparse, Y)).fingerprint == EXPECTED.fingerprint
    counts = otdd.extractors.from_callable(lambda batch: scipy.sparse.csr_array(np.stack(batch)))
    assert otdd.embed(WHOLE, counts).fingerprint == EXPECTED.fingerprint
    monkeypatch.setattr(real_numbers, "UNASKED", 0)
    monkeypatch.setattr(real_numbers, "free_memory", lambda device: 900)
    message = (
        r"features as a dense matrix of shape \(30, 4\) need 960 bytes, and 900 bytes are free"
    )
    with pytest.raises(InputError, match=message):
        otdd.dataset_distance((sparse, Y), (X, Y))


def images(kind: str, folder: Path) -> Any:
    """The same 12 images, 4 of each class in turn."""
    labels = np.arange(12) % 3
    tensors = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)
    if kind.startswith("ImageFolder"):
        for row in np.argsort(labels, kind="stable"):
            place = folder / NAMES[labels[row]]
            place.mkdir(exist_ok=True)
            Image.fromarray(IMAGES[row]).save(place / f"{row:02}.png")
        opened = ImageFolder(folder, transforms.ToTensor() if "tensors" in kind else None)
        return Subset(opened, [4 * (row % 3) + row // 3 for row in range(12)])
    pils = [
        {"image": Image.fromarray(i), "label": int(y)} for i, y in zip(IMAGES, labels, strict=True)
    ]
    match kind:
        case "arrays":
            return IMAGES, labels
        case "tensors of bytes":
            return TensorDataset(tensors, torch.from_numpy(labels))
        case "floats in a loader":
            floats = TensorDataset(tensors.float() / 255, torch.from_numpy(labels))
            return DataLoader(floats, batch_size=5)
        case "PIL":
            return Pairs(lambda row: (Image.fromarray(IMAGES[row]), labels[row]), 12)
        case "Hugging Face":
            return datasets.Dataset.from_list(pils)
        case "a stream without types":
            return datasets.IterableDataset.from_generator(lambda: iter(pils))
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        *("arrays", "tensors of bytes", "floats in a loader", "PIL", "ImageFolder"),
        *("ImageFolder tensors", "Hugging Face", "a stream without types"),
    ],
)
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_images_of_any_form_have_the_same_pixels(kind: str, tmp_path: Path) -> None:
    found = otdd.embed(images(kind, tmp_path), PIXELS)
    expected = torch.from_numpy(IMAGES).permute(0, 3, 1, 2).flatten(1).double() / 255
    assert torch.allclose(found.features.double(), expected, atol=1e-7)
    assert found.labels.tolist() == [0, 1, 2] * 4
    assert found.class_names == (tuple(NAMES) if "Folder" in kind else ("0", "1", "2"))


def test_a_function_gets_tensors_as_they_are() -> None:
    tensors = torch.rand(12, 7, 4, 5)

    def means(batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(batch).mean((2, 3))

    found = otdd.embed(TensorDataset(tensors, Y[:12]), otdd.extractors.from_callable(means))
    assert torch.equal(found.features, tensors.mean((2, 3)))


@pytest.mark.parametrize("kind", ["stream", "loader", "dataset"])
def test_inputs_that_a_function_takes_are_not_held(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    done: list[tuple[int, int]] = []

    def read(row: int) -> Any:
        events.append("read")
        return vector(row)

    def squares(batch: np.ndarray) -> np.ndarray:
        events.append("extract")
        return batch**2

    def make() -> Any:
        pairs = Pairs(read)
        streams = {"stream": Stream(lambda: map(read, range(30))), "dataset": pairs}
        return streams.get(kind) or DataLoader(pairs, batch_size=4)

    extractor = otdd.extractors.from_callable(squares)
    monkeypatch.setattr(given_module, "UNASKED", 4 * 32)
    found = otdd.embed(make(), extractor, batch_size=4, progress=lambda *n: done.append(n))
    assert events == (["read"] * 4 + ["extract"]) * 7 + ["read"] * 2 + ["extract"]
    assert [n for n, _ in done] == [*range(4, 29, 4), 30]
    assert found.fingerprint == otdd.LabeledSamples.from_arrays(X**2, Y).fingerprint
    held = otdd.embed(make(), extractor, batch_size=4, features_path=tmp_path / "x.npy")
    assert held.fingerprint == found.fingerprint

    def later(batch: np.ndarray) -> np.ndarray:
        return batch if np.array_equal(batch[0], X[0]) else batch * np.nan

    with pytest.raises(InputError, match=r"^dataset from row 4 on: .* \(first at row 0, col"):
        otdd.embed(make(), otdd.extractors.from_callable(later), batch_size=4)


def test_labels_are_those_of_the_items() -> None:
    """Some hold other labels beside them: before their transform, or those of a subclass."""

    class Turned(FakeData):
        targets = [0] * 6

    plain = FakeData(6, (3, 4, 4), 3)
    known = [int(y) for _, y in plain]
    assert len(set(known)) > 1
    assert otdd.embed(Turned(6, (3, 4, 4), 3), PIXELS).class_names == tuple(
        map(str, sorted(set(known)))
    )


def test_a_target_transform_has_its_say(tmp_path: Path) -> None:
    folder = images("ImageFolder", tmp_path).dataset.root
    halves = ImageFolder(folder, target_transform=lambda label: label // 2)
    found = otdd.embed(halves, PIXELS)
    assert (found.class_names, found.labels.sum()) == (("0", "1"), 4)
    found = otdd.embed(ImageFolder(folder), PIXELS)
    assert (found.class_names, found.name) == (tuple(NAMES), tmp_path.name)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([NAMES, NAMES], tuple(NAMES)),
        ([NAMES, NAMES[::-1]], ("0", "1", "2")),
        ([NAMES, None], ("0", "1", "2")),
        ([[*NAMES, "fly"]] * 2, tuple(NAMES)),
        ([["cat", "dog"]] * 2, ("0", "1", "2")),
        ([[("a", "b"), ("c",), ("d",)]] * 2, ("a, b", "c", "d")),
    ],
)
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_classes_are_called_as_the_dataset_says(names: list[Any], expected: Any) -> None:
    parts = [Pairs(lambda row: vector(row + 15), 15), Pairs(vector, 15)]
    for part, classes in zip(parts, names, strict=True):
        if classes is not None:
            part.classes = classes
    loader = DataLoader(Subset(ConcatDataset(parts), range(30)), batch_size=8)
    assert otdd.embed(loader).class_names == expected


def test_names_of_classes_that_do_not_fit_are_said() -> None:
    parts = [Pairs(vector, 15), Pairs(vector, 15)]
    parts[0].classes, parts[1].classes = NAMES, NAMES[::-1]
    with pytest.warns(DataNotice, match="its parts name their classes differently"):
        otdd.embed(ConcatDataset(parts))
    parts[0].classes = NAMES[:2]
    with pytest.warns(DataNotice, match="it names 2 classes, and labels go up to 2"):
        otdd.embed(parts[0])


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_max_samples_draws_by_class_where_labels_are_known() -> None:
    kinds = np.repeat([0, 1, 2], [24, 4, 2])
    held: list[Any] = [(X, kinds), TensorDataset(X, torch.from_numpy(kinds))]
    held += [datasets.Dataset.from_dict({"x": X.tolist(), "label": kinds})]
    held += [Subset(held[1], range(30))]
    drawn = [otdd.embed(one, max_samples=15, seed=3) for one in held]
    assert drawn[0].class_counts.tolist() == [12, 2, 1]
    assert len({one.fingerprint for one in drawn}) == 1
    assert otdd.embed(held[0], max_samples=15, seed=4).fingerprint != drawn[0].fingerprint
    loaded = otdd.load("blobs", samples=30)
    assert len(otdd.embed(loaded, max_samples=9)) == 9


def test_max_samples_of_items_reads_no_others() -> None:
    dataset = Pairs(vector)
    drawn = otdd.embed(dataset, max_samples=9)
    assert len(drawn) == len(dataset.read) == 9
    assert dataset.read == sorted(dataset.read) != list(range(9))
    assert torch.equal(drawn.features, X[dataset.read])


@pytest.mark.parametrize(
    "stream",
    [
        lambda: Stream(lambda: map(vector, itertools.cycle(range(30)))),
        lambda: DataLoader(Stream(lambda: map(vector, itertools.cycle(range(30)))), batch_size=4),
        lambda: DataLoader(WHOLE, batch_size=7),
        lambda: datasets.IterableDataset.from_generator(lambda: itertools.cycle(rows())),
    ],
    ids=["endless", "endless loader", "loader", "endless Hugging Face"],
)
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_max_samples_takes_the_first_of_a_stream(stream: Callable[[], Any]) -> None:
    found = otdd.embed(stream(), max_samples=11)
    assert found.fingerprint == otdd.LabeledSamples.from_arrays(X[:11], Y[:11]).fingerprint


@pytest.mark.parametrize("kind", ["items", "Hugging Face"])
def test_a_stream_that_may_have_no_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice after many items; before memory is full, a sentence."""
    stream: Any = Stream(lambda: map(vector, itertools.cycle(range(30))))
    if kind == "Hugging Face":
        stream = datasets.IterableDataset.from_generator(lambda: itertools.cycle(rows()))
    for module in (given_module, real_numbers):
        monkeypatch.setattr(module, "UNASKED", 20_000)
    monkeypatch.setattr(real_numbers, "free_memory", lambda device: 100_000)
    monkeypatch.setattr(given_module, "MANY", 1000)
    with (
        pytest.warns(DataNotice, match="items are read, and more follow; max_samples=N takes"),
        pytest.raises(
            InputError,
            match=r"its first (\d+) items take 0 MiB, and \1 more need .* such as max_samples=\1$",
        ),
    ):
        otdd.embed(stream)


def test_more_than_there_are_is_said() -> None:
    with pytest.warns(DataNotice, match="has 30 rows, fewer than max_samples=99"):
        otdd.embed(Stream(lambda: map(vector, range(30))), max_samples=99)


def test_columns_are_chosen_as_on_the_command_line() -> None:
    wide = datasets.Dataset.from_dict(
        {"a": X[:, 0].tolist(), "b": X[:, 1].tolist(), "kind": Y.tolist(), "mass": [1.0] * 29 + [2]}
    )
    found = otdd.embed(wide, input=["b", "a"], label="kind", weights="mass")
    assert torch.equal(found.features, X[:, [1, 0]])
    assert found.masses[-1] == pytest.approx(2 / 31)
    shown = wide.with_format("torch", columns=["a", "kind"])
    assert otdd.embed(shown, label="kind").dim == 1
    with pytest.warns(DataNotice, match=r"^otdd.embed\(target\): .* choose with label=COLUMN and"):
        otdd.dataset_distance((X, Y), table(), epsilon=1.0)


@pytest.mark.slow
def test_features_are_cached_by_the_content_of_items(tmp_path: Path) -> None:
    network = otdd.extractors.torchvision("resnet18", seed=0)
    tensors = TensorDataset(torch.rand(3, 3, 8, 8), Y[:3])
    first = otdd.embed(tensors, network, cache_dir=tmp_path)
    again = otdd.embed(DataLoader(tensors, batch_size=2), network, cache_dir=tmp_path)
    assert again.fingerprint == first.fingerprint
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def raising(row: int) -> Any:
    if row == 3:
        raise KeyError("gone")
    return vector(row)


ONE_HOT = torch.eye(3)[Y]
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "three": (
        lambda: TensorDataset(X, Y, Y),
        r"row 0 of dataset must be a pair .* got a tuple of 3: Tensor, Tensor, Tensor; wrap the",
    ),
    "no labels": (lambda: TensorDataset(X), "got a tuple of 1: Tensor; .* labels='none'$"),
    "inputs alone": (lambda: Pairs(lambda row: X[row]), r"got Tensor of shape \(4,\); .*'none'$"),
    "dict": (
        lambda: Pairs(lambda row: {"image": 1, "label": 2}),
        "row 0 of dataset must be a pair .*, got a dict with the keys image, label; .*input=COLUMN",
    ),
    "batches of dicts": (
        lambda: DataLoader(table().with_format("torch")),
        "batch 0 of dataset must be a pair .*, got a dict with the keys x, label",
    ),
    "dicts in a batch": (
        lambda: DataLoader(Pairs(lambda row: ({"ids": X[row]}, Y[row]))),
        "batch 0 of dataset has a dict with the keys ids for inputs",
    ),
    "lengths": (
        lambda: Stream(lambda: iter([(X, Y)])),
        r"the label of row 0 of dataset must be one integer or text, got Tensor of shape \(30,\)",
    ),
    "batch lengths": (
        lambda: DataLoader(WHOLE, batch_size=4, collate_fn=lambda batch: (X[:4], Y[:3])),
        r"batch 0 of dataset has 4 inputs, and its labels are Tensor of shape \(3,\)",
    ),
    "PIL in a loader": (
        lambda: DataLoader(FakeData(4, (3, 4, 4), 2)),
        "batch 0 of FakeData raised TypeError: .*; give its dataset itself, or one whose transform",
    ),
    "floats": (
        lambda: TensorDataset(X, X[:, 0]),
        "dataset: labels must be integers or strings, got",
    ),
    "float items": (lambda: Pairs(lambda i: (X[i], 0.5)), "0.5.*cut a continuous target"),
    "one-hot": (lambda: TensorDataset(X, ONE_HOT), r"got Tensor of shape \(30, 3\); .* argmax"),
    "one-hot items": (
        lambda: DataLoader(TensorDataset(X, ONE_HOT)),
        r"label of item 0 of batch 0 of dataset must be .* got Tensor of shape \(3,\); .* argmax",
    ),
    "boxes": (lambda: Pairs(lambda i: (X[i], {"box": 1})), "label of row 0 .* keys box$"),
    "no label": (
        lambda: Pairs(lambda i: (X[i], None if i == 5 else 1)),
        "1 label is missing, at row 5",
    ),
    "numbers": (
        lambda: Pairs(lambda i: (0.5, 1)),
        "input of row 0 of dataset must be a vector.* 0.5;",
    ),
    "objects": (
        lambda: Pairs(lambda i: (object(), 1)),
        "must be a vector, an image or a text, got o",
    ),
    "kinds": (
        lambda: Pairs(lambda i: ("text" if i == 4 else X[i], 1)),
        "row 4 of dataset is a text, 'text', and that of the first is an array of numbers; leave",
    ),
    "lengths of vectors": (
        lambda: Pairs(lambda i: (X[i, : 2 + i // 7], 1)),
        r"inputs of dataset have no common length: row 0 is of shape \(2,\), and row 7 of \(3,\)",
    ),
    "not finite": (lambda: TensorDataset(X / 0, Y), "NaN or infinite"),
    "raises": (lambda: Pairs(raising), "^row 3 of dataset raised KeyError: 'gone'$"),
    "raises in a worker": (
        lambda: DataLoader(Pairs(raising), num_workers=1),
        "^batch 3 of dataset raised KeyError: 'gone'$",
    ),
    "empty": (lambda: TensorDataset(X[:0], Y[:0]), "^dataset is empty: it has no items$"),
    "empty stream": (lambda: Stream(lambda: iter([])), "^dataset is empty: it has no items$"),
    "empty Hugging Face": (lambda: table().select([]), "^dataset is empty: it has no items$"),
    "no length": (
        lambda: type("Bare", (Dataset,), {})(),
        "dataset is a Bare without a length; define __len__, or make it an IterableDataset",
    ),
    "splits": (
        lambda: datasets.DatasetDict(train=table(), test=table()),
        r"dataset holds the splits train, test of a .*; choose one, such as dataset\['train'\]$",
    ),
    "own transform": (
        lambda: table().with_transform(lambda rows: rows),
        "dataset has a transform of its own, .* dataset.with_format",
    ),
    "samples": (lambda: EXPECTED, "dataset has features already"),
    "images": (
        lambda: TensorDataset(torch.rand(4, 3, 5, 5), Y[:4]),
        r"inputs are no vectors .* first is Tensor of shape \(3, 5, 5\); .*otdd.extractors.pixels",
    ),
    "texts": (
        lambda: (["a b", "c"], [0, 1]),
        r"the first is text; .*otdd.extractors.text\(MODEL\)",
    ),
    "normalized": (
        lambda: TensorDataset(torch.randn(4, 3, 5, 5), Y[:4]),
        r"float images must lie in \[0, 1\], .* leave the Normalize of a transform out",
    ),
}


@pytest.mark.parametrize("case", workers_are_slow(REFUSED))
def test_items_of_another_form_are_refused_saying_what_was_got(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        otdd.embed(make(), PIXELS if case == "normalized" else None)


@pytest.mark.parametrize("option", ["input", "label", "weights"])
def test_columns_are_named_of_hugging_face_alone(option: str) -> None:
    with pytest.raises(InputError, match=f"{option}=x names a column .* dataset is TensorDataset"):
        otdd.embed(WHOLE, **{option: "x"})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: FakeData(4, (3, 4, 4), 2), "the first is an image of mode RGB; pass otdd.embed"),
        (lambda: datasets.DatasetDict(a=table()), r"^source holds the splits a .* source\['a'\]$"),
        (lambda: TensorDataset(X, Y, Y), "^row 0 of source must be a pair"),
        (
            lambda: datasets.Dataset.from_dict({"a": ["x"], "b": ["y"], "label": [0]}),
            r"^otdd.embed\(source\): cannot tell which column is the input; choose with input=COL",
        ),
        (lambda: ([[1.0]], [0]), "features must be an array or a tensor, got list of 1 items"),
        (lambda: (X, "abc"), "labels must be a list, an array or a tensor, got 'abc'"),
    ],
)
def test_what_entry_points_refuse_names_the_argument(
    source: Callable[[], Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        otdd.dataset_distance(source(), (X, Y))


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        (torch.tensor([True, False, True, False, False]), "must be row numbers, got bool"),
        ([1.5], "must be row numbers, got float64"),
        ([7], "has rows 7 to 7 of a dataset of 5"),
        ([-6, 0], "has rows -6 to 0 of a dataset of 5"),
    ],
)
def test_indices_of_a_subset_that_are_no_rows_are_refused(indices: Any, said: str) -> None:
    whole = TensorDataset(torch.randn(5, 3), torch.arange(5) % 2)
    with pytest.raises(InputError, match=said):
        otdd.embed(Subset(whole, indices))


def test_parts_of_different_shapes_are_refused() -> None:
    parts = [TensorDataset(torch.randn(4, d), torch.arange(4) % 2) for d in (3, 4)]
    with pytest.raises(InputError, match=r"parts hold inputs of shapes \(3,\) and \(4,\)"):
        otdd.embed(ConcatDataset(parts))
