"""Any dataset class of torchvision by its name, and no file of it that is run."""

import inspect
import os
import pickle
import re
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from otdd_flash.data import load
from otdd_flash.errors import DataNotice, InputError


def _write_like_mnist(folder, prefix, labels):
    folder.mkdir(parents=True)
    for part, values in labels.items():
        images = np.full((len(values), 28, 28), len(values))
        for kind, array in (("images-idx3", images), ("labels-idx1", np.array(values))):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
            content = header + array.astype(np.uint8).tobytes()
            (folder / f"{prefix}{part}-{kind}-ubyte").write_bytes(content)


def test_a_class_that_takes_train(tmp_path):
    labels = {"train": list(range(10)), "t10k": [3, 3, 1]}
    _write_like_mnist(tmp_path / "KMNIST" / "raw", "", labels)
    with pytest.warns(DataNotice, match="8 of 10 classes have no rows"):
        test = load("torchvision", root=tmp_path, dataset="KMNIST", split="test")
    assert test.class_names == ("ki", "tsu")
    assert test.labels.tolist() == [1, 1, 0]
    everything = load("torchvision", root=tmp_path, dataset="KMNIST", split="all")
    assert everything.inputs[:, 0, 0].tolist() == [10] * 10 + [3] * 3
    # What `arguments` chooses is one part, and is read once.
    chosen = {"dataset": "KMNIST", "split": "all", "arguments": {"train": True}}
    assert len(load("torchvision", root=tmp_path, **chosen)) == 10
    assert everything.inputs.dtype == np.uint8


def test_emnist_letters_start_at_one_and_keep_their_names(tmp_path):
    labels = {"train": list(range(1, 27)), "test": [26, 1]}
    _write_like_mnist(tmp_path / "EMNIST" / "raw", "emnist-letters-", labels)
    options = {"dataset": "EMNIST", "arguments": {"split": "letters"}}
    with pytest.warns(DataNotice, match="left out: N/A"):
        letters = load("torchvision", root=tmp_path, **options)
    assert "".join(letters.class_names) == "abcdefghijklmnopqrstuvwxyz"
    assert letters.labels.tolist() == list(range(26))


class _TakesSplit:
    """As SVHN: split as a word, channels first, labels without class names."""

    def __init__(self, root, split="train", download=False):
        if split not in ("train", "test", "extra"):
            raise ValueError(f"Unknown value {split!r}. Valid values are train, test, extra.")
        n = len(split)
        self.labels = np.arange(n) % 2 if split != "extra" else np.full(n, -1)
        self.data = np.zeros((n, 3, 6, 7), np.uint8)
        self.data[:, 2] = 9

    def __len__(self):
        return len(self.data)


def test_a_class_that_takes_split(monkeypatch):
    monkeypatch.setattr("torchvision.datasets.SVHN", _TakesSplit)
    train = load("torchvision", dataset="SVHN")
    assert train.inputs.shape == (5, 6, 7, 3)
    assert train.inputs[0, 0, 0].tolist() == [0, 0, 9]
    assert len(load("torchvision", dataset="SVHN", split="all")) == 9
    assert load("torchvision", dataset="SVHN", split="extra").labels is None
    with pytest.raises(InputError, match=r"Unknown value 'val'.*train, test, extra\.$"):
        load("torchvision", dataset="SVHN", split="val")


def test_impossible_requests(tmp_path):
    fake = {"dataset": "FakeData", "arguments": {"size": 30, "num_classes": 3}}
    assert load("torchvision", max_samples=6, **fake).inputs[0].size == (224, 224)
    for options, message in (
        (fake | {"split": "test"}, "split='test' must be all"),
        ({"dataset": "DatasetFolder"}, "DatasetFolder cannot read .*find any class folder"),
        ({"dataset": "Nope"}, "unknown torchvision dataset 'Nope'; choose one of: .*CIFAR10,"),
        ({"dataset": "CIFAR10"}, "cifar-10-batches-py: .*data_root=DIR.*download=true"),
        ({"dataset": "CIFAR10", "split": "extra"}, "unknown split of torchvision 'extra'"),
        ({"dataset": "KMNIST", "arguments": {"rows": 3}}, "KMNIST cannot read .*'rows'$"),
        ({"dataset": "EMNIST"}, "needs its argument split; give"),
        ({"dataset": "EMNIST", "arguments": "letters"}, "arguments of .* must be a mapping"),
    ):
        with pytest.raises(InputError, match=message):
            load("torchvision", root=tmp_path, **options)


