"""The workloads of `bench_scale`: what one of its processes computes.

Started by `bench_scale` alone, in one process or by torchrun in several:

    python -m experiments.scale_workloads SETTINGS.json

SETTINGS.json names the workload, its sizes, the device, where potentials are kept and where the
row goes. Clouds are random: Gaussian classes around random means, drawn on rank 0. Rank 0 leads, as
in `otdd.led`; a process that is alone computes without a group.

Seconds are of a run in which exchanges are not timed, since to time them a GPU is waited for before
and after each. The share of exchanges is that of a run apart, and so are a flow's iterations.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.labels import ClassDistances
from otdd_flash.labels.by_ranks import measured_by_ranks
from otdd_flash.labels.measuring import measure_all
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.term import TransportTerm


class Sizes(NamedTuple):
    """Of a workload: n points a side of d coordinates in V classes a side."""

    points: int
    dimension: int
    classes: int


class Workload(NamedTuple):
    """What is computed: `compute(settings, sizes, ranks)` says what to keep and what to report.

    Some take one process alone, others take several; these name the workload of one process that
    they are compared with.
    """

    sizes: Sizes
    epsilon_relative: float
    compute: Callable[[dict[str, Any], Sizes, Ranks | None], dict[str, Any]]
    alone: bool = False
    against: str | None = None


def clouds(sizes: Sizes, device: str) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    """Two labelled clouds on the device, float32."""
    count, dimension, classes = sizes
    draw = torch.Generator(device).manual_seed(sum(sizes))
    means = torch.randn(2 * classes, dimension, generator=draw, device=device)
    names, sides = tuple(map(str, range(classes))), []
    for side in range(2):
        labels = torch.randperm(count, generator=draw, device=device) % classes
        points = torch.randn(count, dimension, generator=draw, device=device)
        points += means[side * classes + labels]
        sides.append(otdd.LabeledSamples(points, labels, names))
    return sides[0], sides[1]


def given_table(sizes: Sizes, device: str) -> ClassDistances:
    """W between all classes: squared distances of random means, of the size of those of points."""
    draw = torch.Generator(device).manual_seed(1)
    means = torch.randn(2 * sizes.classes, sizes.dimension, generator=draw, device=device)
    table = torch.cdist(means, means).square().double().cpu()
    table = (table + table.T) / 2
    return ClassDistances.from_full(table.fill_diagonal_(0), sizes.classes)


def distance(settings: dict[str, Any], sizes: Sizes, ranks: Ranks | None) -> dict[str, Any]:
    """The certified debiased divergence, W given."""
    return solved(settings, sizes, ranks, lambda sizes: "auto", clouds)


def ring(settings: dict[str, Any], sizes: Sizes, ranks: Ranks | None) -> dict[str, Any]:
    """The same with a budget that all points, packed, exceed by a third."""
    return solved(settings, sizes, ranks, lambda sizes: 12 * sizes.points * sizes.dimension, clouds)


def streamed(settings: dict[str, Any], sizes: Sizes, ranks: Ranks | None) -> dict[str, Any]:
    """The same of points in host memory, with a budget that holds half of them when packed."""

    def on_host(sizes: Sizes, device: str) -> list[otdd.LabeledSamples]:
        return [side.to("cpu") for side in clouds(sizes, device)]

    return solved(settings, sizes, ranks, lambda sizes: 4 * sizes.points * sizes.dimension, on_host)


def solved(
    settings: dict[str, Any],
    sizes: Sizes,
    ranks: Ranks | None,
    budget_of: Callable[[Sizes], int | str],
    sides_of: Callable[[Sizes, str], Sequence[otdd.LabeledSamples]],
) -> dict[str, Any]:
    """What a divergence between both sides takes and tells, after a smaller one."""
    device = settings["device"]

    def solve(sizes: Sizes) -> Callable[[], otdd.DistanceResult]:
        table, sides = given_table(sizes, device), sides_of(sizes, device)
        compute = otdd.ComputeOptions(device, memory_budget=budget_of(sizes), group=ranks)
        return lambda: otdd.dataset_distance(
            *sides,
            class_distances=table,
            epsilon_relative=settings["epsilon_relative"],
            compute=compute,
        )

    # Classes of as many points, and samples of so many that all kernels are compiled.
    solve(Sizes(sizes.points // 8, sizes.dimension, max(sizes.classes // 8, 1)))()
    work = solve(sizes)
    seconds, result, moved = timed(work, ranks)
    terms = result.divergence
    return {
        **moved,
        "seconds": seconds,
        **exchanging(settings, work, ranks),
        "value": result.value,
        "bounds": result.bounds,
        "converged": result.converged,
        "iterations": {name: term.iterations for name, term in solved_terms(terms).items()},
        "passes": sum(term.passes for term in solved_terms(terms).values()),
        "layout": result.shared.layout,
        **({} if result.streamed is None else {"streamed": result.streamed}),
        **compared(settings, {"f": terms.xy.f, "g": terms.xy.g}, ranks),
    }


def solved_terms(divergence: Divergence) -> dict[str, TransportTerm]:
    """The terms of a divergence by name."""
    terms = {"xy": divergence.xy, "xx": divergence.xx, "yy": divergence.yy}
    return {name: term for name, term in terms.items() if term is not None}


def class_table(settings: dict[str, Any], sizes: Sizes, ranks: Ranks | None) -> dict[str, Any]:
    """Debiased Sinkhorn divergences between all classes of both sides, as tables on the CPU."""
    device = settings["device"]
    metric = otdd.labels.Sinkhorn(epsilon=settings["epsilon_relative"] * 2 * sizes.dimension)

    # As many points in every class.
    labels = torch.arange(sizes.points, device=device) % sizes.classes
    named = [
        otdd.LabeledSamples(side.features, labels, side.class_names)
        for side in clouds(sizes, device)
    ]
    shared = measured_by_ranks(metric, ranks)
    # All of it once, so that memory for as many pairs is there and kernels are compiled.
    measure_all(named, shared)
    seconds, found, moved = timed(lambda: measure_all(named, shared), ranks)
    return {
        **moved,
        "seconds": seconds,
        **exchanging(settings, lambda: measure_all(named, shared), ranks),
        "value": float(found.full.mean()),
        **compared(settings, {"W": found.full}, ranks),
    }


def flow(settings: dict[str, Any], sizes: Sizes, ranks: Ranks | None) -> dict[str, Any]:
    """A gradient flow of some steps, W given."""
    device = settings["device"]
    compute = otdd.ComputeOptions(device, group=ranks)

    metric, sides = otdd.labels.Given(given_table(sizes, device)), clouds(sizes, device)
    epsilon = settings["epsilon_relative"] * 2 * sizes.dimension

    def move(steps: int, callbacks: otdd.Callbacks | None = None) -> Callable[[], otdd.FlowResult]:
        return lambda: otdd.gradient_flow(
            *sides,
            otdd.Flow(steps),
            labels=metric,
            epsilon=epsilon,
            compute=compute,
            callbacks=callbacks,
        )

    # Of all points: one process solves few of them by other kernels.
    move(1)()
    seconds, result, moved = timed(move(settings["steps"]), ranks)
    value = result.to_dict()["value"]
    iterations = Counter[str]()

    def count(term: str, iteration: int, error: float) -> None:
        iterations[term] += 1

    few = min(settings["steps"], COUNTED_STEPS)
    counted = move(few, otdd.Callbacks(solver_progress=count))
    told = exchanging(settings, counted, ranks)
    if ranks is None:
        counted()
    return {
        **moved,
        "seconds": seconds,
        **told,
        "steps": settings["steps"],
        # Start and end of a flow are in its seconds alone.
        "seconds_of_a_step": statistics.median(step.seconds for step in result.history[1:]),
        "iterations_of_cross_terms": [step.iterations for step in result.history],
        "iterations_of_first_steps": {"steps": few, **iterations},
        "value": value,
        **compared(settings, {"points": result.samples.features}, ranks),
    }


WORKLOADS = {
    "imagenet_0.1": Workload(Sizes(1_281_167, 512, 1000), 0.1, distance),
    "imagenet_0.01": Workload(Sizes(1_281_167, 512, 1000), 0.01, distance),
    "imagenet_ring": Workload(Sizes(1_281_167, 512, 1000), 0.1, ring, against="imagenet_0.1"),
    "imagenet_streamed": Workload(Sizes(1_281_167, 512, 1000), 0.1, streamed, alone=True),
    "four_million": Workload(Sizes(4_000_000, 512, 10_000), 0.1, distance),
    "class_table": Workload(Sizes(128_000, 64, 2000), 0.05, class_table),
    "flow": Workload(Sizes(60_000, 784, 10), 0.05, flow),
}


# Steps of a flow in which exchanges are timed and iterations of all terms counted.
COUNTED_STEPS = 4


def timed(run: Callable[[], Any], ranks: Ranks | None) -> tuple[float, Any, dict[str, Any]]:
    """Seconds and result of a call, with the bytes that the ranks moved meanwhile."""
    before, inputs = 0 if ranks is None else ranks.shared.bytes_moved, {}
    _wait()
    if torch.cuda.is_available():
        # Of what the clouds were drawn with, nothing.
        torch.cuda.reset_peak_memory_stats()
        inputs = {"gib_of_inputs": torch.cuda.memory_allocated() / 2**30}
    started = time.perf_counter()
    result = run()
    _wait()
    seconds = time.perf_counter() - started
    moved = 0 if ranks is None else ranks.shared.bytes_moved - before
    return seconds, result, {"bytes_moved": moved, **inputs}


def exchanging(
    settings: dict[str, Any], run: Callable[[], Any], ranks: Ranks | None
) -> dict[str, Any]:
    """The share of a call's time that goes into exchanges, waits for the slowest rank included.

    None where it is not asked for. This call is longer than one in which exchanges are not timed.
    """
    if not settings["shares"]:
        return {"communication_share": None}
    if ranks is None:
        return {"communication_share": 0.0}
    ranks.seconds = 0.0
    _wait()
    started = time.perf_counter()
    run()
    _wait()
    share = ranks.seconds / (time.perf_counter() - started)
    ranks.seconds = None
    return {"communication_share": share}


def compared(
    settings: dict[str, Any], vectors: dict[str, torch.Tensor], ranks: Ranks | None
) -> dict[str, Any]:
    """How far vectors are from those of one process, which keeps them; None without those.

    Potentials are compared up to the constant that may move from f to g.
    """
    path = Path(settings["vectors"])
    vectors = {name: each.detach().double().cpu() for name, each in vectors.items()}
    if ranks is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vectors, path)
        return {"farthest_from_one_process": 0.0}
    if not path.exists():
        return {"farthest_from_one_process": None}
    alone = torch.load(path)
    gaps = {name: each - alone[name] for name, each in vectors.items()}
    if "g" in gaps:
        shift = gaps["f"].mean()
        gaps = {"f": gaps["f"] - shift, "g": gaps["g"] + shift}
    return {"farthest_from_one_process": max(float(gap.abs().max()) for gap in gaps.values())}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gib_used(device: str) -> float:
    """The most memory that this process has held, GiB: of its GPU, or resident."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Compute a workload; rank 0 writes the row."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    workload, device = WORKLOADS[settings["workload"]], settings["device"]
    sizes = Sizes(*settings["sizes"])
    if settings["processes"] == 1:
        row = workload.compute(settings, sizes, None)
        memory = [gib_used(device)]
    else:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        torch.distributed.init_process_group(backend)
        row = otdd.led(lambda ranks: workload.compute(settings, sizes, ranks))
        memory = [0.0] * settings["processes"]
        torch.distributed.all_gather_object(memory, gib_used(device))
    if int(os.environ.get("RANK", "0")) == 0:
        Path(settings["row"]).write_text(json.dumps({**row, "gib_per_process": memory}))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
