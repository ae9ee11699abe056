"""Points in files that every rank reads and none holds: the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import lead, pool
from test_shared_distance import EPSILON, datasets

import otdd_flash as otdd
from otdd_flash.cost.host_points import Streaming
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError
from otdd_flash.features.file_features import FeatureFile
from otdd_flash.operators import blocked, comparison, sharing

pytestmark = pytest.mark.xdist_group("ranks")


def in_files(folder: str) -> list[otdd.LabeledSamples]:
    return [
        replace(side, features=otdd.features_file(f"{folder}/{name}.npy"))
        for name, side in zip("xy", datasets(), strict=True)
    ]


def written(folder: Path) -> str:
    for name, side in zip("xy", datasets(), strict=True):
        np.save(folder / f"{name}.npy", side.features.numpy())
    return str(folder)


def in_blocks(work: Any, *arguments: Any) -> Any:
    """What rank 0 finds where points take more than there is, in small blocks on every rank."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocked, "LEAST_POINTS", 16)
        patched.setattr(comparison, "ASSUMED_FREE", 0)
        return lead(work, *arguments)


def distance(ranks: Ranks, folder: str, precision: str) -> dict[str, Any]:
    compute = otdd.ComputeOptions("cpu", precision=precision, memory_budget=1, group=ranks)
    result = otdd.dataset_distance(*in_files(folder), epsilon=EPSILON, compute=compute)
    assert result.streamed is not None
    return {
        "value": result.value,
        "bounds": result.bounds,
        "f": result.potentials[0],
        "g": result.potentials[1],
        "backend": result.divergence.backend,
        "layout": result.shared.layout,
        "converged": result.converged,
        "bytes": result.streamed["bytes"],
        # Of this process alone.
        "map": result.barycentric_map(),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("size", "precision"), [(2, "double"), (3, "fast")])
def test_distances_are_those_of_one_process(size: int, precision: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    first = pool(size).run(in_blocks, distance, folder, precision)[0]
    compute = otdd.ComputeOptions("cpu", precision="double")
    alone = otdd.dataset_distance(*datasets(), epsilon=EPSILON, compute=compute)
    near = 1e-9 if precision == "double" else 1e-3
    assert first["layout"] == "streamed"
    assert f"points streamed in blocks of {15 if size == 2 else 10} x 15" in first["backend"]
    assert first["backend"].endswith(f", {size} ranks")
    assert first["converged"]
    assert first["bytes"] > 0
    assert first["bounds"][0] <= alone.value <= first["bounds"][1]
    assert first["value"] == pytest.approx(alone.value, abs=near)
    for key, expected in zip("fg", alone.potentials, strict=True):
        assert torch.allclose(first[key].double(), expected.double(), atol=4 * near)
    assert torch.allclose(first["map"].double(), alone.barycentric_map().double(), atol=4 * near)
    again = pool(size).run(in_blocks, distance, folder, precision)[0]
    assert torch.equal(first["f"], again["f"])
    assert (first["value"], first["bounds"]) == (again["value"], again["bounds"])


def in_memory(ranks: Ranks, folder: str) -> None:
    sides = in_files(folder)[0], datasets()[1]
    compute = otdd.ComputeOptions("cpu", memory_budget=1, group=ranks)
    otdd.dataset_distance(*sides, epsilon=EPSILON, compute=compute)


def test_points_of_one_process_are_refused_on_every_rank(tmp_path: Path) -> None:
    for answer in pool(2).run(in_blocks, in_memory, written(tmp_path)):
        assert isinstance(answer, InputError)
        assert "from files that each of them reads; give features_file(...)" in str(answer)


def without_file(folder: str) -> Any:
    """As where one rank runs on a machine that lacks the file."""
    reopened = FeatureFile.reopened

    def missing(file: FeatureFile) -> FeatureFile:
        ((path, stamp),) = file.stamps.items()
        file.stamps = {path.with_suffix(".gone"): stamp}
        return reopened(file)

    with pytest.MonkeyPatch.context() as patched:
        if torch.distributed.get_rank() == 1:
            patched.setattr(FeatureFile, "reopened", missing)
        return in_blocks(distance, folder, "double")


def test_a_file_that_one_rank_lacks_is_refused_on_every_rank(tmp_path: Path) -> None:
    for answer in pool(2).run(without_file, written(tmp_path)):
        assert isinstance(answer, InputError)
        assert "another process cannot read" in str(answer)
        assert "x.gone" in str(answer)


@pytest.mark.parametrize(
    ("device", "budget", "room"),
    [("cpu", "auto", 500), ("cpu", 1000, 1000), ("cuda", "auto", 1000)],
)
def test_ranks_share_free_memory_of_the_host(device: str, budget: Any, room: int) -> None:
    """A card is of one rank, and what is asked for is for each."""
    compute = otdd.ComputeOptions(device, memory_budget=budget)
    whole, ranks = Streaming(torch.device(device), 1000), SimpleNamespace(size=2)
    assert sharing._of_one_rank(whole, ranks, compute).room == room
