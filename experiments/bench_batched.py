"""Many small doubly stochastic matrices: time of a launch and of a call, forward and backward.

4 x 4 for B = 1 to 2^24 by powers of 4 (`--device cpu`: to 2^16, of 16) at 20 iterations, and 1, 5
and 100 at the largest. Then n = 8 to 128 at B n^2 = 2^24 (2^20), 14,336 blocks of 64 x 64 (PermLLM)
and all with a backward pass. Beside us what `experiments.batched_peers` finds installed. A wrong
result is not timed: its row tells the error. Rows that are there are kept, so the sweep can be made
in parts, by `--sizes` and `--seconds`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import batched_peers as peers
from experiments.batched_peers import Run
from experiments.batched_picture import draw
from experiments.environment import RESULTS
from experiments.rows import Rows

# Of a call: the most, the fewest, and seconds after which there are no more.
REPEATS, FEWEST, SECONDS = 101, 5, 1.0
# Seconds that a call of a peer may take.
SLOWEST = 5.0
# What few matrices must make of all before it is believed.
HOPELESS = 40 * SLOWEST
# Entries of matrices whose result is compared.
COMPARED = 2**14
# Error units that ours may have, and others in each iteration.
ALLOWED = 16
KEYS = ("method", "n", "B", "iterations", "backward")
Setting = tuple[int, int, int, bool]


def settings(device: str) -> list[Setting]:
    """(n, B, iterations, with backward), the largest first."""
    power, step, entries = (24, 2, 2**24) if device == "cuda" else (16, 4, 2**20)
    found = [(4, 2**k, 20, False) for k in range(power, -1, -step)]
    found += [(4, 2**power, iterations, False) for iterations in (1, 5, 100)]
    sizes = [(n, entries // n**2, 20) for n in (8, 16, 32, 64, 128)]
    sizes += [(16, 65_536, 100), (64, 14_336, 5)] if device == "cuda" else []
    found += [(*size, False) for size in sizes]
    found += [(4, 2**k, 20, True) for k in range(power, -1, -step)]
    if device == "cuda":
        found += [(4, 32_768, 20, backward) for backward in (False, True)]
    return found + [(*size, True) for size in sizes]


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: the median, and the 1% and 99% quantiles."""
    times = sorted(1e3 * second for second in seconds)
    last = len(times) - 1
    return {
        "ms": statistics.median(times),
        "ms_1%": times[round(0.01 * last)],
        "ms_99%": times[round(0.99 * last)],
    }


def repeated(once: Callable[[], float]) -> dict[str, float]:
    """Quantiles of what a run says that it takes, after three to warm up."""
    seconds: list[float] = []
    start = time.perf_counter()
    for repeat in range(3 + REPEATS):
        seconds.append(once())
        if repeat >= 2 + FEWEST and time.perf_counter() - start > SECONDS:
            break
    return quantiles(seconds[3:])


def call_seconds(run: Run, logits: Tensor) -> float:
    """Of one call, waited for."""
    cuda: Any = torch.cuda
    wait: Callable[[], Any] = cuda.synchronize if logits.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    run(logits)
    wait()
    return time.perf_counter() - start


def called(run: Run, logits: Tensor) -> dict[str, float]:
    """As called from Python, each call waited for."""
    return repeated(lambda: call_seconds(run, logits))


def in_graph(run: Run, logits: Tensor) -> dict[str, float]:
    """Replays of a CUDA graph, by events."""
    cuda: Any = torch.cuda
    side = cuda.Stream()
    with cuda.stream(side):
        run(logits)
    side.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        run(logits)

    def once() -> float:
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))

    return repeated(once)


def seconds_of_all(run: Run, logits: Tensor, few: int) -> float:
    """What a call may take at the most, by a part of the matrices, larger where few seem slow."""
    seconds = 0.0
    for count in (few, max(few, len(logits) // 64)):
        # Compiled, where it is, before it is timed.
        run(logits[:count])
        seconds = call_seconds(run, logits[:count]) * len(logits) / count
        if not SLOWEST < seconds < HOPELESS:
            break
    return seconds


def measured(
    name: str, run: Run, logits: Tensor, iterations: int, backward: bool
) -> dict[str, Any]:
    """Times of a run, or why there are none."""
    compared = logits[: max(1, COMPARED // logits[0].numel())]
    ours = name.startswith("ours")
    row: dict[str, Any] = {"error": peers.error(run, compared, iterations)}
    allowed = ALLOWED * (1 if ours else iterations)
    # The implicit gradient is that of the limit.
    if backward and name != "ours, implicit":
        row["gradient_error"] = peers.gradient_error(run, compared, iterations)
    if not max(row["error"], row.get("gradient_error", 0) / iterations) <= allowed:
        return {**row, "wrong": True}
    timed = peers.gradient_of(run) if backward else torch.inference_mode()(run)
    expected = 0.0 if ours else seconds_of_all(timed, logits, len(compared))
    if expected > SLOWEST:
        return {**row, "failed": f"some {expected:.0f} s a call"}
    row["called"] = called(timed, logits)
    if logits.is_cuda and ours:
        row["in_graph"] = in_graph(timed, logits)
    best = row.get("in_graph", row["called"])["ms"]
    passes = 3 if backward else 2
    return {**row, "GB/s": 1e-6 * passes * logits.numel() * logits.element_size() / best}


def missing(
    rows: Rows, device: str, sizes: list[int], methods: list[str]
) -> Iterator[tuple[Setting, str, Run]]:
    """What is asked for and not there."""
    for setting in settings(device):
        n, _, iterations, backward = setting
        for name, run in peers.runs(iterations, n, device).items():
            keys = dict(zip(KEYS, (name, *setting), strict=True))
            # The one has no gradient, the other is there for it.
            pointless = name == ("OTT-JAX" if backward else "ours, implicit")
            asked = (n in sizes or not sizes) and (name in methods or not methods)
            if asked and not pointless and not rows.has(**keys):
                yield setting, name, run


def measure(rows: Rows, device: str, sizes: list[int], methods: list[str], seconds: float) -> None:
    """Every setting by every method, until the time is over."""
    end = time.perf_counter() + seconds
    for (n, count, iterations, backward), name, run in missing(rows, device, sizes, methods):
        if time.perf_counter() > end:
            break
        # So that no setting is compiled for shapes that vary.
        torch.compiler.reset()
        torch.manual_seed(0)
        logits = torch.randn(count, n, n, device=device)
        row = dict(zip(KEYS, (name, n, count, iterations, backward), strict=True))
        try:
            row |= measured(name, run, logits, iterations, backward)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            row["failed"] = "out of memory"
        except Exception as failure:
            # A peer's own, of whatever kind.
            if name.startswith("ours"):
                raise
            row["failed"] = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
        rows.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="n, by default all")
    parser.add_argument("--methods", nargs="*", default=[], help="by default all")
    parser.add_argument("--seconds", type=float, default=80, help="after which no row begins")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure what is there again")
    given = parser.parse_args()
    packages = ("torch", "triton", "liger-kernel", "POT", "ott-jax", "geomloss", "pygmtools")
    rows = Rows(
        f"bench_batched_{given.device}", KEYS, *packages, folder=given.output, again=given.again
    )
    measure(rows, given.device, given.sizes, given.methods, given.seconds)
    draw(rows.rows, given.output / f"bench_batched_{given.device}.png")


if __name__ == "__main__":
    main()
