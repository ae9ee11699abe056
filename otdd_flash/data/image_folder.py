"""A folder of images with one subfolder per class, as torchvision's ImageFolder reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.lazy_items import LazyItems
from otdd_flash.data.request import Request, reading
from otdd_flash.errors import InputError


def read_image_folder(request: Request, *, path: str | None = None) -> LabeledDataset:
    """Read `path/CLASS/*.png` (and other image types), or `path/SPLIT/CLASS/*` where that exists.

    Images are decoded to RGB when they are asked for.

    Args:
        request: the shared options. Its split is a subfolder of `path`; without one of that name,
            `train` and `all` mean `path` itself.
        path: the folder.

    Raises:
        InputError: no such folder or split, no class folders, or no images in them.
    """
    from torchvision.datasets import ImageFolder

    folder = request.locate("path", path)
    if not folder.is_dir():
        raise InputError(f"image_folder: path={path} is a file; name the folder of class folders")
    chosen = _split_folder(folder, request.split)
    with reading(folder):
        opened = ImageFolder(str(chosen), allow_empty=True)

    files = [file for file, _ in opened.samples]
    return LabeledDataset.from_raw(
        LazyItems(_Images(files, opened.loader), np.arange(len(files)), files),
        np.array(opened.targets, dtype=np.int64),
        class_names=opened.classes,
        modality="image",
        name=folder.name if chosen == folder else f"{folder.name} {request.split}",
    )


@dataclass(frozen=True)
class _Images:
    """Decodes the image of a file. A class, so that other processes can be sent it."""

    files: list[str]
    loader: Callable[[str], Any]

    def __call__(self, row: int) -> Any:
        with reading(Path(self.files[row])):
            return self.loader(self.files[row])


def _split_folder(folder: Path, split: str) -> Path:
    if split != "all" and (folder / split).is_dir():
        return folder / split
    if split in ("train", "all"):
        return folder
    inside = ", ".join(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
    raise InputError(f"unknown split {split!r}: {folder} has the folders {inside or '(none)'}")
