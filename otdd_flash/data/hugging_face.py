"""Datasets of the `datasets` library: from the hub, from local files, or given as an object.

`data.registry` calls `read_hugging_face` for `huggingface` datasets; `data.given` calls
`labeled_table` for a `datasets.Dataset` in memory; `data.writing` uses `without_progress_bars`.

A change must keep the following rules. Without `download` no address is opened, be it in `path`, in
a folder's README or in a row, because a dataset may come from others. For the same reason a local
folder may name data files inside it only. Values are read in Arrow format, in which the library
decodes and fetches nothing by itself. Numbers that a reader has rounded are refused, where `path`
is a csv or json file, its address, or a local folder of such files. The library takes long to
import, so it is imported in the functions that use it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.arguments import Word
from otdd_flash.checks import shown
from otdd_flash.data.arrays import (
    LABEL_NAMES,
    TARGETS,
    check_columns,
    check_rounded_text,
    check_spelled,
    find_label,
    find_weights,
    listed,
)
from otdd_flash.data.dataset import (
    LabeledDataset,
    LazyItems,
    Modality,
    Request,
    as_inputs,
    chosen,
    reading,
)
from otdd_flash.data.images import open_image, plain_image, rgb_image
from otdd_flash.errors import InputError
from otdd_flash.offline import ALLOW, is_address, network
from otdd_flash.raw_labels import Column, columns_of
from otdd_flash.real_numbers import LARGEST_IN_DOUBLE, side_by_side
from otdd_flash.shown import listing

FILE_FORMATS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".arrow": "arrow",
}
# Formats that store numbers as text.
TEXT_FORMATS = ("csv", "json")


def read_hugging_face(
    request: Request,
    *,
    path: str | Path | None = None,
    config: Word | None = None,
    input: str | Sequence[str] | None = None,
    label: Word | None = None,
    drop_unlabelled: bool = False,
) -> LabeledDataset:
    """Read images, texts or numbers with labels from a Hugging Face dataset.

    Without `download` no address is opened, be it in `path`, in a folder's README or in a row.

    Args:
        request: the shared options; `weights` is a column or a file.
        path: a parquet, csv, json or arrow file; a folder (of such files, of images, or written by
            `save_to_disk`); or a name on the hub.
        config: one of the configurations of a dataset on the hub, or of a folder whose README names
            some.
        input: the input column, or several numeric ones; None chooses it if the types of the
            columns leave one choice only.
        label: the label column; None chooses the only ClassLabel, or a column by its usual name.
            Floats, or lists of them, in a column called `targets` are numbers.
        drop_unlabelled: leave out the rows whose label is missing, instead of refusing them.

    Raises:
        InputError: nothing is there or it is unreadable, no such split or column, or an ambiguous
            choice.

    Warns:
        DataNotice: which columns were chosen, if they are not named.
    """
    if not path:
        raise InputError("huggingface needs path=PATH or path=HUB_NAME")
    path = str(path)
    opened, texts = _open(request, path, config)
    table = _one_split(opened, request.split, path)
    if len(table) == 0:
        raise InputError(f"{path} is empty: it has no rows in split={request.split}")
    title = Path(path).name if request.split == "all" else f"{Path(path).name} {request.split}"
    return labeled_table(
        table,
        title,
        path,
        request,
        texts=texts,
        input=input,
        label=label,
        drop_unlabelled=drop_unlabelled,
    )


def labeled_table(
    table: Any,
    title: str,
    path: str,
    request: Request,
    *,
    texts: Sequence[str] = (),
    input: str | Sequence[str] | None = None,
    label: str | None = None,
    drop_unlabelled: bool | None = None,
) -> LabeledDataset:
    """Build a dataset from the input, label and weight columns of a `datasets.Dataset`.

    Args:
        table: the dataset, with at least one row.
        title: its name in reports.
        path: its name in messages.
        request: `weights` is a column or a file, `download` says whether addresses are opened.
        texts: the text files that it was read from.
        input: the input column, as for `read_hugging_face`.
        label: the label column.
        drop_unlabelled: whether to leave out rows without a label; None if the caller has no such
            option, which messages then do not offer.

    Raises:
        InputError: no such column, or an ambiguous choice.

    Warns:
        DataNotice: which columns were chosen, if they are not named.
    """
    columns, label, weights, modality, choices = _choose_columns(
        table.features, input, label, request.weights, path
    )
    labels, class_names, targets = None, None, None
    if label == TARGETS and _is_float(table.features[label]):
        targets = _numbers(table, [label], path).astype(np.float64).reshape(len(table), -1)
    elif label is not None:
        labels = _labels(table, label, texts, path)
        feature = table.features[label]
        class_names = getattr(getattr(feature, "feature", feature), "names", None)
        if hasattr(feature, "feature") and class_names is not None:
            # Lists of class labels are no indicator, whatever they hold.
            labels = [None if row is None else set(row) for row in labels]
    feature_names = None
    numbers = columns if modality == "array" else []
    others = [] if weights is None else [weights]
    # Integers of labels are exact.
    if label is not None and _is_float(table.features[label]):
        others.append(label)
    if texts and (numeric := [*numbers, *others]):
        _check_rounded(table, numeric, texts)
    inputs: NDArray[Any] | LazyItems
    if modality == "array":
        inputs, modality = as_inputs(_numbers(table, columns, path), path)
        # A column of lists has several features, which have no names.
        if inputs.shape[1:] == (len(columns),):
            feature_names = tuple(columns)
    else:
        # Inputs are read in Arrow format, as the library would decode images, and fetch them, by
        # itself.
        stored = table.select_columns(columns).with_format("arrow")
        fetch = partial(_item, stored, table.features[columns[0]], request.download, path)
        inputs = LazyItems(fetch, np.arange(len(table)))
    return LabeledDataset.from_raw(
        inputs,
        labels,
        targets=targets,
        class_names=class_names,
        weights=request.masses() if weights is None else _values(table, weights),
        modality=modality,
        name=title,
        drop_unlabelled=drop_unlabelled,
        choices=choices,
        feature_names=feature_names,
    )


def _open(request: Request, path: str, config: str | None) -> tuple[Any, list[str]]:
    """Return the dataset or its splits, and the text files that were read for it."""
    import datasets

    suffix = Path(path).suffix.lower()
    if is_address(path):
        texts = [path] if FILE_FORMATS.get(suffix) in TEXT_FORMATS else []
        return _from_hub(request, path, config), texts
    local = suffix in FILE_FORMATS or path.startswith(("/", "."))
    places = (Path(path), request.root / path)
    if not local and not any(place.exists() for place in places):
        return _from_hub(request, path, config), []
    found = request.locate("path", path)
    with reading(found), network(allowed=request.download), without_progress_bars():
        saved = any((found / mark).exists() for mark in ("state.json", "dataset_dict.json"))
        known = () if found.is_file() or saved else datasets.get_dataset_config_names(str(found))
        if config is not None and config not in known:
            there = f"its configurations are: {', '.join(known)}" if known else "it has none"
            raise InputError(f"{found} has no configuration {config!r}, {there}; leave config out")
        if saved:
            _check_inside(found, _saved_files(found))
            return datasets.load_from_disk(str(found)), []
        if not found.is_file():
            texts = _texts_inside(found, config)
            return datasets.load_dataset(str(found), config), texts
        if suffix not in FILE_FORMATS:
            raise InputError(f"{found} must end in one of: {', '.join(FILE_FORMATS)}")
        file_format = FILE_FORMATS[suffix]
        texts = [str(found)] if file_format in TEXT_FORMATS else []
        return datasets.load_dataset(file_format, data_files=str(found)), texts


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silence the library's progress bars, which would disturb those of the commands."""
    import datasets

    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not silent:
            datasets.enable_progress_bars()


