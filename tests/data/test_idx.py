"""IDX files, and MNIST, Fashion-MNIST and USPS in them: the real files, and every damage."""

import bz2
import gzip
import os
import struct

import numpy as np
import pytest

from otdd_flash.data import load
from otdd_flash.data.image_datasets import ELEMENT_TYPES, read_idx
from otdd_flash.errors import DataNotice, InputError


@pytest.mark.slow
def test_real_images_show_what_their_classes_say(real_data):
    for name, split, shape in (
        ("mnist", "all", (70_000, 28, 28)),
        ("usps", "all", (9_298, 16, 16)),
    ):
        dataset = load(name, root=real_data, split=split)
        assert (dataset.inputs.shape, dataset.inputs.dtype) == (shape, np.uint8), name
        assert dataset.modality == "image"
        assert len(dataset.class_names) == len(np.unique(dataset.labels)) == 10, name
        centre = slice(shape[1] // 2 - 2, shape[1] // 2 + 2)
        ink = [dataset.inputs[dataset.labels == c][:, centre, centre].mean() for c in (0, 1)]
        # Zeros have a hole and ones do not.
        assert ink[0] < ink[1] / 3, name
    names = "Ankle boot", "T-shirt/top"
    clothes = load("fashion_mnist", root=real_data, split="test", classes=list(names))
    assert clothes.class_names == names


def test_missing_files_name_the_path_and_both_ways_out(tmp_path):
    for name, place in (
        ("mnist", "MNIST/raw"),
        ("fashion_mnist", "FashionMNIST/raw"),
        ("usps", ""),
    ):
        with pytest.raises(InputError, match=r"data_root=DIR.*download=true") as caught:
            load(name, root=tmp_path)
        assert str(tmp_path / place) in str(caught.value), name
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"")
    with pytest.raises(InputError, match="gunzip"):
        load("mnist", root=tmp_path)


def test_a_truncated_file_is_named(real_data, tmp_path):
    folder = tmp_path / "USPS" / "raw"
    folder.mkdir(parents=True)
    for file in (real_data / "USPS" / "raw").iterdir():
        os.symlink(file, folder / file.name)
    images = folder / "train-images-idx3-ubyte"
    content = images.read_bytes()[:-1]
    images.unlink()
    images.write_bytes(content)
    with pytest.raises(InputError, match=f"{images} is damaged"):
        load("usps", root=tmp_path, split="train")


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


def _idx(values, code=8):
    header = bytes([0, 0, code, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape)
    return header + values.astype(ELEMENT_TYPES[code]).tobytes()


def test_every_element_type_is_read_back(tmp_path):
    for code, kind in ELEMENT_TYPES.items():
        values = np.arange(24).reshape(2, 3, 4)
        (tmp_path / "file").write_bytes(_idx(values, code))
        read = read_idx(tmp_path / "file")
        np.testing.assert_array_equal(read, values, err_msg=str(kind))
        assert read.dtype == np.dtype(kind).newbyteorder("=")


@pytest.mark.parametrize("packed", [False, True])
def test_a_pair_of_files_in_any_label_numbering(tmp_path, packed):
    images = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    for name, values in (("images", images), ("labels", np.array([9, 4, 9, 250]))):
        content = _idx(values)
        (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    dataset = load("idx", root=tmp_path, images="images", labels=str(tmp_path / "labels"))
    np.testing.assert_array_equal(dataset.inputs, images)
    assert (dataset.modality, dataset.class_names) == ("image", ("4", "9", "250"))
    assert dataset.labels.tolist() == [1, 0, 1, 2]
    assert load("idx", images=str(tmp_path / "images")).labels is None


def test_bad_files_and_requests_are_named(tmp_path):
    whole = _idx(np.zeros((3, 2, 2)))
    for case, content, message in (
        ("empty", b"", "is not an IDX file"),
        ("short", whole[:-1], "is damaged"),
        ("long", whole + b"0", "is damaged"),
        ("cut header", b"\0\0\x08\x03\0\0", "cannot read"),
        ("cut gzip", gzip.compress(whole)[:-9], "cannot read"),
    ):
        (tmp_path / case).write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            load("idx", images=str(tmp_path / case))
        assert str(tmp_path / case) in str(caught.value)
    (tmp_path / "images").write_bytes(whole)
    (tmp_path / "labels").write_bytes(_idx(np.zeros(2)))
    for options, message in (
        ({"labels": "labels"}, r"has 3 inputs, but its labels have shape \(2,\)"),
        ({"split": "test"}, "split='test' must be all"),
        ({"images": "nowhere"}, f"images=nowhere does not exist.*{tmp_path / 'nowhere'}"),
    ):
        with pytest.raises(InputError, match=message):
            load("idx", **{"root": tmp_path, "images": "images"} | options)
