"""Columns of tables and raw labels as NumPy arrays: conversion without rounding or lost entries.

`encode_labels` maps integers or text in any numbering to class indices; `label_sets` calls it.
`label_sets`, `samples`, `data.given`, `data.dataset`, `shift.rows` and `integrations.sklearn` call
its parts, such as `raw_values` and `missing_rows`. `columns_of` reads columns of pandas, pyarrow
and Hugging Face, nullable, categorical or nested; `label_sets`, `real_numbers`, `data.arrays` and
`data.hugging_face` use it. `frame_of` makes the pandas tables of results (`result`, `pairwise`,
`sliced`, `unmatched`, `flows.result`, `ranking.race` and `study.result`).

NumPy's own conversion turns integers into floats as soon as one is missing, or beside floats, and
rounds large ones, so that two classes may become one. So a change must convert the present entries
alone, with a mask of the missing ones (`tests/test_samples.py`, `tests/test_real_numbers.py`).
Tables are recognised without an import of pandas or pyarrow: an object of theirs exists only where
they are imported already.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterable, Mapping
from decimal import Decimal
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.arguments import HF_COLUMN
from otdd_flash.checks import is_a
from otdd_flash.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame

# The dtype of a result column by the type of its values; other columns hold objects.
DTYPES: Mapping[Any, str] = {
    float: "float64",
    float | None: "float64",
    int: "int64",
    int | None: "Int64",
    bool: "bool",
    bool | None: "boolean",
}

# Number of rows that a message lists.
ROWS_SHOWN = 5

NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


def encode_labels(labels: Any) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Map raw labels to indices (n,) into their sorted distinct values.

    Floats that are whole numbers count as integers.

    Returns:
        The indices and the class names (the distinct labels as text).

    Raises:
        InputError: the labels are not one-dimensional integers or strings, or some are missing or
            infinite.
    """
    values = raw_values(labels)
    if values.dtype.kind == "f" and (infinite := np.isinf(values)).any():
        rows = infinite.reshape(len(values), -1).any(1) if values.ndim else infinite.ravel()
        raise InputError(
            f"targets must be finite, got {values[infinite][0]:g} {rows_shown(rows)}; leave those "
            "rows out of features and labels"
        )
    check_one_dimensional(labels, values)
    if (missing := missing_labels(values)).any():
        raise InputError(
            f"{missing_rows(missing)}; leave those rows out of features and labels, or label them"
        )
    values = without_fractions(values)
    # `raw_values` leaves integers beyond 64 bits as objects.
    integers = values.dtype.kind == "O" and all(isinstance(value, int) for value in values)
    if values.dtype.kind not in "iubU" and not integers:
        way_out = "cut a continuous target into classes first"
        raise InputError(
            f"labels must be integers or strings, got {values.dtype} such as {values[:1].tolist()}"
            f"; {'bring all to one type' if values.dtype.kind == 'O' else way_out}"
        )
    distinct, indices = np.unique(values, return_inverse=True)
    return indices.astype(np.int64), tuple(str(value) for value in distinct)


def check_one_dimensional(labels: Any, values: NDArray[Any]) -> None:
    """Refuse labels that are not one per row; arguments as for `one_label_a_row`.

    Raises:
        InputError: they are not one-dimensional.
    """
    if values.ndim != 1:
        raise InputError(
            f"labels must be one-dimensional, got shape {values.shape}; "
            f"{one_label_a_row(labels, values)}"
        )


def one_label_a_row(labels: Any, values: NDArray[Any]) -> str:
    """Return advice for labels that are a matrix or a scalar, suited to their content.

    Args:
        labels: the labels as given.
        values: the same as an array, not one-dimensional.
    """
    if values.ndim == 0:
        return f"give {'labels.toarray()' if hasattr(labels, 'toarray') else 'an array of them'}"
    # A `np.matrix` stays two-dimensional under ravel.
    array = isinstance(labels, np.ndarray | Tensor) and not isinstance(labels, np.matrix)
    given = "labels"
    # One column whose entries are lists.
    if hasattr(labels, "iloc") and not hasattr(labels, "columns"):
        given = "labels.tolist()"
    elif hasattr(labels, "to_pylist") and not hasattr(labels, "schema"):
        given = "labels.to_pylist()"
    if values.size == max(values.shape):
        return f"take {'labels.ravel()' if array else f'np.ravel({given})'}"
    advice = (
        "of several labels for one row give an indicator (n, V) of 0 and 1, or a list of lists or "
        "sets; of numbers give floats"
    )
    if values.ndim != 2 or values.dtype.kind not in "iubf":
        return advice
    argmax = "labels.argmax(axis=1)" if array else f"np.argmax({given}, axis=1)"
    if bool((values >= 0).all()) and np.allclose(values.sum(1, dtype=np.float64), 1, 0, 1e-3):
        return (
            "its rows are probabilities of classes, and classes themselves are compared: where the "
            f"likeliest is meant, take {argmax}"
        )
    return advice


