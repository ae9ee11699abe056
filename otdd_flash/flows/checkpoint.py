"""Checkpoints of a flow: one file, whole or not at all, that a later run goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from otdd_flash import arguments
from otdd_flash.checks import check_fields
from otdd_flash.errors import InputError
from otdd_flash.files import replacing
from otdd_flash.flows.history import Moment, StepRecord
from otdd_flash.labels import ClassDistances
from otdd_flash.solver.term.result import TransportTerm
from otdd_flash.tensor_file import warn_unchecked
from otdd_flash.torch_file import load_torch_file

FILE = "checkpoint.pt"

# Parameters of a choice, which only another choice lacks: that has a key of its own.
PARAMETERS = ("labels.", "solver.")

# What a state holds beside tensors, numbers, texts and containers.
TYPES: list[Any] = [ClassDistances, Moment, StepRecord, TransportTerm]


@dataclass(frozen=True)
class Checkpoints:
    """Where a flow keeps its state, and how often.

    Args:
        folder: gets one file, `checkpoint.pt`.
        every: steps between two writes; the end of a flow is always written.
        resume: go on from the file instead of starting.

    Raises:
        InputError: `every` is not positive.
    """

    folder: Path
    every: int = 10
    resume: bool = False

    def __post_init__(self) -> None:
        check_fields(self, arguments.CHECKPOINTS)
        object.__setattr__(self, "folder", Path(self.folder))
        if self.every < 1:
            raise InputError(f"flow.checkpoint_every must be positive, got {self.every}")

    def save(
        self,
        state: Mapping[str, Any],
        settings: Mapping[str, Any],
        may_change: Sequence[str] = (),
    ) -> None:
        """Write a state, the settings that it belongs to, and which of them may change.

        Raises:
            InputError: the file cannot be written.
        """
        content = {"settings": dict(settings), "may_change": [*may_change], "state": dict(state)}
        with replacing(self.folder / FILE) as partial, partial.open("wb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:
                # Of a full disk torch says that it is somewhere unexpected; the file says why.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise

    def load(self, settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """The state last written, its tensors on `device`, or on the CPU where they were there.

        Raises:
            InputError: there is no checkpoint, it cannot be read, or it belongs to other settings:
                the message names the first key that changed.

        Warns:
            DataNotice: the file has no checksums.
        """
        path = self.folder / FILE
        if not path.exists():
            raise InputError(
                f"flow.resume=true, but there is no {path}; give the folder of the run to go on "
                "with as hydra.run.dir=FOLDER, or leave flow.resume out"
            )
        try:
            with torch.serialization.safe_globals(TYPES):
                content, checked = load_torch_file(path, map_location=_on(device))
            before, free, state = (content[key] for key in ("settings", "may_change", "state"))
        except Exception as error:
            # What torch says of it is long, and advises to run code that a file may hold.
            raise InputError(
                f"{path} is damaged, or no checkpoint of a flow; leave flow.resume out to start "
                "again"
            ) from error
        if not checked:
            warn_unchecked(path)
        chosen = [key for key in before if not key.startswith(PARAMETERS)]
        for key in [*settings, *chosen]:
            now, then = settings.get(key), before.get(key)
            if now != then and key not in free:
                raise InputError(
                    f"flow.resume=true, but {key} was {then} in the run of {path} and is {now} "
                    f"now; set {key} as it was, or start again without flow.resume"
                )
        return dict(state)


def _on(device: torch.device) -> Any:
    """Leave what was on the CPU there; everything else goes to `device`."""

    def place(storage: Any, location: str) -> Any:
        if location == "cpu" or device.type == "cpu":
            return storage
        return storage.cuda(device.index)

    return place
