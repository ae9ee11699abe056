"""USPS: postal digits, 16 x 16, from torchvision's archive or from IDX files."""

from __future__ import annotations

from pathlib import Path

from otdd_flash.data.dataset import LabeledDataset, concatenate
from otdd_flash.data.idx import read_idx
from otdd_flash.data.request import Request
from otdd_flash.data.torchvision_class import read_class

ARCHIVES = {"train": "usps.bz2", "test": "usps.t.bz2"}
STEMS = {"train": "train", "test": "t10k"}


def read_usps(request: Request) -> LabeledDataset:
    """Read the digits as uint8 images (n, 16, 16).

    `root/usps.bz2` (and usps.t.bz2 for the test part) is read through torchvision where it is
    there; else the IDX files in `root/USPS/raw`, gzipped or not.

    Raises:
        InputError: neither is there and downloading is not allowed, or a file is damaged.
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
