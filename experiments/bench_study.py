"""How long the parts of a study take: the default one, distances alone, sliced distances.

    python -m experiments.bench_study --data-root DIR [--device cpu] [--output DIR]

On a CPU, each as a process of its own with an empty cache, so that starting Python counts:

    default     python -m otdd_flash.study epsilon=0.1
    distances   the twelve tasks of tasks=images, 2,000 rows each, measures=[otdd], class distances
                by Gaussians, epsilon_relative=0.01, nothing transferred

and within this process `otdd.sliced_distances` of two draws of 2,000 rows of MNIST along 1,000
lines. On a GPU (--device cuda) within this process: the distances of MNIST, Fashion-MNIST, USPS and
digits, all rows, twice, as kernels are compiled in the first run; and `otdd.sliced_distances` of
MNIST and Fashion-MNIST, 60,000 rows each, along 10,000 lines, with the memory it takes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory
from typing import Any

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from experiments.timing import extra_mib

ROWS, SIDE, EPSILON_RELATIVE = 2000, 28, 0.01
DRAWS = {"cpu": 1000, "cuda": 10_000}
# Of the default study: what else the machine does differs from one to the next.
DEFAULT_RUNS = 3
WHOLE = ("mnist", "fashion_mnist", "usps", "digits")


def command_seconds(*arguments: str) -> dict[str, float]:
    """Times of the study command in an empty folder, with an empty cache.

    Other work on the machine lengthens the wall time, and less what its processes take of the
    processor; the load is that of the minute before.
    """
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "otdd_flash.study", "device=cpu"]
        command += [*arguments, f"cache_dir={folder}/cache", f"hydra.run.dir={folder}/run"]
        # Of its own folder: what is imported is this checkout.
        places = (str(Path(otdd.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        load = os.getloadavg()[0]
        before, started = getrusage(RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            command, cwd=folder, env=variables, check=True, capture_output=True, text=True
        )
        wall, after = time.perf_counter() - started, getrusage(RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": wall, "processor_seconds": used, "load_before": load}


def load(name: str, data_root: str, rows: int | None) -> otdd.LabeledSamples:
    """Images of 28 x 28 as pixels in [0, 1]."""
    found = otdd.load(name, root=data_root, max_samples=rows)
    return otdd.embed(found, otdd.extractors.pixels(size=SIDE))


def sliced(datasets: Sequence[otdd.LabeledSamples], device: str) -> dict[str, Any]:
    """Seconds a dataset, and on a GPU the memory over the inputs."""
    placed = [samples.to(device) for samples in datasets]

    def run() -> None:
        otdd.sliced_distances(placed, projections=DRAWS[device], device=device)

    otdd.sliced_distances(placed, projections=DRAWS[device] // 20, device=device)
    return {
        "rows": [len(samples) for samples in datasets],
        "dim": datasets[0].dim,
        "draws": DRAWS[device],
        "seconds_a_dataset": seconds(run) / len(datasets),
        "gib_over_inputs": extra_mib(run) / 1024 if device == "cuda" else None,
    }


def whole_distances(data_root: str) -> dict[str, Any]:
    """Seconds of all distances between whole datasets, in a first run and in a second."""
    datasets = [load(name, data_root, None) for name in WHOLE]

    def run() -> None:
        otdd.pairwise_distances(
            datasets, epsilon_relative=EPSILON_RELATIVE, labels="gaussian", compute="cuda"
        )

    return {
        "rows": [len(samples) for samples in datasets],
        "seconds": {name: seconds(run) for name in ("first", "second")},
    }


def seconds(run: Callable[[], None]) -> float:
    """Wall time of one call, whose numbers come back to the processor."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def on_cpu(data_root: str) -> dict[str, Any]:
    """What is measured on a processor."""
    images = [
        "tasks=images",
        f"data_root={data_root}",
        f"max_samples={ROWS}",
        "transfer=null",
        "measures=[otdd]",
        f"epsilon_relative={EPSILON_RELATIVE}",
    ]
    draws = [load("mnist", data_root, ROWS), load("fashion_mnist", data_root, ROWS)]
    return {
        "sliced": sliced(draws, "cpu"),
        "distances": {"tasks": 12, "rows": ROWS, **command_seconds(*images)},
        "default": [command_seconds("epsilon=0.1") for _ in range(DEFAULT_RUNS)],
    }


def on_gpu(data_root: str) -> dict[str, Any]:
    """What is measured on a GPU."""
    images = [load(name, data_root, None) for name in WHOLE[:2]]
    return {"sliced": sliced(images, "cuda"), "distances": whole_distances(data_root)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="how long the parts of a study take")
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    root = str(Path(given.data_root).expanduser().resolve())
    found = on_cpu(root) if given.device == "cpu" else on_gpu(root)
    for name, row in found.items():
        print(name, row)
    content = {**found, **environment("torch", "joblib")}
    write_result(f"bench_study_{given.device}", content, given.output)


if __name__ == "__main__":
    main()
