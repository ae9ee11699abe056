"""Arguments that Hydra would take and the commands cannot: no choice of a group, deletions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources

GROUPS = ("source", "target", "tasks", "extractor", "labels", "solver", "report")

# What Hydra reads as something else than a name, and ends on with a traceback.
NO_NAME = re.compile(
    r"(null|true|false|nan|inf|[-+]?[\d.].*|'.*'|\".*\"|[\[{$].*|)", re.IGNORECASE | re.DOTALL
)


def refused_argument(arguments: Iterable[str]) -> str | None:
    """Why an argument such as source=null, source=[3] or ~epsilon is none; None where all are."""
    for argument in arguments:
        group, equals, value = argument.partition("=")
        if argument.startswith("~"):
            return f"no setting can be deleted; leave {argument} out, or give KEY=VALUE"
        if not equals or group not in GROUPS:
            continue
        if any(NO_NAME.fullmatch(choice.strip()) for choice in value.split(",")):
            return f"{group} must be one of {', '.join(choices(group))}, got {value or 'nothing'}"
    return None


def choices(group: str) -> list[str]:
    """The names of a group's choices."""
    files = resources.files("otdd_flash.conf").joinpath(group).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
