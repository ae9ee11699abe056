"""Tables: the columns of csv and parquet files, and the choice of columns of any table.

`data.arrays` calls `read_table` for csv and parquet files and `find_weights` for npz files.
`data.hugging_face` calls `choose_columns`, `check_rounded_text` and `check_spelled`.

A change must keep two promises. An ambiguous choice of columns is an error, and any choice that the
user did not make is reported. No integer is rounded silently, although pandas reads large ones as
floats. pandas is imported in the functions that use it, because its import takes half a second.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from otdd_flash.checks import shown
from otdd_flash.data.dataset import Modality
from otdd_flash.data.request import chosen, reading
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.raw_labels import columns_of
from otdd_flash.real_numbers import LARGEST_IN_DOUBLE, doubles_of_columns, inexact
from otdd_flash.shown import listing

# pandas' name for a first column without a name, which `to_csv` writes for the row index.
NAMELESS = "Unnamed: 0"

# The pandas types with their own missing values, in which integers stay integers beside gaps.
NULLABLE = "numpy_nullable"

# Integers of 19 digits are the shortest that may exceed 64 bits.
LONG_INTEGER = r"\s*[+-]?\d{19,}\s*"

NUMBER = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"

LABEL_NAMES = ("label", "labels", "class", "target", "y")


def read_table(
    path: Path,
    features: Sequence[str] | None,
    label: str | None,
    weights: str | None,
    *,
    skip_label: bool = False,
) -> tuple[NDArray[Any], Any, Any, tuple[str, ...], tuple[str, ...]]:
    """Read the input, label and weight columns of a csv or parquet file.

    Args:
        path: a csv or parquet file with column names.
        features: the input columns; None takes all but label and weights.
        label: the label column; None finds it by its name or as the only text column.
        weights: the weight column; a .npy file is left to the caller.
        skip_label: labels come from elsewhere, look for none.

    Returns:
        Inputs (n, d) float64, labels (n,) or None, weights (n,) or None, the choices made, and the
        names of the inputs.

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
    columns, choices = tuple(table.columns), []
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise InputError(f"{path} has several columns {twice[0]!r}; give each a name of its own")
    for column in [*(features or ()), *([label] if label else [])]:
        if column not in columns:
            raise InputError(f"{path} has no column {column!r}; {listed(columns)}")
    weight_column = find_weights(columns, weights, str(path))
    text = tuple(c for c in columns if not pd.api.types.is_numeric_dtype(table[c]))
    reserved = {weight_column, *(features or ())}
    if label is None and not skip_label:
        label, why = find_label(
            tuple(c for c in columns if c not in reserved),
            tuple(c for c in text if c not in reserved),
            str(path),
        )
        if label is not None:
            choices.append(f"labels are its column {label!r}, {why}")
    inputs = list(features) if features else [c for c in columns if c not in (label, weight_column)]
    if not features:
        others = "other column" if len(inputs) == 1 else f"{len(inputs)} other columns"
        choices.append(f"inputs are its {others}: {listing(inputs, 10)}")
    if not inputs:
        raise InputError(f"{path} has no input column besides {label!r}; {listed(columns)}")
    for column in [*inputs, *([weight_column] if weight_column else [])]:
        if column in text and not _holds_numbers(table, column, is_text=is_text):
            first = next(iter(table[column].dropna()), "")
            what = "text" if isinstance(first, str) else shown(first)
            way_out = f"name the inputs with features=[...]; {listed(columns)}"
            if column == weight_column:
                way_out = f"name another with weights=COLUMN; {listed(columns)}"
            elif isinstance(first, list | np.ndarray):
                way_out = f"read it with huggingface, which takes lists, or {way_out}"
            raise InputError(f"column {column!r} of {path} holds {what}, not numbers; {way_out}")
    if is_text:
        read = [*inputs, *([weight_column] if weight_column else [])]
        check_rounded_text(path, table, read)
    numbers = columns_of(table[inputs])
    assert numbers is not None
    way_out = "features=[COLUMN, ...]" if skip_label else "label=COLUMN and features=[COLUMN, ...]"
    return (
        doubles_of_columns(f"{path}: inputs", numbers),
        None if label is None else table[label],
        None if weight_column is None else table[weight_column],
        chosen(str(path), choices, way_out),
        tuple(inputs),
    )