def _texts_inside(folder: Path, config: str | None) -> list[str]:
    """Return the files of a folder that store numbers as text.

    Raises:
        InputError: the folder's README names files elsewhere.
    """
    import datasets

    builder = datasets.load_dataset_builder(str(folder), config)
    files = [str(file) for part in (builder.config.data_files or {}).values() for file in part]
    _check_inside(folder, files)
    return files if builder.name in TEXT_FORMATS else []


def _saved_files(folder: Path) -> list[str]:
    """Return the data files that a folder written by `save_to_disk` names, of all its splits."""
    parts = [folder]
    if (marks := folder / "dataset_dict.json").exists():
        parts = [folder / split for split in json.loads(marks.read_text("utf-8"))["splits"]]
    files = []
    for part in parts:
        state = json.loads((part / "state.json").read_text("utf-8"))
        files += [os.path.join(part, file["filename"]) for file in state["_data_files"]]
    return files


def _check_inside(folder: Path, files: Sequence[str]) -> None:
    """Refuse a folder that names data files outside of it, such as ../../secret.csv.

    Links inside the folder are followed: the hub's cache consists of them.

    Raises:
        InputError: a data file is outside of the folder.
    """
    # The library names files by the folder's path with its links resolved or not; links inside the
    # folder are never resolved.
    inside = tuple(os.path.join(kind(folder), "") for kind in (os.path.abspath, os.path.realpath))
    for file in files:
        if not os.path.abspath(file).startswith(inside):
            raise InputError(
                f"{folder} names a data file outside of it, {file}; give that file as path, if it "
                "is meant"
            )


