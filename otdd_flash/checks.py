"""The vocabulary of declarations: what an argument may be, said once and checked at the boundary.

A check is called with the argument's name and what was given for it. It returns what goes on, or
raises an `InputError` of one sentence: the name, what is accepted, what was given. Numbers of any
library come back as Python's own; bool is not a number, 1.5 is not an integer, text is neither.

Nothing here imports torch or looks into an array: whether values are finite is for those who read
them. Classes are named, not imported, so that declarations cost nothing and know nobody.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from otdd_flash.errors import InputError, choose
from otdd_flash.shown import display

P = ParamSpec("P")
R = TypeVar("R")

Check = Callable[[str, Any], Any]
Declaration = Mapping[str, Check]

LONGEST_SHOWN = 60

# Keywords without a default, and what to give.
REQUIRED = {
    "epsilon": "give epsilon=VALUE, the regularisation in units of the cost, such as 0.01 times "
    "its mean"
}


def takes(
    declaration: Declaration, prefix: str = "", elsewhere: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a function, those left to their defaults excepted.

    Args:
        declaration: checks by parameter; further keywords go on as they are.
        prefix: what messages put before a parameter's name, such as `extractor.`.
        elsewhere: keywords that are fields of an options argument, and how they are written there.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                for name in kwargs:
                    if elsewhere and name in elsewhere:
                        raise InputError(
                            f"{function.__name__} takes no {name}: write {elsewhere[name]}"
                        ) from None
                if missing := _missing(signature, kwargs):
                    raise InputError(f"{function.__name__} {missing}") from None
                # Too many arguments, or too few: Python's own words name the function as well.
                return function(*args, **kwargs)
            for name, value in bound.arguments.items():
                if name in declaration:
                    bound.arguments[name] = declaration[name](f"{prefix}{name}", value)
            return function(*bound.args, **bound.kwargs)

        return checked

    return decorate


def _missing(signature: inspect.Signature, given: Mapping[str, Any]) -> str:
    """Say which keyword that has no default is missing, "" for none, and what to give."""
    known = signature.parameters
    if "epsilon_relative" in given and "epsilon" in known and "epsilon_relative" not in known:
        return f"takes no epsilon_relative: {REQUIRED['epsilon']}"
    for name, parameter in known.items():
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required and name not in given:
            return f"needs {name}: {REQUIRED.get(name, f'give {name}=...')}"
    return ""


def check_fields(options: object, declaration: Declaration, prefix: str = "") -> None:
    """Check the fields of a frozen dataclass, and keep what the checks return.

    Args:
        options: the instance, in its `__post_init__`.
        declaration: checks by field.
        prefix: what messages put before a field's name, such as `solver.`.
    """
    for name, check in declaration.items():
        object.__setattr__(options, name, check(f"{prefix}{name}", getattr(options, name)))


def refused(name: str, accepted: str, value: object) -> InputError:
    """The error for an argument that is not what it must be."""
    return InputError(f"{name} must {accepted}, got {shown(value)}")


def shown(value: object) -> str:
    """A value as messages show it: in full where it is short, else what it is."""
    if value is None or isinstance(value, bool | numbers.Number | str | os.PathLike):
        return display(repr(value) if isinstance(value, str) else str(value), LONGEST_SHOWN)
    kind = type(value).__qualname__
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{kind} of shape {tuple(shape)}"
    return f"{kind} of {len(value)} items" if isinstance(value, list | tuple | dict) else kind


def number(accepted: str, allowed: Callable[[float], bool]) -> Check:
    """A real number that is `allowed`; `accepted` says which are, after `must`."""

    def check(name: str, value: Any) -> float:
        value = _item(value)
        if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
            raise refused(name, "be a number", value)
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        except ValueError:
            # A signaling NaN of decimal.
            found = math.nan
        # NaN fails every comparison.
        if not allowed(found):
            raise refused(name, accepted, value)
        return found

    return check


def integer(at_least: int | None = 1, below: int | None = None) -> Check:
    """An integer in [at_least, below)."""

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
    """True or False, and no text that means one of them."""
    value = _item(value)
    if not isinstance(value, bool):
        raise refused(name, "be true or false", value)
    return value


def choice(*known: str) -> Check:
    """One of some names."""

    def check(name: str, value: Any) -> str:
        return choose(name, text(name, value), known)

    return check


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise refused(name, "be text", value)
    return value


def path(name: str, value: Any) -> Any:
    """Return a path, as text or as an object, with a leading `~` expanded; refuse empty ones.

    The only place where paths that users give are made ready for the file system.
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
    """Return text that is not empty."""
    if not text(name, value).strip():
        raise InputError(f"{name} must not be empty, got {value!r}; leave it out instead")
    return str(value)


