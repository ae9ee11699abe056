"""Arguments before Hydra reads them: choices of groups, deletions, and folders of runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from otdd_flash import conf, plugins
from otdd_flash.checks import path

GROUPS = ("source", "target", "tasks", "extractor", "labels", "solver", "report", "log")

# An option of Hydra's, which may be abbreviated down to three characters.
RERUN = "--experimental-rerun"

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")

# What Hydra reads as something else than a name, and ends on with a traceback.
NO_NAME = re.compile(
    r"(null|true|false|nan|inf|[-+]?[\d.].*|'.*'|\".*\"|[\[{$].*|)", re.IGNORECASE | re.DOTALL
)


def refused_argument(arguments: Iterable[str]) -> str | None:
    """Say why an argument such as source=null, source=[3] or ~epsilon is refused, if it is."""
    for argument in arguments:
        group, equals, value = argument.partition("=")
        if len(group) > 2 and RERUN.startswith(group):
            return (
                f"{RERUN} unpickles a file, which may run any code; give the arguments in the "
                "run's .hydra/overrides.yaml again"
            )
        if argument.startswith("~"):
            return f"no setting can be deleted; leave {argument} out, or give KEY=VALUE"
        added, group = argument.startswith("+"), group.lstrip("+").strip()
        if not equals or group not in GROUPS:
            continue
        if "[" in value or "{" in value:
            # Of a list Hydra composes all, and the last one replaces the others.
            return (
                f"{group} takes one choice, got {value}; write {group}=CHOICE with one of "
                f"{', '.join(choices(group))}"
            )
        if any(NO_NAME.fullmatch(choice.strip()) for choice in value.split(",")):
            return f"{group} must be one of {', '.join(choices(group))}, got {value or 'nothing'}"
        for choice in map(str.strip, value.split(",")):
            owners = [
                package for folder, package in folders() if choice in _choices_in(folder, group)
            ]
            if len(owners) > 1:
                return (
                    f"{group}={choice} is a choice of package {' and of package '.join(owners)}, "
                    "and which one is meant nobody can say; remove one of the packages"
                )
        if added:
            return f"{group} has a choice already; write {group}={value}, without the +"
    return None


def with_folders(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with `~` expanded in folders of runs, which Hydra does not do.

    Raises:
        InputError: such a folder is empty, or of no user.
    """
    found = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key.lstrip("+").strip() in FOLDERS:
            plain = value.strip()
            if len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"":
                plain = plain[1:-1]
            folder = path(key.lstrip("+").strip(), plain)
            if folder != plain:
                quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
                argument = f"{key}='{quoted}'"
        found.append(argument)
    return found


def twice_given(arguments: Iterable[str]) -> list[str]:
    """Return a sentence for every key that is given more than once; its last value counts."""
    given: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and not key.startswith("-"):
            given.setdefault(key.lstrip("+").strip(), []).append(value)
    return [
        f"{key} is given {len(values)} times: {key}={values[-1]}, the last one, is taken"
        for key, values in given.items()
        if len(values) > 1
    ]


def choices(group: str) -> list[str]:
    """The names of a group's choices, those of packages that add parts among them."""
    return sorted({name for folder, _ in folders() for name in _choices_in(folder, group)})


def folders() -> list[tuple[Path, str]]:
    """The folders of choices, this package's own first, with the packages that they belong to."""
    return [(Path(conf.__file__).parent, plugins.OWN), *plugins.folders().items()]


def _choices_in(folder: Path, group: str) -> set[str]:
    return {file.stem for file in folder.joinpath(group).glob("*.yaml")}
