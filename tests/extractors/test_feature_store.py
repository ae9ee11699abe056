"""Features that are written to a file as they come, and interruptions of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, feature_store, identity
from otdd_flash.extractors.network import Network
from otdd_flash.features.file_features import FileFeatures


class Failing:
    """A network that stops at one of its batches, or gives no number there."""

    def __init__(self, at: int | None = None, *, overflows: bool = False) -> None:
        self.seen: list[int] = []
        self.layer = nn.Linear(4, 3)
        self.layer.weight.data = torch.arange(12.0).view(3, 4)

        def forward(module: nn.Module, items: list[Tensor]) -> Tensor:
            if len(self.seen) == at:
                if overflows:
                    return torch.full((len(items), 3), torch.inf)
                raise KeyboardInterrupt
            self.seen.append(len(items))
            return module(torch.stack(items))

        self.extractor = Network(
            "failing", self.layer, frozenset({"array"}), torch.as_tensor, forward
        )


@pytest.fixture
def dataset(make_dataset: Any) -> Any:
    vectors = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
    return make_dataset(vectors, modality="array")


def test_features_in_a_file_are_those_in_memory(dataset: Any, tmp_path: Path) -> None:
    path = tmp_path / "made" / "x.npy"
    seen: list[tuple[int, int]] = []
    network = Failing()
    network.layer.bias.data.zero_()
    samples = embed(
        dataset, network.extractor, batch_size=5, features_path=path, device="cpu",
        progress=lambda *counts: seen.append(counts),
    )  # fmt: skip
    assert isinstance(samples.features, FileFeatures)
    expected = embed(dataset, network.extractor, batch_size=5, device="cpu")
    assert torch.equal(samples.features, expected.features)
    assert samples.fingerprint == expected.fingerprint
    assert np.array_equal(np.load(path), expected.features.numpy())
    assert seen == [(5, 23), (10, 23), (15, 23), (20, 23), (23, 23)]
    assert {file.name for file in path.parent.iterdir()} == {"x.npy", "x.npy.json"}
    calls = len(network.seen)
    again = embed(dataset, network.extractor, batch_size=5, features_path=path, device="cpu")
    assert torch.equal(again.features, samples.features)
    assert len(network.seen) == calls


def test_an_interruption_costs_what_was_not_noted(
    dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches of 5 rows of 12 bytes are noted at once."""
    monkeypatch.setattr(feature_store, "NOTED_BYTES", 100)
    path, network = tmp_path / "x.npy", Failing(3)
    network.layer.bias.data.zero_()
    call = {"batch_size": 5, "features_path": path, "device": "cpu"}
    with pytest.raises(KeyboardInterrupt):
        embed(dataset, network.extractor, **call)
    assert not path.exists()
    whole = Failing()
    whole.layer.bias.data.zero_()
    found = embed(dataset, whole.extractor, **call)
    assert whole.seen == [5, 5, 3]
    expected = embed(dataset, whole.extractor, batch_size=5, device="cpu")
    assert torch.equal(found.features, expected.features)


def test_what_is_of_something_else_is_not_gone_on_with(
    dataset: Any, make_dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_store, "NOTED_BYTES", 1)
    path, network = tmp_path / "x.npy", Failing(3)
    network.layer.bias.data.zero_()
    with pytest.raises(KeyboardInterrupt):
        embed(dataset, network.extractor, batch_size=5, features_path=path, device="cpu")
    other, whole = make_dataset(dataset.inputs + 1, modality="array"), Failing()
    whole.layer.bias.data.zero_()
    found = embed(other, whole.extractor, batch_size=5, features_path=path, device="cpu")
    assert whole.seen == [5, 5, 5, 5, 3]
    assert torch.equal(
        found.features, embed(other, whole.extractor, batch_size=5, device="cpu").features
    )
    with pytest.raises(InputError, match="holds features of other data or of another network"):
        embed(dataset, whole.extractor, batch_size=5, features_path=path, device="cpu")


def test_bad_features_and_paths_are_refused(dataset: Any, tmp_path: Path) -> None:
    network = Failing(1, overflows=True)
    call = {"batch_size": 5, "device": "cpu"}
    with pytest.raises(InputError, match="features from row 5 on are not finite"):
        embed(dataset, network.extractor, features_path=tmp_path / "x.npy", **call)
    with pytest.raises(InputError, match=r"must end in \.npy"):
        embed(dataset, identity(), features_path=tmp_path / "x.pt", **call)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*choose another features_path"):
        embed(dataset, identity(), features_path=tmp_path / "file" / "x.npy", **call)
