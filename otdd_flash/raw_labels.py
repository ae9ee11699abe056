"""Labels as data hold them, integers or text in any numbering, as class indices and names."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.errors import InputError

# How many rows a message lists.
ROWS_SHOWN = 5


def encode_labels(labels: Any) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Map raw labels to indices (n,) into their sorted distinct values.

    Floats that are whole numbers are the integers that they stand for.

    Returns:
        The indices and the class names (the distinct labels as text).

    Raises:
        InputError: the labels are not one-dimensional integers or strings, or some are missing.
    """
    values = raw_values(labels)
    if values.ndim != 1:
        raise InputError(
            f"labels must be one-dimensional, got shape {values.shape}; "
            "of one-hot labels take labels.argmax(axis=1)"
        )
    if (missing := missing_labels(values)).any():
        raise InputError(
            f"{missing_rows(missing)}; leave those rows out of features and labels, or label them"
        )
    values = without_fractions(values)
    if values.dtype.kind not in "iubU":
        raise InputError(
            f"labels must be integers or strings, got {values.dtype} such as {values[:1].tolist()}"
            "; cut a continuous target into classes first"
        )
    distinct, indices = np.unique(values, return_inverse=True)
    return indices.astype(np.int64), tuple(str(value) for value in distinct)


def raw_values(labels: Any) -> NDArray[Any]:
    """Labels as an array; bytes become text, objects of one kind an array of that kind.

    Labels that an array masks become None.

    Raises:
        InputError: bytes are no text.
    """
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if isinstance(labels, np.ma.MaskedArray) and np.ma.getmaskarray(labels).any():
        values = values.astype(object)
        values[np.ma.getmaskarray(labels)] = None
    if values.dtype.kind == "S":
        try:
            return np.char.decode(values, "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"labels must be text in UTF-8, got {error.object!r}; decode them first"
            ) from None
    if values.dtype.kind == "O" and (whole := _common_type(values)) is not None:
        return values.astype(whole)
    return values


def missing_labels(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which labels are missing: None, or the NaN by which tables mark them."""
    if values.dtype.kind == "f":
        missing: NDArray[np.bool_] = np.isnan(values)
        return missing
    if values.dtype.kind != "O":
        return np.zeros(values.shape, dtype=np.bool_)
    return np.array([_is_missing(value) for value in values.ravel()], dtype=np.bool_)


def missing_rows(missing: NDArray[np.bool_]) -> str:
    """What messages say of missing labels."""
    count = int(missing.sum())
    return f"{count} {'label is' if count == 1 else 'labels are'} missing, {rows_shown(missing)}"


def without_fractions(values: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers in floats as integers; anything else as it is."""
    whole = values.dtype.kind == "f" and bool((values == np.floor(values)).all())
    if whole and bool((np.abs(values) < 2**63).all()):
        return values.astype(np.int64)
    return values


def rows_shown(chosen: NDArray[np.bool_]) -> str:
    """Where a mask holds, as messages say it: `at row 3`, `at rows 3, 7 and 5 more`."""
    rows = np.flatnonzero(chosen)
    listed = ", ".join(map(str, rows[:ROWS_SHOWN]))
    more = f" and {len(rows) - ROWS_SHOWN} more" if len(rows) > ROWS_SHOWN else ""
    return f"at row{'s' if len(rows) > 1 else ''} {listed}{more}"


def _is_missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):
        # Pandas' own mark is neither equal to itself nor different.
        return True


def _common_type(values: NDArray[Any]) -> type | None:
    """The type that all objects of an array are of, if it is one of labels."""
    kinds = ((str, str), (bool, bool), (np.int64, int | np.integer), (np.float64, float | int))
    for kind, accepted in kinds:
        if all(isinstance(value, accepted) for value in values.ravel()):
            return kind
    return None
