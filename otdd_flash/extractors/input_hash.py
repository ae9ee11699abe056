"""A hash of a dataset's raw inputs: equal inputs in equal order give equal features."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import PIL
from PIL import Image
from torch import Tensor

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.images import DECODING, image_array, plain_item

KINDS = {Image.Image: "image ", Tensor: "tensor "}


def inputs_hash(dataset: LabeledDataset) -> str:
    """SHA-256 of the inputs, without labels, names and weights.

    Lazy inputs that know their files (an attribute `paths`, one per input) are identified by path,
    size, and times of change of content and of the file itself, which tools that copy files with
    their dates cannot set, so that images are not decoded twice. Other inputs are read.
    """
    digest = hashlib.sha256(dataset.modality.encode())
    inputs = dataset.inputs
    paths = getattr(inputs, "paths", None)
    if isinstance(inputs, np.ndarray) and inputs.dtype != object:
        digest.update(_content(inputs))
    elif paths is not None:
        digest.update(f"decoding {DECODING} by PIL {PIL.__version__}\0".encode())
        for path in paths:
            status = os.stat(path)
            changed = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
            digest.update(f"{path}\0{status.st_size}\0{changed}\0".encode("utf-8", "surrogatepass"))
    else:
        for row in range(len(inputs)):
            digest.update(_content(plain_item(inputs[row], f"row {row}")))
    return digest.hexdigest()


def _content(item: Any) -> bytes:
    """The item with its length or shape, so that neighbours cannot run into each other."""
    if isinstance(item, str):
        text = item.encode("utf-8", "surrogatepass")
        return f"{len(text)}\0".encode() + text
    array = image_array(item)
    # A tensor has its channels first, and a network may take it as it is.
    header = next((kind for cls, kind in KINDS.items() if isinstance(item, cls)), "")
    return f"{header}{array.dtype}{array.shape}\0".encode() + array.tobytes()
