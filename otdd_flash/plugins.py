"""Code of others: users' own functions, and parts that other installed packages add.

`import_callable` imports a function by its path for `extractors.plain`, `flows.functionals` and
`study.setup`. `user_code` turns anything that foreign code raises into a `UserCodeError` of one
sentence. A new caller of users' code must use it, so that no error of the user's looks like a
defect of this package, as `extractors.plain`, `extractors.embedding`, `extractors.module_features`,
`flows.functionals`, `study.training`, `data.given`, `labels.metrics` and `operators.given_costs`
do. `blamed_on` does the same for parts of other packages alone, in `data.registry`, `extractors`,
`labels.metrics`, `labels.measuring`, `study.measures`, `study.study` and `study.result`.
`user_traceback` gives `commands.outcome` the part of the traceback that is the user's.

Parts of packages are entry points of the groups `otdd_flash.KIND`. `Registry` holds this package's
parts of one kind and finds those of others: `data.registry`, `extractors`, `labels.metrics` and
`study.measures` each have one. `commands.arguments` reads `folders` to find configurations, and
`parts` for its messages. A part's package, with name and version, is in the keys of study units
(`study.measures`) and of cached features (`extractors`), and the groups are written in the metadata
of other packages, so both must stay. Nothing of another package may be imported before one of its
names is used, because an import runs its code: until then its metadata list its names, and its
folder of configurations is found without an import. The working directory of a command is not
searched; see `otdd_flash/__init__.py`.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, distributions
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import otdd_flash
from otdd_flash.errors import InputError, UserCodeError, choose

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


T = TypeVar("T")

OWN = "otdd-flash"
GROUP = "otdd_flash."
KINDS = ("datasets", "extractors", "labels", "measures")


class Part(NamedTuple):
    """An entry point of another package.

    Attributes:
        package: the package's name and version.
        entry: the entry point.
    """

    package: str
    entry: EntryPoint


class Registry(dict[str, T]):
    """The parts of one kind by name: this package's own, as a dict, and those of other packages.

    Args:
        kind: one of `KINDS`.
        what: the word for such a part in messages, before its name.
        own: this package's parts.
        accepted: called with a foreign part and its name; returns what it must be instead, or None
            if it is acceptable.
    """

    def __init__(
        self,
        kind: str,
        what: str,
        own: Mapping[str, T],
        accepted: Callable[[Any, str], str | None],
    ) -> None:
        super().__init__(own)
        self.kind, self.what, self._accepted = kind, what, accepted

    def named(self, name: str) -> T:
        """Return the part of a name, imported if another package has it.

        Raises:
            InputError: there is none, or two packages have the name.
            UserCodeError: the package of the part does not import.
        """
        added = parts(self.kind)
        found = added.get(name, [])
        owners = [OWN] * (name in self) + [one.package for one in found]
        if len(owners) > 1:
            one, *others = owners
            raise InputError(
                f"{self.what} {name} is a name of package {one} and of package "
                f"{' and '.join(others)}, and which one is meant nobody can say; remove one of "
                "them, or ask its makers for another name"
            )
        if name in self:
            return self[name]
        if not found:
            choose(self.what, name, (*self, *sorted(added)))
        ((package, entry),) = found
        what = f"{self.what} {name} of package {package}"
        try:
            with user_code(f"{what} does not import:", doing="it raised"):
                part: T = entry.load()
        except InputError as error:
            raise InputError(f"{error}; mend or remove that package") from error
        if (wrong := self._accepted(part, name)) is not None:
            raise InputError(f"{what}, {entry.value}, must be {wrong}; mend or remove that package")
        return part

    def __missing__(self, name: str) -> T:
        return self.named(name)

    def package(self, name: str) -> str | None:
        """Return the package of a foreign part, with its version; None for own parts."""
        found = () if name in self else parts(self.kind).get(name, ())
        return found[0].package if found else None


def parts(kind: str) -> dict[str, list[Part]]:
    """Return the entry points of a kind that installed packages add, by name, without imports."""
    places = [place for place in sys.path if place not in otdd_flash._appended]
    # A package that is installed while this process runs changes its folder's time.
    return _parts(tuple(places), tuple(map(_changed, places))).get(GROUP + kind, {})


def folders() -> dict[Path, str]:
    """Return the configuration folders of packages that add parts, with the packages' names.

    A folder is called `conf` and is in the package of an entry point's module, or in the nearest
    package above that has one.
    """
    found: dict[Path, str] = {}
    for kind in KINDS:
        for several in parts(kind).values():
            for package, entry in several:
                if (folder := _folder(entry)) is not None:
                    found.setdefault(folder, package)
    return found


def blamed_on(part: Any, what: str) -> AbstractContextManager[None]:
    """Return `user_code(what)` for a part of another package, an empty context for own parts."""
    module = str(getattr(part, "__module__", type(part).__module__))
    return nullcontext() if f"{module}.".startswith(GROUP) else user_code(what)


def _folder(entry: EntryPoint) -> Path | None:
    try:
        top, *below = entry.module.split(".")
        # The top package alone: finding a module below it would import the package.
        spec = find_spec(top)
    except Exception:
        # The entry names no module; an error is raised once its name is used.
        return None
    for place in () if spec is None else spec.submodule_search_locations or ():
        for depth in range(len(below), -1, -1):
            folder = Path(place, *below[:depth], "conf")
            if folder.is_dir():
                return folder.resolve()
    return None


def _changed(place: str) -> int:
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _parts(places: tuple[str, ...], changed: tuple[int, ...]) -> dict[str, dict[str, list[Part]]]:
    found: dict[str, dict[str, list[Part]]] = {}
    seen = set()
    for distribution in distributions(path=[*places]):
        try:
            entries = [one for one in distribution.entry_points if one.group.startswith(GROUP)]
            # Read only for packages with entry points: for all others this would take most of the
            # time.
            name = distribution.metadata["Name"] if entries else ""
            version = distribution.version if name else ""
            # If a package is installed twice, Python imports the first.
            normal = re.sub(r"[-_.]+", "-", name).lower()
        except Exception:
            # Damaged: metadata that cannot be read or has no name.
            continue
        if not normal or normal in seen:
            continue
        seen.add(normal)
        for one in entries:
            named = found.setdefault(one.group, {}).setdefault(one.name, [])
            named.append(Part(f"{name} {version}", one))
    return found
