import gzip
import struct

import numpy as np
import pytest

from otdd_flash.data import load
from otdd_flash.data.idx import ELEMENT_TYPES, read_idx
from otdd_flash.errors import InputError


def _idx(values, code=8):
    header = bytes([0, 0, code, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape)
    return header + values.astype(ELEMENT_TYPES[code]).tobytes()


@pytest.mark.parametrize("code", ELEMENT_TYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4)])
def test_every_element_type_is_read_back(tmp_path, code, shape):
    values = np.arange(np.prod(shape)).reshape(shape)
    (tmp_path / "file").write_bytes(_idx(values, code))
    read = read_idx(tmp_path / "file")
    np.testing.assert_array_equal(read, values)
    assert read.dtype == np.dtype(ELEMENT_TYPES[code]).newbyteorder("=")


@pytest.mark.parametrize("packed", [False, True])
def test_a_pair_of_files_in_any_label_numbering(tmp_path, packed):
    images = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    for name, values in (("images", images), ("labels", np.array([9, 4, 9, 250]))):
        content = _idx(values)
        (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    dataset = load("idx", root=tmp_path, images="images", labels=str(tmp_path / "labels"))
    np.testing.assert_array_equal(dataset.inputs, images)
    assert dataset.modality == "image"
    assert dataset.class_names == ("4", "9", "250")
    assert dataset.labels.tolist() == [1, 0, 1, 2]
    assert load("idx", images=str(tmp_path / "images")).labels is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file"),
        (b"PNG and more", "is not an IDX file"),
        (_idx(np.zeros((3, 2, 2)))[:-1], "is damaged"),
        (_idx(np.zeros((3, 2, 2))) + b"0", "is damaged"),
        (b"\0\0\x08\x03\0\0", "cannot read"),
        (gzip.compress(_idx(np.zeros((3, 2, 2))))[:-9], "cannot read"),
    ],
    # Named, because gzip writes the time into its header and test workers compare names.
    ids=["empty", "other format", "short", "long", "cut header", "cut gzip"],
)
def test_damaged_files_are_named(tmp_path, content, message):
    (tmp_path / "images").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load("idx", images=str(tmp_path / "images"))
    assert str(tmp_path / "images") in str(caught.value)


def test_lengths_must_agree(tmp_path):
    (tmp_path / "images").write_bytes(_idx(np.zeros((3, 2, 2))))
    (tmp_path / "labels").write_bytes(_idx(np.zeros(2)))
    with pytest.raises(InputError, match=r"has 3 inputs, but its labels have shape \(2,\)"):
        load("idx", root=tmp_path, images="images", labels="labels")


def test_files_have_no_splits(tmp_path):
    (tmp_path / "images").write_bytes(_idx(np.zeros((3, 2, 2))))
    with pytest.raises(InputError, match="split='test' must be all"):
        load("idx", root=tmp_path, images="images", split="test")


def test_a_missing_file_names_where_it_looked(tmp_path):
    with pytest.raises(InputError, match="images=nowhere does not exist") as caught:
        load("idx", root=tmp_path, images="nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)
