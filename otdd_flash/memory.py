"""Free memory of a device, the budget for stored scores, and the errors for a shortage.

`cost.compute`, `operators.comparison`, `operators.sharing`, `solver.small.route`, `labels.exact`,
`extractors.plain` and others ask it before they allocate: to refuse work (`check_memory`,
`check_room`), or to choose between storing and computing again (`holds`, `budget_in_bytes`). Solves
run within `Comparison.within_memory`, which turns a failed allocation into an `InputError`.

A shortage is the user's error: the message must give the bytes needed, the bytes free and ways out
that help. Limits of control groups, such as those of a container, count: the group of this process
and all its ancestors may have one; versions 1 and 2 of cgroups are read. Cached pages of files that
are not in use count as free, as the kernel reclaims them first. A query of free memory takes as
long as a small pass, so needs up to ASSUMED_FREE must be granted without a query.
`tests/test_memory.py` and `tests/test_control_groups.py` test this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from otdd_flash.errors import InputError

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

# Bytes that are assumed to be free: to query a device takes as long as a small pass.
ASSUMED_FREE = 1 << 26

# PyTorch's messages for a failed allocation, on a GPU and on a CPU.
REFUSALS = (
    r"Tried to allocate ([\d.]+ \w+)",
    r"can't allocate memory: you tried to allocate (\d+)",
)


def stated_budget(memory_budget: str | int) -> int | None:
    """Return the bytes of a budget such as `4GiB` or 1000; None for `auto`.

    Raises:
        InputError: the text is neither `auto` nor a number with a known unit.
    """
    if memory_budget == "auto":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(memory_budget).strip())
    if match is None or match[2] not in UNITS:
        raise InputError(
            f"memory_budget must be auto, a number of bytes or one with a unit "
            f"({', '.join(unit for unit in UNITS if unit)}), got {memory_budget!r}"
        )
    return int(float(match[1]) * UNITS[match[2]])


def budget_in_bytes(memory_budget: str | int, device: torch.device) -> int:
    """Return the bytes that stored scores may take: as stated, or half of free memory (`auto`)."""
    stated = stated_budget(memory_budget)
    return free_memory(device) // 2 if stated is None else stated


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated without swapping, within limits of containers."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch's cache of freed tensors is free for new ones. Its functions for a single number
        # sort all of its statistics.
        kept = torch.cuda.memory_stats_as_nested_dict(device)
        reserved, allocated = (
            kept.get(name, {}).get("all", {}).get("current", 0)
            for name in ("reserved_bytes", "allocated_bytes")
        )
        return free + int(reserved) - int(allocated)
    meminfo = Path("/proc/meminfo")
    available = _available_in_kib(meminfo.read_text()) if meminfo.exists() else 0
    # Other systems do not report free memory: take half of the total.
    free = available * 1024 or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    left = bytes_left()
    return free if left is None else min(free, left)


def holds(needed: int, most: int | None, device: torch.device) -> bool:
    """Whether so many bytes may be held: at most `most`, or half of free memory for None.

    A few, `ASSUMED_FREE`, always may.
    """
    return needed <= ASSUMED_FREE or needed <= (free_memory(device) // 2 if most is None else most)


def readable_bytes(count: int) -> str:
    """Format a number of bytes in the largest unit that it fills: 1.5 GiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= UNITS[unit]:
            return f"{count / UNITS[unit]:.1f} {unit}"
    return f"{count} bytes"


HOST = torch.device("cpu")


def check_room(what: str, needed: int, way_out: str, device: torch.device = HOST) -> None:
    """Refuse arrays that do not fit in the memory of a device.

    Raises:
        InputError: they do not fit; the message gives the bytes needed and free.
    """
    if needed > ASSUMED_FREE and needed > (free := free_memory(device)):
        raise InputError(
            f"{what} need {readable_bytes(needed)}, and {readable_bytes(free)} are free; {way_out}"
        )


PCA = "fewer dimensions (extractor.pca)"


