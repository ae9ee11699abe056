"""Columns of tables as NumPy arrays and masks, and rows of results as tables of pandas.

Columns are those of pandas, pyarrow and Hugging Face, nullable, categorical or nested.
NumPy's own conversion makes floats of integers as soon as one is missing, and of integers and
floats side by side: large ones would be rounded. Here only what is there is converted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otdd_flash.arguments.values import HF_COLUMN
from otdd_flash.checks import is_a

if TYPE_CHECKING:
    from pandas import DataFrame


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        name: what the table calls it; None for a series or an array.
        values: (n, ...), in the type that the column has; objects where NumPy has none.
        missing: (n,) which entries there are not, whose `values` mean nothing.
    """

    name: str | None
    values: NDArray[Any]
    missing: NDArray[np.bool_]


# The dtype of a column, by the type of its values; any other has objects.
DTYPES: Mapping[Any, str] = {
    float: "float64",
    float | None: "float64",
    int: "int64",
    int | None: "Int64",
    bool: "bool",
    bool | None: "boolean",
}


def frame_of(rows: Iterable[Any], kinds: Mapping[str, Any]) -> DataFrame:
    """Return a pandas table of rows; None and what a row lacks is missing.

    Args:
        rows: tuples, or mappings by the names of columns, whose further keys are left out.
        kinds: the types of values by the names of columns, as type hints.
    """
    import pandas

    # Text stays objects: names of files may hold bytes that pandas's own text does not.
    frame = pandas.DataFrame(list(rows), columns=list(kinds), dtype=object)
    return frame.astype({name: DTYPES.get(kind, "object") for name, kind in kinds.items()})


def is_complete(given: Any) -> bool:
    """Whether a table of pandas is one array of float32 or float64, in which nothing is missing."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(given, pandas.DataFrame):
        return False
    dtypes = set(given.dtypes)
    if len(dtypes) != 1 or not dtypes <= {np.dtype(np.float32), np.dtype(np.float64)}:
        return False
    return not bool(np.isnan(given.to_numpy()).any())


def names_of_columns(given: Any) -> tuple[str, ...] | None:
    """Return what a table calls its columns; None for an object that is no table."""
    pandas, pyarrow = sys.modules.get("pandas"), sys.modules.get("pyarrow")
    if pandas is not None and isinstance(given, pandas.DataFrame):
        return tuple(map(str, given.columns))
    if pyarrow is not None and isinstance(given, pyarrow.Table | pyarrow.RecordBatch):
        return tuple(given.schema.names)
    return None


def columns_of(given: Any) -> list[Column] | None:
    """Return the columns of a table, or the only one of a series; None for any other object."""
    if is_a(given, HF_COLUMN):
        return [_of_hugging_face(given)]
    pandas, pyarrow = sys.modules.get("pandas"), sys.modules.get("pyarrow")
    # An object of theirs exists only where they were imported.
    if pandas is not None:
        if isinstance(given, pandas.DataFrame):
            names = map(str, given.columns)
            return [
                _of_series(name, given.iloc[:, place], pandas) for place, name in enumerate(names)
            ]
        if isinstance(given, pandas.Index | pandas.api.extensions.ExtensionArray):
            given = pandas.Series(given)
        if isinstance(given, pandas.Series):
            return [_of_series(None, given, pandas)]
    if pyarrow is not None:
        if isinstance(given, pyarrow.Table | pyarrow.RecordBatch):
            names = given.schema.names
            return [_of_arrow(name, given.column(place)) for place, name in enumerate(names)]
        if isinstance(given, pyarrow.Array | pyarrow.ChunkedArray):
            return [_of_arrow(None, given)]
    return None


def _of_hugging_face(column: Any) -> Column:
    """Return a `datasets.Column`; class labels as their names."""
    import pyarrow

    source, name = column.source, column.column_name
    if not hasattr(source, "select_columns"):
        # A field of another column.
        return _of_arrow(None, pyarrow.array(list(column)))
    # As Arrow holds it: the library itself would decode images, and wrap large integers.
    table = source.select_columns([name]).with_format("arrow")[:]
    found = _of_arrow(None, table.column(name))
    if (names := getattr(source.features[name], "names", None)) is None:
        return found
    missing = found.missing | (found.values < 0)
    return Column(None, np.array(names)[np.where(missing, 0, found.values)], missing)


def _of_series(name: str | None, series: Any, pandas: Any) -> Column:
    if isinstance(series.dtype, pandas.ArrowDtype):
        import pyarrow

        return _of_arrow(name, pyarrow.array(series.array))
    missing = np.asarray(series.isna(), dtype=np.bool_)
    present = series[~missing]
    if isinstance(present.dtype, pandas.CategoricalDtype):
        present = present.astype(present.cat.categories.dtype)
        if isinstance(present.dtype, pandas.ArrowDtype):
            return _scattered(name, missing, _of_series(None, present, pandas).values)
    # What masked types are of.
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
    """Put the values that there are between those that there are not."""
    if not missing.any():
        return Column(name, present, missing.copy())
    values = np.zeros((len(missing), *present.shape[1:]), present.dtype)
    values[~missing] = present
    return Column(name, values, missing.copy())
