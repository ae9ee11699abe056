"""The commands, run inside the test's process and in a folder of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_runs import Ended, quicken_hydra, run_here, write_archives

# A comparison that takes a tenth of a second, pictures aside.
SMALL = (
    *("source=blobs", "target=blobs", "extractor=identity", "max_samples=40", "target.split=test"),
    # Nothing of one test may be known to another, and most tests run twice into one folder.
    *("cache_dir=null", "overwrite=true", "hydra.run.dir=run", "hydra.sweep.dir=sweep"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two small labelled archives."""
    monkeypatch.chdir(tmp_path)
    return write_archives(tmp_path)


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told of progress, whose lines would stand between those that tests read."""
    from otdd_flash.commands.messages import Phases

    monkeypatch.setattr(Phases, "_say", lambda _: None)


@pytest.fixture
def ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """`ended(main, *arguments)` runs a command's entry point in this process."""
    return lambda main, *arguments: run_here(main, [*arguments], monkeypatch, capsys)


@pytest.fixture
def command(ended: Callable[..., Ended]) -> Callable[..., Ended]:
    """`command(*arguments)` runs `python -m otdd_flash.distance` on a small problem."""
    from otdd_flash.distance import main

    return lambda *arguments: ended(main, *_with(SMALL, arguments))


@pytest.fixture
def flow_command(ended: Callable[..., Ended]) -> Callable[..., Ended]:
    """`flow_command(*arguments)` runs `python -m otdd_flash.flow` on a small problem."""
    from otdd_flash.flow import main

    return lambda *arguments: ended(main, *_with((*SMALL, "flow.steps=2"), arguments))


def _with(small: tuple[str, ...], arguments: tuple[str, ...]) -> list[str]:
    """Settings, as far as the arguments do not say otherwise; flags first, as Hydra wants them."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    settings = [argument for argument in arguments if not argument.startswith("-")]
    keys = {argument.partition("=")[0] for argument in settings}
    if "target" in keys:
        # Another dataset has splits of its own.
        keys.add("target.split")
    if not {"-m", "--multirun"} & {*flags}:
        # Three files, which only a summary reads.
        settings.append("hydra.output_subdir=null")
    return [*flags, *(s for s in small if s.partition("=")[0] not in keys), *settings]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write their tables but not the pictures that would take most of the time."""
    from otdd_flash.report import distance as writing
    from otdd_flash.report import flow as flow_writing
    from otdd_flash.report import page

    for name in ("projection", "draw_class_distances", "draw_class_coupling"):
        monkeypatch.setattr(writing, name, lambda *_, **__: None)
    for name in ("draw_objective", "draw_paths", "draw_images", "write_animation"):
        monkeypatch.setattr(flow_writing, name, lambda *_, **__: None)
    save = page.save_picture
    monkeypatch.setattr(page, "save_picture", lambda figure, path: figure and save(figure, path))


@pytest.fixture
def composed() -> Callable[..., Any]:
    """`composed(*overrides)` is the configuration of a run, by default of a distance."""
    from hydra import compose, initialize_config_module

    quicken_hydra()

    def run(*overrides: str, name: str = "distance", **more: Any) -> Any:
        with initialize_config_module("otdd_flash.conf", version_base="1.3"):
            return compose(name, overrides=list(overrides), **more)

    return run


@pytest.fixture
def read() -> Callable[[str], Any]:
    """`read(path)` is the content of a JSON file."""
    return lambda path: json.loads(Path(path).read_text(encoding="utf-8"))


@pytest.fixture
def rows() -> Callable[[str], list[dict[str, str]]]:
    """`rows(path)` are the lines of a table, by column."""
    import csv

    def lines(path: str) -> list[dict[str, str]]:
        with Path(path).open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    return lines
