"""Commands that torchrun starts in two processes: same files and exit codes, and nobody left.

One test starts torchrun as its users do; the others fork its processes (`forked_torchrun.py`).
"""

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

import pytest
from forked_torchrun import GONE, Started

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torchrun")]

SMALL = ("source.max_samples=60", "target.max_samples=50", "report=none", "device=cpu")
AGAIN = ("--max-restarts", "1")


def exit_codes(said: str) -> list[int]:
    return [int(code) for code in re.findall(r"exitcode  : (-?\d+)", said)]


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return content


def test_a_distance_is_written_once(tmp_path: Path) -> None:
    """By torchrun itself."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("TRITON_INTERPRET", None)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = ["otdd_flash.distance", *SMALL]
    done = subprocess.run(
        [*run, "-m", *command, f"hydra.run.dir={tmp_path / 'two'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=4 * GONE,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("[") == 1, done.stdout
    found = result(tmp_path / "two")
    assert found["ranks"] == 2
    assert found["bytes_moved"] > 0
    assert found["converged"]
    assert found["backend"].endswith("2 ranks")
    one = Started(tmp_path, *command, f"hydra.run.dir={tmp_path / 'one'}", ranks=1)
    said = one.ended()
    assert one.returncode == 0, said
    alone = result(tmp_path / "one")
    assert found["value"] == pytest.approx(alone["value"], rel=1e-5)
    assert max(found["bounds"][0], alone["bounds"][0]) <= min(
        found["bounds"][1], alone["bounds"][1]
    )
    assert found["fingerprints"] == alone["fingerprints"]
    written = [{path.name for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert written[0] == written[1]


UNLIKE = """
import os, sys
if os.environ["RANK"] == "1":
    sys.argv.append("seed=1")
from otdd_flash.distance import main, run_command
run_command(main)
"""
# Commands that are refused, and what is said once of them.
REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a bad value": (
        ("otdd_flash.distance", *SMALL, "epsilon=-1"),
        ("epsilon must be finite and not negative", "it is not tried again"),
    ),
    "other arguments": (
        ("unlike.py", *SMALL),
        ("ranks disagree on the arguments: rank 0 has", "it is not tried again"),
    ),
    "a multirun": (
        ("otdd_flash.distance", "--multirun", *SMALL, "epsilon=0.1,0.2"),
        ("a multirun is of one process",),
    ),
    "a study": (("otdd_flash.study",), ("study.shard=1/4",)),
}


def test_what_is_refused_is_said_once_and_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "unlike.py").write_text(UNLIKE)
    for name, (command, sentences) in REFUSED.items():
        where = tmp_path / name
        where.mkdir()
        first = str(tmp_path / command[0]) if command[0].endswith(".py") else command[0]
        run = Started(tmp_path, first, *command[1:], options=AGAIN, cwd=where)
        said = run.ended()
        assert [said.count(each) for each in sentences] == [1] * len(sentences), (name, said)
        assert exit_codes(said) == [2, 2], (name, said)
        if name in ("other arguments", "a multirun"):
            # Before Hydra has made a directory.
            assert list(where.iterdir()) == [], name


def test_an_interrupted_flow_goes_on_with_other_ranks(tmp_path: Path) -> None:
    command = ("otdd_flash.flow", *SMALL, f"hydra.run.dir={tmp_path / 'run'}")
    process = Started(tmp_path, *command, "flow.steps=100000", "flow.checkpoint_every=1")
    first = process.rank(0)
    wait_for_steps(process, tmp_path)
    os.kill(first, signal.SIGINT)
    said = process.ended()
    assert exit_codes(said) == [130, 130], said
    steps = result(tmp_path / "run")["history"][-1]["step"]
    assert steps > 0
    resumed = Started(tmp_path, *command, "flow.resume=true", f"flow.steps={steps + 2}", ranks=1)
    said = resumed.ended()
    assert resumed.returncode == 0, said
    assert result(tmp_path / "run")["history"][-1]["step"] == steps + 2


def test_a_restarted_flow_goes_on_in_its_directory(tmp_path: Path) -> None:
    where = tmp_path / "it's here"
    where.mkdir()
    steps = ("flow.steps=12", "flow.checkpoint_every=1")
    process = Started(tmp_path, "otdd_flash.flow", *SMALL, *steps, options=AGAIN, cwd=where)
    lost = process.rank(1)
    wait_for_steps(process, where)
    os.kill(lost, signal.SIGKILL)
    said = process.ended()
    assert process.returncode == 0, said
    (found,) = where.rglob("result.json")
    history = json.loads(found.read_text())["history"]
    assert [record["step"] for record in history] == list(range(13))
    # One directory, made by the first start.
    assert len(list(where.rglob("checkpoint.json"))) == 1


def wait_for_steps(process: Started, folder: Path) -> None:
    """Wait until a flow of the process has written a checkpoint of a step below a folder."""
    until = time.monotonic() + GONE
    while process.poll() is None and time.monotonic() < until:
        for manifest in folder.rglob("checkpoint.json"):
            if json.loads(manifest.read_text())["step"] > 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"no step was taken: {process.ended()}")
