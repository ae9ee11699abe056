"""How much memory the scores of one operator may take."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from otdd_flash.errors import InputError

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def budget_in_bytes(memory_budget: str | int, device: torch.device) -> int:
    """Bytes that stored scores may take: `auto` is half of the free memory, else `4GiB` or a count.

    Raises:
        InputError: the text is neither `auto` nor a number with a known unit.
    """
    if memory_budget == "auto":
        return free_memory(device) // 2
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(memory_budget).strip())
    if match is None or match[2] not in UNITS:
        raise InputError(
            f"memory_budget must be auto, a number of bytes or one with a unit "
            f"({', '.join(unit for unit in UNITS if unit)}), got {memory_budget!r}"
        )
    return int(float(match[1]) * UNITS[match[2]])


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device without swapping."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        return _available_in_kib(meminfo.read_text()) * 1024
    # Other systems do not say what is free: take half of what there is.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _available_in_kib(meminfo: str) -> int:
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    return int(match[1]) if match else 0
