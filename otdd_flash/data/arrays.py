"""Arrays of the user's own files: npz archives, .npy files, csv and parquet tables.

`data.registry` calls `read_arrays` for the source `arrays`; `flows.functionals` calls `read_npy`;
`data.writing` reads `TARGETS`. `data.hugging_face` chooses its columns by `check_columns`,
`find_label` and `find_weights`, names them by `listed`, reads LABEL_NAMES and `TARGETS`, and checks
text files by `check_rounded_text` and `check_spelled`.

Pickled objects must never be loaded, because loading them runs code that a file may hold. .npy
files must be mapped, not copied, because they may exceed the memory. An ambiguous choice of columns
must be an error, and any choice that the user did not make must be reported in a notice. No integer
may be rounded silently: pandas reads those of a column with decimals as floats. pandas must be
imported in the functions that use it, because its import takes half a second.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.arguments import Word
from otdd_flash.checks import shown
from otdd_flash.data.dataset import LabeledDataset, Request, as_inputs, chosen, reading
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.label_sets import split_text
from otdd_flash.raw_labels import columns_of
from otdd_flash.real_numbers import LARGEST_IN_DOUBLE, inexact, side_by_side
from otdd_flash.shown import listing

# pandas' name for a first column without a name, which `to_csv` writes for the row index.
NAMELESS = "Unnamed: 0"

# The pandas types with their own missing values, in which integers stay integers beside gaps.
NULLABLE = "numpy_nullable"

# Integers of 19 digits are the shortest that may exceed 64 bits.
LONG_INTEGER = r"\s*[+-]?\d{19,}\s*"

NUMBER = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"

# Usual names of a label column, in lower case; a further name may make files ambiguous that were
# read.
LABEL_NAMES = ("label", "labels", "class", "target", "y")

# The npz key, or column of a Hugging Face dataset, whose floats are numbers.
TARGETS = "targets"


def read_arrays(
    request: Request,
    *,
    path: str | Path | None = None,
    labels_path: str | Path | None = None,
    features: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    label_separator: Word | None = None,
    drop_unlabelled: bool = False,
) -> LabeledDataset:
    """Read vectors (n, d) or images (n, h, w[, c]), with labels and weights if there are any.

    Args:
        request: the shared options; `weights` is an npz key (default `w`), a column or a file.
        path: a .npz, .npy, .csv or .parquet file.
        labels_path: a .npy file of labels, one entry or row for each input, for an input file of
            any of these formats.
        features: the npz key of the inputs (default `x`), or the columns of a table that are inputs
            (default: all columns but label and weights).
        label: the npz key (default `y`) or column of the labels; a table's label column is found by
            its name or as its only text column. An npz key `class_names` gives the names of
            integer labels, if these are under `y`. Without `y`, floats under `targets` are numbers.
            Several columns of a table are an indicator of labels, of 0 and 1, or numbers; a row
            with an empty cell among them has no label.
        label_separator: what stands between several labels in one text column, such as "|".
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
    skip_label = labels_path is not None
    named = [label] if isinstance(label, str) else list(label or ())
    label, is_table = next(iter(named), None), file.suffix.lower() in (".csv", ".parquet")
    one_column = is_table and len(named) == 1
    if (len(named) > 1 and not is_table) or (label_separator and not one_column):
        raise InputError(
            "several columns of labels, and label_separator for one column of text, are of a csv "
            f"or parquet file, and with label=COLUMN; got {file.name}"
        )
    if len(set(named)) < len(named):
        raise InputError(f"label={named} names a column twice")
    if skip_label and label is not None:
        raise InputError(f"give label={label} or labels_path={labels_path}, and not both")
    found: dict[str, Any]
    match file.suffix.lower():
        case ".npz":
            found = _read_npz(file, features, label, request.weights, skip_label=skip_label)
        case ".npy":
            for key, value in (("features", features), ("label", label)):
                if value is not None:
                    raise InputError(
                        f"{key}={value} has no meaning for {file}, which holds one array; leave it "
                        "out, and give labels as labels_path=FILE.npy"
                    )
            found = {"inputs": read_npy(file)}
        case ".csv" | ".parquet":
            columns = [features] if isinstance(features, str) else features
            several = named if len(named) > 1 else label
            found = _read_table(file, columns, several, request.weights, skip_label=skip_label)
            if len(named) == 1:
                _check_texts(found["labels"], label_separator, f"column {label!r} of {file}")
            if label_separator is not None:
                found["labels"] = split_text(found["labels"], label_separator)
        case _:
            raise InputError(
                f"arrays cannot read {file}: its name must end in npz, npy, csv or parquet"
            )
    if skip_label:
        found["labels"] = read_npy(request.locate("labels_path", labels_path))
    found["inputs"], modality = as_inputs(found["inputs"], str(file))
    if found.get("weights") is None:
        found["weights"] = request.masses()
    return LabeledDataset.from_raw(
        **{"labels": None, **found},
        modality=modality,
        name=file.stem,
        drop_unlabelled=drop_unlabelled,
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
) -> dict[str, Any]:
    """Read an npz file; return what `LabeledDataset.from_raw` takes, by the arguments' names."""
    if features is not None and not isinstance(features, str):
        raise InputError(f"features={list(features)}: an npz file has its inputs under one key")
    with reading(path), np.load(path, allow_pickle=False) as archive:
        keys = tuple(archive.files)

        def read(key: str) -> NDArray[Any]:
            if key not in keys:
                raise InputError(f"{path} has no key {key!r}; its keys are: {', '.join(keys)}")
            return np.asarray(archive[key])

        label = label or ("y" if "y" in keys and not skip_label else None)
        if label is None and not skip_label and TARGETS in keys:
            label = TARGETS if read(TARGETS).dtype.kind == "f" else None
        weight_key = find_weights(keys, weights or ("w" if "w" in keys else None), str(path))
        taken = {"inputs": features or "x", "labels": label, "weights": weight_key}
        if label == "y" and "class_names" in keys and read("y").dtype.kind in "iu":
            taken["class_names"] = "class_names"
        choices = [] if weights or weight_key is None else [f"weights are its key {weight_key!r}"]
        if label is None and not skip_label:
            choices.append("it is taken as unlabelled, as it has no key 'y'")
        if unread := [key for key in keys if key not in taken.values()]:
            choices.append(f"not read: {listing(unread, 10)}")
        found: dict[str, Any] = {name: read(key) for name, key in taken.items() if key is not None}
        if label == TARGETS and found["labels"].dtype.kind == "f":
            found["targets"] = _numbers(found.pop("labels"), str(path))
        found["choices"] = chosen(str(path), choices, "features=KEY, label=KEY and weights=KEY")
        return found


