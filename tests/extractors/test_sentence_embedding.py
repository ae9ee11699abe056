"""The text extractor against a stand-in for sentence-transformers, and the real one if there."""

import hashlib
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, text

TEXTS = ["a first text", "another", "a first text"]


class StandIn(nn.Module):
    """Embeds a text by its hash, with the interface of a SentenceTransformer."""

    calls = 0
    max_seq_length = 128

    def __init__(self, model, device, local_files_only):
        super().__init__()
        if model == "absent":
            raise OSError("no such model on the hub")
        self.layer = nn.Linear(8, 4, device=device)
        nn.init.constant_(self.layer.weight, len(model))
        nn.init.zeros_(self.layer.bias)

    def encode(self, texts, *, convert_to_tensor, **_):
        type(self).calls += 1
        assert convert_to_tensor
        assert all(type(item) is str for item in texts)
        digests = [list(hashlib.sha256(item.encode()).digest()[:8]) for item in texts]
        return self.layer(torch.tensor(digests, dtype=torch.float32))


@pytest.fixture
def stand_in(monkeypatch):
    module = ModuleType("sentence_transformers")
    module.SentenceTransformer = StandIn
    module.__version__ = "0"
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    monkeypatch.setattr(StandIn, "calls", 0)
    return StandIn


def test_nothing_is_fetched_unless_asked_for(stand_in, monkeypatch):
    local = []

    def load(model, device, local_files_only):
        local.append(local_files_only)
        return stand_in(model, device, local_files_only)

    monkeypatch.setattr(sys.modules["sentence_transformers"], "SentenceTransformer", load)
    for given in ({}, {"download": False}, {"download": True}):
        text("a model", **given)
    assert local == [True, True, False]


def test_texts_are_embedded_in_batches_and_cached_by_content(make_dataset, stand_in, tmp_path):
    for texts in (TEXTS, np.array(TEXTS)):
        features = embed(make_dataset(texts, "text"), text("small"), batch_size=2).features
        assert (features.shape, features.dtype) == ((3, 4), torch.float32)
        assert torch.equal(features[0], features[2])
        assert not torch.equal(features[0], features[1])
    assert stand_in.calls == 4

    def extract(texts, model="small"):
        before = stand_in.calls
        embed(make_dataset(texts, "text"), text(model), cache_dir=tmp_path)
        return stand_in.calls - before

    assert extract(TEXTS) == 1
    assert extract(TEXTS) == 0
    assert extract(["a first", " textanother", "a first text"]) == 1
    assert extract(TEXTS, "larger") == 1


def test_what_cannot_be_embedded_is_named(make_dataset, colour_images, stand_in, monkeypatch):
    with pytest.raises(InputError, match="tiny holds image data, which extractor text does not"):
        embed(make_dataset(colour_images), text("small"))
    with pytest.raises(InputError, match=r"cannot load the text model 'absent'.*no such model"):
        text("absent")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(InputError, match=r"pip install 'otdd-flash\[text\]'"):
        text("small")
