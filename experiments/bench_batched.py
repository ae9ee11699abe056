"""Many small doubly stochastic matrices: time of a launch and of a call, forward and backward.

On a GPU: 4 x 4 for B = 1 to 2^24 and 1 to 100 iterations, then n = 8 to 128 at B n^2 = 2^24, and
PermLLM's 14,336 blocks of 64 x 64. `--device cpu`: 4 x 4, B = 65,536 on this processor. Beside us
the loop in PyTorch and what `torch.compile` makes of it. A wrong result is not timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.rows import Rows

Run = Callable[[Tensor], Tensor]
UNIT = 2.0**-24
REPEATS = 50


def plain(logits: Tensor, iterations: int) -> Tensor:
    """The loop as layers write it, of matrices whose exponentials neither overflow nor are lost."""
    balanced = (logits - logits.amax((-2, -1), keepdim=True)).exp()
    for _ in range(iterations):
        balanced = balanced / balanced.sum(-1, keepdim=True)
        balanced = balanced / balanced.sum(-2, keepdim=True)
    return balanced


def exact(logits: Tensor, iterations: int) -> Tensor:
    """The same in the log domain and in float64."""
    x = logits.double()
    for _ in range(iterations):
        x = x - x.logsumexp(-1, keepdim=True)
        x = x - x.logsumexp(-2, keepdim=True)
    return x.exp()


def error(run: Run, logits: Tensor, iterations: int) -> float:
    """The largest relative error, in units of 2^-24 times 1 and the range of the logits."""
    part = logits[:4096]
    truth = exact(part, iterations)
    spread = (part.amax((1, 2)) - part.amin((1, 2))).double()
    off = ((run(part).detach().double() - truth).abs() / truth).amax((1, 2))
    return float((off / (UNIT * (1 + spread))).max())


def gradient_of(run: Run) -> Run:
    """Forward and backward of a run, with cotangents like the logits."""

    def both(logits: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(run(leaf), leaf, logits)[0]

    return both


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: the median, and the 1% and 99% quantiles."""
    times = sorted(1e3 * second for second in seconds)
    last = len(times) - 1
    return {
        "ms": statistics.median(times),
        "ms_1%": times[round(0.01 * last)],
        "ms_99%": times[round(0.99 * last)],
    }


def called(run: Run, logits: Tensor) -> dict[str, float]:
    """As called from Python, each call waited for."""
    cuda: Any = torch.cuda
    wait: Callable[[], Any] = cuda.synchronize if logits.is_cuda else lambda: None
    seconds = []
    for repeat in range(REPEATS + 3):
        wait()
        start = time.perf_counter()
        run(logits)
        wait()
        if repeat >= 3:
            seconds.append(time.perf_counter() - start)
    return quantiles(seconds)


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
    seconds = []
    for repeat in range(REPEATS + 3):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= 3:
            seconds.append(1e-3 * start.elapsed_time(end))
    return quantiles(seconds)


def runs(iterations: int, device: str) -> dict[str, Run]:
    """Ours and the peers."""

    def loop(logits: Tensor) -> Tensor:
        return plain(logits, iterations)

    found: dict[str, Run] = {
        "ours": lambda logits: otdd.doubly_stochastic(logits, iterations=iterations),
        "loop": loop,
    }
    if device == "cuda":
        found["torch.compile"] = torch.compile(loop)
        found["ours, implicit"] = lambda logits: otdd.doubly_stochastic(
            logits, iterations=iterations, gradient="implicit"
        )
    return found


def settings(device: str) -> list[tuple[int, int, int, bool]]:
    """(n, B, iterations, with backward), the largest first."""
    if device == "cpu":
        return [(4, 65_536, 20, False), (4, 65_536, 20, True)]
    forward = [(4, 4**k, 20, False) for k in range(12, -1, -1)]
    forward += [(4, 4**12, iterations, False) for iterations in (1, 5, 100)]
    sizes = [(n, 2**24 // n**2, 20) for n in (8, 16, 32, 64, 128)]
    sizes += [(16, 65_536, 100), (64, 14_336, 5)]
    backward = [(4, 4**12, 20), (4, 32_768, 20), (4, 1, 20), *sizes]
    return forward + [(*one, False) for one in sizes] + [(*one, True) for one in backward]


def measure(rows: Rows, device: str) -> None:
    """Every setting by every method."""
    for n, count, iterations, backward in settings(device):
        torch.manual_seed(0)
        logits = torch.randn(count, n, n, device=device)
        for name, forward in runs(iterations, device).items():
            keys = {"n": n, "B": count, "iterations": iterations, "backward": backward}
            if rows.has(method=name, **keys) or (name == "ours, implicit" and not backward):
                continue
            run = gradient_of(forward) if backward else torch.inference_mode()(forward)
            row: dict[str, Any] = {"method": name, **keys}
            row["error"] = error(forward, logits, iterations)
            if not row["error"] <= 16 * (1 if name.startswith("ours") else iterations):
                rows.add({**row, "wrong": True})
                continue
            try:
                row["called"] = called(run, logits)
                if device == "cuda" and name.startswith("ours"):
                    row["in_graph"] = in_graph(run, logits)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                rows.add({**row, "out_of_memory": True})
                continue
            best = row.get("in_graph", row["called"])["ms"]
            row["GB/s"] = (3 if backward else 2) * logits.numel() * 4e-6 / best
            rows.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--again", action="store_true", help="measure what is there again")
    given = parser.parse_args()
    keys = ("method", "n", "B", "iterations", "backward")
    measure(
        Rows(f"bench_batched_{given.device}", keys, "torch", "triton", again=given.again),
        given.device,
    )


if __name__ == "__main__":
    main()
