"""`log=` of the commands: settings, numbers with solver bounds and pictures for a tracker."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from otdd_flash.errors import InputError, choose

# Each a module beside this one, with the package that it needs.
TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets of a run.

    Args:
        name: what the run is called.
        directory: the run's folder, with its pictures.
        config: all settings, nested by group.
        numbers: by name, such as `value`, `lower` and `upper`.
        series: by name, (step, number) for every step of a flow.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    numbers: Mapping[str, float]
    series: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)

    @property
    def pictures(self) -> list[Path]:
        """The pictures that the run has written."""
        return sorted(self.directory.glob("*.png"))

    @property
    def flat_config(self) -> dict[str, Any]:
        """The settings by their keys on the command line, such as `solver.tolerance`."""
        return dict(_flattened(self.config))


def check_tracker(name: str | None) -> None:
    """Raise an `InputError` unless there is such a tracker and its package is installed."""
    if name is None:
        return
    package = TRACKERS[choose("log", name, tuple(TRACKERS))]
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"log={name} needs the package {package}: pip install 'otdd-flash[integrations]'"
        )


def track(name: str, run: TrackedRun) -> None:
    """Hand a run to the tracker of this name, which writes into the run's folder.

    Raises:
        InputError: as `check_tracker`.
    """
    check_tracker(name)
    import_module(f"otdd_flash.integrations.{name}").write(run)


def folder_of(name: str, directory: Path) -> Path:
    """Where a tracker writes: a folder of its own inside the run's, as its programs expect."""
    return directory / {"mlflow": "mlruns"}.get(name, name)


def finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers without those that are missing or not finite, which no tracker draws."""
    return {
        name: float(value)
        for name, value in numbers.items()
        if value is not None and math.isfinite(value)
    }


def _flattened(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
