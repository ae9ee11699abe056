"""Parts that other installed packages add, by entry points of the groups `otdd_flash.KIND`.

`Registry` holds this package's parts of one kind and finds those of other packages.
`data.registry`, `extractors`, `labels.metrics` and `study.measures` each have one.
`commands.choices` reads `folders` to find configurations, and `commands.hydra_errors` reads `parts`
for its messages. Calls of foreign code are inside `blamed_on`, so that errors name the package: in
these, in `labels.measuring`, `study.measures`, `study.study` and `study.result`.

The groups `otdd_flash.KIND` are written in the metadata of other packages, so they must stay.
Nothing of another package may be imported before one of its names is used, because an import runs
its code: until then its metadata list its names, and its folder of configurations is found without
an import. The working directory of a command is not searched; see `otdd_flash/__init__.py`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.metadata import EntryPoint, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import otdd_flash
from otdd_flash.errors import InputError, choose
from otdd_flash.importing import user_code

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
