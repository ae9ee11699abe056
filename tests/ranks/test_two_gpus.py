"""Two processes with a GPU each, by NCCL: replicated points and a ring, and the numbers of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import otdd_flash as otdd
from otdd_flash.operators import sharing

alone = "RANK" not in os.environ
if not alone:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
sides = []
for seed in range(2):
    draw, labels = torch.Generator().manual_seed(seed), torch.arange(20_000) % 20
    points = torch.randn(20_000, 64, generator=draw) + 0.3 * seed * labels[:, None] / 20
    # Features in host memory that a GPU has no room for are streamed, and go round no ring.
    sides.append(otdd.LabeledSamples(points, labels, tuple(map(str, range(20)))).to("cuda"))


def work(ranks):
    found = []
    for unasked, budget in ((sharing.ASSUMED_FREE, "auto"), (0, 0)):
        sharing.ASSUMED_FREE = unasked
        compute = otdd.ComputeOptions("cuda", memory_budget=budget, group=ranks)
        result = otdd.dataset_distance(*sides, epsilon_relative=0.1, compute=compute)
        f = result.potentials[0].double()
        found.append({key: getattr(result, key) for key in ("value", "bounds", "converged")})
        found[-1] |= {"layout": result.shared.layout, "f": (f - f.mean())[::100].tolist()}
    return found


found = work(None) if alone else otdd.led(work)
if alone or dist.get_rank() == 0:
    open(sys.argv[1], "w").write(json.dumps(found))
if not alone:
    dist.destroy_process_group()
"""


def found_by(processes: int, folder: Path) -> list[dict[str, Any]]:
    """What that many processes find, in the environment of this one."""
    script, out = folder / "script.py", folder / f"{processes}.json"
    script.write_text(SCRIPT)
    run = [sys.executable]
    if processes > 1:
        run += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*run, str(script), str(out)], capture_output=True, text=True, timeout=400, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    content: list[dict[str, Any]] = json.loads(out.read_text())
    return content


@pytest.mark.gpu
@pytest.mark.slow
def test_two_gpus_find_the_numbers_of_one(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one, _ = found_by(1, tmp_path)
    replicated, ring = found_by(2, tmp_path)
    assert (replicated["layout"], ring["layout"]) == ("replicated", "ring")
    for found in (replicated, ring):
        assert found["converged"]
        assert found["value"] == pytest.approx(one["value"], rel=1e-4)
        assert max(found["bounds"][0], one["bounds"][0]) <= min(
            found["bounds"][1], one["bounds"][1]
        )
        gaps = torch.tensor(found["f"]) - torch.tensor(one["f"])
        assert float(gaps.abs().max()) < 1e-2 * abs(one["value"])
