"""Checks of single arguments, from which `otdd_flash.arguments` builds its table by annotation.

A check is called with the argument's name and value. It returns the value to use, or raises an
`InputError` of one sentence: the name, what is accepted, the value given. Numbers of any library
become Python's own; bool is not a number, 1.5 is not an integer, text is neither. `arguments`
imports nearly all of it. More than forty other modules use parts: `shown` for values in messages
(`data.arrays`, `derivatives.hessian`, ...), `path` (`data.dataset`, `files.cache`, ...), and checks
that they declare in `@takes(...)`, the decorator of public functions, such as `optional` and
`tensor` (`derivatives.loss`, `batched.plans`, ...).

This module must not import torch or read arrays: whether values are finite is checked where they
are read. Classes are compared by full names instead of imported, so that declarations are cheap and
depend on no other module.
"""

from __future__ import annotations

import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from otdd_flash.errors import InputError, choose
from otdd_flash.shown import display

Check = Callable[[str, Any], Any]

LONGEST_SHOWN = 60


def refused(name: str, accepted: str, value: object) -> InputError:
    """Return, for the caller to raise, the error for an argument that is not valid."""
    return InputError(f"{name} must {accepted}, got {shown(value)}")


def shown(value: object) -> str:
    """Return a value for messages: numbers, text and paths shortened, of others type and size."""
    if value is None or isinstance(value, bool | numbers.Number | str | os.PathLike):
        return display(repr(value) if isinstance(value, str) else str(value), LONGEST_SHOWN)
    kind = type(value).__qualname__
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{kind} of shape {tuple(shape)}"
    return f"{kind} of {len(value)} items" if isinstance(value, list | tuple | dict) else kind


def must(accepted: str, allowed: Callable[[Any], bool]) -> Check:
    """Return a check for values that are `allowed`; messages say `must {accepted}`."""

    def check(name: str, value: Any) -> Any:
        if not allowed(value):
            raise refused(name, accepted, value)
        return value

    return check


def number(accepted: str, allowed: Callable[[float], bool]) -> Check:
    """Return a check for real numbers that are `allowed`; messages say `must {accepted}`."""

    def check(name: str, value: Any) -> float:
        value = _item(value)
        if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
            raise refused(name, "be a number", value)
        try:
            found = float(value)
        except OverflowError:
            found = -math.inf if value < 0 else math.inf
        except ValueError:
            # A signaling NaN of decimal.
            found = math.nan
        # NaN fails every comparison.
        if not allowed(found):
            raise refused(name, accepted, value)
        return found

    return check


def integer(at_least: int | None = 1, below: int | None = None) -> Check:
    """Return a check for integers in [at_least, below); by default from 1 on."""

    def check(name: str, value: Any) -> int:
        value = _item(value)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise refused(name, "be an integer", value)
        found = int(value)
        if at_least is not None and found < at_least:
            raise refused(name, f"be at least {at_least}", value)
        if below is not None and found >= below:
            raise refused(name, f"be below {below}", value)
        return found

    return check


def flag(name: str, value: Any) -> bool:
    """Accept True or False, but no text such as "true"."""
    value = _item(value)
    if not isinstance(value, bool):
        raise refused(name, "be true or false", value)
    return value


# Accepts a string.
text = must("be text", lambda value: isinstance(value, str))
# Accepts a callable.
function = must("be a function", callable)


def mapping(accepted: str = "be a mapping") -> Check:
    """Return a check for mappings."""
    return must(accepted, lambda value: isinstance(value, Mapping))


def choice(*known: str) -> Check:
    """Return a check for one of the known names."""

    def check(name: str, value: Any) -> str:
        return choose(name, text(name, value), known)

    return check


def path(name: str, value: Any) -> Any:
    """Return a path, as text or as an object, with a leading `~` expanded; refuse empty ones.

    Every path that a user gives must be prepared here, but for the folder of `log.uri`, an address,
    which `integrations.tracking` prepares.
    """
    if not isinstance(value, str | os.PathLike):
        raise refused(name, "be a path", value)
    given = os.fsdecode(value)
    if not given.strip() or "\0" in given:
        raise InputError(f"{name} must name a file or folder, got {given!r}; or leave it out")
    expanded = os.path.expanduser(given)
    if expanded == given and given.startswith("~"):
        user, *_ = given[1:].split("/")
        raise InputError(
            f"{name}={given}: there is no user {user!r}; write {os.path.abspath(given)} for a name "
            "that begins so"
        )
    return expanded if isinstance(value, str) else Path(expanded)


