"""Samples that a flow has moved, and mixtures, written to files: npz, and a Hugging Face dataset.

`report.flow` and `report.mixture` call `write_npz` and `write_hugging_face`, `report.flow` also
`check_image_shape`; `report.flow_pictures` uses `eight_bit_images`. A change must keep the keys and
columns, which the sources `arrays` and `huggingface` of this package read, and must replace files
only as a whole, so that an interrupted run leaves no half of one (`tests/data/test_writing.py`).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from otdd_flash.arguments import takes
from otdd_flash.data.arrays import TARGETS
from otdd_flash.data.hugging_face import without_progress_bars
from otdd_flash.errors import InputError
from otdd_flash.files.atomic import replacing_folder
from otdd_flash.files.tensor_file import write_arrays
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import told_apart

ImageShape = tuple[int, int, int]
# A file that `save_to_disk` of the datasets library always writes into its folder.
DATASET_MARK = "state.json"


# `takes` checks arguments by their annotations.
@takes()
def write_npz(samples: LabeledSamples, path: str | Path) -> None:
    """Write samples as an npz file that the source `arrays` reads.

    The keys are `x` (n, d); with labels `y` (n,) int64 class indices and `class_names` (V,); with
    numbers `targets` (n, q) float64; with weights `w` (n,) float64 masses. For rows with several
    labels `y` is an indicator (n, V).

    Raises:
        InputError: the file cannot be written.
    """
    arrays: dict[str, Any] = {"x": samples.features.detach().cpu()}
    if samples.targets is not None:
        arrays[TARGETS] = samples.targets.cpu()
    elif samples.labels is not None:
        labels = _only_labels(samples)
        if labels is None:
            labels = (samples.shares > 0).to(torch.int64).cpu()
        arrays |= {"y": labels, "class_names": np.array(samples.label_names, str)}
    if samples.weights is not None:
        arrays["w"] = samples.weights.cpu()
    write_arrays(path, arrays)


@takes()
def write_hugging_face(
    samples: LabeledSamples, path: str | Path, image_shape: ImageShape | None = None
) -> None:
    """Write samples as a folder for `datasets.load_from_disk` and the source `huggingface`.

    The column `features` holds d numbers in the samples' precision. Labels are the column `label`,
    a ClassLabel, or lists of them where rows have several; numbers are lists of floats in the
    column `targets`. Masses are the column `weight`: without `weights=weight`, the source
    `huggingface` takes it for an input beside `features`. With an image shape there is a column
    `image` too, which that source chooses: 8-bit pictures, values outside [0, 1] clipped.

    Args:
        samples: the samples; pixel values in [0, 1], channel after channel, if an image shape is
            given.
        path: a new folder, or one that holds a dataset, which is replaced; any other is refused.
        image_shape: (c, h, w) of one sample, c = 1 or 3.

    Raises:
        InputError: the image shape does not fit the samples, something other than a dataset is at
            `path`, or it cannot be written.
    """
    import datasets

    path = Path(path)
    if path.exists() and not (path / DATASET_MARK).is_file():
        raise InputError(
            f"{path} exists and is no dataset, so it is not replaced; choose another folder"
        )
    columns: dict[str, Any] = {}
    types: dict[str, Any] = {}
    if image_shape is not None:
        images = eight_bit_images(samples.features, image_shape)
        columns["image"] = [{"bytes": _png(image), "path": None} for image in images]
        types["image"] = datasets.Image()
    vectors = samples.features.detach().cpu().numpy()
    columns["features"] = vectors
    types["features"] = datasets.Sequence(datasets.Value(vectors.dtype.name), length=samples.dim)
    if samples.targets is not None:
        columns[TARGETS] = samples.targets.cpu().numpy()
        types[TARGETS] = datasets.Sequence(datasets.Value("float64"))
    elif samples.labels is not None:
        # The datasets library accepts valid UTF-8 alone. Lone surrogates, from undecodable file
        # names, become escapes instead of an error.
        valid = (name.encode("utf-8", "backslashreplace").decode() for name in samples.label_names)
        kind = datasets.ClassLabel(names=told_apart(valid))
        if (labels := _only_labels(samples)) is not None:
            columns["label"], types["label"] = labels.numpy(), kind
        else:
            rows = (samples.shares > 0).cpu()
            columns["label"] = [row.nonzero().squeeze(1).tolist() for row in rows]
            types["label"] = datasets.Sequence(kind)
    if samples.weights is not None:
        columns["weight"] = samples.weights.cpu().numpy()
        types["weight"] = datasets.Value("float64")
    with without_progress_bars():
        table = datasets.Dataset.from_dict(columns, features=datasets.Features(types))
        with replacing_folder(path) as partial:
            table.save_to_disk(str(partial))


def _only_labels(samples: LabeledSamples) -> Tensor | None:
    """Return the label (n,) of each row, int64; None if a row has several."""
    assert samples.labels is not None
    labels, members = samples.labels.cpu(), samples.members
    if members is None:
        return labels
    # An indicator of one label would be read as one column of classes.
    return None if bool((members.sum(1) > 1).any()) else members.int().argmax(1)[labels]


def eight_bit_images(features: Tensor, image_shape: ImageShape) -> NDArray[np.uint8]:
    """Convert pixel values (n, c * h * w) to 8-bit images (n, h, w), or (n, h, w, 3) for c = 3.

    Args:
        features: 0 is black and 1 is white; values outside are clipped, then rounded to 1 / 255.
        image_shape: (c, h, w).

    Raises:
        InputError: as for `check_image_shape`.
    """
    check_image_shape(features, image_shape)
    levels = (features.detach().cpu().clamp(0, 1) * 255).round().byte().numpy()
    images: NDArray[np.uint8] = np.moveaxis(levels.reshape(-1, *image_shape), 1, 3)
    return images[..., 0] if image_shape[0] == 1 else images


def check_image_shape(features: Tensor, image_shape: ImageShape) -> None:
    """Refuse a shape (c, h, w) that does not fit the rows of `features`.

    Raises:
        InputError: rows do not have that many values, or c is neither 1 nor 3.
    """
    c, h, w = image_shape
    if c not in (1, 3) or features.shape[1] != c * h * w:
        raise InputError(
            f"rows of {features.shape[1]} values are no images of shape {(c, h, w)}; give the "
            "(channels, height, width) of one row, with 1 or 3 channels"
        )


def _png(image: NDArray[np.uint8]) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(image).save(sink, format="PNG")
    return sink.getvalue()
