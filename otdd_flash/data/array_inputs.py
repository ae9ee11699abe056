"""Arrays as inputs: vectors or images, by their shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash.data.dataset import Modality
from otdd_flash.errors import InputError
from otdd_flash.real_numbers import (
    LARGEST_INTEGER,
    check_integers,
    exact_array,
    in_double,
    largest_integer,
    real_tensor,
)

CHANNELS = (1, 3, 4)


def as_inputs(values: NDArray[Any], where: str) -> tuple[NDArray[Any], Modality]:
    """Vectors (n, d) as modality "array", images (n, h, w) or (n, h, w, c) as "image".

    Images of uint8, uint16, bool and floats stay as they are, as their type says what is white;
    those of other integers become uint8 within 0 to 255. Vectors of integers that float32 does not
    hold become float64, which has to hold them.

    Args:
        values: numbers.
        where: the file and key, for the message.

    Raises:
        InputError: the values are not numbers, have another shape or would be rounded.
    """
    values = exact_array(what := f"{where}: inputs", values)
    if values.dtype.kind not in "fiub":
        raise InputError(f"{where}: inputs must be numbers, got {values.dtype}")
    if values.ndim == 2:
        large = largest_integer(values) > LARGEST_INTEGER
        return in_double(what, real_tensor(what, values)).numpy() if large else values, "array"
    if values.ndim == 3 or (values.ndim == 4 and values.shape[3] in CHANNELS):
        check_integers(where, values)
        return _as_pixels(values), "image"
    raise InputError(
        f"{where}: inputs must have shape (n, d), or (n, h, w) or (n, h, w, c) with {CHANNELS} "
        f"channels last for images; got {values.shape}"
    )


def _as_pixels(values: NDArray[Any]) -> NDArray[Any]:
    kind, size = values.dtype.kind, values.dtype.itemsize
    if kind in "fb" or (kind == "u" and size <= 2) or values.size == 0:
        return values
    if values.min() < 0 or values.max() > 255:
        return values.astype(np.float32)
    return values.astype(np.uint8)