def _numbers(values: NDArray[Any], where: str) -> NDArray[np.float64]:
    """Return the key `targets` of an npz file as numbers (n, q).

    Raises:
        InputError: they are no such array.
    """
    if values.ndim not in (1, 2) or values.size == 0:
        raise InputError(f"{where}: targets must be (n,) or (n, q), got shape {values.shape}")
    return values.astype(np.float64).reshape(len(values), -1)


def _read_table(
    path: Path,
    features: Sequence[str] | None,
    label: str | Sequence[str] | None,
    weights: str | None,
    *,
    skip_label: bool,
) -> dict[str, Any]:
    """Read the columns of a csv or parquet file; return what `LabeledDataset.from_raw` takes.

    Raises:
        InputError: unreadable file, no such column, two of one name, text in an input column, or an
            ambiguous label.

    Warns:
        DataNotice: which columns were chosen, if they are not named.
    """
    import pandas as pd

    with reading(path):
        is_text = path.suffix.lower() == ".csv"
        table = _csv(path) if is_text else pd.read_parquet(path, dtype_backend=NULLABLE)
    if len(table) == 0:
        raise InputError(f"{path} is empty: it has no rows")
    table.columns = [str(column) for column in table.columns]
    if table.columns[0] == NAMELESS:
        table = table.drop(columns=NAMELESS)
        warn(
            f"{path}: its first column has no name, is taken for row numbers and left out",
            DataNotice,
        )
    columns, choices = tuple(table.columns), list[str]()
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise InputError(f"{path} has several columns {twice[0]!r}; give each a name of its own")
    labels = [label] if isinstance(label, str) else list(label or ())
    check_columns([*(features or ()), *labels], columns, str(path))
    weight_column = find_weights(columns, weights, str(path))
    # All columns that are not numeric: text, but also dates and lists.
    text = [c for c in columns if not pd.api.types.is_numeric_dtype(table[c])]
    if label is None and not skip_label:
        free = [c for c in columns if c not in (weight_column, *(features or ()))]
        label, choices = find_label(free, [c for c in free if c in text], str(path))
        labels = [] if label is None else [label]
    taken = {*labels, weight_column}
    inputs = list(features) if features else [c for c in columns if c not in taken]
    if not features:
        others = "other column" if len(inputs) == 1 else f"{len(inputs)} other columns"
        choices.append(f"inputs are its {others}: {listing(inputs, 10)}")
    if not inputs:
        raise InputError(f"{path} has no input column besides {label!r}; {listed(columns)}")
    numeric = inputs if weight_column is None else [*inputs, weight_column]
    for column in numeric:
        if column in text and not _holds_numbers(table, column, is_text=is_text):
            first = next(iter(table[column].dropna()), "")
            way_out = "name the inputs with features=[...]"
            if column == weight_column:
                way_out = "name another with weights=COLUMN"
            elif isinstance(first, list | np.ndarray):
                way_out = f"read it with huggingface, which takes lists, or {way_out}"
            raise InputError(
                f"column {column!r} of {path} holds "
                f"{'text' if isinstance(first, str) else shown(first)}, not numbers; {way_out}; "
                f"{listed(columns)}"
            )
    if is_text:
        check_rounded_text(path, table, [*numeric, *labels])
    numbers = columns_of(table[inputs])
    assert numbers is not None
    way_out = "features=[COLUMN, ...]" if skip_label else "label=COLUMN and features=[COLUMN, ...]"
    return {
        "inputs": side_by_side(f"{path}: inputs", numbers, double=True),
        "labels": table[labels[0]] if len(labels) == 1 else _label_columns(table, labels, path),
        "weights": None if weight_column is None else table[weight_column],
        "choices": chosen(str(path), choices, way_out),
        "feature_names": tuple(inputs),
    }


