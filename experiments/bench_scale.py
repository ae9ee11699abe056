"""Strong scaling: workloads by one process and by several, each with a GPU of its own.

    python -m experiments.bench_scale WORKLOAD ... [--processes 1 2 4 8] [--device cuda]
        [--points N] [--dimension D] [--classes V] [--steps N] [--no-shares] [--output DIR]

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
the speed-up against the row of one process; bytes that rank 0 moved; the most memory that each
process held; iterations; value, bounds, and how far potentials are from those of one process, which
are kept in OUTPUT/vectors. The share of time in which rank 0 exchanged something, waits for the
slowest process included, is that of a run apart, as a GPU is waited for around every exchange that
is timed; `--no-shares` leaves it out. At the end the seconds and speed-ups of all rows are printed
and drawn in bench_scale_DEVICE.png.

Rows that bench_scale_DEVICE.json holds already are not measured again, so that a command can be one
row: `--processes 2`. Compare rows of one command alone: cards differ. Every process has the
environment of this one, NCCL's settings included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.environment import RESULTS
from experiments.rows import Rows
from experiments.scale_workloads import WORKLOADS
from otdd_flash.report.page import new_figure, save_picture

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


def add_rows(rows: Rows, name: str, given: argparse.Namespace) -> None:
    """Measure the rows of a workload that are not there yet."""
    workload = WORKLOADS[name]
    sizes = [getattr(given, key) or getattr(workload.sizes, key) for key in KEYS[2:]]
    one = workload.against or name
    for processes in [1] if workload.alone else given.processes:
        if processes == 1 and workload.against is not None:
            continue
        keys = dict(zip(KEYS, (name, processes, *sizes), strict=True))
        if rows.has(**keys):
            continue
        vectors = "_".join(map(str, (one, *sizes)))
        settings = {
            "workload": name,
            "processes": processes,
            "sizes": sizes,
            "epsilon_relative": workload.epsilon_relative,
            "steps": given.steps,
            "device": given.device,
            "shares": given.shares,
            "vectors": str((given.output / "vectors" / f"{vectors}.pt").resolve()),
        }
        found = measured(settings)
        alone = [row for row in rows.rows if all(row[key] == keys[key] for key in KEYS[2:])]
        alone = [row for row in alone if (row["workload"], row["processes"]) == (one, 1)]
        first = alone[0]["seconds"] if alone else found["seconds"] if processes == 1 else None
        speed_up = None if first is None else first / found["seconds"]
        rows.add(
            {**keys, "epsilon_relative": workload.epsilon_relative, "speed_up": speed_up} | found
        )


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds of every row, and how many times as fast as one process it is."""
    lines = [f"{'workload':20} {'processes':>9} {'seconds':>9} {'times as fast':>13}"]
    for row in rows:
        times = "" if row["speed_up"] is None else f"{row['speed_up']:.2f}"
        name, processes = row["workload"], row["processes"]
        lines.append(f"{name:20} {processes:>9} {row['seconds']:>9.2f} {times:>13}")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw speed-ups against processes, with the line on which all work is divided."""
    figure = new_figure(5.5, 4.2)
    axes = figure.subplots()
    known = [row for row in rows if row["speed_up"] is not None]
    counts = sorted({1, *(row["processes"] for row in known)})
    axes.plot(counts, counts, color="0.7", linestyle="--", label="all work divided")
    for name in dict.fromkeys(row["workload"] for row in known):
        own = sorted(
            (row["processes"], row["speed_up"]) for row in known if row["workload"] == name
        )
        axes.plot(*zip(*own, strict=True), marker="o", label=name)
    axes.set(xlabel="processes, one GPU each", ylabel="times as fast as one", xticks=counts)
    axes.legend(frameon=False)
    save_picture(figure, path)


def main() -> None:
    """Write bench_scale_DEVICE.json and bench_scale_DEVICE.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("workloads", choices=list(WORKLOADS), nargs="+", metavar="WORKLOAD")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--points", type=int, help="a side")
    parser.add_argument("--dimension", type=int)
    parser.add_argument("--classes", type=int, help="a side")
    parser.add_argument("--steps", type=int, default=20, help="of the flow")
    parser.add_argument(
        "--shares",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure, in a run apart, how much of the time goes into exchanges",
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = Rows(f"bench_scale_{given.device}", KEYS, "torch", "triton", folder=given.output)
    for name in given.workloads:
        add_rows(rows, name, given)
    sys.stdout.write(table_of(rows.rows))
    draw(rows.rows, given.output / f"{rows.name}.png")


if __name__ == "__main__":
    main()