# Whose files torchvision compares with MD5 sums of its own before it unpickles them.
VERIFIED = {"CIFAR10", "CIFAR100"}
# What may run code that a file holds.
RUNS_CODE = re.compile(
    r"\b(?:pickle\.(?:load|loads|Unpickler)|pd\.read_pickle|torch\.jit\.load|eval|exec|__import__)\("
    r"|\btorch\.load\((?!.*weights_only=True)|allow_pickle=(?!False)"
    r"|from pickle import"
    r"|\b(?:import|from) (?:joblib|dill|cloudpickle|shelve|marshal|runpy|importlib)"
)


def _modules(kind):
    found = {inspect.getmodule(base) for base in kind.__mro__}
    return {m for m in found if m is not None and m.__name__.startswith("torchvision.datasets")}


def test_classes_that_unpickle_are_refused_or_compare_sums():
    """A class of a newer torchvision that runs what files hold is to be looked at."""
    from torchvision import datasets

    from otdd_flash.data.image_datasets import UNPICKLING

    kinds = {name: getattr(datasets, name) for name in datasets.__all__}
    assert len(kinds) > 60
    risky = {
        name
        for name, kind in kinds.items()
        if inspect.isclass(kind)
        and any(RUNS_CODE.search(inspect.getsource(module)) for module in _modules(kind))
    }
    assert risky == VERIFIED | {*UNPICKLING}


class _Alarm:
    """A pickle that makes a folder where it is opened."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def _traps(folder):
    """Pickles that make a folder wherever a class of torchvision looks for its files."""
    content = pickle.dumps(_Alarm())
    lsun = str(folder / "church_outdoor_train_lmdb")
    caches = ["_cache_" + "".join(c for c in p if c.isalnum()) for p in (lsun, str(folder))]
    cifar = "cifar-10-batches-py", "cifar-100-python"
    batches = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    names = [f"{cifar[0]}/{b}" for b in batches]
    names += [f"{cifar[1]}/{b}" for b in ("train", "test", "meta")]
    names += [*caches, "meta.bin", "yosemite.pt"]
    names += ["MNIST/processed/training.pt", "MNIST/processed/test.pt"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        if name.endswith(("pt", "bin")):
            torch.save(_Alarm(), folder / name)
    (folder / "train").mkdir()


def test_no_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _traps(tmp_path)
    for name, arguments, message in (
        ("LSUN", {"classes": ["church_outdoor_train"]}, "unpickles a file .* as image_folder"),
        ("LSUNClass", {}, "unpickles a file"),
        ("CIFAR10", {}, "cannot read"),
        ("CIFAR100", {}, "cannot read"),
        ("ImageNet", {}, "cannot read"),
        ("PhotoTour", {"name": "yosemite"}, "cannot read"),
        ("MNIST", {}, "cannot read"),
    ):
        with pytest.raises(InputError, match=message):
            load("torchvision", root=tmp_path, dataset=name, arguments=arguments)
        assert not (tmp_path / "ran").exists(), name


def test_a_folder_that_links_lead_around_is_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    for i in range(3):
        Image.new("L", (4, 4), i).save(tmp_path / "cat" / f"{i}.png")
    options = {"root": str(tmp_path)}
    assert len(load("torchvision", dataset="ImageFolder", arguments=options)) == 3
    (tmp_path / "cat" / "up").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"cat/0\.png more than once.*image_folder"):
        load("torchvision", dataset="ImageFolder", arguments=options)