# Texts of lists, as Python writes them.
LISTED = r"\[.*[,'\"].*\]"


def _check_texts(column: Any, separator: str | None, what: str) -> None:
    """Refuse a separator for lists, and tell of texts that it does not cut as it seems they should.

    Raises:
        InputError: there is a separator, and the column holds lists.

    Warns:
        DataNotice: texts look like lists, or none has the separator.
    """
    present = column.dropna()
    if any(isinstance(entry, list | np.ndarray) for entry in present):
        if separator is None:
            return
        raise InputError(
            f"{what} holds lists, which are several labels already; leave label_separator out"
        )
    texts = [entry for entry in present if isinstance(entry, str)]
    listed = [text for text in texts if re.fullmatch(LISTED, text.strip())]
    if listed:
        warn(
            f"{what}: texts such as {shown(listed[0])} are read as they stand, with their brackets "
            "and quotes; store lists as parquet, or as texts such as cat|dog with a separator",
            DataNotice,
        )
    elif separator is not None and texts and not any(separator in text for text in texts):
        warn(
            f"{what}: no text has label_separator={separator!r}, such as {shown(texts[0])}",
            DataNotice,
        )


def _label_columns(table: Any, labels: Sequence[str], path: Path) -> Any:
    """Return several label columns of a table: those of 0 and 1 with their names, or numbers."""
    if not labels:
        return None
    columns = columns_of(table[labels])
    assert columns is not None
    if any(column.values.dtype.kind not in "iufb" for column in columns):
        raise InputError(
            f"{path}: columns {listing(labels)} of labels must hold 0 and 1, or numbers"
        )
    values = [np.where(c.missing, np.nan, c.values.astype(np.float64)) for c in columns]
    found = type(table)(dict(zip(labels, values, strict=True)))
    is_indicator = bool((found.isna() | found.isin([0, 1])).all(axis=None))
    if not is_indicator:
        return found.to_numpy()
    # A row whose labels are not all known counts as one without labels, which the caller refuses.
    found[found.isna().any(axis=1)] = 0
    return found


def _csv(path: Path) -> Any:
    """Read a csv file without taking its first field for row names.

    pandas does that where rows have one field more than the first line; `index_col=False` makes it
    a warning, which is an error here.

    Raises:
        InputError: rows have more fields than the first line names.
    """
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            table = pd.read_csv(path, index_col=False, dtype_backend=NULLABLE)
        except pd.errors.ParserWarning:
            raise InputError(
                f"{path}: its rows have more fields than its first line names, so that it is open "
                "which names belong to which; name every column"
            ) from None
    for place, dtype in enumerate(table.dtypes):
        if isinstance(dtype, pd.StringDtype):
            column = table.columns[place]
            if bool(table[column].str.fullmatch(LONG_INTEGER).any()):
                # Integers beyond 64 bits come as text, and pandas has lost which entries are
                # missing: read the column again, as text.
                table[column] = _texts(path, place)
    # pandas renames columns of one name to label and label.1.
    first = pd.read_csv(path, index_col=False, header=None, nrows=1, dtype=str)
    names = [str(name) for name in first.iloc[0].fillna("")]
    if len(names) == len(table.columns):
        table.columns = [
            name if name and names.count(name) > 1 else column
            for name, column in zip(names, table.columns, strict=True)
        ]
    return table


