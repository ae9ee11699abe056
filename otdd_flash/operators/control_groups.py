"""How much memory the control groups of this process leave it, as those of a container do.

A group and all above it may have a limit; both versions of the interface are read. Pages of files
that were read and are not in use count as free: the kernel gives them up first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MEMBERSHIP, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class Names(NamedTuple):
    """Where groups are mounted and what their files are called."""

    folder: str
    limit: str
    usage: str
    idle_files: str


VERSION_1 = Names("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = Names("", "memory.max", "memory.current", "inactive_file")


def bytes_left(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int | None:
    """The least that any group of this process leaves; None where there is no limit.

    Args:
        membership: the groups of the process, a line each.
        mount: where groups are folders.
    """
    left = [
        found
        for names, folder in _folders(membership, mount)
        if (found := _left(names, folder)) is not None
    ]
    return min(left, default=None)


def _folders(membership: Path, mount: Path) -> Iterator[tuple[Names, Path]]:
    """The folders of the group and of all above it; in a container, its own may be the mount."""
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
