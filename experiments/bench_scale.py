"""Strong scaling: one workload by one process and by several, each with a GPU of its own.

    python -m experiments.bench_scale WORKLOAD [--processes 1 2 4 8] [--device cuda]
        [--points N] [--dimension D] [--classes V] [--steps N] [--output DIR]

Workloads, of random labelled clouds with W given unless it is what is measured:

- imagenet_0.1, imagenet_0.01: the certified debiased divergence of 1,281,167 points a side, d =
  512, 1,000 classes a side, at that multiple of the mean cost;
- imagenet_ring: the first with a budget for which points go round, by several processes;
- imagenet_streamed: the first with points in host memory, of which the device holds a part, by one
  process alone;
- four_million: 4 million points a side, 10,000 classes a side, at 0.1;
- class_table: Sinkhorn divergences between 2,000 + 2,000 classes of 64 points, 8 million pairs, to
  tables of values and bounds on the CPU;
- flow: 20 steps of a gradient flow of 60,000 points in 784 dimensions.

A row is one workload by so many processes: seconds after a smaller warm-up, points on the device;
the speed-up against the row of one process; bytes that rank 0 moved and the share of its time in
which it did, waits for the slowest process included; the most memory that each process held; value,
bounds, and how far potentials are from those of one process, which are kept in OUTPUT/vectors.
Rows that bench_scale_DEVICE.json holds already are not measured again, so that a command can be one
row: `--processes 2`. Every process has the environment of this one, NCCL's settings included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.scale_workloads import WORKLOADS

KEYS = ("workload", "processes", "points", "dimension", "classes")
ROOT = Path(__file__).parents[1]


def measured(settings: dict[str, Any]) -> dict[str, Any]:
    """What the processes of a row report."""
    with tempfile.TemporaryDirectory() as folder:
        given, row = Path(folder) / "settings.json", Path(folder) / "row.json"
        given.write_text(json.dumps({**settings, "row": str(row)}))
        start = ["-m", "experiments.scale_workloads", str(given)]
        if settings["processes"] > 1:
            count = str(settings["processes"])
            run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
            start = [*run, *start]
        # Its environment is this one's, in which a machine says what NCCL may use.
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        subprocess.run([sys.executable, *start], check=True, cwd=ROOT, env=environment)
        found: dict[str, Any] = json.loads(row.read_text())
        return found


def main() -> None:
    """Write bench_scale_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--points", type=int, help="a side")
    parser.add_argument("--dimension", type=int)
    parser.add_argument("--classes", type=int, help="a side")
    parser.add_argument("--steps", type=int, default=20, help="of the flow")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    workload = WORKLOADS[given.workload]
    sizes = [getattr(given, key) or getattr(workload.sizes, key) for key in KEYS[2:]]
    rows = Rows(f"bench_scale_{given.device}", KEYS, "torch", "triton", folder=given.output)
    one = workload.against or given.workload
    for processes in [1] if workload.alone else given.processes:
        if processes == 1 and workload.against is not None:
            continue
        keys = dict(zip(KEYS, (given.workload, processes, *sizes), strict=True))
        if rows.has(**keys):
            continue
        name = "_".join(map(str, (one, *sizes)))
        settings = {
            "workload": given.workload,
            "processes": processes,
            "sizes": sizes,
            "epsilon_relative": workload.epsilon_relative,
            "steps": given.steps,
            "device": given.device,
            "vectors": str((given.output / "vectors" / f"{name}.pt").resolve()),
        }
        found = measured(settings)
        alone = [row for row in rows.rows if all(row[key] == keys[key] for key in KEYS[2:])]
        alone = [row for row in alone if (row["workload"], row["processes"]) == (one, 1)]
        first = alone[0]["seconds"] if alone else found["seconds"] if processes == 1 else None
        speed_up = None if first is None else first / found["seconds"]
        rows.add(
            {**keys, "epsilon_relative": workload.epsilon_relative, "speed_up": speed_up} | found
        )


if __name__ == "__main__":
    main()
