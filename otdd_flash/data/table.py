"""csv and parquet tables: numeric columns as inputs, one label column, maybe one of weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.data.request import reading
from otdd_flash.errors import DataNotice, InputError, warn

# What pandas calls a first column without a name, which its own `to_csv` writes for the row index.
NAMELESS = "Unnamed: 0"
LABEL_NAMES = ("label", "labels", "class", "target", "y")


def read_table(
    path: Path,
    features: Sequence[str] | None,
    label: str | None,
    weights: str | None,
    *,
    skip_label: bool = False,
) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
    """The inputs (n, d) float64, labels (n,) and weights (n,) of a table.

    Args:
        path: a csv or parquet file with column names.
        features: the input columns; None takes all but label and weights.
        label: the label column; None finds it by its name or as the only text column.
        weights: the weight column; a .npy file is left to the caller.
        skip_label: labels come from elsewhere, look for none.

    Raises:
        InputError: unreadable file, no such column, text in an input column, or an ambiguous label.
    """
    import pandas as pd

    with reading(path):
        table = _csv(path) if path.suffix.lower() == ".csv" else pd.read_parquet(path)
    if len(table) == 0:
        raise InputError(f"{path} is empty: it has no rows")
    table.columns = [str(column) for column in table.columns]
    if table.columns[0] == NAMELESS:
        table = table.drop(columns=NAMELESS)
        warn(
            f"{path}: its first column has no name, is taken for row numbers and left out",
            DataNotice,
        )
    columns = tuple(table.columns)
    for column in [*(features or ()), *([label] if label else [])]:
        if column not in columns:
            raise InputError(f"{path} has no column {column!r}; {listed(columns)}")
    weight_column = find_weights(columns, weights, str(path))
    text = tuple(c for c in columns if not pd.api.types.is_numeric_dtype(table[c]))
    reserved = {weight_column, *(features or ())}
    if label is None and not skip_label:
        label = find_label(
            tuple(c for c in columns if c not in reserved),
            tuple(c for c in text if c not in reserved),
            str(path),
        )
    inputs = list(features) if features else [c for c in columns if c not in (label, weight_column)]
    if not inputs:
        raise InputError(f"{path} has no input column besides {label!r}; {listed(columns)}")
    for column in inputs:
        if column in text:
            raise InputError(
                f"column {column!r} of {path} holds text, not numbers; name the inputs with "
                f"features=[...]; {listed(columns)}"
            )
    return (
        table[inputs].to_numpy(dtype=np.float64),
        None if label is None else _label_values(table[label]),
        None if weight_column is None else table[weight_column].to_numpy(),
    )


def _csv(path: Path) -> Any:
    """The table of a csv file, whose first field by itself pandas may take for the rows' names.

    Raises:
        InputError: rows have more fields than the first line names.
    """
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            return pd.read_csv(path, index_col=False)
        except pd.errors.ParserWarning:
            raise InputError(
                f"{path}: its rows have more fields than its first line names, so that it is open "
                "which names belong to which; name every column"
            ) from None


def find_label(columns: Sequence[str], text: Sequence[str], where: str) -> str | None:
    """The column that holds labels: the one with a usual name, else the only text column.

    Args:
        columns: the candidates.
        text: those among them that could hold labels although their name does not say so.
        where: what the columns are of, for the message.

    Returns:
        The column, or None with a `DataNotice` where nothing looks like labels.

    Raises:
        InputError: several columns could be meant.
    """
    named = [column for column in columns if column.lower() in LABEL_NAMES]
    candidates = named or list(text)
    if len(candidates) > 1:
        raise InputError(
            f"{where}: the labels could be any of {', '.join(candidates)}; choose with "
            f"label=COLUMN; {listed(columns)}"
        )
    if not candidates:
        warn(
            f"{where} has no column that looks like labels and is taken as unlabelled; name "
            f"one with label=COLUMN; {listed(columns)}",
            DataNotice,
        )
        return None
    return candidates[0]


def find_weights(columns: Sequence[str], weights: str | None, where: str) -> str | None:
    """The column or key that `weights` names; None where it names a .npy file or nothing.

    Raises:
        InputError: it is neither.
    """
    if weights is None or weights in columns:
        return weights
    if Path(weights).suffix.lower() == ".npy":
        return None
    raise InputError(
        f"{where} has no weights {weights!r}: name a column, a key or a .npy file; "
        f"there are: {', '.join(columns)}"
    )


def _label_values(column: Any) -> NDArray[Any]:
    """Integers stay integers; text, categories and missing values become objects."""
    values: NDArray[Any] = column.to_numpy()
    if values.dtype.kind in "iubf":
        return values
    return np.asarray(column.astype(object))


def listed(columns: Sequence[str]) -> str:
    """The columns, for a message."""
    shown = ", ".join(columns[:40]) + (", ..." if len(columns) > 40 else "")
    return f"its columns are: {shown}"
