"""MNIST, Fashion-MNIST and USPS: the real files, and what is said when they are not there."""

import bz2
import gzip
import os

import numpy as np
import pytest

from otdd_flash.data import load
from otdd_flash.errors import DataNotice, InputError


@pytest.mark.slow
def test_real_images_show_what_their_classes_say(real_data):
    for name, split, shape in (
        ("mnist", "all", (70_000, 28, 28)),
        ("fashion_mnist", "test", (10_000, 28, 28)),
        ("usps", "train", (7_291, 16, 16)),
        ("usps", "all", (9_298, 16, 16)),
    ):
        dataset = load(name, root=real_data, split=split)
        assert (dataset.inputs.shape, dataset.inputs.dtype) == (shape, np.uint8), name
        assert dataset.modality == "image"
        assert len(dataset.class_names) == len(np.unique(dataset.labels)) == 10, name
        centre = slice(shape[1] // 2 - 2, shape[1] // 2 + 2)
        if split == "all":
            ink = [dataset.inputs[dataset.labels == c][:, centre, centre].mean() for c in (0, 1)]
            # Zeros have a hole and ones do not.
            assert ink[0] < ink[1] / 3, name
    names = "Ankle boot", "T-shirt/top"
    clothes = load("fashion_mnist", root=real_data, split="test", classes=list(names))
    assert clothes.class_names == names
    heights = [(clothes.inputs[clothes.labels == c] > 0).any(2).sum(1).mean() for c in (0, 1)]
    assert heights[0] < heights[1]


def test_missing_files_name_the_path_and_both_ways_out(tmp_path):
    images = "USPS/raw/train-images-idx3-ubyte"
    for name, *places in (
        ("mnist", "MNIST/raw"),
        ("fashion_mnist", "FashionMNIST/raw"),
        ("usps", "usps.bz2", images),
    ):
        with pytest.raises(InputError, match=r"data_root=DIR.*download=true") as caught:
            load(name, root=tmp_path)
        assert all(str(tmp_path / place) in str(caught.value) for place in places), name
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"")
    with pytest.raises(InputError, match="gunzip"):
        load("mnist", root=tmp_path)


def _copied(source, target):
    """A folder with links to the files of another."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        os.symlink(file, target / file.name)
    return target


def test_a_truncated_file_is_named(real_data, tmp_path):
    for name, folder, image, size, message in (
        ("usps", "USPS", "train-images-idx3-ubyte", -1, "{} is damaged"),
        ("mnist", "MNIST", "t10k-images-idx3-ubyte", 1000, "cannot read .*MNIST/raw"),
    ):
        images = _copied(real_data / folder / "raw", tmp_path / folder / "raw") / image
        content = images.read_bytes()[:size]
        images.unlink()
        images.write_bytes(content)
        with pytest.raises(InputError, match=message.format(images)):
            load(name, root=tmp_path, split="test" if name == "mnist" else "train")


def test_usps_reads_gzipped_files_and_prefers_the_archive_that_torchvision_reads(
    real_data, tmp_path
):
    (tmp_path / "USPS" / "raw").mkdir(parents=True)
    for file in (real_data / "USPS" / "raw").glob("t10k-*-ubyte"):
        packed = tmp_path / "USPS" / "raw" / f"{file.name}.gz"
        packed.write_bytes(gzip.compress(file.read_bytes(), compresslevel=1))
    plain, packed_set = (
        load("usps", root=root, split="test", max_samples=50) for root in (real_data, tmp_path)
    )
    np.testing.assert_array_equal(plain.inputs, packed_set.inputs)
    # Two images in the archive's text format: label, then index:value in [-1, 1].
    lines = [
        f"{label} " + " ".join(f"{i + 1}:{value}" for i in range(256))
        for label, value in ((1, -1.0), (10, 1.0))
    ]
    (tmp_path / "usps.bz2").write_bytes(bz2.compress("\n".join(lines).encode()))
    with pytest.warns(DataNotice, match="8 of 10 classes have no rows"):
        dataset = load("usps", root=tmp_path)
    assert (dataset.class_names, dataset.inputs.shape) == (("0", "9"), (2, 16, 16))
    assert dataset.inputs.mean(axis=(1, 2)).tolist() == [0, 255]
