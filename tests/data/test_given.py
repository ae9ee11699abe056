"""What people hold is a dataset: of PyTorch, loaders, streams, of Hugging Face, arrays, lists."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import naming
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

import otdd_flash as otdd
from otdd_flash import memory
from otdd_flash.data import given as given_module
from otdd_flash.errors import DataNotice, InputError

X = torch.from_numpy(np.random.default_rng(0).normal(size=(30, 4)))
Y = torch.arange(30) % 3
IMAGES = np.random.default_rng(1).integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)
NAMES = ["cat", "dog", "eel"]
EXPECTED = otdd.LabeledSamples.from_arrays(X, Y)
PIXELS = otdd.extractors.pixels()
quiet = pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")


class Pairs(Dataset):
    """Items made by a function of their row."""

    def __init__(self, item, count=30):
        self.item, self.count, self.read = item, count, []

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        self.read.append(row)
        return self.item(row)


class Stream(IterableDataset):
    """Items one after the other, without an end where the function makes none."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


class Rows:
    """A dataset by its methods alone."""

    def __len__(self):
        return 30

    def __getitem__(self, row):
        return X[row], Y[row]


def vector(row):
    return X[row], Y[row]


def collated(batch):
    return [[x for x, _ in batch], [y for _, y in batch]]


def one_buffer():
    buffer = np.empty(4)
    for row in range(30):
        buffer[:] = X[row]
        yield buffer, Y[row]


def rows():
    for row in range(30):
        yield {"x": X[row].tolist(), "label": int(Y[row])}


def endless():
    return map(vector, itertools.cycle(range(30)))


def hugging_face():
    import datasets

    return datasets


def table(given=None):
    return hugging_face().Dataset.from_list(list(given or rows()))


def stream_of(generator):
    return hugging_face().IterableDataset.from_generator(generator)


def fake_data(*shape):
    from torchvision.datasets import FakeData

    return FakeData(*shape)


WHOLE = TensorDataset(X, Y)
VECTORS = {
    "arrays": lambda: (X.numpy(), Y.tolist()),
    "ConcatDataset": lambda: ConcatDataset(
        [Subset(WHOLE, range(9)), Pairs(lambda i: vector(i + 9), 21)]
    ),
    "Dataset of lists": lambda: Pairs(lambda row: [X[row].tolist(), np.int16(Y[row])]),
    "no class of PyTorch": Rows,
    "loader of batches": lambda: DataLoader(
        Stream(lambda: zip(X.split(8), Y.split(8), strict=True)), batch_size=None
    ),
    "collated by hand": lambda: DataLoader(Pairs(vector), 4, collate_fn=collated),
    "IterableDataset": lambda: Stream(lambda: map(vector, range(30))),
    "one buffer": lambda: Stream(one_buffer),
    "Hugging Face": table,
    "loader with a worker": lambda: DataLoader(Pairs(vector), batch_size=7, num_workers=1),
    "its stream": lambda: stream_of(rows),
    "mapped stream": lambda: table().to_iterable_dataset().map(lambda row: {"x": row["x"]}),
}


@quiet
@pytest.mark.slow(after=8)
@pytest.mark.parametrize("kind", VECTORS)
def test_every_kind_of_dataset_gives_the_samples_of_its_arrays(kind):
    assert otdd.embed(VECTORS[kind]()).fingerprint == EXPECTED.fingerprint
    if kind == "loader with a worker":
        dataset = Pairs(vector)
        assert otdd.embed(dataset, num_workers=2).fingerprint == EXPECTED.fingerprint
        assert dataset.read == []


