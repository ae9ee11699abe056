"""Gradient flows: time per step against flash-sinkhorn, and whole flows to a tolerance.

    python -m experiments.bench_flow [--data-root DIR] [--output DIR]

On a GPU, one process:

- fixed: 60,000 x 60,000 random labelled points, d = 512, ten iterations a step from the potentials
  of the step before, 20 steps, at fixed class distances. flash-sinkhorn's divergence with gradient,
  ten iterations from nothing, is what one step of a flow costs with it; its optimiser is not
  counted. Ours is the whole step: solve, certificate, gradient, records and the move. The first
  step, which has no potentials to start from, takes as many iterations and is left out; a ratio
  counts only where the plans of all others are no farther from their marginals than theirs.
- converged: all of MNIST to all of Fashion-MNIST in pixels, every solve to a marginal error of
  1e-3, gaussian class distances measured at every step, and at every fifth.

Without a GPU: the bundled digits, the command's defaults. Times are of a second flow in the same
process, after one whose steps compile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.bench_divergence import (
    ITERATIONS,
    Workload,
    marginal_error,
    their_potentials,
    with_gradient,
)
from experiments.environment import RESULTS, environment, write_result
from experiments.timing import milliseconds
from otdd_flash.labels import ClassDistances
from otdd_flash.samples import LabeledSamples

STEPS = 20
POINTS, DIM = 60_000, 512
# What float32 allows and never reached: iterations stop at their number.
FIXED = otdd.Converged(tolerance=3e-5, max_iterations=ITERATIONS)


def bench_fixed() -> dict[str, Any]:
    """Steps of ten iterations, beside flash-sinkhorn's divergence with gradient."""
    work = Workload.draw(POINTS, DIM)
    names = tuple(map(str, range(len(work.table) // 2)))
    source = LabeledSamples(work.x, work.labels_x, names)
    target = LabeledSamples(work.y, work.labels_y, names)
    table = ClassDistances.from_full(work.table, len(names), names, names)

    def flow(steps: int) -> otdd.FlowResult:
        return otdd.gradient_flow(
            source,
            target,
            otdd.Flow(steps),
            epsilon=work.epsilon,
            labels=otdd.labels.Given(table),
            solver=FIXED,
        )

    flow(2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = flow(STEPS)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    steps = [1e3 * record.seconds for record in result.history[1:-1]]
    ours = statistics.median(steps)
    operators = {term: work.problem("high").operator(term) for term in ("xy", "xx")}
    their_error = max(
        marginal_error(operators[term], *their_potentials(work)[term], work.epsilon)
        for term in operators
    )
    del operators
    attached = work.x.clone().requires_grad_()
    theirs = milliseconds(lambda: with_gradient(work.theirs, attached), warm_ups=1, repeats=5)
    errors = [record.marginal_error for record in result.history]
    our_error = max(errors[1:])
    return {
        "n": POINTS,
        "d": DIM,
        "classes": 2 * len(names),
        "iterations": ITERATIONS,
        "steps": STEPS,
        "ms_per_step": ours,
        "slowest_step_ms": max(steps),
        "flash_sinkhorn_divergence_with_gradient_ms": theirs,
        "ratio": theirs / ours if our_error <= their_error else None,
        "marginal_error": {"ours": errors, "flash_sinkhorn": their_error},
        "peak_mib_over_inputs": peak,
        "objective": [record.divergence for record in result.history],
    }


def bench_converged(
    source: LabeledSamples, target: LabeledSamples, *, refresh: int = 1, **options: Any
) -> dict[str, Any]:
    """A whole flow whose every solve converges."""
    otdd.gradient_flow(source, target, otdd.Flow(1, refresh=refresh), **options)
    start = time.perf_counter()
    result = otdd.gradient_flow(source, target, otdd.Flow(STEPS, refresh=refresh), **options)
    seconds = time.perf_counter() - start
    return {
        "source": source.name,
        "target": target.name,
        "n": len(source),
        "m": len(target),
        "d": source.dim,
        "epsilon": result.settings["epsilon"],
        "tolerance": result.settings["solver.tolerance"],
        "refresh": result.settings["flow.refresh"],
        "steps": STEPS,
        "seconds": seconds,
        "seconds_per_step": [record.seconds for record in result.history],
        "iterations": [record.iterations for record in result.history],
        "value": [record.divergence for record in result.history],
        "bounds": [[record.lower, record.upper] for record in result.history],
        "ran_on": result.ran_on,
    }


def pixels(name: str, **request: Any) -> LabeledSamples:
    """Images as vectors, at their native size."""
    return otdd.embed(otdd.load(name, **request), otdd.extractors.pixels())


def main() -> None:
    """Write bench_flow_cuda.json or bench_flow_cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packages = ("torch", "triton", "flash-sinkhorn") if device == "cuda" else ("torch",)
    result: dict[str, Any] = {"environment": environment(*packages)}
    if device == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", otdd.NotConvergedWarning)
            result["fixed"] = bench_fixed()
        write_result(f"bench_flow_{device}", result, arguments.output)
    # A solve that stops early is an error from here on: nothing is reported.
    warnings.simplefilter("error", otdd.NotConvergedWarning)
    if device == "cpu":
        sides = pixels("digits", split="train"), pixels("digits", split="test", rotate=30)
        result["converged"] = [bench_converged(*sides, epsilon=0.1)]
    elif arguments.data_root is not None:
        sides = (
            pixels("mnist", root=arguments.data_root),
            pixels("fashion_mnist", root=arguments.data_root),
        )
        on_device = [side.to(device) for side in sides]
        result["converged"] = [
            bench_converged(*on_device, epsilon_relative=1e-2, refresh=refresh)
            for refresh in (1, 5)
        ]
    write_result(f"bench_flow_{device}", result, arguments.output)
    sys.stdout.write(f"{result}\n")


if __name__ == "__main__":
    main()
