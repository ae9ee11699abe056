"""Parameters of functionals: numbers, vectors and matrices, given as they are or as files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.checks import path
from otdd_flash.data.arrays import read_npy
from otdd_flash.data.request import reading
from otdd_flash.errors import InputError


def as_number(name: str, value: Any, *, least: float = -math.inf) -> float:
    """A finite number, at least `least`.

    Raises:
        InputError: it is none; the message names the parameter.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" and at least {least:g}"
        raise InputError(f"{name} must be a finite number{bound}, got {value!r}")
    return float(value)


def as_tensor(name: str, value: Any, shape: tuple[int | None, ...]) -> Tensor:
    """A float64 tensor on the CPU from (nested lists of) numbers, an array, or a file.

    Args:
        name: the parameter; also the key in an npz file that holds several arrays.
        value: the numbers, or the path of a .npy or .npz file.
        shape: that it must have; None is any length from 1.

    Raises:
        InputError: the file cannot be read, the shape is another or a value is not finite.
    """
    given = _read(name, Path(path(name, value))) if isinstance(value, str | Path) else value
    try:
        # Of a list, as_tensor alone would make float32.
        tensor = torch.as_tensor(given, dtype=torch.float64).detach().to("cpu", copy=True)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} must be numbers or a file of them, got {given!r}") from None
    fits = tensor.ndim == len(shape) and all(
        length == wanted if wanted is not None else length > 0
        for length, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise InputError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"{name} holds NaN or infinite values")
    return tensor


def _read(name: str, file: Path) -> NDArray[Any]:
    match file.suffix.lower():
        case ".npy":
            return np.array(read_npy(file))
        case ".npz":
            return _read_npz(name, file)
    raise InputError(f"{name} must be numbers or a .npy or .npz file, got {str(file)!r}")


def _read_npz(name: str, file: Path) -> NDArray[Any]:
    with reading(file), np.load(file, allow_pickle=False) as archive:
        key = archive.files[0] if len(archive.files) == 1 else name
        if key not in archive.files:
            raise InputError(
                f"{file} has no key {name!r} for {name}; its keys are: {', '.join(archive.files)}"
            )
        return np.asarray(archive[key])
