"""How experiments time and weigh a computation on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def milliseconds(
    run: Callable[[], object], *, repeats: int = 10, warm_ups: int = 3, pause: float = 0.0
) -> float:
    """Median time by CUDA events, after warm-up runs that include compilation and tuning.

    Runs follow one another at once, which brings a GPU to its power limit, or after a pause of some
    seconds, as a call that stands alone would find it.
    """
    for _ in range(warm_ups):
        run()
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(repeats):
        time.sleep(pause)
        start, end = (event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def extra_mib(run: Callable[[], object]) -> float:
    """Peak MiB that a run allocates above what is held before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def cublas_tflops(products: int = 1) -> float:
    """Rate of cuBLAS' float16 product of 8192 x 8192 matrices of random numbers.

    With many products a run, a run lasts as long as a solve's and meets the same power limit.
    """
    a, b = (torch.randn(8192, 8192, device="cuda").half() for _ in range(2))

    def run() -> None:
        for _ in range(products):
            a @ b

    return products * 2 * 8192**3 / milliseconds(run) / 1e9


def graphed(call: Callable[[], object]) -> float:
    """Milliseconds a call, ten of them in one CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return milliseconds(graph.replay) / 10