def _from_hub(request: Request, path: str, config: str | None) -> Any:
    import datasets

    file_format = FILE_FORMATS.get(Path(path).suffix.lower())
    try:
        with network(allowed=request.download):
            if is_address(path) and not request.download:
                raise InputError("it is an address")
            if is_address(path) and file_format is not None:
                return datasets.load_dataset(file_format, data_files=path)
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
    # In Arrow format labels are neither decoded nor fetched.
    values: list[Any] = table.select_columns([column]).with_format("arrow")[:][column].to_pylist()
    return values


def _columns(table: Any, columns: Sequence[str]) -> list[Column]:
    # The library itself reads float64 as float32, and wraps the largest integers.
    found = columns_of(table.select_columns(list(columns)).with_format("arrow")[:])
    assert found is not None
    return found


def _labels(table: Any, column: str, texts: Sequence[str], path: str) -> list[Any]:
    """Return the labels of a column, in lists where a row has several.

    Raises:
        InputError: a row has a record for a label; the message names the first.
    """
    labels = _values(table, column)
    for row, label in enumerate(labels):
        if isinstance(label, dict):
            raise InputError(
                f"label={column} of {path} has records, {shown(label)} in row {row}, and labels "
                "are integers, texts, numbers or lists of them; name another column, or make one"
            )
    if any(text.lower().endswith(".csv") for text in texts):
        # pandas reads integers beyond 64 bits as text, and missing values beside them as "".
        return [None if label == "" else label for label in labels]
    return labels


def _check_rounded(table: Any, columns: Sequence[str], texts: Sequence[str]) -> None:
    """Refuse numbers of text files that their readers rounded.

    Raises:
        InputError: a number was rounded; the message names the file and its row.
    """
    floats = [c.values for c in _columns(table, columns) if c.values.dtype.kind == "f"]
    if not any(bool((np.abs(values) >= LARGEST_IN_DOUBLE).any()) for values in floats):
        return
    for file in texts:
        with reading(Path(file)):
            match Path(file).suffix.lower():
                case ".csv":
                    import pandas as pd

                    rows = pd.read_csv(file)
                    check_rounded_text(file, rows, [c for c in columns if c in rows.columns])
                case ".json" | ".jsonl":
                    for row, record in enumerate(_records(file)):
                        for column in columns:
                            for number in _decimals(record.get(column)):
                                check_spelled(f"column {column!r} of {file}", number, row)
                case _:
                    raise InputError(
                        f"{file} holds numbers beyond 2^53 and is not read again to see whether "
                        "they were rounded; save it as parquet"
                    )


def _records(file: str) -> list[dict[str, Any]]:
    """Return the rows of a json file (an array, or one row a line), with numbers as Decimal."""
    import fsspec

    with fsspec.open(file, "rt", encoding="utf-8") as stream:
        text = stream.read()
    decoder = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal)
    try:
        found = decoder.decode(text)
    except json.JSONDecodeError:
        found = [decoder.decode(line) for line in text.splitlines() if line.strip()]
    return found if isinstance(found, list) else [found]


def _decimals(value: Any) -> Iterator[Decimal]:
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, Decimal):
            yield part
        elif isinstance(part, list):
            yield from _decimals(part)


def _numbers(table: Any, columns: Sequence[str], path: str) -> NDArray[Any]:
    """Return one column in its own shape, or several side by side as a matrix."""
    found = _columns(table, columns)
    for column in found:
        if any(isinstance(value, list) for value in column.values[:1].flat):
            raise InputError(
                f"{path}: rows of its column {column.name!r} have different numbers of entries; "
                "pad or cut them to one length"
            )
    return side_by_side(f"{path}: inputs", found)


def _item(table: Any, feature: Any, download: bool, path: str, row: int) -> Any:
    """Read one row of a table with one column, an image or a text."""
    place = f"row {row} of {path}"
    (column,) = table.column_names
    with reading(Path(place)):
        value = table[row][column][0].as_py()
    if value is None:
        raise InputError(f"{place} has nothing in its column {column!r}")
    if not isinstance(value, dict):
        return value
    content, source = value.get("bytes"), value.get("path")
    if content is not None:
        image = open_image(content, place)
    elif not source:
        raise InputError(f"{place} has neither bytes nor a path in its column {column!r}")
    elif not is_address(source):
        image = open_image(source, place)
    elif not download:
        raise InputError(
            f"{place} is the address {source} of an image, and {ALLOW} it, where otdd.load or a "
            "command reads the dataset"
        )
    else:
        with reading(Path(place)):
            image = plain_image(feature.decode_example({"bytes": None, "path": source}))
    match feature.mode:
        case "RGB":
            return rgb_image(image)
        case "L":
            return rgb_image(image).convert("L")
    return image


