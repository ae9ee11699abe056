"""The benchmark of several processes, small on a processor: rows, resumption, the same numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_torchrun import Started

from experiments import bench_scale
from experiments.scale_workloads import WORKLOADS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torchrun")]

SMALL = {
    "imagenet_0.1": ("--points", "300", "--dimension", "8", "--classes", "4"),
    "imagenet_0.01": ("--points", "200", "--dimension", "8", "--classes", "4"),
    # More than is taken to be there without asking.
    "imagenet_ring": ("--points", "300", "--dimension", "20000", "--classes", "4"),
    "imagenet_streamed": ("--points", "300", "--dimension", "8", "--classes", "4"),
    "four_million": ("--points", "200", "--dimension", "8", "--classes", "20"),
    "class_table": ("--points", "120", "--dimension", "8", "--classes", "12"),
    "flow": ("--points", "100", "--dimension", "8", "--classes", "4", "--steps", "2"),
}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The rows that a command finds or has found, its processes forked."""

    def start(run: list[str], **_: Any) -> None:
        ranks = int(run[run.index("--nproc-per-node") + 1]) if "--standalone" in run else 1
        process = Started(tmp_path, *run[-2:], ranks=ranks, cwd=bench_scale.ROOT)
        said = process.ended()
        assert process.returncode == 0, said

    def found(workload: str, *processes: str, sizes: str = "") -> list[dict[str, Any]]:
        given = ["--processes", *processes, "--output", str(tmp_path), *SMALL[sizes or workload]]
        monkeypatch.setattr(sys, "argv", ["bench_scale", workload, "--device", "cpu", *given])
        bench_scale.main()
        content: list[dict[str, Any]]
        content = json.loads((tmp_path / "bench_scale_cpu.json").read_text())["rows"]
        return content

    monkeypatch.setattr(bench_scale, "subprocess", SimpleNamespace(run=start))
    return found


def test_points_in_host_memory_are_for_one_process(rows: Any) -> None:
    assert SMALL.keys() == WORKLOADS.keys()
    (row,) = rows("imagenet_streamed", "1", "2")
    _, device = rows("imagenet_0.1", "1")
    assert row["processes"] == 1
    assert row["value"] == pytest.approx(device["value"], rel=1e-6)


def test_points_that_go_round_are_compared_with_one_process(rows: Any) -> None:
    (one,) = rows("imagenet_0.1", "1", sizes="imagenet_ring")
    assert rows("imagenet_ring", "1") == [one]
    _, two = rows("imagenet_ring", "2")
    assert (one["layout"], two["layout"]) == ("replicated", "ring")
    assert two["value"] == pytest.approx(one["value"], rel=1e-3)
    assert two["farthest_from_one_process"] < 1e-2 * one["value"]
    assert two["speed_up"] == pytest.approx(one["seconds"] / two["seconds"])


@pytest.mark.parametrize("workload", ["class_table", "flow"])
def test_two_processes_find_the_numbers_of_one(workload: str, rows: Any) -> None:
    one, two = rows(workload, "1", "2")
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["value"] == pytest.approx(one["value"], rel=1e-3)
    assert two["farthest_from_one_process"] < 1e-2
    assert two["bytes_moved"] > 0 == one["bytes_moved"]
    assert 0 < two["communication_share"] < 1
    assert len(two["gib_per_process"]) == 2
    assert two["speed_up"] == pytest.approx(one["seconds"] / two["seconds"])
    # Nothing is measured again.
    assert rows(workload, "2") == [one, two]
