"""Processes killed at every moment of a flow, and what a later one makes of what they left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_flows import blobs, flow

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows import checkpoint as shard

pytestmark = pytest.mark.slow

# Where a process dies, as it tells of a step or at the n-th write of a checkpoint, and the step of
# the checkpoint that it leaves.
MOMENTS = {
    "before any checkpoint": ("told", 0, None),
    "as the end is told": ("told", 5, 4),
    "amid the first write": ("amid", 1, None),
    "amid a later write": ("amid", 2, 2),
    "before a write counts": ("before", 2, 2),
    "after a write counts": ("after", 2, 4),
}


def run(folder, *, resume=False, progress=None):
    """The flow that is killed, and resumed."""
    return flow(
        blobs(9),
        blobs(11, seed=1),
        steps=5,
        mode="joint",
        stepping=otdd.Stepping(0.1, "adam"),
        solver=otdd.Converged(tolerance=1e-2),
        checkpoints=otdd.Checkpoints(folder, every=2, resume=resume),
        progress=progress,
    )


def killed_flow(folder, where, count):
    """A flow in this process, which it does not survive."""
    writes = 0
    real_save, real_replace = shard.save_tensors, os.replace

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def save(path, *content):
        nonlocal writes
        writes += 1
        checksum = real_save(path, *content)
        if where == "amid" and writes == count:
            os.truncate(path, path.stat().st_size // 2)
            die()
        return checksum

    def replace(source, target):
        if where == "before" and writes == count:
            die()
        real_replace(source, target)
        if where == "after" and writes == count:
            die()

    shard.save_tensors, os.replace = save, replace
    run(folder, progress=lambda record: die() if (where, count) == ("told", record.step) else None)


def main(root):
    """One child for every moment: a fork costs nothing, and another start would seconds."""
    torch.set_num_threads(1)
    # Whatever torch imports when it is first used is there for all of them.
    run(root / "warm")
    for name, (where, count, _) in MOMENTS.items():
        child = os.fork()
        if child == 0:
            killed_flow(root / name, where, count)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise RuntimeError(f"{name}: the flow was not killed, status {status}")


@pytest.fixture(scope="module")
def remains(tmp_path_factory):
    """What killed processes left, in a folder each."""
    root = tmp_path_factory.mktemp("killed")
    paths = [str(Path(otdd.__file__).parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_flow_ends_where_it_would_have(moment, remains, whole):
    steps = []
    left = MOMENTS[moment][2]
    if left is None:
        with pytest.raises(InputError, match="there is no"):
            run(remains / moment, resume=True)
        return
    resumed = run(remains / moment, resume=True, progress=lambda record: steps.append(record.step))
    assert steps[0] == left
    assert resumed.samples.fingerprint == whole.samples.fingerprint
    assert [r.objective for r in resumed.history] == [r.objective for r in whole.history]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
