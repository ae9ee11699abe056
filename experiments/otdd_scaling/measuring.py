"""Time and memory of a call on any device, and what to say when memory runs out."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from otdd_flash.memory import free_memory

FEWEST, MOST = 3, 10
SECONDS_TO_REPEAT = 2.0
# What PyTorch, cuBLAS and the CPU's allocator say.
REFUSALS = ("out of memory", "ALLOC_FAILED", "can't allocate memory")

T = TypeVar("T")


class Measured(NamedTuple, Generic[T]):
    """Seconds of a call, its peak MiB above what was held before (None on a CPU), its result."""

    seconds: float
    peak_mib: float | None
    result: T


def measure(run: Callable[[], T], device: torch.device) -> Measured[T]:
    """The median of three to ten calls after one that compiles and tunes."""
    run()
    calls = [measure_once(run, device)]
    while len(calls) < MOST and (
        len(calls) < FEWEST or sum(call.seconds for call in calls) < SECONDS_TO_REPEAT
    ):
        calls.append(measure_once(run, device))
    return calls[0]._replace(seconds=statistics.median(call.seconds for call in calls))


def measure_once(run: Callable[[], T], device: torch.device) -> Measured[T]:
    """One call, which should not be the first of its kind."""
    gc.collect()
    held = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    started = time.perf_counter()
    result = run()
    if device.type != "cuda":
        return Measured(time.perf_counter() - started, None, result)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return Measured(seconds, (torch.cuda.max_memory_allocated() - held) / 2**20, result)


def within_memory(run: Callable[[], T], device: torch.device) -> T | None:
    """What a call returns, or None if memory ran out; what the call held is free afterwards."""
    try:
        return run()
    except RuntimeError as error:
        if not any(refusal in str(error) for refusal in REFUSALS):
            raise
        return None
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def refused_before(side: str, smaller: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What to say of a side that ran out of memory in a row of a smaller n."""
    for row in smaller:
        if "failed" in row["sides"].get(side, {}):
            return {"failed": f"not tried: out of memory at n={row['n']:,}"}
    return None


def refused(
    side: str, n: int, smaller: list[dict[str, Any]], device: torch.device
) -> dict[str, Any]:
    """What to say of a side that ran out of memory: its need, as n^2 from its peak at smaller n."""
    peaks = {row["n"]: row["sides"].get(side, {}).get("peak_mib") for row in smaller}
    measured = {size: peak for size, peak in peaks.items() if peak is not None}
    if not measured:
        gib = free_memory(device) / 2**30
        return {"failed": f"out of memory at n={n:,}, needs more than {gib:.0f} GiB"}
    largest = max(measured)
    needed = measured[largest] * (n / largest) ** 2
    text = f"out of memory at n={n:,}, needs ~{needed / 2**10:.0f} GiB"
    return {"failed": text, "needed_mib": needed}


def device_name(device: torch.device) -> str:
    """The GPU's name, or that it is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def device_memory_mib(device: torch.device) -> float | None:
    """The GPU's memory."""
    if device.type != "cuda":
        return None
    _, total = torch.cuda.mem_get_info(device)
    return total / 2**20
