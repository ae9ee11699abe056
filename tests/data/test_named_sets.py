"""MNIST, Fashion-MNIST and USPS: the real files, and what is said when they are not there."""

import bz2
import gzip
import shutil

import numpy as np
import pytest

from otdd_flash.data import load
from otdd_flash.errors import DataNotice, InputError


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("name", "split", "shape"),
    [
        ("mnist", "train", (60_000, 28, 28)),
        ("mnist", "all", (70_000, 28, 28)),
        ("fashion_mnist", "test", (10_000, 28, 28)),
        ("usps", "train", (7_291, 16, 16)),
        ("usps", "all", (9_298, 16, 16)),
    ],
)
def test_real_images_and_labels(real_data, name, split, shape):
    dataset = load(name, root=real_data, split=split)
    assert dataset.inputs.shape == shape
    assert dataset.inputs.dtype == np.uint8
    assert dataset.modality == "image"
    assert len(dataset.class_names) == len(np.unique(dataset.labels)) == 10


def test_zeros_have_a_hole_and_ones_do_not(real_data):
    for name, centre in (("mnist", slice(12, 16)), ("usps", slice(6, 10))):
        digits = load(name, root=real_data, split="test", classes=["0", "1"])
        ink = [digits.inputs[digits.labels == c][:, centre, centre].mean() for c in (0, 1)]
        assert ink[0] < ink[1] / 3


def test_fashion_classes_have_their_names(real_data):
    clothes = load(
        "fashion_mnist", root=real_data, split="test", classes=["Ankle boot", "T-shirt/top"]
    )
    assert clothes.class_names == ("Ankle boot", "T-shirt/top")
    heights = [(clothes.inputs[clothes.labels == c] > 0).any(2).sum(1).mean() for c in (0, 1)]
    assert heights[0] < heights[1]


def test_the_same_seed_draws_the_same_rows_of_both_sides(real_data):
    source, target = (load("mnist", root=real_data, max_samples=500, seed=3) for _ in range(2))
    np.testing.assert_array_equal(source.inputs, target.inputs)
    assert source.subset_hash == target.subset_hash


def test_missing_files_name_the_path_and_both_ways_out(tmp_path):
    for name, folder in (("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")):
        with pytest.raises(InputError, match=r"data_root=DIR.*download=true") as caught:
            load(name, root=tmp_path)
        assert str(tmp_path / folder) in str(caught.value)
    with pytest.raises(InputError, match=r"data_root=DIR.*download=true") as caught:
        load("usps", root=tmp_path)
    assert str(tmp_path / "usps.bz2") in str(caught.value)
    assert str(tmp_path / "USPS/raw/train-images-idx3-ubyte") in str(caught.value)


def test_gzipped_mnist_says_to_unpack(tmp_path):
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"")
    with pytest.raises(InputError, match="gunzip"):
        load("mnist", root=tmp_path)


def test_a_truncated_file_is_named(real_data, tmp_path):
    shutil.copytree(real_data / "USPS", tmp_path / "USPS")
    images = tmp_path / "USPS" / "raw" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{images} is damaged"):
        load("usps", root=tmp_path)


def test_truncated_mnist_is_refused(real_data, tmp_path):
    shutil.copytree(real_data / "MNIST", tmp_path / "MNIST")
    images = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"cannot read .*MNIST/raw"):
        load("mnist", root=tmp_path, split="test")


def test_usps_reads_gzipped_files(real_data, tmp_path):
    (tmp_path / "USPS" / "raw").mkdir(parents=True)
    for file in (real_data / "USPS" / "raw").glob("t10k-*-ubyte"):
        packed = tmp_path / "USPS" / "raw" / f"{file.name}.gz"
        packed.write_bytes(gzip.compress(file.read_bytes(), compresslevel=1))
    plain, packed_set = (
        load("usps", root=root, split="test", max_samples=50) for root in (real_data, tmp_path)
    )
    np.testing.assert_array_equal(plain.inputs, packed_set.inputs)


def test_usps_prefers_the_archive_that_torchvision_reads(tmp_path):
    """Two images in the archive's text format: label, then index:value in [-1, 1]."""
    lines = [
        f"{label} " + " ".join(f"{i + 1}:{value}" for i in range(256))
        for label, value in ((1, -1.0), (10, 1.0))
    ]
    (tmp_path / "usps.bz2").write_bytes(bz2.compress("\n".join(lines).encode()))
    with pytest.warns(DataNotice, match="8 of 10 classes have no rows"):
        dataset = load("usps", root=tmp_path)
    assert dataset.class_names == ("0", "9")
    assert dataset.inputs.shape == (2, 16, 16)
    assert dataset.inputs.mean(axis=(1, 2)).tolist() == [0, 255]
