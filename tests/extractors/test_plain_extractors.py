"""Extractors without a network: vectors, pixels, functions, and all by their names in commands."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import naming

from otdd_flash.errors import InputError
from otdd_flash.extractors import (
    FACTORIES,
    OTHER_SETTINGS,
    build_extractor,
    embed,
    from_callable,
    identity,
    pixels,
)

# Vectors.


def test_vectors_are_kept(make_dataset):
    for given in (np.float32, np.float64, np.float16, np.int64, np.uint16, np.bool_):
        values = np.arange(21).reshape(7, 3).astype(given)
        for inputs in (values, list(values)):
            features = embed(make_dataset(inputs, "array"), identity(), batch_size=2).features
            exact = given is np.float64
            assert features.dtype == (torch.float64 if exact else torch.float32), given
            assert np.array_equal(features.numpy(), values.astype(features.numpy().dtype)), given
    # Features do not share memory with the data.
    features = embed(make_dataset(values := np.zeros((3, 2), np.float32), "array"), identity())
    values += 1
    assert features.features.abs().sum() == 0


def test_what_is_no_vector_is_refused(make_dataset):
    images = "holds image data.*pixels, timm, torchvision, efficientnet_lite0 or callable"
    rows = "rows of numbers of one length"
    ragged = [np.zeros(2), np.zeros(3)]
    for inputs, modality, size, message in (
        (np.zeros((2, 4, 4), dtype=np.uint8), "image", 9, f"tiny {images}"),
        (["a text", "another"], "text", 9, "tiny holds text data.*use text, wordllama or callable"),
        (ragged, "array", 9, rows),
        (np.array([["a", "b"], ["c", "d"]]), "array", 9, rows),
        (ragged, "array", 1, "tiny have no common feature dimension: 2 and 3"),
    ):
        with pytest.raises(InputError, match=message):
            embed(make_dataset(inputs, modality), identity(), batch_size=size)


# Pixels.


def pil_reference(image, size):
    """Features by PIL, channel by channel in its float mode, which does not round."""
    channels = [channel.convert("F") for channel in image.split()]
    if size is not None:
        channels = [c.resize((size, size), Image.Resampling.BILINEAR) for c in channels]
    return np.concatenate([np.asarray(channel).ravel() for channel in channels]) / 255


def test_arrays_match_pil(colour_images):
    images = [Image.fromarray(image) for image in colour_images]
    for size in (None, 7, 20, 33):
        features = pixels(size)(colour_images).numpy()
        assert features.dtype == np.float32
        expected = [pil_reference(image, size) for image in images]
        np.testing.assert_allclose(features, expected, atol=1e-5, err_msg=f"{size}")
    for size in (None, 7):
        features = pixels(size, grayscale=True)(colour_images).numpy()
        expected = [pil_reference(image.convert("L"), size) for image in images]
        # PIL rounds the luma to 8 bit.
        np.testing.assert_allclose(features, expected, atol=0.51 / 255, err_msg=f"{size}")


def test_lazy_images_agree_with_arrays_and_each_is_resized_by_itself(make_dataset, colour_images):
    lazy = make_dataset([Image.fromarray(image) for image in colour_images])
    for size in (None, 6):
        whole = embed(make_dataset(colour_images), pixels(size))
        assert torch.equal(embed(lazy, pixels(size), batch_size=2).features, whole.features)
    mixed = [Image.fromarray(colour_images[0]), Image.fromarray(colour_images[1][:10, :13])]
    together = pixels(size=8)(mixed)
    for row, image in enumerate(mixed):
        assert torch.equal(together[row], pixels(size=8)([image])[0])


def test_what_is_no_image_or_size_is_refused(make_dataset):
    for size in (0, -3, 2.5, "28", True):
        with naming(size), pytest.raises(InputError, match=r"extractor\.size"):
            pixels(size)
    for images, message in (
        (np.zeros((2, 4)), "h, w"),
        (np.zeros((2, 4, 4, 5), dtype=np.uint8), "1 to 4 channels"),
        (np.full((2, 4, 4), 255.0), r"\[0, 1\], got 255 to 255"),
        (np.full((2, 4, 4), np.nan), r"\[0, 1\]"),
        (np.zeros((2, 4, 4), dtype=np.int64), "int64"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            pixels()(images)
    # Both have 48 pixels: comparing flattened lengths alone would mix them up.
    lazy = make_dataset([Image.new("L", (8, 6)), Image.new("L", (6, 8))])
    for batch_size in (1, 2):
        with pytest.raises(InputError, match=r"6 x 8 .* 8 x 6 .*extractor\.size=N"):
            embed(lazy, pixels(), batch_size=batch_size)


# Functions.

SOURCE = """
import numpy as np

