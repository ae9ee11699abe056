"""Synthetic data: one Gaussian per class."""

from __future__ import annotations

import numpy as np

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.request import Request
from otdd_flash.errors import InputError


def read_blobs(
    request: Request,
    *,
    samples: int = 500,
    dim: int = 2,
    num_classes: int = 5,
    spread: float = 0.2,
) -> LabeledDataset:
    """Draw float32 vectors (samples, dim) in classes of equal size.

    Class centres are standard normal; `train` and `test` are independent draws around the same
    centres, `all` is both.

    Args:
        request: the shared options; its seed decides centres and points.
        samples: points per split.
        dim: their dimension.
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
