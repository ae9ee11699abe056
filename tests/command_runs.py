"""Commands in the process of a test, which has imported once what they need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """The lines on stderr, but for notices of what was chosen for the user."""
        return [line for line in self.err.splitlines() if not line.startswith("notice: ")]

    @property
    def error(self) -> str:
        """The message of a failed command, its last line on stderr."""
        lines = self.err.strip().splitlines()
        assert "Traceback" not in self.err
        assert lines[-1].startswith("error: "), self.err
        return lines[-1].removeprefix("error: ")


def run_here(
    main: Callable[[], None],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Ended:
    """Run a command's entry point in this process."""
    from otdd_flash import shown
    from otdd_flash.commands.outcome import Outcome
    from otdd_flash.commands.start import run_command

    _quicken_hydra()
    monkeypatch.setattr(sys, "argv", ["command.py", *arguments])
    # Both outlive the command here, whose own process would end with it.
    monkeypatch.setattr(Outcome, "exit_code", 0)
    monkeypatch.setattr(shown, "_concealed", {})
    with pytest.raises(SystemExit) as left:
        run_command(main)
    captured = capsys.readouterr()
    return Ended(int(left.value.code or 0), captured.out, captured.err)


@cache
def _quicken_hydra() -> None:
    """Let Hydra compose a run once, and read a file of conf/ once, half of a command's time.

    It composes every run twice, the first time for `hydra.mode`, which no test sets.
    """
    from hydra._internal.core_plugins.importlib_resources_config_source import (
        ImportlibResourcesConfigSource as Source,
    )
    from hydra._internal.hydra import Hydra

    read, known = Source._read_config, {}

    def read_once(self: Source, file: Any) -> Any:
        if self.path != "otdd_flash.conf":
            return read(self, file)
        key = self.provider, str(file)
        if key not in known:
            known[key] = read(self, file)
        # What is composed of it changes it.
        return deepcopy(known[key])

    Source._read_config = read_once
    Hydra.get_mode = lambda *_, **__: None
