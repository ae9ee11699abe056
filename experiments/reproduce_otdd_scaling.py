"""OTDD and its gradient flow as n grows: Figures 3 and 6 of Ye et al. 2026, arXiv:2602.03067.

    python -m experiments.reproduce_otdd_scaling --data-root DIR [--samples 5000 10000 ...]
        [--device cuda] [--checkpoint FILE] [--output DIR] [--again]

MNIST against Fashion-MNIST, n training images of each, drawn in proportion to the classes.

- Figure 3: 512 features of a ResNet18, gaussian class distances W; the distance, and a flow of 20
  steps x <- x - step n dS/dx, each of ten iterations from the potentials of the step before, W
  fixed.
- Figure 6: 784 pixels, no labels; the distance.

No pretrained weights are at hand: without `--checkpoint` the network is trained here, for one epoch
on the largest n of both datasets (otdd_scaling/features.py). The sides are ours, plain PyTorch on a
dense cost, and geomloss on a dense cost; all make ten iterations at an epsilon of 0.05 of the mean
cost (otdd_scaling/sides.py), and the whole call is timed: ours with its packing and certificate.

A row holds, per side: milliseconds (the median of three to ten calls, or one flow, after a
warm-up), peak memory above the inputs, half-passes, and the marginal error of the last potentials,
the largest of the three terms'. A ratio counts only where ours is not larger, or within the 3e-5 at
which a term may stop; of a flow, after the first step's solve, the only one that all sides make at
the same points. W is measured once per n, apart. Beside the fixed count stands our distance
converged to the default tolerance, with its bounds; a flow's row has that at the end points of
every side. A side that runs out of memory says so, with its need as its last peak tells, and is not
tried at larger n.
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.otdd_scaling.features import Inputs
from experiments.otdd_scaling.measuring import (
    Measured,
    device_memory_mib,
    device_name,
    measure,
    measure_once,
    refused,
    refused_before,
    within_memory,
)
from experiments.otdd_scaling.picture import draw
from experiments.otdd_scaling.sides import (
    ITERATIONS,
    OPTIONS,
    Side,
    Solved,
    Workload,
    geomloss_potentials,
    marginal_errors,
    solve_geomloss,
    solve_ours,
    solve_tensorized,
)
from experiments.rows import Rows
from otdd_flash.devices import resolve_device
from otdd_flash.solver.solving import solve

SIZES = (5_000, 10_000, 20_000, 40_000, 60_000)
TASKS = {"features": ("distance", "flow"), "pixels": ("distance",)}
RELATIVE_EPSILON = 0.05
FLOW_STEPS = 20
FLOW_STEP = 0.5
# Of the distance: a dense value further from ours is one of another problem.
AGREEMENT = 0.02


@dataclass(frozen=True, eq=False)
class Case:
    """A workload, our converged distance on it, and the seconds that W took."""

    work: Workload
    converged: dict[str, Any]
    class_distances_seconds: float

    @classmethod
    def prepare(cls, source: otdd.LabeledSamples, target: otdd.LabeledSamples) -> Case:
        """Measure W, if there are classes, and the converged distance."""
        device = source.features.device
        solve = partial(
            otdd.dataset_distance,
            source,
            target,
            epsilon_relative=RELATIVE_EPSILON,
            labels="none" if source.labels is None else "gaussian",
            compute=otdd.ComputeOptions(device=str(device)),
        )
        first = solve()
        given = first.class_distances
        again = partial(solve, class_distances=None if source.labels is None else given)
        measured = measure(again, device)
        result = measured.result
        if not result.converged:
            raise SystemExit(f"n={len(source)} did not converge: nothing is reported")
        table, epsilon = given.full.to(device), result.epsilon
        summary = result.to_dict()
        kept = ("value", "bounds", "marginal_error", "iterations", "passes", "backend")
        converged = {
            **{key: summary[key] for key in kept},
            "ms": 1000 * measured.seconds,
            "peak_mib": measured.peak_mib,
        }
        work = Workload(source, target, table, epsilon, epsilon / RELATIVE_EPSILON)
        return cls(work, converged, first.seconds["class_distances"])


class Flow(NamedTuple):
    """Where a flow ended; the points and the outcome of its last solve; half-passes of all."""

    end: Tensor
    x: Tensor
    last: Solved
    half_passes: float


def flow(side: Side, work: Workload, steps: int) -> Flow:
    """Move the source's points along the gradient; W and the labels stay."""
    end, half_passes = work.source.features, 0.0
    last: Solved | None = None
    for _ in range(steps):
        x = end
        last = side(work, x, None if last is None else last.potentials, True)
        half_passes += last.half_passes
        assert last.gradient is not None
        end = x - FLOW_STEP * len(x) * last.gradient
    assert last is not None
    return Flow(end, x, last, half_passes)


def run_distance(side: Side, work: Workload) -> dict[str, Any]:
    """One side's part of a row of distances."""
    x = work.source.features
    measured = measure(partial(side, work, x, None, False), x.device)
    solved = measured.result
    return {**took(measured, solved.half_passes), **reached(work, x, solved)}


def run_flow(side: Side, work: Workload) -> dict[str, Any]:
    """One side's part of a row of flows."""
    first = flow(side, work, 1)
    first_error = reached(work, first.x, first.last)["marginal_error"]
    del first
    measured = measure_once(partial(flow, side, work, FLOW_STEPS), work.source.features.device)
    flown = measured.result
    end = solve(work.problem(flown.end), otdd.Converged())
    after = {"value": end.value, "bounds": list(end.bounds), "converged": end.converged}
    return {
        **took(measured, flown.half_passes),
        "first_marginal_error": first_error,
        **reached(work, flown.x, flown.last),
        "divergence_after": after,
    }