@pytest.mark.slow
def test_every_entry_point_takes_datasets_of_vectors():
    other, settings = TensorDataset(X + 1, Y), {"labels": "means", "epsilon": 5.0}
    whole = otdd.dataset_distance(WHOLE, DataLoader(other), **settings)
    assert whole.value == otdd.dataset_distance((X, Y), (X + 1, Y), **settings).value
    assert otdd.dataset_distance(Pairs(vector), (X, Y), **settings).bounds == (0, 0)
    pairs = otdd.pairwise_distances([WHOLE, other], **settings)
    assert pairs.values[0, 1] == pytest.approx(whole.value, rel=1e-3)
    assert otdd.class_distances([WHOLE, other]).full.shape == (6, 6)
    assert otdd.sliced_distances([WHOLE, other], projections=30).values[0, 1] > 0
    assert otdd.sinkhorn_divergence(WHOLE, other, epsilon=5.0, debias=True).value > 0
    assert otdd.noise_floor(WHOLE, other, **settings).source is not None
    scaled, _ = otdd.extractors.standardize(WHOLE, other)
    assert scaled.features.std() < 2
    moved = otdd.gradient_flow(WHOLE, other, otdd.Flow(1), **settings)
    same = otdd.gradient_flow((X, Y), (X + 1, Y), otdd.Flow(1), **settings)
    assert moved.samples.fingerprint == same.samples.fingerprint


def test_a_study_reads_its_datasets_once_and_takes_pairs_of_features_and_labels(tmp_path):
    loader = DataLoader(TensorDataset(X + 1, Y), batch_size=4, shuffle=True)
    tasks = {"one": ((X, Y), (X + 0.1, Y)), "two": loader, "three": (Pairs(vector, 12), None)}
    study = otdd.Study(tasks, ["frechet"], None)
    for resume in (False, True):
        result = study.run(tmp_path / "study", resume=resume)
        assert result.complete
    assert [task.test is not None for task in result.setup.tasks] == [True, False, False]


@pytest.mark.slow
def test_labels_are_of_any_container():
    import pandas as pd
    import pyarrow as pa

    kind = hugging_face().ClassLabel(names=NAMES)
    named = [NAMES[y] for y in Y]
    series, chunks = pd.Series(Y.numpy()), pa.chunked_array([Y.tolist()[:9], Y.tolist()[9:]])
    numbers = [tuple(Y.tolist()), series, pa.array(Y.tolist()), chunks, table()["label"]]
    names = [named, np.array(named), pd.Series(named, dtype="category")]
    names.append(table().cast_column("label", kind)["label"])
    for k, labels in enumerate([*numbers, *names]):
        found = otdd.dataset_distance((X, labels), (X, Y), epsilon=5.0, labels="means").source
        assert found.labels.tolist() == Y.tolist(), type(labels)
        expected = ("0", "1", "2") if k < len(numbers) else tuple(NAMES)
        assert found.class_names == expected, type(labels)
    column = hugging_face().Dataset.from_dict({"y": [0, -1, 2]}).cast_column("y", kind)["y"]
    with pytest.raises(InputError, match="1 label is missing, at row 1"):
        otdd.dataset_distance((X[:3], column), (X, Y))


