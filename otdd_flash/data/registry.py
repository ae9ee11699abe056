"""The registry of data sources by name, `load`, which reads one, and the sources without files.

`load` is public; `commands.sides` calls it for the source and the target, `commands.study` for each
task; `ranking.index` calls `load` for members. `SOURCES` holds the readers of this package and
those that other packages add by entry points (`plugins`). Names and options of the readers are keys
of users' configurations, so they must stay.

The sources without files are scikit-learn's digits (1,797 images of 8 x 8) and Gaussian blobs. A
change must keep their draws, because the same request must give the same rows in every version: the
halves of the digits are fixed, and blobs depend on the request's seed alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.arguments import (
    Count,
    Finite,
    NotNegative,
    Seed,
    Word,
    checks_of,
    classes,
    takes,
    weights,
)
from otdd_flash.checks import optional, path, shown
from otdd_flash.data.arrays import read_arrays
from otdd_flash.data.dataset import DEFAULT_ROOT, LabeledDataset, Request
from otdd_flash.data.hugging_face import read_hugging_face
from otdd_flash.data.image_datasets import (
    read_fashion_mnist,
    read_idx_pair,
    read_image_folder,
    read_mnist,
    read_torchvision,
    read_usps,
)
from otdd_flash.data.subset import stratified_rows, subset
from otdd_flash.eager import computes
from otdd_flash.errors import InputError, choose
from otdd_flash.plugins import Registry, blamed_on

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


_OWN: dict[str, Callable[..., LabeledDataset]] = {
    "digits": read_digits,
    "blobs": read_blobs,
    "mnist": read_mnist,
    "fashion_mnist": read_fashion_mnist,
    "usps": read_usps,
    "idx": read_idx_pair,
    "torchvision": read_torchvision,
    "image_folder": read_image_folder,
    "huggingface": read_hugging_face,
    "arrays": read_arrays,
}
# Other packages add functions read(request, *, OPTION=DEFAULT, ...), as this package's are.
SOURCES: Registry[Callable[..., LabeledDataset]] = Registry(
    "datasets",
    "dataset",
    _OWN,
    lambda read, name: None if callable(read) else "a function of a Request and of options",
)


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes(classes=optional(classes), weights=optional(weights))
def load(
    name: str,
    root: str | Path | None = None,
    split: Word | None = "train",
    max_samples: Count | None = None,
    classes: Sequence[str | int] | str | int | None = None,
    seed: Seed = 0,
    weights: str | Path | None = None,
    download: bool = False,
    **options: Any,
) -> LabeledDataset:
    """Read a labelled dataset.

    The same arguments give the same rows in the same order, whatever the state of any global random
    generator.

    Args:
        name: name of a dataset, such as `digits`: one of `otdd_flash.data.registry.SOURCES`, or one
            that an installed package adds.
        root: folder of named datasets (on the command line: data_root).
        split: `train`, `test` or `all`, or a split's name in the source; None means `all`.
        max_samples: draw at most this many rows, in proportion to the classes and at least one of
            each. If there are fewer rows, all are taken, with a `DataNotice`.
        classes: keep only these classes, by name or index, and number them in this order.
        seed: seed of the draw, and of synthetic data.
        weights: a column or key of the data, or a .npy file, with one mass per row of the split.
        download: whether a missing dataset may be fetched.
        **options: options of the reader of this dataset, such as `path` (see its reader).

    Raises:
        InputError: an unknown name, option, split or class; missing or unreadable files; labels
            that are not integers or strings; an empty dataset; `max_samples` below the number of
            classes.
    """
    reader = SOURCES.named(name)
    options = _checked(name, options)
    request = Request(
        name=name,
        split="all" if split is None else split,
        root=Path(path("root", DEFAULT_ROOT if root is None else root)),
        download=download,
        seed=seed,
        weights=None if weights is None else str(weights),
    )
    with blamed_on(reader, f"dataset {name}"):
        dataset = reader(request, **options)
    if not isinstance(dataset, LabeledDataset):
        raise InputError(
            f"dataset {name} of package {SOURCES.package(name)} must return a LabeledDataset, got "
            f"{shown(dataset)}"
        )
    if dataset.weights is None and (masses := request.masses()) is not None:
        dataset = dataset.weighted(masses)
    return subset(dataset, classes, max_samples, seed)


def known_options(name: str) -> tuple[str, ...]:
    """Return all options that `load` takes for a source: the shared ones, then its own."""
    shared = [p for p in inspect.signature(load).parameters if p not in ("name", "options")]
    own = [
        parameter.name
        for parameter in inspect.signature(SOURCES[name]).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    return (*shared, *own)


def _checked(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a source, after checking their names and types."""
    checks = checks_of(inspect.signature(SOURCES[name]))
    for option in options:
        choose(f"option of {name}", option, known_options(name))
    return {
        option: checks[option](f"{option} of {name}", value) if option in checks else value
        for option, value in options.items()
    }
