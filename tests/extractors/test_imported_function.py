"""The callable extractor: import paths, functions, and the check of what they return."""

import numpy as np
import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, from_callable

SOURCE = """
import numpy as np

class Features:
    @staticmethod
    def doubled(batch):
        return np.asarray(batch) * 2

def mean_and_size(batch):
    return np.array([[np.mean(item), np.size(item)] for item in batch])

number = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_package").mkdir()
    (tmp_path / "user_package" / "features.py").write_text(SOURCE)
    (tmp_path / "user_package" / "broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("user_module")
def test_paths_find_functions_and_attributes_of_classes(make_dataset, colour_images):
    for separator in (":", "."):
        extractor = from_callable(f"user_package.features{separator}mean_and_size")
        features = embed(make_dataset(colour_images), extractor, batch_size=2).features
        expected = [[image.mean(), image.size] for image in colour_images]
        np.testing.assert_allclose(features.numpy(), expected)
    extractor = from_callable("user_package.features:Features.doubled")
    features = embed(make_dataset(np.ones((3, 2)), "array"), extractor).features
    assert features.tolist() == [[2.0, 2.0]] * 3


@pytest.mark.usefixtures("user_module")
def test_bad_paths_are_named():
    form = "must be package.module:function"
    for path, message in (
        ("user_package.features:nothing", "user_package.features has no nothing"),
        ("user_package.features:number", "is not callable: int"),
        ("user_package.nowhere:f", "no module named 'user_package.nowhere'"),
        ("user_package.broken:f", "not import: it raised ModuleNotFoundError: .* 'not_installed_"),
        ("function", form),
        ("", form),
        (":f", form),
    ):
        with pytest.raises(InputError, match=message):
            from_callable(path)


def test_what_is_no_feature_matrix_is_refused(make_dataset, colour_images):
    for returned, message in (
        (lambda batch: torch.zeros(len(batch)), r"shape \(5, d\), got \(5,\)"),
        (lambda batch: torch.zeros(1, 4), r"shape \(5, d\), got \(1, 4\)"),
        (lambda batch: None, "got None"),
        (lambda batch: np.array(["a"] * len(batch)), "got <U1"),
    ):
        with pytest.raises(InputError, match=message):
            embed(make_dataset(colour_images), from_callable(returned))


def test_gradients_are_not_kept(make_dataset):
    layer = torch.nn.Linear(2, 3)
    extractor = from_callable(lambda batch: layer(torch.from_numpy(batch).float()))
    features = embed(make_dataset(np.ones((4, 2)), "array"), extractor).features
    assert not features.requires_grad
    assert features.shape == (4, 3)