def check_memory(
    what: object, needed: int, device: torch.device, dtype: torch.dtype, dimensions: str = PCA
) -> None:
    """Raise an error, before anything is allocated, for work that would not fit.

    Args:
        what: the work that needs the memory, for the message.
        needed: bytes, at least.
        device: on which they are needed.
        dtype: of scores and potentials.
        dimensions: how to have fewer dimensions.

    Raises:
        InputError: less is free.
    """
    if needed <= ASSUMED_FREE:
        return
    free = free_memory(device)
    if needed > free:
        raise InputError(
            f"not enough memory on {device} for {what}: at least {readable_bytes(needed)} are "
            f"needed and {readable_bytes(free)} are free; {_ways_out(device, dtype, dimensions)}"
        )


class within_memory(AbstractContextManager["within_memory"]):
    """A `with` block in which a failed allocation becomes an error that the user can act on.

    The new error has no reference to frames that were called in the block, nor to their tensors,
    which fill the device. It refers to the frame of the block itself, as any error does: allocate
    large tensors inside a call.

    Arguments as for `check_memory`.

    Raises:
        InputError: an allocation failed in the block.
    """

    def __init__(self, what: object, needed: int, device: torch.device, dtype: torch.dtype) -> None:
        self._what, self._needed, self._device, self._dtype = what, needed, device, dtype

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, RuntimeError):
            return
        short = shortage(error, self._what, self._needed, self._device, self._dtype)
        if short is None:
            return
        # The new error's traceback refers to this frame, and by it to the frames that failed.
        del error, traceback
        try:
            raise short
        finally:
            # Raised while the failure is handled, it refers to that one as its context, too.
            short.__context__ = None
            del short


def shortage(
    error: RuntimeError, what: object, needed: int, device: torch.device, dtype: torch.dtype
) -> InputError | None:
    """Return the error that tells a user of a failed allocation; None for any other error.

    Arguments as for `check_memory`.
    """
    found = next((match for text in REFUSALS if (match := re.search(text, str(error)))), None)
    if found is None and not isinstance(error, torch.OutOfMemoryError):
        return None
    wanted = "one allocation" if found is None else f"an allocation of {_in_units(found[1])}"
    return InputError(
        f"out of memory on {device}: {wanted} found {readable_bytes(free_memory(device))} free, "
        f"and {what} need at least {readable_bytes(needed)} in all; {_ways_out(device, dtype)}"
    )


def _ways_out(device: torch.device, dtype: torch.dtype, dimensions: str = PCA) -> str:
    ways = ["fewer samples (max_samples)", dimensions]
    if dtype == torch.float64:
        ways.append("precision=high")
    if device.type != "cpu":
        ways.append("device=cpu")
    elif torch.cuda.is_available():
        ways.append("device=cuda")
    return f"use {', '.join(ways[:-1])} or {ways[-1]}"


def _in_units(amount: str) -> str:
    return readable_bytes(int(amount)) if amount.isdecimal() else amount


def _available_in_kib(meminfo: str) -> int:
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    return int(match[1]) if match else 0


MEMBERSHIP, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class Names(NamedTuple):
    """The folder and file names of one version of cgroups."""

    folder: str
    limit: str
    usage: str
    idle_files: str


VERSION_1 = Names("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = Names("", "memory.max", "memory.current", "inactive_file")


def bytes_left(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int | None:
    """Return the least memory that any control group of this process leaves; None without limits.

    Args:
        membership: the file that lists the groups of the process, a line each.
        mount: the folder under which groups are folders.
    """
    left = [
        found
        for names, folder in _folders(membership, mount)
        if (found := _left(names, folder)) is not None
    ]
    return min(left, default=None)


def _folders(membership: Path, mount: Path) -> Iterator[tuple[Names, Path]]:
    """Yield the folders of the group and its ancestors; a container's own may be the mount."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        names = VERSION_1 if controllers else VERSION_2
        top = mount / names.folder
        own = top / path.strip("/")
        yield from ((names, folder) for folder in (own, *own.parents) if folder.is_relative_to(top))


def _left(names: Names, folder: Path) -> int | None:
    try:
        limit = (folder / names.limit).read_text().strip()
        if not limit.isdecimal():
            return None
        usage = int((folder / names.usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return None
    idle = re.search(rf"^{names.idle_files} (\d+)$", stat, re.MULTILINE)
    return max(0, int(limit) - usage + (int(idle[1]) if idle else 0))
