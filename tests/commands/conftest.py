"""The commands, run inside the test's process and in a folder of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from otdd_flash.commands import progress
from otdd_flash.commands.outcome import Outcome
from otdd_flash.commands.start import run_command
from otdd_flash.distance import main as distance
from otdd_flash.flow import main as flow
from otdd_flash.report.distance import writing

# A comparison that takes a tenth of a second, pictures aside.
SMALL = (
    "source=blobs",
    "target=blobs",
    "extractor=identity",
    "max_samples=40",
    "target.split=test",
    # Nothing of one test may be known to another.
    "cache_dir=null",
    # Most tests run twice into one folder.
    "overwrite=true",
    "hydra.run.dir=run",
    "hydra.sweep.dir=sweep",
)


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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two small labelled archives."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for name, shift in (("a", 0), ("b", 1)):
        x = generator.standard_normal((60, 4)).astype(np.float32) + shift
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.repeat(["u", "v", "w"], 20))
    return tmp_path


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told of progress, whose lines would stand between those that tests read."""
    monkeypatch.setattr(progress, "say", lambda *_: None)


@pytest.fixture
def ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """`ended(main, *arguments)` runs a command's entry point in this process."""

    def run(main: Callable[[], None], *arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["command.py", *arguments])
        monkeypatch.setattr(Outcome, "exit_code", 0)
        with pytest.raises(SystemExit) as left:
            run_command(main)
        captured = capsys.readouterr()
        return Ended(int(left.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def command(ended: Callable[..., Ended]) -> Callable[..., Ended]:
    """`command(*arguments)` runs `python -m otdd_flash.distance` on a small problem."""
    return lambda *arguments: ended(distance, *_small(arguments))


@pytest.fixture
def flow_command(ended: Callable[..., Ended]) -> Callable[..., Ended]:
    """`flow_command(*arguments)` runs `python -m otdd_flash.flow` on a small problem."""

    def run(*arguments: str) -> Ended:
        # Steps that differ between runs of one test are the test's.
        steps = () if any(a.startswith("flow.steps=") for a in arguments) else ("flow.steps=2",)
        return ended(flow, *_small(arguments), *steps)

    return run


def _small(arguments: tuple[str, ...]) -> list[str]:
    """SMALL, as far as the arguments do not say otherwise; flags first, as Hydra wants them."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    settings = [argument for argument in arguments if not argument.startswith("-")]
    keys = {argument.partition("=")[0] for argument in settings}
    if "target" in keys:
        # Another dataset has splits of its own.
        keys.add("target.split")
    return [*flags, *(s for s in SMALL if s.partition("=")[0] not in keys), *settings]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write their tables but draw no pictures, which would take most of the time."""
    for name in ("projection", "draw_class_distances", "draw_class_coupling"):
        monkeypatch.setattr(writing, name, lambda *_, **__: None)


@pytest.fixture
def composed() -> Callable[..., DictConfig]:
    """`composed(*overrides)` is the configuration of a run, by default of a distance."""

    def run(*overrides: str, name: str = "distance") -> DictConfig:
        with initialize_config_module("otdd_flash.conf", version_base="1.3"):
            return compose(name, overrides=list(overrides))

    return run


@pytest.fixture
def read() -> Callable[[str], Any]:
    """`read(path)` is the content of a JSON file."""
    return lambda path: json.loads(Path(path).read_text(encoding="utf-8"))
