"""Samples that are written as npz and as Hugging Face datasets, and read back."""

import os

import numpy as np
import pytest
import torch

from otdd_flash.data import load
from otdd_flash.data.writing import eight_bit_images, write_hugging_face, write_npz
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.extractors import embed, pixels
from otdd_flash.files.atomic import replacing_folder
from otdd_flash.samples import LabeledSamples

NAMES = ("T-shirt, $a$", "10", "9", "猫")


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    """The library, with a cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def samples(d=12, dtype=torch.float32, **changes):
    draw = torch.Generator().manual_seed(0)
    given = {
        "features": 2 * torch.rand(7, d, generator=draw, dtype=dtype) - 0.5,
        "labels": torch.tensor([3, 0, 1, 2, 2, 0, 3]),
        "class_names": NAMES,
        "weights": torch.tensor([1.0, 2, 3, 0, 5, 6, 7]),
    }
    return LabeledSamples(**(given | changes))


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("d", "dtype"), [(1, torch.float32), (12, torch.float64)])
def test_what_was_written_is_read_back(tmp_path, datasets, d, dtype):
    """Also doubles, which the library by itself makes float32 of."""
    written = samples(d, dtype)
    write_npz(written, tmp_path / "adapted.npz")
    write_hugging_face(written, tmp_path / "adapted")
    options = {"weights": "weight", "input": "features"}
    for read in (
        load("arrays", path=str(tmp_path / "adapted.npz")),
        load("huggingface", path=str(tmp_path / "adapted"), **options),
    ):
        assert (read.inputs.dtype, read.modality) == (written.features.numpy().dtype, "array")
        np.testing.assert_array_equal(read.inputs, written.features)
        np.testing.assert_array_equal(read.labels, written.labels)
        np.testing.assert_array_equal(read.weights, written.weights)
        assert read.class_names == NAMES
    table = datasets.load_from_disk(str(tmp_path / "adapted"))
    assert table.features["features"].length == d


def test_plain_points_hold_nothing_else(tmp_path):
    write_npz(samples(labels=None, weights=None), tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as archive:
        assert archive.files == ["x"]
    write_hugging_face(samples(labels=None, weights=None), tmp_path / "a")
    with pytest.warns(DataNotice, match="unlabelled"):
        assert load("huggingface", path=str(tmp_path / "a")).labels is None


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 2, 2)])
def test_huggingface_reads_back_images_clipped_and_rounded(tmp_path, shape):
    written = samples()
    write_hugging_face(written, tmp_path / "adapted", shape)
    read = embed(load("huggingface", path=str(tmp_path / "adapted"), weights="weight"), pixels())
    levels = (written.features.clamp(0, 1) * 255).round()
    torch.testing.assert_close(read.features, levels / 255)
    assert bool((written.features < 0).any() and (written.features > 1).any())
    assert (read.class_names, read.labels.tolist()) == (NAMES, written.labels.tolist())
    colours = torch.arange(12).float().reshape(1, 12) / 255
    places = {(1, 3, 4): [[0, 1, 2, 3], [4, 5, 6, 7]], (3, 2, 2): [[[0, 4, 8], [1, 5, 9]]]}[shape]
    assert eight_bit_images(colours, shape)[0, : len(places)].tolist() == places


def test_what_is_no_dataset_is_refused_and_nothing_else_replaced(tmp_path, datasets):
    for shape in ((1, 4, 4), (2, 2, 3)):
        with pytest.raises(InputError, match=r"rows of 12 values are no images of shape"):
            write_hugging_face(samples(), tmp_path / "a", shape)
    assert listing(tmp_path) == []
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    with pytest.raises(InputError, match="home exists and is no dataset"):
        write_hugging_face(samples(), tmp_path / "home")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years"
    # Names that the library refuses are told apart.
    write_hugging_face(samples(class_names=("a", "a", "b\udc80", "")), tmp_path / "a")
    table = datasets.load_from_disk(str(tmp_path / "a"))
    assert table.features["label"].names == ["a", "a (2)", "b\\udc80", ""]


def test_a_dataset_is_replaced_only_by_a_whole_one(tmp_path, monkeypatch, datasets):
    path = tmp_path / "adapted"
    write_hugging_face(samples(), path)
    save = datasets.Dataset.save_to_disk

    def save_and_stop(table, folder):
        save(table, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(datasets.Dataset, "save_to_disk", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            write_hugging_face(samples(3), path)
    assert listing(tmp_path) == ["adapted"]
    assert datasets.load_from_disk(str(path)).features["features"].length == 12
    write_hugging_face(samples(3), path)
    assert listing(tmp_path) == ["adapted"]
    assert datasets.load_from_disk(str(path)).features["features"].length == 3


def test_a_failed_exchange_puts_the_old_folder_back(tmp_path, monkeypatch):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").write_text("")
    rename = os.replace

    def refuse_the_new_one(source, target):
        if source.name.endswith(".partial"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr("otdd_flash.files.atomic.os.replace", refuse_the_new_one)
    with pytest.raises(InputError, match="No space left"), replacing_folder(path) as partial:
        (partial / "new").write_text("")
    assert listing(tmp_path) == ["folder"]
    assert listing(path) == ["old"]
