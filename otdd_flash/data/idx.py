"""IDX files, the format of MNIST, gzipped or not; USPS from IDX files or torchvision's archive.

`data.registry` calls `read_idx_pair` for the source `idx` and `read_usps` for `usps`. A file whose
length differs from its header is refused, because it is damaged. Arrays are returned in native byte
order, which torch requires.
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.data.dataset import LabeledDataset, as_inputs, concatenate
from otdd_flash.data.request import Request, reading
from otdd_flash.data.torchvision_class import read_class
from otdd_flash.errors import InputError

# The third byte of the magic number is the element type; all are stored big-endian.
ELEMENT_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx_pair(
    request: Request, *, images: str | Path | None = None, labels: str | Path | None = None
) -> LabeledDataset:
    """Read a pair of IDX files.

    Args:
        request: the shared options.
        images: file of inputs (n, h, w), (n, h, w, c) or (n, d).
        labels: file of labels (n,); None for unlabelled data.

    Raises:
        InputError: a file is missing or damaged, or the lengths disagree.
    """
    request.one_part()
    path = request.locate("images", images)
    targets = None if labels is None else read_idx(request.locate("labels", labels))
    inputs, modality = as_inputs(read_idx(path), str(path))
    return LabeledDataset.from_raw(inputs, targets, modality=modality, name=path.name)


def read_idx(path: Path) -> NDArray[Any]:
    """Read the array in one IDX file, in native byte order.

    Raises:
        InputError: the file is unreadable, not IDX, or shorter or longer than its header says.
    """
    with reading(path):
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return _decode(content, path)


def _decode(content: bytes, path: Path) -> NDArray[Any]:
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in ELEMENT_TYPES:
        raise InputError(f"{path} is not an IDX file: it starts with {content[:4].hex(' ')!r}")
    rank = content[3]
    header = 4 + 4 * rank
    shape = struct.unpack(f">{rank}i", content[4:header])
    dtype = np.dtype(ELEMENT_TYPES[content[2]])
    expected = header + dtype.itemsize * math.prod(shape)
    if len(content) != expected:
        raise InputError(
            f"{path} is damaged: {len(content)} bytes, but its header {shape} needs {expected}"
        )
    values = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


ARCHIVES = {"train": "usps.bz2", "test": "usps.t.bz2"}

STEMS = {"train": "train", "test": "t10k"}


def read_usps(request: Request) -> LabeledDataset:
    """Read USPS, postal digits, as uint8 images (n, 16, 16).

    torchvision reads `root/usps.bz2` (and usps.t.bz2 for the test part) if these files exist.
    Otherwise the IDX files in `root/USPS/raw` are read, gzipped or not.

    Raises:
        InputError: neither exists and downloading is not allowed, or a file is damaged.
    """
    parts = request.parts()
    archives = all((request.root / ARCHIVES[part]).exists() for part in parts)
    files = [[_idx_file(request, part, kind) for kind in ("images", "labels")] for part in parts]
    if archives or (request.download and not all(path.exists() for pair in files for path in pair)):
        return read_class(request, "USPS", class_names=[str(digit) for digit in range(10)])
    datasets = [_read_pair(request, images, labels) for images, labels in files]
    return concatenate(datasets, request.title)


def _read_pair(request: Request, images: Path, labels: Path) -> LabeledDataset:
    for path in (images, labels):
        if not path.exists():
            raise request.missing(f"{request.root.absolute() / ARCHIVES['train']}, and no {path}")
    return LabeledDataset.from_raw(
        read_idx(images),
        read_idx(labels),
        class_names=[str(digit) for digit in range(10)],
        modality="image",
        name=request.title,
    )


def _idx_file(request: Request, part: str, kind: str) -> Path:
    rank = 3 if kind == "images" else 1
    plain = request.root.absolute() / "USPS" / "raw" / f"{STEMS[part]}-{kind}-idx{rank}-ubyte"
    packed = plain.with_name(f"{plain.name}.gz")
    return packed if packed.exists() and not plain.exists() else plain