RUNS = {"distance": run_distance, "flow": run_flow}


def took(measured: Measured[Any], half_passes: float) -> dict[str, Any]:
    """Time and memory of a call."""
    return {
        "ms": 1000 * measured.seconds,
        "half_passes": half_passes,
        "ms_per_half_pass": 1000 * measured.seconds / half_passes,
        "peak_mib": measured.peak_mib,
    }


def reached(work: Workload, x: Tensor, solved: Solved) -> dict[str, Any]:
    """How far a solve at x came."""
    errors = marginal_errors(work, x, solved.potentials or geomloss_potentials(work, x))
    return {
        "value": solved.value,
        "marginal_error": max(errors.values()),
        "marginal_error_by_term": errors,
    }


def compare(case: Case, task: str, smaller: list[dict[str, Any]]) -> dict[str, Any]:
    """All sides' parts of a row, and the ratios; `smaller` are the rows of smaller n."""
    sides: dict[str, Side] = {"ours": solve_ours, "tensorized": solve_tensorized}
    if importlib.util.find_spec("geomloss") is not None:
        sides["geomloss"] = solve_geomloss
    device, n = case.work.source.features.device, len(case.work.source)
    found: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        part = refused_before(name, smaller)
        if part is None:
            part = within_memory(partial(RUNS[task], side, case.work), device)
        found[name] = refused(name, n, smaller, device) if part is None else part
    check(task, case, found)
    ours = found["ours"]
    peers = {name: part for name, part in found.items() if name != "ours" and "ms" in part}
    return {
        "sides": found,
        "ratio": {name: ratio(part, ours) for name, part in peers.items()},
        "ratio_to_converged": {name: ratio(part, case.converged) for name, part in peers.items()}
        if task == "distance"
        else None,
    }


def ratio(theirs: dict[str, Any], ours: dict[str, Any]) -> float | None:
    """How often our time goes into theirs, if our marginal error is not larger."""
    # The first solve of a flow is the only one that both make at the same points.
    key = "first_marginal_error" if "first_marginal_error" in ours else "marginal_error"
    counts = ours[key] <= max(theirs[key], OPTIONS.asked_tolerance)
    return theirs["ms"] / ours["ms"] if counts else None


def check(task: str, case: Case, found: dict[str, dict[str, Any]]) -> None:
    """Refuse values of different problems, and a flow that does not descend."""
    ours, dense, before = found["ours"], found["tensorized"], case.converged["value"]
    if abs(ours["value"] - dense.get("value", ours["value"])) > AGREEMENT * abs(before):
        raise SystemExit(f"{task}: our value is {ours['value']}, the dense one {dense['value']}")
    if task == "flow" and ours["divergence_after"]["value"] >= before:
        raise SystemExit("the flow does not lower the divergence")


def main() -> None:
    """Write reproduce_otdd_scaling.json and otdd_scaling.png."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, nargs="+", default=SIZES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--checkpoint", type=Path, help="weights of torchvision's resnet18")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget rows measured before")
    arguments = parser.parse_args()
    if arguments.checkpoint is not None and not arguments.checkpoint.is_file():
        parser.error(f"there is no file {arguments.checkpoint}")
    warnings.simplefilter("ignore", otdd.NotConvergedWarning)
    device = resolve_device(arguments.device)
    inputs = Inputs(arguments.data_root, max(arguments.samples), arguments.checkpoint, device)
    rows = Rows(
        "reproduce_otdd_scaling",
        ("points", "network", "task", "n"),
        *("torch", "triton", "torchvision", "geomloss"),
        folder=arguments.output,
        again=arguments.again,
    )
    for points, tasks in TASKS.items():
        network = inputs.network_name if points == "features" else None
        known = {"points": points, "network": network}
        for n in sorted(set(arguments.samples)):
            missing = [task for task in tasks if not rows.has(**known, task=task, n=n)]
            if missing:
                measure_size(rows, inputs, known, missing, n)
    shown = [row for row in rows.rows if row["network"] in (None, inputs.network_name)]
    draw(shown, arguments.output / "otdd_scaling.png")


def measure_size(
    rows: Rows, inputs: Inputs, known: dict[str, Any], tasks: list[str], n: int
) -> None:
    """Add the rows of one n."""
    case = Case.prepare(*inputs.embedded(known["points"], n))
    for task in tasks:
        head = {**known, "task": task}
        smaller = [
            row
            for row in rows.rows
            if row["n"] < n and all(row[key] == value for key, value in head.items())
        ]
        row = {
            **head,
            "n": n,
            "d": case.work.source.dim,
            "training": None if known["network"] is None else inputs.network()[1],
            "class_distances_seconds": case.class_distances_seconds,
            "epsilon": case.work.epsilon,
            "epsilon_relative": RELATIVE_EPSILON,
            "iterations": ITERATIONS,
            "device_name": device_name(inputs.device),
            "device_memory_mib": device_memory_mib(inputs.device),
            "flow": {"steps": FLOW_STEPS, "step": FLOW_STEP} if task == "flow" else None,
            "converged": case.converged,
            **compare(case, task, smaller),
        }
        rows.add(row)


if __name__ == "__main__":
    main()
