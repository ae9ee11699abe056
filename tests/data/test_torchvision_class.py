from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision import datasets

from otdd_flash.data import load
from otdd_flash.data.lazy_items import LazyItems
from otdd_flash.errors import DataNotice, InputError


def _write_idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def _write_like_mnist(folder: Path, prefix: str, labels: dict[str, list[int]]) -> None:
    for part, values in labels.items():
        images = np.full((len(values), 28, 28), len(values))
        _write_idx(folder / f"{prefix}{part}-images-idx3-ubyte", images)
        _write_idx(folder / f"{prefix}{part}-labels-idx1-ubyte", np.array(values))


def test_a_class_that_takes_train(tmp_path: Path) -> None:
    labels = {"train": list(range(10)), "t10k": [3, 3, 1]}
    _write_like_mnist(tmp_path / "KMNIST" / "raw", "", labels)
    with pytest.warns(DataNotice, match="8 of 10 classes have no rows"):
        test = load("torchvision", root=tmp_path, dataset="KMNIST", split="test")
    assert test.class_names == ("ki", "tsu")
    assert test.labels.tolist() == [1, 1, 0]
    everything = load("torchvision", root=tmp_path, dataset="KMNIST", split="all")
    assert everything.inputs[:, 0, 0].tolist() == [10] * 10 + [3] * 3
    assert everything.inputs.dtype == np.uint8


def test_emnist_letters_start_at_one_and_keep_their_names(tmp_path: Path) -> None:
    labels = {"train": list(range(1, 27)), "test": [26, 1]}
    _write_like_mnist(tmp_path / "EMNIST" / "raw", "emnist-letters-", labels)
    with pytest.warns(DataNotice, match="left out: N/A"):
        letters = load(
            "torchvision", root=tmp_path, dataset="EMNIST", arguments={"split": "letters"}
        )
    assert "".join(letters.class_names) == "abcdefghijklmnopqrstuvwxyz"
    assert letters.labels.tolist() == list(range(26))


class _TakesSplit:
    """As SVHN: split as a word, channels first, labels without class names."""

    def __init__(self, root: str, split: str = "train", download: bool = False) -> None:
        if split not in ("train", "test", "extra"):
            raise ValueError(f"Unknown value {split!r}. Valid values are train, test, extra.")
        n = len(split)
        self.labels = np.arange(n) % 2 if split != "extra" else np.full(n, -1)
        self.data = np.zeros((n, 3, 6, 7), np.uint8)
        self.data[:, 2] = 9

    def __len__(self) -> int:
        return len(self.data)


def test_a_class_that_takes_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "SVHN", _TakesSplit)
    train = load("torchvision", dataset="SVHN")
    assert train.inputs.shape == (5, 6, 7, 3)
    assert train.inputs[0, 0, 0].tolist() == [0, 0, 9]
    assert train.class_names == ("0", "1")
    assert len(load("torchvision", dataset="SVHN", split="all")) == 9
    assert load("torchvision", dataset="SVHN", split="extra").labels is None
    with pytest.raises(InputError, match=r"Unknown value 'val'.*train, test, extra\.$"):
        load("torchvision", dataset="SVHN", split="val")


def test_a_class_without_arrays_is_read_lazily() -> None:
    options: dict[str, Any] = {"dataset": "FakeData", "arguments": {"size": 30, "num_classes": 3}}
    fake = load("torchvision", max_samples=6, classes=[2, 0], **options)
    assert isinstance(fake.inputs, LazyItems)
    assert fake.class_names == ("2", "0")
    assert fake.inputs[0].size == (224, 224)
    with pytest.raises(InputError, match="split='test' must be all"):
        load("torchvision", split="test", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "VisionDataset"}, "unknown torchvision dataset 'VisionDataset'; choose one"),
        ({"dataset": "DatasetFolder"}, "unknown torchvision dataset 'DatasetFolder'; choose one"),
        ({"dataset": "Nope"}, "unknown torchvision dataset 'Nope'; choose one of: .*CIFAR10,"),
        ({"dataset": "CIFAR10"}, "cifar-10-batches-py: .*data_root=DIR.*download=true"),
        ({"dataset": "CIFAR10", "split": "extra"}, "unknown split of torchvision 'extra'"),
        ({"dataset": "KMNIST", "arguments": {"rows": 3}}, "KMNIST cannot read .*'rows'$"),
        (
            {"dataset": "EMNIST", "arguments": "letters"},
            "arguments of torchvision must be a mapping",
        ),
    ],
)
def test_impossible_requests(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load("torchvision", root=tmp_path, **options)
