"""What a key takes, in words, read off the dataclass that the settings become."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from otdd_flash.checks import LONGEST_SHOWN
from otdd_flash.errors import InputError
from otdd_flash.shown import display

WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


def mistyped(schema: type, key: str, value: Any) -> InputError | None:
    """The error for a value that a key does not take; None where the key says nothing of that.

    Args:
        schema: the dataclass of all settings.
        key: dotted.
        value: what was given.
    """
    accepted = _accepted(schema, key)
    if accepted is None:
        return None
    return InputError(f"{key} must be {accepted}, got {display(_written(value), LONGEST_SHOWN)}")


def _written(value: Any) -> str:
    """A value as the command line writes it, text in quotes."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _accepted(schema: Any, key: str) -> str | None:
    for part in key.split("."):
        optional, kinds = _kinds(schema)
        hints = get_type_hints(kinds[0]) if is_dataclass(kinds[0]) else {}
        if part not in hints:
            return None
        schema = hints[part]
    optional, kinds = _kinds(schema)
    if len(kinds) != 1:
        return None
    kind = get_origin(kinds[0]) or kinds[0]
    words = "a mapping" if is_dataclass(kind) else WORDS.get(kind)
    return words and (f"{words} or null" if optional else words)


def _kinds(hint: Any) -> tuple[bool, list[Any]]:
    """Whether a type takes None, and what else it takes."""
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    return NoneType in kinds, [kind for kind in kinds if kind is not NoneType]
