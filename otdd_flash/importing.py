"""Users' own functions: import by path, and errors that they raise.

`import_callable` imports a function for `extractors.plain`, `flows.functionals` and `study.setup`.
`user_code` turns anything that user code raises into a `UserCodeError` of one sentence. Every place
that calls a user's function must use it, so that no error of the user's looks like a defect of this
package: the first two, `study.training`, `data.given`, `extractors.embedding`,
`extractors.module_features`, `labels.metrics`, and all that use `plugins.blamed_on`.
`user_traceback` gives `commands.outcome` the part of the traceback that is the user's.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from types import TracebackType
from typing import Any

import otdd_flash
from otdd_flash.errors import InputError, UserCodeError

FORM = "package.module:function or package.module.function"

IN_A_WORKER = " in DataLoader worker process "
# Modules whose frames are not the user's code.
OUR_FRAMES = ("otdd_flash.", "importlib.", "contextlib")


def import_callable(path: str, setting: str) -> Callable[..., Any]:
    """Import a function or any other callable.

    Args:
        path: "package.module:function" or "package.module.function"; attributes of a class are
            found too.
        setting: the setting's name in errors, such as `extractor.path`.

    Raises:
        InputError: nothing callable has that path.
        UserCodeError: its module does not import.
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


@contextmanager
def user_code(what: str, doing: str = "raised") -> Iterator[None]:
    """Turn anything that user code raises into one sentence, with its own error as the cause.

    Args:
        what: the code, for the sentence.
        doing: what it did when it raised.

    Raises:
        UserCodeError: anything was raised but an interrupt, or `sys.exit` was called.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{what} {doing} {_in_one_line(error)}") from error


def user_traceback(error: BaseException) -> str:
    """Return the traceback of a user's own error from their first frame, or ""."""
    found: BaseException = error
    cause: BaseException | None = error
    while isinstance(cause, InputError):
        # Errors with a place in front have the original as their cause.
        found, cause = cause, cause.__cause__
    if cause is None or not isinstance(found, UserCodeError):
        return ""
    frames = _theirs(cause.__traceback__)
    return "".join(traceback.format_exception(type(cause), cause, frames)).rstrip()


def _theirs(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames before the user's."""
    while frames is not None:
        module = str(frames.tb_frame.f_globals.get("__name__", ""))
        if not f"{module}.".startswith(OUR_FRAMES):
            break
        frames = frames.tb_next
    return frames


def _in_one_line(error: BaseException) -> str:
    kind, lines = type(error).__name__, str(error).splitlines()
    if lines and IN_A_WORKER in lines[0]:
        # A DataLoader raises its worker's error again, with the traceback as its message.
        return " ".join(lines[-1].split())
    words = " ".join(" ".join(lines).split())
    return f"{kind}: {words}" if words else kind


def _find_in_working_directory(name: str) -> None:
    """Let a user's module be found where the command was started, after all other places.

    The commands remove that folder from sys.path (`otdd_flash/__init__.py`). A user who names a
    module in it wants that module, and what it imports from there.
    """
    folder = otdd_flash._started_in
    if folder is None or folder in sys.path:
        return
    if PathFinder.find_spec(name.partition(".")[0], [folder]) is not None:
        sys.path.append(folder)
        otdd_flash._appended.append(folder)


def _import_module(name: str, request: str) -> Any:
    with user_code(f"{request} does not import:", doing="it raised"):
        try:
            _find_in_working_directory(name)
            return import_module(name)
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):
                raise InputError(
                    f"{request}: no module named {error.name!r}; give {FORM}, with its folder on "
                    "PYTHONPATH"
                ) from None
            # A module that the user's module imports is missing.
            raise
