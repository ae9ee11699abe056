"""Numbers in any container of the user's, converted to tensors exactly or refused.

Features, numbers as labels, weights, tables of class distances and cost matrices that a user gives
pass here. `samples`, `data` (`arrays`, `dataset`, `given`, `hugging_face`), `extractors`,
`labels.table`, `cost.class_table`, `solver.matrix_comparison`, `integrations` and others call it;
`fingerprint` takes its `in_one_row`.

A change must keep the rule, because a rounded identifier or value would give another result
unnoticed: a number from 2^53 on that float64 cannot hold is refused, with its row where a user gave
it, in whatever container: integers, Python's own, decimals and fractions. So is any number of a
longer floating-point type that float64 rounds. Integers of an extractor's features are refused
beyond 2^24, where float32 rounds some (`check_integers`). Decimal digits below 2^53 are rounded to
the nearest float64, as those of a text are. Memory is shared with the caller if possible, and never
written to (`tests/test_real_numbers.py`).
"""

from __future__ import annotations

import math
import numbers
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.checks import check_numbers, shown
from otdd_flash.errors import InputError
from otdd_flash.memory import check_room
from otdd_flash.raw_labels import (
    Column,
    columns_of,
    is_complete,
    is_missing,
    of_integers,
    rows_shown,
)

# float32 and float64 hold every integer up to these.
LARGEST_INTEGER, LARGEST_IN_DOUBLE = 1 << 24, 1 << 53

MISSING = "must be real numbers, and are missing"

WIDE = (torch.int32, torch.uint32, torch.int64, torch.uint64)


def real_tensor(what: str, values: Any) -> Tensor:
    """Return real numbers as a dense tensor; `what` is their name in errors.

    Lists of Python's floats become float64, as in NumPy. Columns of a table take the type that
    holds all of them.

    Raises:
        InputError: they are not real numbers, some are missing or masked, or float64 would round
            some.
    """
    if isinstance(values, Tensor):
        check_numbers(what, values)
        tensor = values
    else:
        try:
            array = exact_array(what, values)
            if array.dtype.kind == "O":
                raise TypeError("objects that are no numbers")
            tensor = _shared(array)
        except InputError:
            raise
        except (TypeError, ValueError, RuntimeError):
            kind = getattr(values, "dtype", None) or shown(values)
            raise InputError(f"{what} must be real numbers, got {kind}") from None
    if tensor.is_complex():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{what} must be real, got {kind}; take parts or magnitudes")
    if tensor.layout != torch.strided:
        raise InputError(f"{what} must be dense, got {tensor.layout}; give them as .to_dense()")
    return tensor.dequantize() if tensor.is_quantized else tensor


def dense(what: str, values: Any) -> Any:
    """Return a sparse matrix of SciPy or PyTorch as a dense one, anything else unchanged.

    Raises:
        InputError: it does not fit in memory.
    """
    if isinstance(values, Tensor):
        check_numbers(what, values)
        if values.layout == torch.strided:
            return values
    elif not hasattr(values, "tocsr"):
        return values
    shape = tuple(map(int, values.shape))
    check_room(
        f"{what} as a dense matrix of shape {shape}",
        math.prod(shape) * values.dtype.itemsize,
        "take fewer rows, or fewer columns, such as by sklearn.decomposition.TruncatedSVD",
    )
    return values.to_dense() if isinstance(values, Tensor) else values.toarray()


def in_one_row(tensor: Tensor) -> Tensor:
    """Return all entries in order with a last stride of 1, to read their bits; a view if possible.

    PyTorch calls one row or column contiguous at any stride, but a view of another type needs
    stride 1: such a tensor is returned flat.
    """
    whole = tensor.contiguous()
    if whole.ndim and whole.stride(-1) == 1:
        return whole
    return whole.as_strided((whole.numel(),), (1,))


def in_floating_point(what: str, values: Tensor) -> Tensor:
    """Return numbers of another type in float32, or in float64 if float32 would change integers.

    Raises:
        InputError: float64 would change some as well.
    """
    single = values.to(torch.float32)
    # Rounding is monotone: no integer beyond the limit rounds to below it.
    if values.dtype not in WIDE or not bool((single.abs() >= LARGEST_INTEGER).any()):
        return single
    double = in_double(what, values)
    return single if torch.equal(single.double(), double) else double


