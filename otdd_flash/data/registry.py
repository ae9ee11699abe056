"""The datasets by name, and `load`, which reads one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from otdd_flash.data.arrays import read_arrays
from otdd_flash.data.blobs import read_blobs
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.digits import read_digits
from otdd_flash.data.hugging_face import read_hugging_face
from otdd_flash.data.idx import read_idx_pair
from otdd_flash.data.image_folder import read_image_folder
from otdd_flash.data.mnist import read_fashion_mnist, read_mnist
from otdd_flash.data.request import DEFAULT_ROOT, Request, reading
from otdd_flash.data.subset import subset
from otdd_flash.data.torchvision_class import read_torchvision
from otdd_flash.data.usps import read_usps
from otdd_flash.errors import InputError, choose

SOURCES: dict[str, Callable[..., LabeledDataset]] = {
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
PSEUDO_LABELS = ("kmeans",)


def load(
    name: str,
    root: str | Path | None = None,
    split: str | None = "train",
    max_samples: int | None = None,
    classes: Sequence[str | int] | str | int | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    pseudo_labels: str | None = None,
    k: int | None = None,
    download: bool = False,
    **options: Any,
) -> LabeledDataset:
    """Read a labelled dataset.

    The same arguments give the same rows in the same order, whatever the state of any global
    random generator.

    Args:
        name: one of `SOURCES`.
        root: folder under which named datasets lie (on the command line: data_root).
        split: `train`, `test` or `all`, or what the source calls its splits; None means `all`.
        max_samples: draw at most so many rows, in proportion to the classes and at least one of
            each; above the size it is a `DataNotice` and all rows are taken.
        classes: keep only these classes, by name or index, and number them in this order.
        seed: of the draw, and of synthetic data.
        weights: a column or key of the data, or a .npy file, with one mass per row of the split.
        pseudo_labels: only checked here: clusters are found among features, so the caller applies
            `with_pseudo_labels` after extraction.
        k: the number of clusters, only checked here.
        download: whether a missing dataset may be fetched.
        **options: the source's own options (see its reader).

    Raises:
        InputError: an unknown name, option, split or class; missing or unreadable files; labels
            that are not integers or strings; an empty dataset; `max_samples` below the number of
            classes.
    """
    reader = SOURCES[choose("dataset", name, tuple(SOURCES))]
    _check_options(name, options)
    _check_count("max_samples", max_samples)
    _check_count("k", k)
    if not _is_integer(seed) or not 0 <= seed < 2**32:
        raise InputError(f"seed must be an integer in [0, 2^32), got {seed!r}")
    if not isinstance(download, bool):
        raise InputError(f"download must be true or false, got {download!r}")
    if pseudo_labels is not None:
        choose("pseudo_labels", pseudo_labels, PSEUDO_LABELS)
    request = Request(
        name=name,
        split="all" if split is None else str(split),
        root=Path(DEFAULT_ROOT if root is None else str(root)).expanduser(),
        download=download,
        seed=seed,
        weights=None if weights is None else str(weights),
    )
    dataset = reader(request, **options)
    if request.weights is not None and dataset.weights is None:
        dataset = _with_weights_file(dataset, request)
    return subset(dataset, classes, max_samples, seed)


def known_options(name: str) -> tuple[str, ...]:
    """All options that `load` takes for a source: the shared ones, then its own."""
    shared = [p for p in inspect.signature(load).parameters if p not in ("name", "options")]
    own = [
        parameter.name
        for parameter in inspect.signature(SOURCES[name]).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    return (*shared, *own)


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse unknown options, and anything but numbers where the default is a number."""
    parameters = inspect.signature(SOURCES[name]).parameters
    for option, value in options.items():
        default = parameters[choose(f"option of {name}", option, known_options(name))].default
        if isinstance(default, int) and not _is_integer(value):
            raise InputError(f"{option} of {name} must be an integer, got {value!r}")
        if isinstance(default, float) and not (_is_integer(value) or isinstance(value, float)):
            raise InputError(f"{option} of {name} must be a number, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{option} of {name} must be finite, got {value!r}")


def _with_weights_file(dataset: LabeledDataset, request: Request) -> LabeledDataset:
    path = request.locate("weights", request.weights)
    with reading(path):
        weights = np.load(path, allow_pickle=False)
    return replace(dataset, weights=np.asarray(weights, dtype=np.float64))


def _check_count(option: str, value: int | None) -> None:
    if value is not None and (not _is_integer(value) or value < 1):
        raise InputError(f"{option} must be a positive integer or null, got {value!r}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
