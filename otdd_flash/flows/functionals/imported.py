"""Functionals of the user's own, by import path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from otdd_flash.errors import InputError
from otdd_flash.flows.functionals.base import Functional
from otdd_flash.importing import import_callable


def imported_functional(path: str, parameters: Mapping[str, Any]) -> Functional:
    """The function at `path` with some of its arguments.

    Args:
        path: "package.module:function" or "package.module.function". It is called as
            function(points, labels, masses, **parameters) and returns a 0-dim tensor; see
            `Functional`.
        parameters: keyword arguments.

    Raises:
        InputError: nothing callable stands there, or it does not take these arguments.
    """
    if not isinstance(path, str):
        raise InputError(f"path must be package.module:function, got {path!r}")
    function = import_callable(path, "path")
    try:
        inspect.signature(function).bind("points", "labels", "masses", **parameters)
    except TypeError as error:
        raise InputError(
            f"{error}; it is called with points, labels, masses, and every other key of the "
            "configuration as a keyword"
        ) from None
    return cast(Functional, partial(function, **parameters))
