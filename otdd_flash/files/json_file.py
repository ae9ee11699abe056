"""Strict JSON, written whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from otdd_flash.files.atomic import write_text


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write `data` as indented JSON in its own order, ending with a newline.

    Paths become text; numpy scalars and 0-d tensors become numbers, 1-d ones lists.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold; the message names its key.
        TypeError: a value has no JSON form; the message names its key.
        InputError: the file cannot be written.
    """
    text = json.dumps(_plain(data, ""), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def json_content(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` in JSON's own types, as `write_json` writes it.

    A number that is not finite, which JSON cannot hold, becomes None.

    Raises:
        TypeError: a value has no JSON form; the message names its key.
    """
    content: dict[str, Any] = _plain(data, "", finite=False)
    return content


def _plain(value: Any, where: str, *, finite: bool = True) -> Any:
    """`value` in JSON's own types; `where` is its dotted key for messages.

    Where numbers must be `finite`, one that is not raises; else it becomes None.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        if finite:
            raise ValueError(f"{where or 'the value'} is {value}, which JSON cannot hold")
        return None
    if isinstance(value, Mapping):
        return {
            str(key): _plain(item, f"{where}.{key}".strip("."), finite=finite)
            for key, item in value.items()
        }
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, bytes):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [_plain(item, f"{where}[{i}]", finite=finite) for i, item in enumerate(items)]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where, finite=finite)
    raise TypeError(f"{where or 'the value'} is a {type(value).__name__}, which has no JSON form")
