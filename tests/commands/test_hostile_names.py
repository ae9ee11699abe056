"""Names that others wrote, through whole commands: they act on no terminal and no reader."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from otdd_flash.commands.messages import messages
from otdd_flash.distance import main as distance
from otdd_flash.flow import main as flow
from otdd_flash.mix import main as mix
from otdd_flash.pairwise import pairwise_distances
from otdd_flash.report.pairwise import write_pairwise_report
from otdd_flash.samples import LabeledSamples
from otdd_flash.study.__main__ import main as study

# Terminal controls, markup, mathtext, tags, quotes, bidirectional and invisible letters.
NAME = "=1+1\x1b]0;x\x07\x1b[31m[red][/no]\u202e\x9b\n\t$\\frac$<b>&'\"\x7f\u200b"
CLASSES = (NAME, "-2+3", "\udc80", "z" * 200_000)
FILE = "=cmd\x1b[2J[red]\u202e\n\udcff$\\frac$"
FOLDER = "run\x1b[1m[bold]\udcfe"
FORMULAS = tuple("=+-@\t\r")


@pytest.fixture
def named(folder: Path) -> Callable[[str], str]:
    """Writes samples with hostile class names; returns the path as an argument has it."""

    def write(name: str, shift: float = 0.0) -> str:
        x = np.random.default_rng(0).normal(size=(60, 3)) + np.arange(60)[:, None] % 4 + shift
        with (folder / name).open("wb") as file:
            np.savez(file, x=x, y=np.arange(60) % 4, class_names=np.array(CLASSES))
        return f'"{folder / name}"'

    return write


def _assert_harmless(*texts: str) -> None:
    for text in texts:
        assert len(text) < 50_000
        rest = "".join(character for character in text if character not in "\n ")
        odd = [character for character in rest if not character.isprintable()]
        assert not odd


def _assert_files_harmless(folder: str, *expected: str) -> None:
    files = [*Path(folder).iterdir()]
    assert {*expected} <= {path.name for path in files}
    for path in files:
        if path.suffix in (".csv", ".html"):
            # Pictures are inside the page.
            _assert_harmless(text := re.sub(r"base64,[^\"]*", "", path.read_bytes().decode()))
            assert "<script>alert" not in text or path.suffix == ".csv"
        if path.suffix == ".csv":
            for cell in (cell for row in csv.reader(text.splitlines()) for cell in row):
                if cell.startswith(FORMULAS):
                    float(cell)
        if path.suffix == ".png":
            assert path.stat().st_size > 1000


COMMON = ("extractor=identity", "cache_dir=null", "log_level=INFO", f'hydra.run.dir="{FOLDER}"')
PAIR = ("source=arrays", "target=arrays", "save_result=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "more", "files"),
    [
        (
            distance,
            ("contributions=true",),
            ("class_distances.png", "class_coupling.png", "projection.png", "contributions.csv"),
        ),
        (flow, ("flow.steps=1",), ("objective.png", "paths.png", "metrics.csv", "adapted")),
    ],
)
def test_a_comparison_of_hostile_names(
    ended: Callable, named: Callable, main: Callable, more: tuple[str, ...], files: tuple[str, ...]
) -> None:
    paths = (f"source.path={named(FILE + '.npz')}", f"target.path={named('b.npz', 1.0)}")
    said = ended(main, *PAIR, *paths, *COMMON, *more)
    assert said.code == 0, said.err
    _assert_harmless(said.out, said.err)
    assert "\\x1b[2J[red]\\u202e" in said.out
    assert "written to" in said.out
    assert "[bold]\\udcfe" in said.out
    _assert_files_harmless(FOLDER, *files)
    result = json.loads((Path(FOLDER) / "result.json").read_text())
    assert result["source"] == FILE
    if main is distance:
        # In full where machines read it.
        assert result["classes"]["source"] == [*CLASSES]


@pytest.mark.slow
def test_a_study_of_hostile_names(ended: Callable, named: Callable) -> None:
    labels = ["=1+1[/x]<script>alert(1)", "../../\x1b[2J", "@$\\frac$\n", "z" * 200_000]
    tasks = [
        {"name": "arrays", "path": named(f"{k}.npz", k)[1:-1], "as": label}
        for k, label in enumerate(labels)
    ]
    Path("theirs/tasks").mkdir(parents=True)
    text = json.dumps({"datasets": tasks, "size": None})
    Path("theirs/tasks/hostile.yaml").write_text(text)
    more = ("--config-dir", "theirs", "tasks=hostile", "transfer=null", "measures=[otdd]")
    said = ended(study, *more, *COMMON, "study.workers=1")
    assert said.code == 0, said.err
    _assert_harmless(said.out, said.err)
    _assert_files_harmless(FOLDER, "pairs.csv", "report.html", "distances.png")
    assert "'=1+1[/x]<script>alert(1)" in (Path(FOLDER) / "pairs.csv").read_text()


@pytest.mark.slow
def test_a_mixture_of_hostile_names(ended: Callable, named: Callable) -> None:
    labels = ["=1+1[/x]<script>alert(1)", "../../\x1b[2J", "@$\\frac$\n"]
    sources = [
        {"name": "arrays", "path": named(f"{k}.npz", k)[1:-1], "as": label}
        for k, label in enumerate(labels)
    ]
    Path("theirs").mkdir()
    (Path("theirs") / "hostile.yaml").write_text(
        json.dumps({"defaults": ["mix", "_self_"], "sources": sources})
    )
    more = ("--config-dir", "theirs", "--config-name", "hostile", "rows=20", "both=false")
    said = ended(mix, *more, "target=arrays", f"target.path={named('t.npz')}", *COMMON)
    assert said.code == 0, said.err
    _assert_harmless(said.out, said.err)
    _assert_files_harmless(FOLDER, "mixture.csv", "mixture.html", "mixture.png", "mixture")


@pytest.mark.slow
def test_pairwise_reports_of_hostile_names(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    sets = [
        LabeledSamples.from_arrays(x + k, np.array(CLASSES)[np.arange(40) % 4], name=name)
        for k, name in enumerate((NAME, "z" * 200_000))
    ]
    result = pairwise_distances(sets, epsilon=0.5)
    assert not write_pairwise_report(result, folder / "out").missing
    _assert_files_harmless(str(folder / "out"), "distances.csv", "class_distances.png")


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "arguments",
    [
        ("source.path=\x1b[2J[/no]\u202e.npz",),
        ("source.path=a.npz", 'source.classes=["\x1b[2J"]'),
        ("source.path=a.npz", "\x1b[2J=1"),
        ("source.path=no.npz", 'hydra.searchpath=["file:///\x1b[2J"]'),
        ("source.path=a.npz", f"device={'w' * 100_000}"),
        ("-m", "source.path='\x1b[2J\u202e'", "hydra.sweep.dir=sweep"),
    ],
)
def test_errors_and_sweeps_repeat_values_without_their_effects(
    ended: Callable, arguments: tuple[str, ...]
) -> None:
    said = ended(distance, "source=arrays", "target=arrays", "target.path=b.npz", *arguments)
    assert said.code == 2
    _assert_harmless(said.out, said.err)
    if "-m" in arguments:
        assert "#0 : source=arrays" in said.out
    else:
        assert len(said.error) <= 4000


def test_messages_act_on_no_terminal() -> None:
    """Letters of any language and line ends stay."""
    for text in ("a\nb", "a\x1b[31mb", "\x9b31m", "gr\u00fc\u00df \u65e5\u672c", "\u202ea"):
        with messages.capture() as said:
            messages.print(text, soft_wrap=True)
        _assert_harmless(said.get())
        assert said.get().count("\n") == text.count("\n") + 1