def raw_values(labels: Any) -> NDArray[Any]:
    """Return labels as an array; bytes become text, objects of one kind an array of that kind.

    Masked entries of an array and missing entries of a table become None.

    Raises:
        InputError: bytes are not text, text ends in NUL, rows have different numbers of labels, or
            whole numbers in floats are so large that their type rounds integers.
    """
    missing = None
    if isinstance(labels, Tensor):
        values = _of_tensor(labels.detach().cpu())
    elif (columns := columns_of(labels)) is not None:
        masks = [column.missing for column in columns]
        values, missing = columns[0].values, masks[0]
        if len(columns) > 1 or columns[0].name is not None:
            values = np.stack([column.values.astype(object) for column in columns], 1)
            missing = np.stack(masks, 1)
    else:
        values = _of_sequence(labels)
        missing = np.ma.getmaskarray(labels) if isinstance(labels, np.ma.MaskedArray) else None
    if missing is not None and missing.any():
        values = values.astype(object)
        values[missing] = None
    if values.dtype.kind == "S":
        return _decoded(values)
    return _unboxed(values) if values.dtype.kind == "O" else values


def missing_labels(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which labels are missing: None, or the NaN by which tables mark them."""
    if values.dtype.kind == "f":
        missing: NDArray[np.bool_] = np.isnan(values)
        return missing
    if values.dtype.kind != "O":
        return np.zeros(values.shape, dtype=np.bool_)
    return np.array([is_missing(value) for value in values.ravel()], dtype=np.bool_)


def missing_rows(missing: NDArray[np.bool_]) -> str:
    """Describe missing labels for a message."""
    count = int(missing.sum())
    return f"{count} {'label is' if count == 1 else 'labels are'} missing, {rows_shown(missing)}"


def without_fractions(values: NDArray[Any]) -> NDArray[Any]:
    """Return whole numbers in floats as integers, and anything else unchanged.

    Raises:
        InputError: the floating-point type cannot hold every integer up to the largest value.
    """
    whole = values.dtype.kind == "f" and bool((values == np.floor(values)).all())
    if not whole or not bool(np.isfinite(values).all()):
        return values
    check_unrounded(values, values.dtype)
    return values.astype(np.int64)


def check_unrounded(values: NDArray[Any], kind: np.dtype[Any] | torch.dtype) -> None:
    """Refuse whole numbers in floats so large that several integers may have been rounded to one.

    Args:
        values: the numbers, in any type.
        kind: the floating-point type in which they were given.

    Raises:
        InputError: there are such numbers; the message names the rows.
    """
    limit = exact_integers(kind)
    if (large := np.abs(values) >= limit).any():
        # Such floats of NumPy's types are numbers, where these are read (`label_sets`).
        other = isinstance(kind, torch.dtype) and kind not in NUMPY_FLOATS
        wider = ", or numbers in a wider type" if other else ""
        raise InputError(
            f"labels must be integers or text, got {values[large][0]:.0f} {rows_shown(large)} as "
            f"{kind}, which rounds integers beyond {limit}, so that classes may "
            f"have become one; give them as integers{wider}"
        )


def rounded(values: NDArray[Any]) -> bool:
    """Return whether whole numbers in floats are so large that their type rounds integers."""
    return bool((np.abs(values) >= exact_integers(values.dtype)).any())


def exact_integers(kind: np.dtype[Any] | torch.dtype) -> int:
    """Return the number up to which a floating-point type holds every integer."""
    ends = torch.finfo(kind) if isinstance(kind, torch.dtype) else np.finfo(kind)
    return int(2 / ends.eps)


def rows_shown(chosen: NDArray[np.bool_]) -> str:
    """Return where a mask is true, for messages: `at row 3`, `at rows 3, 7 and 5 more`."""
    rows = np.flatnonzero(chosen)
    listed = ", ".join(map(str, rows[:ROWS_SHOWN]))
    more = f" and {len(rows) - ROWS_SHOWN} more" if len(rows) > ROWS_SHOWN else ""
    return f"at row{'s' if len(rows) > 1 else ''} {listed}{more}"


def is_missing(value: Any) -> bool:
    """Return whether an object is None or another mark of a missing entry."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        # pandas.NA is neither equal to itself nor different.
        return True
    except ValueError:
        # The comparison of an array has several values.
        return False


def _of_tensor(labels: Tensor) -> NDArray[Any]:
    if labels.dtype.is_floating_point and labels.dtype not in NUMPY_FLOATS:
        values = np.asarray(labels.float().numpy())
        whole = np.nan_to_num(values)
        if bool((whole == np.floor(whole)).all()):
            check_unrounded(whole, labels.dtype)
        return values
    return np.asarray(labels.numpy())


def _of_sequence(labels: Any) -> NDArray[Any]:
    """Return a list or an array; entries of mixed types in lists stay objects."""
    try:
        values = np.asarray(labels)
    except ValueError:
        raise InputError("labels must be one for each row, got lists of several lengths") from None
    # NumPy makes floats of floats and integers, and text of text and anything else.
    lists = isinstance(labels, list | tuple) and values.dtype.kind in "fUS"
    return np.asarray(labels, dtype=object) if lists or values.dtype.kind == "T" else values


def _decoded(values: NDArray[Any]) -> NDArray[Any]:
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"labels must be text in UTF-8, got {error.object!r}; decode them first"
        ) from None