def test_sparse_features_are_made_dense(monkeypatch):
    import scipy.sparse

    given = [scipy.sparse.csr_matrix(X.numpy()), scipy.sparse.coo_array(X.numpy())]
    given += [X.to_sparse(), X.to_sparse_csr()]
    for sparse in given:
        assert otdd.embed((sparse, Y)).fingerprint == EXPECTED.fingerprint, type(sparse)
    counts = otdd.extractors.from_callable(lambda batch: scipy.sparse.csr_array(np.stack(batch)))
    assert otdd.embed(WHOLE, counts).fingerprint == EXPECTED.fingerprint
    monkeypatch.setattr(memory, "ASSUMED_FREE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: 900)
    said = r"features as a dense matrix of shape \(30, 4\) need 960 bytes, and 900 bytes are free"
    for sparse in given:
        with pytest.raises(InputError, match=said):
            otdd.dataset_distance((sparse, Y), (X, Y))


def image_folder(folder, transform=None, **more):
    from torchvision.datasets import ImageFolder

    for row in range(12):
        (folder / NAMES[row % 3]).mkdir(exist_ok=True)
        Image.fromarray(IMAGES[row]).save(folder / NAMES[row % 3] / f"{row:02}.png")
    return ImageFolder(folder, transform, **more)


@pytest.mark.slow
@quiet
def test_images_of_any_form_have_the_same_pixels(tmp_path):
    from torchvision.transforms import ToTensor

    labels = np.arange(12) % 3
    tensors = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)
    order = [4 * (row % 3) + row // 3 for row in range(12)]
    pils = [{"image": Image.fromarray(IMAGES[i]), "label": int(labels[i])} for i in range(12)]
    given = {
        "arrays": (IMAGES, labels),
        "bytes": TensorDataset(tensors, torch.from_numpy(labels)),
        "floats": DataLoader(TensorDataset(tensors / 255, torch.from_numpy(labels)), 5),
        "PIL": Pairs(lambda row: (Image.fromarray(IMAGES[row]), labels[row]), 12),
        "ImageFolder": Subset(image_folder(tmp_path), order),
        "ImageFolder of tensors": Subset(image_folder(tmp_path, ToTensor()), order),
        "Hugging Face": table(pils),
        "a stream without types": stream_of(lambda: iter(pils)),
    }
    expected = tensors.flatten(1).double() / 255
    for kind, dataset in given.items():
        found = otdd.embed(dataset, PIXELS)
        assert torch.allclose(found.features.double(), expected, atol=1e-7), kind
        assert found.labels.tolist() == [0, 1, 2] * 4, kind
        names = tuple(NAMES) if "Folder" in kind else ("0", "1", "2")
        assert found.class_names == names, kind


@pytest.mark.parametrize("kind", ["stream", "loader", "dataset"])
def test_inputs_that_a_function_takes_are_not_held(kind, tmp_path, monkeypatch):
    events, done = [], []

    def read(row):
        events.append("read")
        return vector(row)

    def squares(batch):
        events.append("extract")
        return batch**2

    pairs = Pairs(read)
    given = {"stream": Stream(lambda: map(read, range(30))), "dataset": pairs}
    dataset = given.get(kind) or DataLoader(pairs, batch_size=4)
    extractor = otdd.extractors.from_callable(squares)
    monkeypatch.setattr(given_module, "ASSUMED_FREE", 4 * 32)
    found = otdd.embed(dataset, extractor, batch_size=4, progress=lambda *n: done.append(n))
    assert events == (["read"] * 4 + ["extract"]) * 7 + ["read"] * 2 + ["extract"]
    assert [n for n, _ in done] == [*range(4, 29, 4), 30]
    assert found.fingerprint == otdd.LabeledSamples.from_arrays(X**2, Y).fingerprint
    held = otdd.embed(dataset, extractor, batch_size=4, features_path=tmp_path / "x.npy")
    assert held.fingerprint == found.fingerprint

    def later(batch):
        return batch if np.array_equal(batch[0], X[0]) else batch * np.nan

    with pytest.raises(InputError, match=r"^dataset from row 4 on: .* \(first at row 0, col"):
        otdd.embed(dataset, otdd.extractors.from_callable(later), batch_size=4)


@pytest.mark.slow
def test_labels_are_those_of_the_items(tmp_path):
    """Some hold other labels beside them, from before their transform."""
    halves = image_folder(tmp_path, target_transform=lambda label: label // 2)
    found = otdd.embed(halves, PIXELS)
    assert (found.class_names, found.labels.sum()) == (("0", "1"), 4)
    assert otdd.embed(image_folder(tmp_path), PIXELS).name == tmp_path.name


def test_classes_are_called_as_the_dataset_says():
    parts = [Pairs(lambda row: vector(row + 15), 15), Pairs(vector, 15)]
    several, numbers = "its parts name their classes differently", ("0", "1", "2")
    for one, other, expected, said in (
        (NAMES, NAMES, tuple(NAMES), None),
        (NAMES, NAMES[::-1], numbers, several),
        (NAMES, None, numbers, None),
        ([*NAMES, "fly"], [*NAMES, "fly"], tuple(NAMES), "left out: fly"),
        (["cat", "dog"], ["cat", "dog"], numbers, "it names 2 classes, and labels go up to 2"),
    ):
        parts[0].classes, parts[1].classes = one, other
        loader = DataLoader(Subset(ConcatDataset(parts), range(30)), batch_size=8)
        with pytest.warns(DataNotice, match=said) if said else nullcontext():
            assert otdd.embed(loader).class_names == expected, (one, other)


@quiet
def test_max_samples_draws_by_class_where_labels_are_known_and_reads_no_other_items():
    kinds = torch.from_numpy(np.repeat([0, 1, 2], [24, 4, 2]))
    whole = TensorDataset(X, kinds)
    held = [(X, kinds.numpy()), whole, Subset(whole, range(30))]
    drawn = [otdd.embed(one, max_samples=15, seed=3) for one in held]
    assert drawn[0].class_counts.tolist() == [12, 2, 1]
    assert len({one.fingerprint for one in drawn}) == 1
    assert otdd.embed(held[0], max_samples=15, seed=4).fingerprint != drawn[0].fingerprint
    dataset = Pairs(vector)
    found = otdd.embed(dataset, max_samples=9)
    assert len(found) == len(dataset.read) == 9
    assert dataset.read == sorted(dataset.read) != list(range(9))
    assert torch.equal(found.features, X[dataset.read])


@quiet
def test_max_samples_takes_the_first_of_a_stream():
    expected = otdd.LabeledSamples.from_arrays(X[:11], Y[:11]).fingerprint
    for stream in (
        Stream(endless),
        DataLoader(Stream(endless), batch_size=4),
    ):
        assert otdd.embed(stream, max_samples=11).fingerprint == expected, stream
    with pytest.warns(DataNotice, match="has 30 rows, fewer than max_samples=99"):
        otdd.embed(Stream(lambda: map(vector, range(30))), max_samples=99)


@pytest.mark.slow
def test_a_stream_that_may_have_no_end(monkeypatch):
    """A notice after many items; before memory is full, a sentence."""
    for module in (given_module, memory):
        monkeypatch.setattr(module, "ASSUMED_FREE", 20_000)
    monkeypatch.setattr(memory, "free_memory", lambda device: 100_000)
    monkeypatch.setattr(given_module, "MANY", 1000)
    end = r"its first (\d+) items take 0 MiB, and \1 more need .* such as max_samples=\1$"
    with (
        pytest.warns(DataNotice, match="items are read, and more follow; max_samples=N takes"),
        pytest.raises(InputError, match=end),
    ):
        otdd.embed(Stream(endless))


def test_columns_are_chosen_as_on_the_command_line():
    columns = {"a": X[:, 0].tolist(), "b": X[:, 1].tolist(), "kind": Y.tolist()}
    wide = hugging_face().Dataset.from_dict(columns | {"mass": [1.0] * 29 + [2]})
    found = otdd.embed(wide, input=["b", "a"], label="kind", weights="mass")
    assert torch.equal(found.features, X[:, [1, 0]])
    assert found.masses[-1] == pytest.approx(2 / 31)
    with pytest.warns(DataNotice, match=r"^otdd.embed\(target\): .* choose with label=COLUMN and"):
        otdd.dataset_distance((X, Y), table(), epsilon=1.0)
    for option in ("input", "label", "weights"):
        said = f"{option}=x names a column .* dataset is TensorDataset"
        with pytest.raises(InputError, match=said):
            otdd.embed(WHOLE, **{option: "x"})


def raising(row):
    if row == 3:
        raise KeyError("gone")
    return vector(row)


def splits(*names):
    return hugging_face().DatasetDict({name: table() for name in names})


FIVE = TensorDataset(torch.randn(5, 3), torch.arange(5) % 2)
CUT = DataLoader(WHOLE, batch_size=4, collate_fn=lambda batch: (X[:4], Y[:3]))
OTHERS = ConcatDataset([TensorDataset(torch.randn(4, d), Y[:4]) for d in (3, 4)])
WRONG = [
    (TensorDataset(X, Y, Y), "0 of dataset must be a pair .* a tuple of 3: Tensor, Te"),
    (Pairs(lambda row: X[row]), r"got Tensor of shape \(4,\); .*'none'$"),
    (Pairs(lambda row: {"image": 1, "label": 2}), "a dict with the keys image, label; .*input=COL"),
    (DataLoader(Pairs(lambda i: ({"ids": X[i]}, Y[i]))), "batch 0 .* a dict with the keys ids for"),
    (Stream(lambda: iter([(X, Y[:, None])])), r"label of row 0 .* got Tensor of shape \(30, 1\)"),
    (CUT, r"batch 0 of dataset has 4 inputs, and its labels are Tensor of shape \(3,\)"),
    (TensorDataset(X, Y[:, None, None]), r"got Tensor of shape \(30, 1, 1\); .* argmax"),
    (Pairs(lambda row: (X[row], 0.5 if row else np.nan)), "1 label is missing, at row 0"),
    (Pairs(lambda row: (X[row], {"box": 1})), "label of row 0 .* keys box$"),
    (Pairs(lambda row: (X[row], None if row == 5 else 1)), "1 label is missing, at row 5"),
    (Pairs(lambda row: ("text" if row == 4 else X[row], 1)), "row 4 .* text, 'text', and that of"),
    (Pairs(lambda i: (X[i, : 2 + i // 7], 1)), r"no common length: .* \(2,\), and row 7"),
    (TensorDataset(X / 0, Y), "NaN or infinite"),
    (Pairs(raising), "^row 3 of dataset raised KeyError: 'gone'$"),
    (TensorDataset(X[:0], Y[:0]), "^dataset is empty: it has no items$"),
    (Dataset(), "dataset is a Dataset without a length; define __len__, or make"),
    (EXPECTED, "dataset has features already"),
    (TensorDataset(torch.rand(4, 3, 5, 5), Y[:4]), r"no vectors .* \(3, 5, 5\); .*pixels"),
    ((["a b", "c"], [0, 1]), r"first is text; .*otdd.extractors.text\(MODEL\)"),
    (Subset(FIVE, torch.arange(5) < 2), "must be row numbers, got bool"),
    (Subset(FIVE, [-6, 0]), "has rows -6 to 0 of a dataset of 5"),
    (OTHERS, r"parts hold inputs of shapes \(3,\) and \(4,\)"),
]


def test_items_of_another_form_are_refused_saying_what_was_got():
    for dataset, message in WRONG:
        with naming(message), pytest.raises(InputError, match=message):
            otdd.embed(dataset)
    images = TensorDataset(torch.randn(4, 3, 5, 5), Y[:4])
    with pytest.raises(InputError, match=r"lie in \[0, 1\], .* leave the Normalize of a transf"):
        otdd.embed(images, PIXELS)


@pytest.mark.slow
def test_datasets_of_libraries_in_another_form_are_refused():
    fake, parts = fake_data(4, (3, 4, 4), 2), r"the splits train, test of a .*; choose one"
    for dataset, message in (
        (DataLoader(Pairs(raising), num_workers=1), "^batch 3 of dataset raised Key"),
        (DataLoader(table().with_format("torch")), "batch 0 .* pair .*, got a dict .* x, label"),
        (DataLoader(fake), "batch 0 of FakeData raised TypeError: .*; give its dataset itself, or"),
        (table().select([]), "^dataset is empty: it has no items$"),
        (splits("train", "test"), parts + r", such as dataset\['train'\]$"),
        (table().with_transform(lambda rows: rows), "a transform of its own, .* dataset.with_form"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            otdd.embed(dataset)


@pytest.mark.slow
def test_what_entry_points_refuse_names_the_argument():
    texts = hugging_face().Dataset.from_dict({"a": ["x"], "b": ["y"], "label": [0]})
    for source, message in (
        (fake_data(4, (3, 4, 4), 2), "the first is an image of mode RGB; pass otdd.embed"),
        (splits("a"), r"^source holds the splits a .* source\['a'\]$"),
        (TensorDataset(X, Y, Y), "^row 0 of source must be a pair"),
        (texts, r"^otdd.embed\(source\): cannot tell which column .*; choose with input=COL"),
        (([[1.0]], [0]), "features must be an array or a tensor, got list of 1 items"),
        ((X, "abc"), "labels must be a list, an array or a tensor, got 'abc'"),
    ):
        with pytest.raises(InputError, match=message):
            otdd.dataset_distance(source, (X, Y))
