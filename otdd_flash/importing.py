"""A user's own function, by import path."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from otdd_flash.errors import InputError

FORM = "package.module:function or package.module.function"


def import_callable(path: str, setting: str) -> Callable[..., Any]:
    """Import a function or any other callable.

    Args:
        path: "package.module:function" or "package.module.function"; attributes of a class are
            found too.
        setting: what errors call the path, such as `extractor.path`.

    Raises:
        InputError: nothing callable stands there.
    """
    module_name, _, attributes = path.partition(":")
    if not attributes:
        module_name, _, attributes = path.rpartition(".")
    if not module_name or not attributes:
        raise InputError(f"{setting} must be {FORM}, got {path!r}")
    found = _import_module(module_name, f"{setting}={path}")
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise InputError(f"{setting}={path}: {module_name} has no {attributes}")
        found = getattr(found, attribute)
    if not callable(found):
        raise InputError(f"{setting}={path} is not callable: {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _import_module(name: str, request: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # A module missing inside the user's own file is reported under its own name.
        raise InputError(
            f"{request}: no module named {error.name!r}; give {FORM}, with its folder on PYTHONPATH"
        ) from None
