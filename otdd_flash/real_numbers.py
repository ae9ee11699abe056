"""Numbers as users hold them, in any array, as tensors of the same numbers or not at all."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.checks import check_numbers, shown
from otdd_flash.errors import InputError
from otdd_flash.raw_labels import rows_shown

# float32 holds every integer up to it, and rounds larger ones to no less.
LARGEST_INTEGER = 1 << 24


def real_tensor(what: str, values: Any) -> Tensor:
    """Real numbers as a dense tensor; `what` is what an error calls them.

    Raises:
        InputError: they are no such numbers, or some of them are masked.
    """
    if isinstance(values, Tensor):
        check_numbers(what, values)
    if isinstance(values, np.ma.MaskedArray):
        _refuse_masked(what, np.ma.getmaskarray(values))
    try:
        tensor = torch.as_tensor(_array_for_torch(values))
    except (TypeError, ValueError, RuntimeError):
        kind = getattr(values, "dtype", None) or shown(values)
        raise InputError(f"{what} must be real numbers, got {kind}") from None
    if tensor.is_complex():
        raise InputError(f"{what} must be real, got {tensor.dtype}; take parts or magnitudes")
    if tensor.layout != torch.strided:
        raise InputError(f"{what} must be dense, got {tensor.layout}; give them as .to_dense()")
    return tensor.dequantize() if tensor.is_quantized else tensor


def in_one_row(tensor: Tensor) -> Tensor:
    """All entries in order, (numel,) with stride 1, to read their bits; a view where it can be.

    One row or column is contiguous at any stride, and a view of another type needs that of 1.
    """
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))


def in_floating_point(features: Tensor) -> Tensor:
    """Features of another type in float32, or in float64 where that would change integers."""
    single = features.to(torch.float32)
    if features.dtype.is_floating_point or not bool((single.abs() > LARGEST_INTEGER).any()):
        return single
    return features.to(torch.float64)


def check_integers(what: str, values: NDArray[Any]) -> None:
    """Refuse integers that float32 does not hold.

    Raises:
        InputError: as said; `what` names the extractor.
    """
    if (largest := largest_integer(values)) > LARGEST_INTEGER:
        raise InputError(
            f"{what} gives integers up to {largest}, which float32 rounds; give them as float64"
        )


def largest_integer(values: NDArray[Any]) -> int:
    """The largest of the absolute values, 0 for numbers that are no integers."""
    if values.dtype.kind not in "iu" or values.size == 0:
        return 0
    return max(-int(values.min()), int(values.max()))


def _array_for_torch(values: Any) -> Any:
    """What torch makes a tensor of without a word: lists and tensors are so as they are."""
    if isinstance(values, Tensor) or not hasattr(values, "__array__"):
        return values
    array: NDArray[Any] = np.asarray(values)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    turned = any(stride < 0 for stride in array.strides)
    if turned or not array.dtype.isnative:
        return np.array(array, array.dtype.newbyteorder("="), order="C")
    if not array.flags.writeable:
        with warnings.catch_warnings():
            # Nothing here writes to what a user gave.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.as_tensor(array)
    return array


def _refuse_masked(what: str, masked: NDArray[np.bool_]) -> None:
    if masked.any():
        count = len(masked) if masked.ndim else 1
        where = rows_shown(np.asarray(masked.reshape(count, -1).any(1)))
        raise InputError(
            f"{what} are masked {where}; leave those rows out, or fill them with numbers"
        )
