"""IDX files: every element type, packed or not, and every damage."""

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


def test_every_element_type_is_read_back(tmp_path):
    for code, kind in ELEMENT_TYPES.items():
        for shape in ((1,), (3, 5), (2, 3, 4)):
            values = np.arange(np.prod(shape)).reshape(shape)
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
        ("other format", b"PNG and more", "is not an IDX file"),
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