class Features:
    @staticmethod
    def doubled(batch):
        return np.asarray(batch) * 2

same, number = Features.doubled, 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_package").mkdir()
    (tmp_path / "user_package" / "features.py").write_text(SOURCE)
    (tmp_path / "user_package" / "broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("path", ["features:Features.doubled", "features.same"])
def test_paths_find_functions_and_attributes_of_classes(path, make_dataset):
    extractor = from_callable(f"user_package.{path}")
    features = embed(make_dataset(np.ones((3, 2)), "array"), extractor, batch_size=2).features
    assert features.tolist() == [[2.0, 2.0]] * 3


@pytest.mark.usefixtures("user_module")
def test_bad_paths_and_what_is_no_feature_matrix_are_refused(make_dataset, colour_images):
    for path, message in (
        ("user_package.features:nothing", "user_package.features has no nothing"),
        ("user_package.features:number", "is not callable: int"),
        ("user_package.nowhere:f", "no module named 'user_package.nowhere'"),
        ("user_package.broken:f", "not import: it raised ModuleNotFoundError: .* 'not_installed_"),
        ("function", "must be package.module:function"),
        ("", "must be package.module:function"),
        (lambda batch: torch.zeros(len(batch)), r"shape \(5, d\), got \(5,\)"),
        (lambda batch: torch.zeros(1, 4), r"shape \(5, d\), got \(1, 4\)"),
        (lambda batch: torch.zeros(5, 4) * 1j, "complex"),
        (lambda batch: None, "got None"),
        (lambda batch: np.array(["a"] * len(batch)), "got <U1"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            embed(make_dataset(colour_images), from_callable(path))
    # Gradients are not kept.
    layer = torch.nn.Linear(2, 3)
    extractor = from_callable(lambda batch: layer(torch.from_numpy(batch).float()))
    assert not embed(make_dataset(np.ones((4, 2)), "array"), extractor).features.requires_grad


# Names and configurations.

# What follows the settings of the run.
FOLLOWING = ("seed", "download")
FOLDER = Path(__file__).resolve().parents[2] / "conf" / "extractor"


def test_files_hold_every_parameter_with_its_default():
    from omegaconf import OmegaConf

    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(FACTORIES)
    for name, factory in FACTORIES.items():
        values = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
        shared = {"name": name, "standardize": False, "pca": None, "batch_size": 256}
        assert shared.items() <= values.items(), name
        settings = set(inspect.signature(embed).parameters) & set(OTHER_SETTINGS)
        parameters = inspect.signature(factory).parameters
        assert set(values) - settings - set(shared) == set(parameters), name
        for parameter, declared in parameters.items():
            if declared.default is not inspect.Parameter.empty and parameter not in FOLLOWING:
                assert values[parameter] == declared.default, (name, parameter)
        if name == "pixels":
            assert build_extractor(**{**values, "size": 8}) == pixels(size=8)


def test_bad_names_and_parameters_list_the_known():
    for name, parameters, message in (
        ("pixel", {}, "unknown extractor 'pixel'; choose one of: identity, pixels, timm"),
        ("pixels", {"sise": 3}, "no parameter 'sise'; it has: size, grayscale"),
        ("identity", {"size": 3}, "no parameter 'size'; it has: none"),
        ("callable", {}, r"callable needs extractor\.path="),
        ("timm", {"model": None}, r"timm needs extractor\.model="),
    ):
        with pytest.raises(InputError, match=message):
            build_extractor(name, **parameters)
