"""The benchmark of several processes, small on a processor: rows, resumption, the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def rows(workload: str, folder: Path, *processes: str, sizes: str = "") -> list[dict[str, Any]]:
    start = [sys.executable, "-m", "experiments.bench_scale", workload, "--device", "cpu"]
    given = ["--processes", *processes, "--output", str(folder), *SMALL[sizes or workload]]
    done = subprocess.run(start + given, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads((folder / "bench_scale_cpu.json").read_text())["rows"]
    return found


def test_there_is_a_small_size_of_every_workload() -> None:
    assert SMALL.keys() == WORKLOADS.keys()


def test_points_in_host_memory_are_for_one_process(tmp_path: Path) -> None:
    (row,) = rows("imagenet_streamed", tmp_path, "1", "2")
    (device,) = rows("imagenet_0.1", tmp_path / "device", "1")
    assert row["processes"] == 1
    assert row["value"] == pytest.approx(device["value"], rel=1e-6)


def test_points_that_go_round_are_compared_with_one_process(tmp_path: Path) -> None:
    (one,) = rows("imagenet_0.1", tmp_path, "1", sizes="imagenet_ring")
    assert rows("imagenet_ring", tmp_path, "1") == [one]
    _, two = rows("imagenet_ring", tmp_path, "2")
    assert (one["layout"], two["layout"]) == ("replicated", "ring")
    assert two["value"] == pytest.approx(one["value"], rel=1e-3)
    assert two["farthest_from_one_process"] < 1e-2 * one["value"]
    assert two["speed_up"] == pytest.approx(one["seconds"] / two["seconds"])


@pytest.mark.parametrize("workload", ["imagenet_0.1", "class_table", "flow"])
def test_two_processes_find_the_numbers_of_one(workload: str, tmp_path: Path) -> None:
    one, two = rows(workload, tmp_path, "1", "2")
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["value"] == pytest.approx(one["value"], rel=1e-3)
    assert two["farthest_from_one_process"] < 1e-2
    assert two["bytes_moved"] > 0 == one["bytes_moved"]
    assert 0 < two["communication_share"] < 1
    assert len(two["gib_per_process"]) == 2
    assert two["speed_up"] == pytest.approx(one["seconds"] / two["seconds"])
    # Nothing is measured again.
    assert rows(workload, tmp_path, "2") == [one, two]
