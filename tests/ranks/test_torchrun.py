"""Commands that torchrun starts in two processes: same files and exit codes, and nobody left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import otdd_flash

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torchrun")]

# Seconds within which all processes are to be gone.
GONE = 60
SMALL = ("source.max_samples=120", "target.max_samples=100", "report=none", "device=cpu")


# In the environment of all processes of a run.
MARK = "OTDD_FLASH_TEST_RUN"


def start(
    command: str, *arguments: str, options: tuple[str, ...] = (), cwd: Path | None = None
) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("TRITON_INTERPRET", None)
    environment[MARK] = str(uuid4())
    # A script is not in the folder of the package.
    paths = (str(Path(otdd_flash.__file__).parents[1]), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    # A command, or a script.
    what = [command] if command.endswith(".py") else ["-m", f"otdd_flash.{command}"]
    process = subprocess.Popen(
        [*run, *what, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=cwd,
    )
    RUNS[process.pid] = environment[MARK]
    return process


# The mark of every process that was started.
RUNS: dict[int, str] = {}


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed; all of its processes are gone."""
    try:
        said, _ = process.communicate(timeout=GONE)
    finally:
        left = [number for number, _ in _running(process)]
        for number in left:
            os.kill(number, signal.SIGKILL)
    assert left == []
    return said


def _running(process: subprocess.Popen[str]) -> list[tuple[int, dict[str, str]]]:
    """The processes of a run, and their environments."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            entries = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        if environment.get(MARK) == RUNS[process.pid]:
            found.append((int(file.parent.name), environment))
    return found


def rank(process: subprocess.Popen[str], number: int) -> int:
    """The process of a rank, once it runs."""
    until = time.monotonic() + GONE
    while time.monotonic() < until:
        for candidate, environment in _running(process):
            if environment.get("RANK") == str(number):
                return candidate
        time.sleep(0.1)
    raise AssertionError("no such rank")


def exit_codes(said: str) -> list[int]:
    return [int(code) for code in re.findall(r"exitcode  : (-?\d+)", said)]


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return content


def test_a_distance_is_written_once(tmp_path: Path) -> None:
    said = ended(start("distance", *SMALL, f"hydra.run.dir={tmp_path / 'two'}"))
    found = result(tmp_path / "two")
    assert said.count("[") == 1, said
    assert found["ranks"] == 2
    assert found["bytes_moved"] > 0
    assert found["converged"]
    assert found["backend"].endswith("2 ranks")
    one = [sys.executable, "-m", "otdd_flash.distance", *SMALL]
    subprocess.run([*one, f"hydra.run.dir={tmp_path / 'one'}"], check=True, capture_output=True)
    alone = result(tmp_path / "one")
    assert found["value"] == pytest.approx(alone["value"], rel=1e-5)
    assert max(found["bounds"][0], alone["bounds"][0]) <= min(
        found["bounds"][1], alone["bounds"][1]
    )
    assert found["fingerprints"] == alone["fingerprints"]
    written = [{path.name for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert written[0] == written[1]


def test_what_is_refused_is_said_once_and_not_tried_again() -> None:
    said = ended(start("distance", *SMALL, "epsilon=-1", options=("--max-restarts", "1")))
    assert said.count("epsilon must be positive") == 1
    assert said.count("it is not tried again") == 1
    assert exit_codes(said) == [2, 2]


def test_a_multirun_is_of_one_process(tmp_path: Path) -> None:
    said = ended(start("distance", "--multirun", *SMALL, "epsilon=0.1,0.2", cwd=tmp_path))
    assert said.count("a multirun is of one process") == 1, said
    assert exit_codes(said) == [2, 2]
    assert list(tmp_path.iterdir()) == []


UNLIKE = """
import os, sys
if os.environ["RANK"] == "1":
    sys.argv.append("seed=1")
from otdd_flash.distance import main, run_command
run_command(main)
"""


def test_processes_of_other_arguments_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE)
    options = ("--max-restarts", "1")
    said = ended(start(str(script), *SMALL, options=options, cwd=tmp_path))
    assert said.count("ranks disagree on the arguments: rank 0 has") == 1, said
    assert said.count("it is not tried again") == 1, said
    assert exit_codes(said) == [2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["unlike.py"]


def test_studies_are_shared_otherwise() -> None:
    said = ended(start("study"))
    assert said.count("study.shard=1/4") == 1


def test_an_interrupted_flow_goes_on_with_other_ranks(tmp_path: Path) -> None:
    run = f"hydra.run.dir={tmp_path / 'run'}"
    process = start("flow", *SMALL, "flow.steps=100000", "flow.checkpoint_every=1", run)
    first = rank(process, 0)
    wait_for_steps(process, tmp_path)
    os.kill(first, signal.SIGINT)
    said = ended(process)
    assert exit_codes(said) == [130, 130], said
    steps = result(tmp_path / "run")["history"][-1]["step"]
    assert steps > 0
    one = [sys.executable, "-m", "otdd_flash.flow", *SMALL, run, "flow.resume=true"]
    done = subprocess.run([*one, f"flow.steps={steps + 2}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["history"][-1]["step"] == steps + 2


def test_a_restarted_flow_goes_on_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "it's here").mkdir()
    steps = ("flow.steps=24", "flow.checkpoint_every=1")
    options = ("--max-restarts", "1")
    process = start("flow", *SMALL, *steps, options=options, cwd=tmp_path / "it's here")
    lost = rank(process, 1)
    wait_for_steps(process, tmp_path)
    os.kill(lost, signal.SIGKILL)
    said = ended(process)
    assert process.returncode == 0, said
    (found,) = (tmp_path / "it's here").rglob("result.json")
    history = json.loads(found.read_text())["history"]
    assert [record["step"] for record in history] == list(range(25))
    # One directory, made by the first start.
    assert len(list((tmp_path / "it's here").rglob("checkpoint.json"))) == 1


def wait_for_steps(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait until a flow of the process has written a checkpoint of a step below a folder."""
    until = time.monotonic() + GONE
    while process.poll() is None and time.monotonic() < until:
        for manifest in folder.rglob("checkpoint.json"):
            if json.loads(manifest.read_text())["step"] > 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"no step was taken: {ended(process)}")
