"""Datasets of the `datasets` library: from the hub, or from local files without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.checks import shown
from otdd_flash.data.array_inputs import as_inputs
from otdd_flash.data.columns import choose_columns
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.lazy_items import LazyItems
from otdd_flash.data.request import Request, reading
from otdd_flash.errors import InputError
from otdd_flash.offline import network

FILE_FORMATS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
}


def read_hugging_face(
    request: Request,
    *,
    path: str | None = None,
    config: str | None = None,
    input: str | Sequence[str] | None = None,
    label: str | None = None,
    drop_unlabelled: bool = False,
) -> LabeledDataset:
    """Read images, texts or numbers with labels from a Hugging Face dataset.

    Args:
        request: the shared options; `weights` is a column or a file.
        path: a parquet, csv, json or arrow file; a folder (of such files, of images, or written by
            `save_to_disk`); or a name on the hub.
        config: which configuration of a dataset on the hub, or of a folder that names some.
        input: the input column, or several numeric ones; found where only one reading is possible.
        label: the label column; found as the only ClassLabel, or by its name.
        drop_unlabelled: leave out the rows whose label is missing, instead of refusing them.

    Raises:
        InputError: nothing there, unreadable, no such split or column, or an ambiguous choice.
    """
    if not path:
        raise InputError("huggingface needs path=PATH or path=HUB_NAME")
    path = str(path)
    table = _one_split(_open(request, path, config), request.split, path)
    if len(table) == 0:
        raise InputError(f"{path} is empty: it has no rows in split={request.split}")
    columns = choose_columns(table.features, input, label, request.weights, path)
    labels = None if columns.label is None else _values(table, columns.label)
    _check_single_labels(labels, columns.label, path)
    label_feature = None if columns.label is None else table.features[columns.label]
    inputs: NDArray[Any] | LazyItems
    if columns.modality == "array":
        inputs, modality = as_inputs(_numbers(table, columns.inputs), path)
    else:
        inputs, modality = _lazy(table, columns.inputs[0], path), columns.modality
    title = Path(path).name if request.split == "all" else f"{Path(path).name} {request.split}"
    return LabeledDataset.from_raw(
        inputs,
        labels,
        class_names=getattr(label_feature, "names", None),
        weights=request.masses() if columns.weights is None else _values(table, columns.weights),
        modality=modality,
        name=title,
        drop_unlabelled=drop_unlabelled,
    )


def _open(request: Request, path: str, config: str | None) -> Any:
    import datasets

    suffix = Path(path).suffix.lower()
    local = suffix in FILE_FORMATS or path.startswith(("/", ".", "~"))
    places = (Path(path).expanduser(), request.root / path)
    if not local and not any(place.exists() for place in places):
        return _from_hub(request, path, config)
    found = request.locate("path", path)
    with reading(found), network(allowed=False):
        saved = any((found / mark).exists() for mark in ("state.json", "dataset_dict.json"))
        known = () if found.is_file() or saved else datasets.get_dataset_config_names(str(found))
        if config is not None and config not in known:
            there = f"its configurations are: {', '.join(known)}" if known else "it has none"
            raise InputError(f"{found} has no configuration {config!r}, {there}; leave config out")
        if saved:
            return datasets.load_from_disk(str(found))
        if not found.is_file():
            return datasets.load_dataset(str(found), config)
        if suffix not in FILE_FORMATS:
            raise InputError(f"{found} must end in one of: {', '.join(FILE_FORMATS)}")
        return datasets.load_dataset(FILE_FORMATS[suffix], data_files=str(found))


def _from_hub(request: Request, path: str, config: str | None) -> Any:
    import datasets

    try:
        with network(allowed=request.download):
            return datasets.load_dataset(path, config)
    except Exception as error:
        way_out = "" if request.download else "; allow fetching it with download=true"
        raise InputError(
            f"huggingface: {path!r} is no local path, and the hub's copy cannot be used: "
            f"{error or type(error).__name__}{way_out}"
        ) from error


def _one_split(opened: Any, split: str, path: str) -> Any:
    import datasets

    if not isinstance(opened, dict):
        if split not in ("train", "all"):
            raise InputError(f"unknown split {split!r} of {path}: it has no splits; choose all")
        return opened
    if split == "all":
        with reading(Path(path)):
            return datasets.concatenate_datasets(list(opened.values()))
    if split not in opened:
        raise InputError(f"unknown split {split!r} of {path}; choose one of: {', '.join(opened)}")
    return opened[split]


def _values(table: Any, column: str) -> list[Any]:
    values: list[Any] = table.select_columns([column]).with_format(None)[:][column]
    return values


def _check_single_labels(labels: list[Any] | None, column: str | None, path: str) -> None:
    """Refuse labels that are lists, arrays or records.

    Raises:
        InputError: as said; the first such row is named.
    """
    for row, label in enumerate(labels or ()):
        if isinstance(label, list | tuple | dict) or getattr(label, "ndim", 0) > 0:
            raise InputError(
                f"label={column} of {path} has several values in a row, {shown(label)} in row "
                f"{row}, and a row is of one class; name a column of single labels, or make one"
            )


def _numbers(table: Any, columns: Sequence[str]) -> NDArray[Any]:
    """One column as it is shaped, or several side by side as a matrix."""
    only = table.select_columns(list(columns))
    # By itself the library makes float32 of float64, which tells large neighbours no more apart.
    double = any("float64" in str(feature) for feature in only.features.values())
    batch = only.with_format("numpy", **({"dtype": np.float64} if double else {}))[:]
    arrays = [np.asarray(batch[column]) for column in columns]
    if len(arrays) > 1 or arrays[0].ndim == 1:
        return np.column_stack(arrays)
    return arrays[0]


@dataclass(frozen=True)
class _Items:
    """Reads the items of a column. A class, so that other processes can be sent it."""

    table: Any
    column: str
    path: str

    def __call__(self, row: int) -> Any:
        with reading(Path(self.path) / f"row {row}"):
            value = self.table[row][self.column]
        if value is None:
            raise InputError(f"row {row} of {self.path} has nothing in its column {self.column!r}")
        return value


def _lazy(table: Any, column: str, path: str) -> LazyItems:
    only = table.select_columns([column]).with_format(None)

    return LazyItems(_Items(only, column, path), np.arange(len(table)))
