"""Commands in the process of a test, which has imported once what they need."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


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
    from otdd_flash.commands import start
    from otdd_flash.commands.start import run_command

    quicken_hydra()
    monkeypatch.setattr(sys, "argv", ["command.py", *arguments])
    # Both outlive the command here, whose own process would end with it.
    monkeypatch.setattr(start, "highest", 0)
    monkeypatch.setattr(shown, "_concealed", {})
    with pytest.raises(SystemExit) as left:
        run_command(main)
    captured = capsys.readouterr()
    return Ended(int(left.value.code or 0), captured.out, captured.err)


def started(folder: Path, *arguments: str | Path, **variables: str) -> CompletedProcess[str]:
    """Run Python in a process, in a folder, with the package found as an installed one is."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        # A shell's background jobs, and what they start, ignore interruptions.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )


def write_archives(folder: Path) -> Path:
    """Write two small labelled archives, a.npz and b.npz, into a folder."""
    generator = np.random.default_rng(0)
    for name, shift in (("a", 0), ("b", 1)):
        x = generator.standard_normal((60, 4)).astype(np.float32) + shift
        np.savez(folder / f"{name}.npz", x=x, y=np.repeat(["u", "v", "w"], 20))
    return folder


@cache
def quicken_hydra() -> None:
    """Let Hydra compose the files of conf/ once for every choice of groups, half a command's time.

    It composes every run twice, the first time for `hydra.mode`, which no test sets. Other folders
    of configurations are read as they are.
    """
    from hydra._internal import config_loader_impl as loader
    from hydra._internal.defaults_list import DefaultsList, Overrides
    from hydra._internal.hydra import Hydra

    Loader = loader.ConfigLoaderImpl
    choose, compose = loader.create_defaults_list, Loader._compose_config_from_defaults_list
    chosen: dict[str, DefaultsList] = {}
    composed: dict[str, bytes] = {}

    def packaged(repo: Any) -> bool:
        return not any(source.scheme() == "file" for source in repo.get_sources())

    def choose_once(repo: Any, config_name: Any, overrides_list: Any, **more: Any) -> DefaultsList:
        given = Overrides(repo, overrides_list)
        key = f"{config_name} {given.override_choices} {more}"
        if given.append_group_defaults or given.deletions or not packaged(repo):
            return choose(repo, config_name, overrides_list, **more)
        if key not in chosen:
            chosen[key] = choose(repo, config_name, overrides_list, **more)
        return replace(chosen[key], config_overrides=given.config_overrides)

    def compose_once(self: Any, defaults: Any, repo: Any) -> Any:
        if not packaged(repo):
            return compose(self, defaults, repo)
        key = str([(each, each.is_self) for each in defaults])
        if key not in composed:
            composed[key] = pickle.dumps(compose(self, defaults, repo))
        # A quarter of the time of a deep copy.
        return pickle.loads(composed[key])

    loader.create_defaults_list = choose_once
    Loader._compose_config_from_defaults_list = compose_once
    Hydra.get_mode = lambda *_, **__: None