def _unboxed(values: NDArray[Any]) -> NDArray[Any]:
    """Return objects of one kind as an array of it; integers beyond 64 bits stay objects."""
    objects = values.ravel().tolist()
    kinds = set(map(type, objects))

    def all_are(*accepted: type) -> bool:
        return all(issubclass(kind, accepted) for kind in kinds)

    if objects and all_are(list, tuple, np.ndarray):
        # From a column whose entries are lists.
        rows = _of_sequence(objects)
        return _unboxed(rows) if rows.dtype.kind == "O" else rows
    if all_are(str) or all_are(bytes):
        text = values.astype(bytes if all_are(bytes) else str)
        if text.ravel().tolist() != objects:
            raise InputError("labels must not end in NUL characters, which NumPy drops; strip them")
        return text if all_are(str) else _decoded(text)
    if all_are(bool, np.bool_):
        return values.astype(bool)
    if not all_are(numbers.Real, Decimal, np.bool_) or any(map(is_missing, objects)):
        return values
    if not all_are(numbers.Integral, np.bool_):
        of_floats = values.ndim == 2 and all_are(float, np.floating)
        if of_floats or not all(map(_is_whole, objects)):
            return np.array(list(map(float, objects))).reshape(values.shape)
        if len(kinds) == 1 and all_are(float, np.floating):
            (kind,) = kinds
            floats: NDArray[Any] = values.astype(np.dtype(kind))
            if rounded(floats):
                return floats
        for kind in kinds:
            if issubclass(kind, float | np.floating):
                of_kind = [n if isinstance(n, kind) else 0.0 for n in objects]
                check_unrounded(np.array(of_kind, np.float64), np.dtype(kind))
    return of_integers(list(map(int, objects))).reshape(values.shape)


def of_integers(integers: list[int]) -> NDArray[Any]:
    """Return integers as int64, else as uint64; as objects if neither holds them."""
    array = np.array(integers, dtype=object)
    for kind in (np.int64, np.uint64):
        ends = np.iinfo(kind)
        if all(ends.min <= number <= ends.max for number in integers):
            return array.astype(kind)
    return array


def _is_whole(number: Any) -> bool:
    try:
        return bool(number == int(number))
    except OverflowError:
        # Infinite.
        return False


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        name: its name in the table; None for a series or an array.
        values: (n, ...) in the type of the column; objects if NumPy has no such type.
        missing: (n,) mask of missing entries, whose `values` are meaningless.
    """

    name: str | None
    values: NDArray[Any]
    missing: NDArray[np.bool_]


def frame_of(rows: Iterable[Any], kinds: Mapping[str, Any]) -> DataFrame:
    """Return a pandas table of rows; None and keys that a row lacks become missing entries.

    Args:
        rows: tuples, or mappings by the names of columns; other keys are left out.
        kinds: type hints of the values by the names of columns.
    """
    import pandas

    # Text stays objects: file names may hold bytes that pandas' own text type cannot.
    frame = pandas.DataFrame(list(rows), columns=list(kinds), dtype=object)
    return frame.astype({name: DTYPES.get(kind, "object") for name, kind in kinds.items()})


def is_complete(given: Any) -> bool:
    """Return whether a pandas table is one array of float32 or float64 without missing entries."""
    if not _is_of("pandas", given, "DataFrame"):
        return False
    dtypes = set(given.dtypes)
    if len(dtypes) != 1 or not dtypes <= {np.dtype(np.float32), np.dtype(np.float64)}:
        return False
    return not bool(np.isnan(given.to_numpy()).any())


def names_of_columns(given: Any) -> tuple[str, ...] | None:
    """Return a table's column names; None for an object that is no table."""
    if _is_of("pandas", given, "DataFrame"):
        return tuple(map(str, given.columns))
    return tuple(given.schema.names) if _is_of("pyarrow", given, "Table", "RecordBatch") else None


