"""The memory that control groups leave, of both versions of their interface."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from otdd_flash import memory
from otdd_flash.memory import bytes_left


def group(folder: Path, version: int, limit: str, usage: int, idle: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"file 5\n{names[2]} {idle}\nactive_file 7\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_above_decides(version: int, tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    line = "4:memory:/a/b" if version == 1 else "0::/a/b"
    membership.write_text(f"9:cpu:/other\n{line}\n")
    mount = tmp_path / "mount"
    top = mount / "memory" if version == 1 else mount
    assert bytes_left(membership, mount) is None
    group(top / "a", version, "1000", 900, 300)
    assert bytes_left(membership, mount) == 400
    group(top / "a" / "b", version, "max" if version == 2 else "9999999999", 50, 0)
    assert bytes_left(membership, mount) == 400
    group(top / "a" / "b", version, "200", 50, 0)
    assert bytes_left(membership, mount) == 150
    # A group above it, and one that is full.
    group(top, version, "100", 500, 300)
    assert bytes_left(membership, mount) == 0


def test_free_memory_is_what_the_groups_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory.free_memory(torch.device("cpu"))
    monkeypatch.setattr(memory, "bytes_left", lambda: 4096)
    assert memory.free_memory(torch.device("cpu")) == 4096
    monkeypatch.setattr(memory, "bytes_left", lambda: None)
    assert memory.free_memory(torch.device("cpu")) >= free / 2
