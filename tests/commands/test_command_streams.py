"""Streams that fail or lack characters cost no result, and say so by the exit code."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from otdd_flash.commands.messages import Phases

pytestmark = pytest.mark.usefixtures("undrawn")

DISTANCE = (
    *("source=blobs", "target=blobs", "target.split=test", "extractor=identity", "max_samples=40"),
    *("report=table", "cache_dir=null", "hydra.run.dir=run"),
)
TABLES = {"class_coupling.csv", "class_distances.csv", "nearest_classes.csv", "result.json"}
# Tests of these commands are not told of progress.
SAY = Phases._say
UNFINISHED = ("solver.max_iterations=1", "solver.tolerance=1e-4")


@pytest.fixture
def full():
    """A text stream on a disk that is full."""
    with open("/dev/full", "w") as stream:
        yield stream


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_what_an_encoding_lacks_is_replaced_and_keeps_its_difference(
    command, monkeypatch, read, encoding
):
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding=encoding))
    assert command("report=table").code == 0
    assert sys.stdout.errors == "strict"
    sys.stdout.flush()
    text = content.getvalue().decode(encoding)
    arrow = "→" if encoding == "utf-16" else "->"
    assert f"blobs train {arrow} blobs test" in text
    assert f"{read('run/result.json')['value']:.2g}"[:4] in text
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(content, encoding=encoding))
    assert command("source=arrays", "source.path='猫.npz'").code == 2
    sys.stderr.flush()
    name = "猫" if encoding == "utf-16" else "\\u732b"
    assert f"{name}.npz" in content.getvalue().decode(encoding)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["run", "flow", "multirun"])
def test_a_full_standard_output_is_code_4_beside_the_result(
    command, flow_command, monkeypatch, read, rows, full, way
):
    monkeypatch.setattr(sys, "stdout", full)
    if way == "multirun":
        assert command("-m", "epsilon=1,3", "report=none").code == 4
        assert len({float(row["value"]) for row in rows("sweep/summary.csv")}) == 2
        return
    ended = (flow_command if way == "flow" else command)("report=table")
    assert ended.code == 4
    assert "standard output (No space left on device)" in ended.error
    assert read("run/result.json")["value"] > 0
    assert read("run/error.json")["exit_code"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), 0), (UNFINISHED, 4), (("epsilon=-1",), 2), (("nothing=1",), 2), (("-x",), 2)],
)
def test_a_full_standard_error_counts_where_something_was_to_be_said(
    command, monkeypatch, full, arguments, code
):
    # Progress that nobody takes is no loss.
    monkeypatch.setattr(Phases, "_say", SAY)
    monkeypatch.setattr(sys, "stderr", full)
    assert command("report=none", *arguments).code == code
    assert Path("run/result.json").exists() == (code in (0, 4))


@pytest.mark.parametrize("arguments", [("--help",), ("--cfg", "job"), ("--version",)])
def test_help_on_a_full_disk_is_code_4(ended, monkeypatch, full, arguments):
    from otdd_flash.distance import main

    monkeypatch.setattr(sys, "stdout", full)
    assert ended(main, *arguments).code == 4


@pytest.mark.slow
def test_a_process_whose_streams_are_closed_leaves_its_result(folder):
    """In a process: what is opened later has the number of a closed stream."""
    command = " ".join(['"$0" -m otdd_flash.distance', *DISTANCE, "<&- >&- 2>&-"])
    assert subprocess.run(["bash", "-c", command, sys.executable], check=False).returncode == 4
    found = {path.name for path in Path("run").iterdir() if path.is_file()}
    assert found - {"error.json"} == TABLES
    for path in Path("run").glob("*.csv"):
        assert not {"distance", "error:"} & {*path.read_text().split(" ")}
    assert json.loads(Path("run/result.json").read_text())["value"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("--version >/dev/full", 4),
        # What is said to nobody, as was asked for.
        ("seed=1 seed=2 --cfg=job 2>&- | true; exit ${PIPESTATUS[0]}", 0),
    ],
)
def test_python_has_nothing_to_add_as_it_ends(given, code):
    """In a process: 120 is Python's where it cannot write what is left."""
    command = f'"$0" -m otdd_flash.distance {given}'
    assert subprocess.run(["bash", "-c", command, sys.executable], check=False).returncode == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COLUMNS", "5"),
        ("COLUMNS", "²"),
        ("TERM", "dumb"),
        ("FORCE_COLOR", "1"),
    ],
)
def test_the_number_is_legible_in_any_terminal(command, monkeypatch, read, name, value):
    monkeypatch.setenv(name, value)
    ended = command("report=table", "solver.bound_width=1", "epsilon=1")
    assert ended.code == 0
    lower, upper = read("run/result.json")["bounds"]
    assert lower > 0
    out = re.sub("\x1b\\[[0-9;]*m", "", ended.out)
    # The first digits of both ends, in whatever lines they stand.
    words = out.replace("[", " ").replace("]", " ").replace(",", " ").split()
    assert any(word.startswith(f"{lower:.3f}"[:4]) for word in words)
    assert any(word.startswith(f"{upper:.3f}"[:4]) for word in words)
    assert max(map(len, out.splitlines())) <= 200
