"""The two sources without files: scikit-learn's digits (1,797 images of 8 x 8) and Gaussian blobs.

`data.registry` calls `read_digits` and `read_blobs`. A change must keep the draws, because the same
request must give the same rows in every version: the halves of the digits are fixed, and blobs
depend on the request's seed alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.arguments import Count, Finite, NotNegative
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.request import Request
from otdd_flash.data.subset import stratified_rows
from otdd_flash.errors import InputError

# It does not depend on the user's seed: halves drawn with two seeds would overlap.
SPLIT_SEED = 0

DARKEST = 16


def read_digits(request: Request, *, rotate: Finite = 0.0) -> LabeledDataset:
    """Read the digits as uint8 images (n, 8, 8) with values 0 to 255.

    `train` and `test` are two disjoint halves with equal class proportions.

    Args:
        request: the shared options.
        rotate: counter-clockwise angle in degrees.
    """
    from sklearn.datasets import load_digits

    bundle = load_digits()
    labels = bundle.target.astype(np.int64)
    parts = request.parts()
    rows = np.sort(np.concatenate([_half(labels, part) for part in parts]))
    images = _rotated(bundle.images[rows] * (255 / DARKEST), float(rotate))
    return LabeledDataset.from_raw(
        images,
        labels[rows],
        class_names=[str(name) for name in bundle.target_names],
        modality="image",
        name=f"{request.title}, rotated {rotate:g}\N{DEGREE SIGN}" if rotate else request.title,
        rows=rows,
    )


def _half(labels: NDArray[np.int64], part: str) -> NDArray[np.int64]:
    count = (len(labels) + 1) // 2
    first = stratified_rows(labels, count, np.random.default_rng(SPLIT_SEED))
    return first if part == "train" else np.setdiff1d(np.arange(len(labels)), first)


def _rotated(images: NDArray[Any], degrees: float) -> NDArray[np.uint8]:
    from scipy import ndimage

    if degrees:
        images = ndimage.rotate(images, degrees, axes=(2, 1), reshape=False, order=1)
    return np.clip(np.round(images), 0, 255).astype(np.uint8)


def read_blobs(
    request: Request,
    *,
    samples: Count = 500,
    dim: Count = 2,
    num_classes: Count = 5,
    spread: NotNegative = 0.2,
) -> LabeledDataset:
    """Draw float32 vectors (samples, dim) in classes of equal size.

    Class centres are standard normal; `train` and `test` are independent draws around the same
    centres, `all` is both.

    Args:
        request: the shared options; its seed determines centres and points.
        samples: points per split.
        dim: dimension of the points.
        num_classes: number of classes.
        spread: standard deviation of each class about its centre.

    Raises:
        InputError: a size is below 1, there are fewer samples than classes, or spread < 0.
    """
    if samples < num_classes:
        raise InputError(
            f"blobs has samples={samples} for num_classes={num_classes}; raise samples"
        )
    centres = np.random.default_rng([request.seed, 0]).standard_normal((num_classes, dim))
    order = {"train": 0, "test": 1}
    parts = request.parts()
    noise = [
        np.random.default_rng([request.seed, 1 + order[part]]).standard_normal((samples, dim))
        for part in parts
    ]
    labels = np.tile(np.arange(samples) % num_classes, len(parts))
    points = centres[labels] + spread * np.concatenate(noise)
    return LabeledDataset.from_raw(
        points.astype(np.float32),
        labels,
        modality="array",
        name=request.title,
        rows=np.concatenate([np.arange(samples) + samples * order[part] for part in parts]),
    )