def _texts(path: Path | str, place: int) -> Any:
    """Read a column as the file spells it."""
    import pandas as pd

    return pd.read_csv(path, index_col=False, usecols=[place], dtype="string").iloc[:, 0]


def _holds_numbers(table: Any, column: str, *, is_text: bool) -> bool:
    """Return whether a column that pandas left as text holds decimals or integers beyond 64 bits.

    If so, those of a csv file (`is_text`) become Decimals in `table`.
    """
    present = table[column].dropna()
    if len(present) and all(isinstance(value, Decimal) for value in present):
        return True
    texts = present.astype(str)
    if not is_text or not len(texts) or not bool(texts.str.fullmatch(NUMBER).all()):
        return False
    table[column] = table[column].astype(object).map(Decimal, na_action="ignore")
    return True


def check_rounded_text(path: Path | str, table: Any, columns: Sequence[str]) -> None:
    """Refuse numbers of a csv file that pandas rounded.

    Args:
        path: the file, or its address.
        table: all its rows, as pandas read them.
        columns: the columns to check.

    Raises:
        InputError: a number was rounded; the message names its row.
    """
    import pandas as pd

    for column in columns:
        if not pd.api.types.is_float_dtype(table[column]):
            continue
        large = np.asarray((table[column].abs() >= LARGEST_IN_DOUBLE).fillna(False), dtype=bool)
        if not large.any():
            continue
        names = pd.read_csv(path, index_col=False, nrows=0).columns
        texts = _texts(path, names.get_loc(column))
        for row in np.flatnonzero(large).tolist():
            if re.fullmatch(NUMBER, texts.iloc[row]):
                check_spelled(f"column {column!r} of {path}", Decimal(texts.iloc[row].strip()), row)


def check_spelled(what: str, number: Decimal, row: int) -> None:
    """Refuse a number of at least 2^53 whose digits are not those of a float64 number.

    The nearest float64 number, rounded to as many digits as the text has, must equal the text. So
    the shortest text that identifies a float64 number, as `repr` writes it, passes.

    Raises:
        InputError: they differ.
    """
    nearest = float(number)
    if LARGEST_IN_DOUBLE <= abs(nearest) < np.inf:
        digits = len(number.as_tuple().digits)
        if Context(prec=digits).create_decimal_from_float(nearest) != number:
            raise inexact(what, int(number) if number == int(number) else number, (row,), None)


def check_columns(named: Iterable[str | None], columns: Sequence[str], where: str) -> None:
    """Refuse a name that the user gave and no column has; None among the names is skipped.

    Raises:
        InputError: there is such a name; the message lists the columns.
    """
    for column in named:
        if column is not None and column not in columns:
            raise InputError(f"{where} has no column {column!r}; {listed(columns)}")


def find_label(
    columns: Sequence[str], text: Sequence[str], where: str, *, kind: str = "text"
) -> tuple[str | None, list[str]]:
    """Find the label column: the one with a usual name, else the only one of `text`.

    Args:
        columns: the candidates.
        text: the candidates that may hold labels whatever they are called.
        where: the table's name, for messages.
        kind: what `text` columns hold, for messages.

    Returns:
        The column and the choice to report, or None and no choice if no column looks like labels.

    Raises:
        InputError: several columns are possible.

    Warns:
        DataNotice: no column looks like labels.
    """
    named = [column for column in columns if column.lower() in LABEL_NAMES]
    candidates = named or list(text)
    if len(candidates) > 1:
        raise InputError(
            f"{where}: the labels could be any of {listing(candidates)}; choose with "
            f"label=COLUMN; {listed(columns)}"
        )
    if not candidates:
        warn(
            f"{where} has no column that looks like labels and is taken as unlabelled; name "
            f"one with label=COLUMN; {listed(columns)}",
            DataNotice,
        )
        return None, []
    why = "by its name" if named else f"the only one of {kind}"
    return candidates[0], [f"labels are its column {candidates[0]!r}, {why}"]


def find_weights(columns: Sequence[str], weights: str | None, where: str) -> str | None:
    """Return `weights` if it is a column or key.

    None is returned if it is None, or the name of a .npy file, which `Request.masses` reads.

    Raises:
        InputError: it is none of these.
    """
    if weights is None or weights in columns:
        return weights
    if Path(weights).suffix.lower() == ".npy":
        return None
    raise InputError(
        f"{where} has no weights {weights!r}: name a column, a key or a .npy file; "
        f"there are: {listing(columns)}"
    )


def listed(columns: Sequence[str]) -> str:
    """Return a list of the columns for messages."""
    return f"its columns are: {listing(columns, 40)}"
