"""Arrays of the user's own files: npz archives, .npy files, csv and parquet tables.

`data.registry` calls `read_arrays` for the source `arrays`; `flows.functionals` calls
`read_npy`. Tables are read by `data.table`. A change must respect that pickled objects are never
loaded, because loading them runs code that a file may hold; that .npy files are mapped rather than
copied, because they may exceed the memory; and that any choice that the user did not make is
reported in a notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.arguments import Word
from otdd_flash.data.dataset import LabeledDataset, as_inputs
from otdd_flash.data.request import Request, chosen, reading
from otdd_flash.data.table import find_weights, read_table
from otdd_flash.errors import InputError
from otdd_flash.shown import listing


def read_arrays(
    request: Request,
    *,
    path: str | Path | None = None,
    labels_path: str | Path | None = None,
    features: str | Sequence[str] | None = None,
    label: Word | None = None,
    drop_unlabelled: bool = False,
) -> LabeledDataset:
    """Read vectors (n, d) or images (n, h, w[, c]), with labels and weights if there are any.

    Args:
        request: the shared options; `weights` is an npz key (default `w`), a column or a file.
        path: a .npz, .npy, .csv or .parquet file.
        labels_path: a .npy file of labels (n,), for any of these.
        features: the npz key of the inputs (default `x`), or the columns of a table that are inputs
            (default: all columns but label and weights).
        label: the npz key (default `y`) or column of the labels; a table's label column is found by
            its name or as its only text column. An npz key `class_names` gives the names of the
            integer labels under `y`.
        drop_unlabelled: leave out the rows whose label is missing, instead of refusing them.

    Raises:
        InputError: a file, key or column is missing, unreadable or ambiguous; labels are given in
            two ways; lengths disagree.

    Warns:
        DataNotice: which columns of a table were chosen, if they are not named; that weights were
            found, that there are no labels, or that keys of an npz file are not read.
    """
    request.one_part()
    file = request.locate("path", path)
    names: NDArray[Any] | None = None
    choices: tuple[str, ...] = ()
    feature_names: tuple[str, ...] | None = None
    if labels_path is not None and label is not None:
        raise InputError(f"give label={label} or labels_path={labels_path}, and not both")
    match file.suffix.lower():
        case ".npz":
            inputs, labels, weights, names, choices = _read_npz(
                file, features, label, request.weights, skip_label=labels_path is not None
            )
        case ".npy":
            for key, value in (("features", features), ("label", label)):
                if value is not None:
                    raise InputError(
                        f"{key}={value} has no meaning for {file}, which holds one array; leave it "
                        "out, and give labels as labels_path=FILE.npy"
                    )
            inputs, labels, weights = read_npy(file), None, None
        case ".csv" | ".parquet":
            columns = [features] if isinstance(features, str) else features
            skip_label = labels_path is not None
            inputs, labels, weights, choices, feature_names = read_table(
                file, columns, label, request.weights, skip_label=skip_label
            )
        case _:
            raise InputError(
                f"arrays cannot read {file}: its name must end in npz, npy, csv or parquet"
            )
    if labels_path is not None:
        labels, names = read_npy(request.locate("labels_path", labels_path)), None
    inputs, modality = as_inputs(inputs, str(file))
    return LabeledDataset.from_raw(
        inputs,
        labels,
        modality=modality,
        name=file.stem,
        class_names=None if names is None else names.tolist(),
        weights=request.masses() if weights is None else weights,
        drop_unlabelled=drop_unlabelled,
        choices=choices,
        feature_names=feature_names,
    )


def read_npy(path: Path) -> NDArray[Any]:
    """Read one array, mapped rather than copied into memory."""
    with reading(path):
        values: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return values


def _read_npz(
    path: Path,
    features: str | Sequence[str] | None,
    label: str | None,
    weights: str | None,
    *,
    skip_label: bool,
) -> tuple[
    NDArray[Any],
    NDArray[Any] | None,
    NDArray[Any] | None,
    NDArray[Any] | None,
    tuple[str, ...],
]:
    """Read inputs, labels, weights, class names, and the choices made beside the keys x and y."""
    if features is not None and not isinstance(features, str):
        raise InputError(f"features={list(features)}: an npz file has its inputs under one key")
    with reading(path), np.load(path, allow_pickle=False) as archive:
        keys = tuple(archive.files)

        def read(key: str) -> NDArray[Any]:
            if key not in keys:
                raise InputError(f"{path} has no key {key!r}; its keys are: {', '.join(keys)}")
            return np.asarray(archive[key])

        label = label or ("y" if "y" in keys and not skip_label else None)
        labels = None if label is None else read(label)
        named = label == "y" and "class_names" in keys and read("y").dtype.kind in "iu"
        weight_key = find_weights(keys, weights or ("w" if "w" in keys else None), str(path))
        inputs = read(features or "x")
        taken = {features or "x", label, weight_key, *(("class_names",) if named else ())}
        choices = [] if weights or weight_key is None else [f"weights are its key {weight_key!r}"]
        if label is None and not skip_label:
            choices.append("it is taken as unlabelled, as it has no key 'y'")
        if unread := [key for key in keys if key not in taken]:
            choices.append(f"not read: {listing(unread, 10)}")
        return (
            inputs,
            labels,
            None if weight_key is None else read(weight_key),
            read("class_names") if named else None,
            chosen(str(path), choices, "features=KEY, label=KEY and weights=KEY"),
        )