def in_double(what: str, values: Tensor) -> Tensor:
    """Return numbers as float64.

    Raises:
        InputError: it would round integers; the message names the first.
    """
    double = values.to(torch.float64)
    if values.dtype in WIDE and bool((double.abs() >= LARGEST_IN_DOUBLE).any()):
        exact_doubles(what, values.detach().cpu().numpy())
    return double


def exact_array(what: str, values: Any) -> NDArray[Any]:
    """Return the numbers of any container except a tensor as a NumPy array of a numeric type.

    Objects stay objects if some of them are not numbers.

    Raises:
        InputError: some are missing or masked, or float64 would round some.
        ValueError: lists have no common shape.
    """
    if not is_complete(values) and (columns := columns_of(values)) is not None:
        for column in columns:
            _refuse_gaps(what, MISSING, column.missing, column.name)
            kind = _plain(what, column.values, column).dtype.kind
            if column.name is not None and kind not in "fiubc":
                raise InputError(
                    f"{what} must be real numbers, and column {column.name!r} holds "
                    f"{shown(column.values.flat[0])}; leave it out or encode it as numbers"
                )
        series = len(columns) == 1 and columns[0].name is None
        return _plain(what, columns[0].values) if series else side_by_side(what, columns)
    if isinstance(values, np.ma.MaskedArray):
        _refuse_gaps(what, "are masked", np.ma.getmaskarray(values))
    array: NDArray[Any] = np.asarray(values)
    if not hasattr(values, "__array__") and _holds_large(array):
        # NumPy turns integers beside floats into floats.
        array = np.asarray(values, dtype=object)
    return _plain(what, array)


def side_by_side(what: str, columns: list[Column], *, double: bool = False) -> NDArray[Any]:
    """Return columns of numbers as a matrix (n, k); one nested column keeps its shape.

    Args:
        what: name of the numbers in errors.
        columns: if entries are missing, all become float64, and these NaN.
        double: whether all become float64 anyway. Otherwise one column keeps its type, and several
            take a common one.

    Raises:
        InputError: float64 would round a number.
    """
    parts = [_plain(what, column.values, column) for column in columns]
    several = len(parts) > 1 and np.result_type(*(part.dtype for part in parts)) == np.float64
    if double or several or any(column.missing.any() for column in columns):
        doubles = [exact_doubles(what, *pair) for pair in zip(parts, columns, strict=True)]
        for part, column in zip(doubles, columns, strict=True):
            part[column.missing] = np.nan
        parts = [*doubles]
    if len(parts) == 1:
        return parts[0][:, None] if parts[0].ndim == 1 else parts[0]
    return np.column_stack(parts)