def function(name: str, value: Any) -> Any:
    """Anything that can be called."""
    if not callable(value):
        raise refused(name, "be a function", value)
    return value


def mapping(accepted: str = "be a mapping") -> Check:
    """Values by name."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise refused(name, accepted, value)
        return value

    return check


def names(name: str, value: Any) -> tuple[str, ...]:
    """Several names: a sequence that is no text, whose items become text."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise refused(name, "be a sequence of names", value)
    return tuple(map(str, value))


def array(shape: str) -> Check:
    """Numbers in an array, a tensor or nested lists of one; `shape` is said in messages."""

    def check(name: str, value: Any) -> Any:
        if not _is_array(value):
            raise refused(name, f"be an array or a tensor {shape}", value)
        return value

    return check


def tensor(shape: str) -> Check:
    """A torch tensor, and not what could become one: gradients have to find their way back."""

    def check(name: str, value: Any) -> Any:
        if not is_a(value, "torch.Tensor"):
            raise refused(name, f"be a tensor {shape}", value)
        check_numbers(name, value)
        return value

    return check


def check_numbers(name: str, given: Any) -> None:
    """Refuse tensors that are not themselves an array of numbers.

    Raises:
        InputError: the tensor is a meta, nested or fake one, or of another class that keeps its
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
    kind, plain = type(given), sys.modules["torch"].Tensor
    ours = is_a(given, "otdd_flash.features.file_features.FileFeatures")
    if kind.__torch_dispatch__ != plain.__torch_dispatch__ and not ours:
        whole = ", such as its full_tensor()" if hasattr(given, "full_tensor") else ""
        raise InputError(
            f"{name} is a {kind.__name__}, which keeps its numbers elsewhere; pass a tensor{whole}"
        )


def tensors(shape: str) -> Check:
    """Accept a list of tensors of one kind, or one tensor with a dimension more."""
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
    """An object of one of some classes, named as `package.module.Class` where they are defined."""

    def check(name: str, value: Any) -> Any:
        if not is_a(value, *kinds):
            raise refused(name, accepted, value)
        return value

    return check


def is_a(value: object, *kinds: str) -> bool:
    """Whether a value's class, or one that it derives from, has one of these full names."""
    return any(f"{base.__module__}.{base.__qualname__}" in kinds for base in type(value).__mro__)


def called(setting: str, check: Check) -> Check:
    """Check under the name that a setting of the commands has."""
    return lambda name, value: check(setting, value)


def optional(check: Check) -> Check:
    """None, or what another check takes."""
    return lambda name, value: None if value is None else check(name, value)


def sequence(check: Check, length: int | None = None) -> Check:
    """Items that all pass a check, as many as `length` says, in a list or a tuple."""
    several = "be a list" if length is None else f"be a list of {length}"

    def check_all(name: str, value: Any) -> Sequence[Any]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise refused(name, several, value)
        if length is not None and len(value) != length:
            raise refused(name, several, value)
        return tuple(check(f"{name}[{place}]", item) for place, item in enumerate(value))

    return check_all


def _item(value: Any) -> Any:
    """The number in a NumPy scalar or a 0-dim array, for which Python's own is as good.

    A tensor that requires a gradient stays one, and is refused: its gradient would be lost.
    """
    single = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if single and not getattr(value, "requires_grad", False) else value


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") or (
        isinstance(value, list | tuple) and len(value) > 0 and not isinstance(value[0], str)
    )