def word(name: str, value: Any) -> str:
    """Accept text that is not empty."""
    if not text(name, value).strip():
        raise InputError(f"{name} must not be empty, got {value!r}; leave it out instead")
    return str(value)


def names(name: str, value: Any) -> tuple[str, ...]:
    """Accept a sequence of names, but not a text; its items become text."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise refused(name, "be a sequence of names", value)
    return tuple(map(str, value))


def array(shape: str) -> Check:
    """Return a check for arrays, tensors and nested lists of numbers.

    `shape` is text for messages and is not checked here.
    """
    return must(f"be an array or a tensor {shape}", _is_array)


def tensor(shape: str) -> Check:
    """Return a check for tensors; arrays are refused, as they cannot receive a gradient.

    `shape` is text for messages and is not checked here.
    """

    def check(name: str, value: Any) -> Any:
        if not is_a(value, "torch.Tensor"):
            raise refused(name, f"be a tensor {shape}", value)
        check_numbers(name, value)
        return value

    return check


def check_numbers(name: str, given: Any) -> None:
    """Refuse tensors that do not hold an array of numbers themselves.

    Raises:
        InputError: the tensor is a meta, nested or fake one, or of another class that stores its
            numbers elsewhere, such as a distributed or a masked tensor.
    """
    if given.is_meta:
        raise InputError(
            f"{name} is on the device meta, where tensors have no numbers; make it on the CPU or a "
            "GPU"
        )
    if given.is_nested:
        raise InputError(
            f"{name} is a nested tensor; pass one of its parts at a time, from its unbind()"
        )
    # A tensor was given, so torch is imported.
    kind, plain = type(given), sys.modules["torch"].Tensor
    ours = is_a(given, "otdd_flash.features.file_features.FileFeatures")
    if kind.__torch_dispatch__ != plain.__torch_dispatch__ and not ours:
        whole = ", such as its full_tensor()" if hasattr(given, "full_tensor") else ""
        raise InputError(
            f"{name} is a {kind.__name__}, which keeps its numbers elsewhere; pass a tensor{whole}"
        )


def tensors(shape: str) -> Check:
    """Return a check for lists of tensors, or for one tensor with an additional dimension.

    `shape` is text for messages and is not checked here.
    """
    accepted = f"be a list of tensors {shape}, or one with a dimension more"

    def check(name: str, value: Any) -> Any:
        given = value if isinstance(value, list | tuple) else [value]
        if not all(is_a(one, "torch.Tensor") for one in given):
            raise refused(name, accepted, value)
        for one in given:
            check_numbers(name, one)
        return value

    return check


def instance(accepted: str, *kinds: str) -> Check:
    """Return a check for objects of classes, given by full names `package.module.Class`."""
    return must(accepted, lambda value: is_a(value, *kinds))


def is_a(value: object, *kinds: str) -> bool:
    """Return whether a value's class, or a base of it, has one of these full names."""
    return any(f"{base.__module__}.{base.__qualname__}" in kinds for base in type(value).__mro__)


def called(setting: str, check: Check) -> Check:
    """Return a check whose messages name a setting of the commands."""
    return lambda name, value: check(setting, value)


def either(check: Check, *kinds: str) -> Check:
    """Return a check that accepts objects of classes and what another check accepts."""
    return lambda name, value: value if is_a(value, *kinds) else check(name, value)


def optional(check: Check) -> Check:
    """Return a check that accepts None and what another check accepts."""
    return lambda name, value: None if value is None else check(name, value)


def sequence(check: Check, length: int | None = None) -> Check:
    """Return a check for lists and tuples of `length` items that all pass a check."""
    several = "be a list" if length is None else f"be a list of {length}"

    def check_all(name: str, value: Any) -> Sequence[Any]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise refused(name, several, value)
        if length is not None and len(value) != length:
            raise refused(name, several, value)
        return tuple(check(f"{name}[{place}]", item) for place, item in enumerate(value))

    return check_all


def _item(value: Any) -> Any:
    """Return the Python number of a NumPy scalar or a 0-dim array, and other values unchanged.

    A tensor that requires a gradient stays one and is refused later: its gradient would be lost.
    """
    # Numbers that a trace of `torch.compile` has for variables have no attributes.
    if isinstance(value, int | float):
        return value
    single = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if single and not getattr(value, "requires_grad", False) else value


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") or (
        isinstance(value, list | tuple) and len(value) > 0 and not isinstance(value[0], str)
    )