MODALITIES: Mapping[str, Modality] = {"image": "image", "text": "text", "number": "array"}


def _choose_columns(
    features: Mapping[str, Any],
    inputs: str | Sequence[str] | None,
    label: str | None,
    weights: str | None,
    where: str,
) -> tuple[list[str], str | None, str | None, Modality, tuple[str, ...]]:
    """Find the columns by their types, or check the ones that the user named.

    Without names, the label is the only ClassLabel, or the only column of lists of them in a table
    without lists of words; among several ClassLabels, and without any, it is the column with a
    usual name, or else floats called `targets`. The input is the only image column, whatever else
    there is. Otherwise it is the only text column or all columns of numbers, if the other of these
    two kinds and images are missing.

    Returns:
        The input columns, of which there are several only if they hold numbers; the label and the
        weight column, or None; the kind of an input; the choices that were reported.

    Raises:
        InputError: no such column, or no single reading is possible; the message lists the columns.

    Warns:
        DataNotice: which columns were chosen, if they are not named.
    """
    kinds = {column: _kind(feature) for column, feature in features.items()}
    named = [inputs] if isinstance(inputs, str) else list(inputs or ())
    check_columns([*named, label], tuple(kinds), where)
    weight_column = find_weights(tuple(kinds), weights, where)
    choices: list[str] = []
    free = [column for column in kinds if column not in (weight_column, *named)]
    if label is None:
        classes = _class_columns(features, [c for c in free if kinds[c] == "class"])
        usual = any(column.lower() in LABEL_NAMES for column in free)
        if not classes and not usual and TARGETS in free and _is_float(features[TARGETS]):
            label, choices = TARGETS, [f"numbers are its column {TARGETS!r}, by its name"]
        else:
            label, choices = find_label(classes or free, classes, where, kind="class labels")
    taken = named or _find_inputs({c: kinds[c] for c in free if c != label}, where)
    if not named:
        others = "column" if len(taken) == 1 else f"{len(taken)} columns"
        choices.append(f"inputs are its {others} of kind {kinds[taken[0]]}: {listing(taken, 10)}")
    modality = _modality(taken, kinds, where)
    reported = chosen(where, choices, "label=COLUMN and input=COLUMN")
    return taken, label, weight_column, modality, reported


def _class_columns(features: Mapping[str, Any], classes: Sequence[str]) -> list[str]:
    """Return those of the columns of class labels that may be chosen as labels of rows."""
    single = [column for column in classes if not hasattr(features[column], "feature")]
    words = any(
        "string" in str(getattr(getattr(feature, "feature", None), "dtype", ""))
        for feature in features.values()
    )
    # Beside lists of words, lists of class labels are of these.
    return single or ([] if words else [*classes])


def _find_inputs(kinds: Mapping[str, str], where: str) -> list[str]:
    by_kind = {kind: [column for column in kinds if kinds[column] == kind] for kind in MODALITIES}
    if len(by_kind["image"]) == 1:
        return by_kind["image"]
    readings = [columns for columns in by_kind.values() if columns]
    # Several columns are one input only if they are numbers.
    if len(readings) == 1 and (by_kind["number"] or len(readings[0]) == 1):
        return readings[0]
    raise InputError(
        f"{where}: cannot tell which column is the input; choose with input=COLUMN; "
        f"{listed(tuple(kinds))}"
    )


def _modality(inputs: Sequence[str], kinds: Mapping[str, str], where: str) -> Modality:
    kind, *others = {kinds[column] for column in inputs}
    if kind in MODALITIES and not others and (len(inputs) == 1 or kind == "number"):
        return MODALITIES[kind]
    described = ", ".join(f"{column} ({kinds[column]})" for column in inputs)
    raise InputError(
        f"{where}: the input must be one image column, one text column or columns of numbers, "
        f"got {described}"
    )


def _is_float(feature: Any) -> bool:
    """Return whether a column holds floats, or lists of them."""
    return str(getattr(getattr(feature, "feature", feature), "dtype", "")).startswith("float")


def _kind(feature: Any) -> str:
    """Return what a column of this type holds: class, other or one of MODALITIES.

    Lists count as their innermost values.
    """
    import datasets

    if isinstance(feature, datasets.ClassLabel):
        return "class"
    if isinstance(feature, datasets.Image):
        return "image"
    nested = getattr(feature, "feature", None)
    if nested is not None:
        return kind if (kind := _kind(nested)) in ("number", "class") else "other"
    dtype = str(getattr(feature, "dtype", ""))
    if isinstance(feature, datasets.Value) and "string" in dtype:
        return "text"
    return "number" if dtype.startswith(("int", "uint", "float", "bool", "decimal")) else "other"