def _csv(path: Path) -> Any:
    """Read a csv file; its first field is never taken for row names.

    pandas would take it so where rows have one field more than the first line (`index_col=False`).

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
                # Integers beyond 64 bits: pandas has lost which entries of the column are missing.
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


def _texts(path: Path, place: int) -> Any:
    """Read a column as the file spells it."""
    import pandas as pd

    return pd.read_csv(path, index_col=False, usecols=[place], dtype="string").iloc[:, 0]


def _holds_numbers(table: Any, column: str, *, is_text: bool) -> bool:
    """Return whether a text column of pandas holds decimals or integers beyond 64 bits.

    pandas leaves these as text when it reads a text file; they become Decimals in `table`.
    """
    present = table[column].dropna()
    if len(present) and all(isinstance(value, Decimal) for value in present):
        return True
    texts = present.astype(str)
    if not is_text or not len(texts) or not bool(texts.str.fullmatch(NUMBER).all()):
        return False
    table[column] = table[column].astype(object).map(Decimal, na_action="ignore")
    return True


def check_rounded_text(path: Path, table: Any, columns: Sequence[str]) -> None:
    """Refuse numbers of a csv file that pandas rounded.

    Args:
        path: the file.
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
    """Refuse a number from 2^53 on whose digits are not those of a float64 number.

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


def find_label(
    columns: Sequence[str], text: Sequence[str], where: str, *, kind: str = "text"
) -> tuple[str | None, str]:
    """Find the label column: the one with a usual name, else the only one of `text`.

    Args:
        columns: the candidates.
        text: those of them that may hold labels whatever their name.
        where: the table's name, for messages.
        kind: what `text` columns hold, for messages.

    Returns:
        The column and why it was chosen, or (None, "") if no column looks like labels.

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
        return None, ""
    return candidates[0], "by its name" if named else f"the only one of {kind}"


def find_weights(columns: Sequence[str], weights: str | None, where: str) -> str | None:
    """Return the column or key that `weights` names; None for a .npy file or no weights.

    Raises:
        InputError: it is neither.
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


Kind = Literal["image", "text", "number", "class", "other"]


@dataclass(frozen=True)
class Columns:
    """The columns that were chosen, and the choices to report.

    There are several `inputs` only if they are columns of numbers.
    """

    inputs: tuple[str, ...]
    label: str | None
    weights: str | None
    modality: Modality
    choices: tuple[str, ...]


def choose_columns(
    features: Mapping[str, Any],
    inputs: str | Sequence[str] | None,
    label: str | None,
    weights: str | None,
    where: str,
) -> Columns:
    """Find the columns by their types, or check the ones that the user named.

    Without names, the label is the only ClassLabel; among several ClassLabels, and without any, it
    is the column with a usual name. The input is the only image column, whatever else there is.
    Otherwise it is the only text column or all columns of numbers, if the other of these two kinds
    and images are missing.

    Raises:
        InputError: no such column, or no single reading is possible; the message lists the columns.

    Warns:
        DataNotice: which columns were chosen, if they are not named.
    """
    kinds = {column: _kind(feature) for column, feature in features.items()}
    named = [inputs] if isinstance(inputs, str) else list(inputs or ())
    for column in [*named, *([label] if label else [])]:
        if column not in kinds:
            raise InputError(f"{where} has no column {column!r}; {listed(tuple(kinds))}")
    weight_column = find_weights(tuple(kinds), weights, where)
    free = [column for column in kinds if column != weight_column and column not in named]
    choices = []
    if label is None:
        classes = [column for column in free if kinds[column] == "class"]
        label, why = find_label(classes or free, classes, where, kind="class labels")
        if label is not None:
            choices.append(f"labels are its column {label!r}, {why}")
    taken = named or _find_inputs({c: kinds[c] for c in free if c != label}, where)
    if not named:
        others = "column" if len(taken) == 1 else f"{len(taken)} columns"
        choices.append(f"inputs are its {others} of kind {kinds[taken[0]]}: {listing(taken, 10)}")
    return Columns(
        tuple(taken),
        label,
        weight_column,
        _modality(taken, kinds, where),
        chosen(where, choices, "label=COLUMN and input=COLUMN"),
    )


def _find_inputs(kinds: Mapping[str, Kind], where: str) -> list[str]:
    by_kind = {
        kind: [column for column in kinds if kinds[column] == kind]
        for kind in ("image", "text", "number")
    }
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


def _modality(inputs: Sequence[str], kinds: Mapping[str, Kind], where: str) -> Modality:
    found = {kinds[column] for column in inputs}
    if found == {"number"}:
        return "array"
    if len(inputs) == 1 and found == {"image"}:
        return "image"
    if len(inputs) == 1 and found == {"text"}:
        return "text"
    described = ", ".join(f"{column} ({kinds[column]})" for column in inputs)
    raise InputError(
        f"{where}: the input must be one image column, one text column or columns of numbers, "
        f"got {described}"
    )


def _kind(feature: Any) -> Kind:
    """Return what a column of this feature type holds; lists count as their innermost values."""
    import datasets

    if isinstance(feature, datasets.ClassLabel):
        return "class"
    if isinstance(feature, datasets.Image):
        return "image"
    nested = getattr(feature, "feature", None)
    if nested is not None:
        return "number" if _kind(nested) == "number" else "other"
    dtype = str(getattr(feature, "dtype", ""))
    if isinstance(feature, datasets.Value) and "string" in dtype:
        return "text"
    return "number" if dtype.startswith(("int", "uint", "float", "bool", "decimal")) else "other"
