"""Tables of class distances as npz files, written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from otdd_flash.errors import InputError
from otdd_flash.files.atomic import replacing
from otdd_flash.files.written_by import STAMP, VERSION_KEY, check_format


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays; tensors, numbers and texts become NumPy's.

    Raises:
        InputError: the file cannot be written.
    """
    # Through a handle, because numpy appends .npz to a path of any other ending.
    with replacing(path) as partial, partial.open("wb") as file:
        content: dict[str, Any] = {key: np.asarray(value) for key, value in arrays.items()}
        np.savez(file, **content)


def read_arrays(path: str | Path, needed: Sequence[str], writer: str) -> dict[str, Any]:
    """All arrays of an npz file, by name.

    Args:
        path: the file.
        needed: names that it has to have.
        writer: what writes such files, for messages.

    Raises:
        InputError: the file is missing or unreadable, lacks an array, or a later version wrote it.
    """
    expected = f"class distances are an npz with arrays {_enumerated(needed)}, as {writer} writes"
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path} holds a single array; {expected}")
        with archive:
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise InputError(f"no class distances at {path}: there is no such file") from None
    except InputError:
        raise
    except Exception as error:
        # NumPy and its zip reader raise anything on damaged bytes.
        raise InputError(f"cannot read class distances from {path} ({error}); {expected}") from None
    if VERSION_KEY in arrays:
        # Else another program wrote it, with what keys it likes.
        check_format(path, {key: arrays[key] for key in STAMP if key in arrays})
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise InputError(
            f"{path} has no array {', '.join(missing)} (it holds: "
            f"{', '.join(arrays) or 'nothing'}); {expected}"
        )
    return arrays


def _enumerated(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