def columns_of(given: Any) -> list[Column] | None:
    """Return the columns of a table, or the only one of a series; None for any other object."""
    if is_a(given, HF_COLUMN):
        return [_of_hugging_face(given)]
    if _is_of("pandas", given, "Index", "api.extensions.ExtensionArray"):
        import pandas

        given = pandas.Series(given)
    if _is_of("pandas", given, "Series"):
        return [_of_series(None, given)]
    if _is_of("pyarrow", given, "Array", "ChunkedArray"):
        return [_of_arrow(None, given)]
    if (names := names_of_columns(given)) is None:
        return None
    if _is_of("pandas", given, "DataFrame"):
        return [_of_series(name, given.iloc[:, place]) for place, name in enumerate(names)]
    return [_of_arrow(name, given.column(place)) for place, name in enumerate(names)]


def _is_of(library: str, given: Any, *kinds: str) -> bool:
    """Return whether an object is of a library's classes, which are imported if there is one."""
    module = sys.modules.get(library)
    return module is not None and any(isinstance(given, attrgetter(k)(module)) for k in kinds)


def _of_hugging_face(column: Any) -> Column:
    """Return a `datasets.Column`; class labels as their names, also in lists."""
    import pyarrow

    source, name = column.source, column.column_name
    if not hasattr(source, "select_columns"):
        # A field of a nested column.
        return _of_arrow(None, pyarrow.array(list(column)))
    # In Arrow format: the library itself would decode images, and wrap large integers.
    table = source.select_columns([name]).with_format("arrow")[:]
    found = _of_arrow(None, table.column(name))
    feature = source.features[name]
    if (names := getattr(getattr(feature, "feature", None), "names", None)) is not None:
        rows = np.empty(len(found.values), object)
        for place, (row, gone) in enumerate(zip(found.values, found.missing, strict=True)):
            rows[place] = [
                None if label is None or label < 0 else names[label]
                for label in (() if gone else row)
            ]
        return Column(None, rows, found.missing)
    if (names := getattr(feature, "names", None)) is None:
        return found
    missing = found.missing | (found.values < 0)
    return Column(None, np.array(names)[np.where(missing, 0, found.values)], missing)


def _of_series(name: str | None, series: Any) -> Column:
    import pandas

    if isinstance(series.dtype, pandas.ArrowDtype):
        import pyarrow

        return _of_arrow(name, pyarrow.array(series.array))
    missing = np.asarray(series.isna(), dtype=np.bool_)
    present = series[~missing]
    if isinstance(present.dtype, pandas.CategoricalDtype):
        present = present.astype(present.cat.categories.dtype)
        if isinstance(present.dtype, pandas.ArrowDtype):
            return _scattered(name, missing, _of_series(None, present).values)
    # The NumPy type of pandas' masked types.
    plain = getattr(present.dtype, "numpy_dtype", None)
    values = np.asarray(present) if plain is None else present.to_numpy(dtype=plain)
    return _scattered(name, missing, values)


def _of_arrow(name: str | None, array: Any) -> Column:
    import pyarrow

    if isinstance(array, pyarrow.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pyarrow.ChunkedArray):
            array = pyarrow.concat_arrays(array.chunks)
    if isinstance(array.type, pyarrow.BaseExtensionType):
        array = array.storage
    missing = np.asarray(array.is_null(nan_is_null=True).to_numpy(zero_copy_only=False))
    present = array.filter(pyarrow.array(~missing))
    types = pyarrow.types
    if types.is_dictionary(array.type):
        return _scattered(name, missing, _of_arrow(None, present.dictionary_decode()).values)
    if not any(
        kind(array.type) for kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    ):
        return _scattered(name, missing, present.to_numpy(zero_copy_only=False))
    lengths = np.asarray(present.value_lengths().to_numpy(zero_copy_only=False))
    if len(set(lengths.tolist())) > 1:
        ragged = np.empty(len(array), object)
        ragged[:] = array.to_pylist()
        return Column(name, ragged, missing)
    inner = _of_arrow(None, present.flatten())
    shape = (len(present), -1, *inner.values.shape[1:]) if len(present) else (0, 1)
    column = _scattered(name, missing, inner.values.reshape(shape))
    column.missing[~missing] = inner.missing.reshape(len(present), -1).any(1)
    return column


def _scattered(name: str | None, missing: NDArray[np.bool_], present: NDArray[Any]) -> Column:
    """Return a column whose present values are at the places that are not missing."""
    if not missing.any():
        return Column(name, present, missing.copy())
    values = np.zeros((len(missing), *present.shape[1:]), present.dtype)
    values[~missing] = present
    return Column(name, values, missing.copy())
