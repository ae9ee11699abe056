"""Groups of the configuration, whose value is the name of a choice and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources

GROUPS = ("source", "target", "tasks", "extractor", "labels", "solver", "report")

# An option of Hydra's, which may be abbreviated down to three characters.
RERUN = "--experimental-rerun"

# What Hydra reads as something else than a name, and ends on with a traceback.
NO_NAME = re.compile(r"(null|true|false|nan|inf|[-+]?[\d.].*|'.*'|\".*\"|)", re.IGNORECASE)


def refused_choice(arguments: Iterable[str]) -> str | None:
    """Why an argument such as source=null or source=3 is none, or None where all are."""
    for argument in arguments:
        if len(argument) > 2 and RERUN.startswith(argument.partition("=")[0]):
            return (
                f"{RERUN} unpickles a file, which may run any code; give the arguments in the "
                "run's .hydra/overrides.yaml again"
            )
        group, equals, value = argument.partition("=")
        if not equals or group not in GROUPS:
            continue
        if any(NO_NAME.fullmatch(choice.strip()) for choice in value.split(",")):
            return f"{group} must be one of {', '.join(choices(group))}, got {value or 'nothing'}"
    return None


def choices(group: str) -> list[str]:
    """The names of a group's choices."""
    files = resources.files("otdd_flash.conf").joinpath(group).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