def exact_doubles(
    what: str, array: NDArray[Any], column: Column | None = None
) -> NDArray[np.float64]:
    """Return integers or floats of any type as float64, which must hold them.

    Raises:
        InputError: float64 would round one.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        double = array.astype(np.float64)
        if array.dtype.kind == "b":
            return double
        if array.dtype.kind == "f":
            other = (double != array) & ~np.isnan(array)
        else:
            # A number rounded up to the end of the range cannot be converted back.
            end = float(np.iinfo(array.dtype).max)
            beyond = double >= max(end, LARGEST_IN_DOUBLE)
            other = beyond | (np.where(beyond, 0, double).astype(array.dtype) != array) & ~beyond
    if other.any():
        place = np.unravel_index(int(other.argmax()), array.shape)
        raise inexact(what, array[place], place, column and column.name)
    return double


def check_integers(what: str, values: Tensor | NDArray[Any]) -> None:
    """Refuse integers that float32 cannot hold.

    Raises:
        InputError: float32 would change one; `what` names the extractor.
    """
    if isinstance(values, Tensor):
        values = np.zeros(0) if values.is_floating_point() else values.detach().cpu().numpy()
    if (largest := largest_integer(values)) > LARGEST_INTEGER:
        rounded = largest > LARGEST_IN_DOUBLE
        raise InputError(
            f"{what} gives integers up to {largest}, which float{64 if rounded else 32} rounds; "
            f"{'subtract a common number first' if rounded else 'give them as float64'}"
        )


def largest_integer(values: NDArray[Any]) -> int:
    """Return the largest absolute value, or 0 for numbers of no integer type."""
    if values.dtype.kind not in "iu" or values.size == 0:
        return 0
    return max(-int(values.min()), int(values.max()))


def inexact(what: str, value: Any, place: Any, column: str | None) -> InputError:
    """Return the error for a number that float64 rounds.

    Args:
        what: the name of the numbers.
        value: the number.
        place: its row, and its column if they are a matrix.
        column: the name of its column, if it has one.
    """
    row, *rest = map(int, place)
    where = f"at row {row}"
    if column is not None:
        where += f", column {column!r}"
    elif rest:
        where += f", column {rest[0] if len(rest) == 1 else rest}"
    return InputError(
        f"{what} must be numbers that float64 holds, got {shown(value)} {where}; "
        "round them to float64 yourself, or subtract a common number first where differences are "
        "all that counts"
    )


def _plain(what: str, array: NDArray[Any], column: Column | None = None) -> NDArray[Any]:
    """Return an array in native byte order, of a type that torch has."""
    if array.dtype.kind == "O":
        return _of_objects(what, array, column)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return exact_doubles(what, array, column)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # C's long long is a 64-bit integer of another type code, which torch does not know.
    return array.view(f"{array.dtype.kind}8") if array.dtype.char in "qQ" else array


def _of_objects(what: str, array: NDArray[Any], column: Column | None) -> NDArray[Any]:
    """Return Python's numbers as 64-bit integers if possible, else as float64."""
    # Converted to Python's numbers: NumPy's own compare with others in floating point.
    objects = [n.item() if isinstance(n, np.generic) else n for n in array.ravel().tolist()]
    kinds = set(map(type, objects))
    if not all(issubclass(kind, numbers.Real | Decimal) for kind in kinds):
        missing = np.fromiter(map(is_missing, objects), bool, len(objects)).reshape(array.shape)
        # A single object has no rows to name.
        if array.ndim:
            _refuse_gaps(what, MISSING, missing, column and column.name)
        return array
    if all(issubclass(kind, numbers.Integral) for kind in kinds):
        integers = of_integers(list(map(int, objects)))
        if integers.dtype != object:
            return integers.reshape(array.shape)
    doubles = np.array([_nearest(number) for number in objects], np.float64)
    decisive = (np.abs(doubles) >= LARGEST_IN_DOUBLE) | (np.longdouble in kinds)
    for place in np.flatnonzero(decisive).tolist():
        # Python compares numbers of different types exactly.
        if objects[place] != (double := float(doubles[place])) and not np.isnan(double):
            raise inexact(
                what, objects[place], np.unravel_index(place, array.shape), column and column.name
            )
    return doubles.reshape(array.shape)


def _nearest(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return np.inf


def _holds_large(array: NDArray[Any]) -> bool:
    long = array.dtype.kind == "f" and array.dtype.itemsize > 2
    return long and bool((np.abs(array) >= LARGEST_IN_DOUBLE).any())


def _shared(array: NDArray[Any]) -> Tensor:
    """Return a tensor of an array, without a copy if torch can share it."""
    if any(stride < 0 for stride in array.strides):
        array = np.array(array, order="C")
    with warnings.catch_warnings():
        # Nothing here writes to the user's memory.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.as_tensor(array)


def _refuse_gaps(what: str, how: str, gaps: NDArray[np.bool_], column: str | None = None) -> None:
    if gaps.any():
        rows = np.asarray(gaps.reshape(len(gaps) if gaps.ndim else 1, -1).any(1))
        of = "" if column is None else f" in column {column!r}"
        raise InputError(
            f"{what} {how} {rows_shown(rows)}{of}; leave those rows out, or fill them with numbers"
        )
