"""Flows whose rows several processes move and write, each its own, and others go on from."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, lead, pool
from safetensors.torch import load_file
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError
from otdd_flash.flows import checkpoint
from otdd_flash.flows import checkpoint as shard
from otdd_flash.flows.stepping import Stepping

pytestmark = pytest.mark.xdist_group("ranks")

DRAW = torch.Generator().manual_seed(4)
LABELS = torch.arange(19) % 3, torch.arange(13) % 2
X = torch.randn(19, 3, generator=DRAW, dtype=torch.float64) + LABELS[0][:, None]
Y = torch.randn(13, 3, generator=DRAW, dtype=torch.float64) + 0.5
STEPS = 6

WAYS: dict[str, dict[str, Any]] = {
    "momentum": {"stepping": Stepping(0.1, optimizer_options={"momentum": 0.9}, box=(-2.0, 2.5))},
    "adam, joint": {"stepping": Stepping(0.1, "adam"), "mode": "joint"},
    "minibatch": {"stepping": Stepping(0.1, "adam", noise=0.1, minibatch=7), "mode": "augmented"},
}


def sides() -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    one = otdd.LabeledSamples(X, LABELS[0], ("a", "b", "c"))
    return one, otdd.LabeledSamples(Y, LABELS[1], ("a", "b"))


def flow(ranks: Ranks | None, folder: str, stop: int, way: str) -> tuple[Tensor, list[float], int]:
    """Points, objectives, and the step at which this run began."""
    resume = (Path(folder) / "checkpoint.json").exists()
    seen: list[int] = []
    moves = otdd.Flow(
        STEPS,
        checkpoints=otdd.Checkpoints(Path(folder), every=2, resume=resume),
        **WAYS[way],
    )
    result = otdd.gradient_flow(
        *sides(),
        moves,
        epsilon=2.0,
        solver=otdd.Converged(1e-8),
        compute=otdd.ComputeOptions("cpu", precision="double", group=ranks),
        callbacks=otdd.Callbacks(
            progress=lambda record: seen.append(record.step), stop=lambda: len(seen) == stop
        ),
    )
    return result.samples.features, [record.seen for record in result.history], seen[0]


def rows_on_disk(folder: Path, step: int) -> list[tuple[int, int]]:
    """Ranges of rows that the shards of the last checkpoint hold, as their names say."""
    manifest = json.loads((folder / "checkpoint.json").read_text())
    assert manifest["step"] == step
    found = []
    for each in manifest["shards"]:
        first, last = map(int, each["file"].split(".rows-")[1].split(".")[0].split("-"))
        points = load_file(folder / "checkpoint" / each["file"])["rows.points.value"]
        assert len(points) == last - first
        found.append((first, last))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", ["adam, joint", "minibatch"])
def test_a_flow_goes_on_with_other_numbers_of_ranks(way: str, tmp_path: Path) -> None:
    """Two processes, then three, then one: but for rounding where one process would have been."""
    points, seen, _ = flow(None, str(tmp_path / "whole"), -1, way)
    folder = tmp_path / "run"
    pool(2).led(flow, str(folder), 2, way)
    assert rows_on_disk(folder, 2) == [(0, 9), (9, 19)]
    assert [answer[2] for answer in pool(3).led(flow, str(folder), 2, way)] == [2, 2, 2]
    assert rows_on_disk(folder, 4) == [(0, 6), (6, 12), (12, 19)]
    found, objectives, first = flow(None, str(folder), -1, way)
    assert first == 4
    assert rows_on_disk(folder, 6) == [(0, 19)]
    torch.testing.assert_close(found, points, rtol=1e-6, atol=1e-6)
    assert objectives == pytest.approx(seen, rel=1e-7)
    # From one to two, which end where they would have by themselves but for rounding.
    again = pool(2).led(flow, str(tmp_path / "other"), -1, way)
    torch.testing.assert_close(again[0][0], points, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_as_many_ranks_go_on_to_the_last_bit(tmp_path: Path) -> None:
    whole = pool(2).led(flow, str(tmp_path / "whole"), -1, "minibatch")
    pool(2).led(flow, str(tmp_path / "run"), 3, "minibatch")
    resumed = pool(2).led(flow, str(tmp_path / "run"), -1, "minibatch")
    assert resumed[0][2] == 3
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1] == other[1]


def few(ranks: Ranks) -> Tensor:
    """Fewer particles than ranks."""
    compute = otdd.ComputeOptions("cpu", group=ranks)
    moves = otdd.Flow(2, stepping=Stepping(0.5))
    return otdd.gradient_flow(X[:2], Y, moves, labels="none", compute=compute).samples.features


@pytest.mark.slow
def test_there_may_be_more_ranks_than_rows() -> None:
    for answer in pool(3).led(few):
        assert answer.shape == (2, 3), answer


def _broken(rank: int) -> Callable[..., Any]:
    real = shard.save_tensors

    def save(path: Path, *content: Any) -> str:
        if torch.distributed.get_rank() == rank:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return real(path, *content)

    return save


def full_disk(folder: str) -> Any:
    """A second checkpoint for which rank 1 has no room."""
    lead(flow, folder, 2, "momentum")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard, "save_tensors", _broken(1))
        return lead(flow, folder, 2, "momentum")


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_is_heard_of_on_all(tmp_path: Path) -> None:
    for answer in pool(2).run(full_disk, str(tmp_path)):
        assert isinstance(answer, InputError), answer
        assert "rank 1: cannot write" in str(answer)
        assert "No space left on device" in str(answer)
    # The last one is whole, and nothing of the other is left.
    assert rows_on_disk(tmp_path, 2) == [(0, 9), (9, 19)]
    assert len(list((tmp_path / "checkpoint").iterdir())) == 2
    assert flow(None, str(tmp_path), -1, "momentum")[2] == 2


def elsewhere(folder: str, made: bool) -> Any:
    """Ranks whose folders are not one; another run may have made that of the second."""
    real = shard.write_shard

    def write(place: Path, *arguments: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            place = place.parent / "of another machine"
            if made:
                place.mkdir(exist_ok=True)
        return real(place, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("otdd_flash.flows.stepping.write_shard", write)
        return lead(flow, folder, 2, "momentum")


@pytest.mark.slow
@pytest.mark.parametrize("made", [True, False])
def test_a_folder_that_ranks_do_not_share_is_refused(made: bool, tmp_path: Path) -> None:
    (said,) = {str(answer) for answer in pool(2).run(elsewhere, str(tmp_path), made)}
    who = "is not seen by rank 0" if made else "which rank 0 has made, is not there"
    assert f"{who}; give a hydra.run.dir that all machines share" in said


def killed(folder: str) -> Any:
    """A flow of which all processes die between shards and manifest of the second checkpoint."""
    real, count = checkpoint.Checkpoints._put_in_place, iter(range(9))

    def put(self: Any, manifest: Any) -> None:
        if next(count) == 1:
            os._exit(1)
        real(self, manifest)

    checkpoint.Checkpoints._put_in_place = put
    return lead(flow, folder, -1, "momentum")


@pytest.mark.slow
def test_ranks_killed_between_shards_and_manifest_leave_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    own = RankPool(2)
    with pytest.raises(EOFError):
        own.run(killed, str(tmp_path))
    assert len(list((tmp_path / "checkpoint").glob("step-4.*"))) == 2
    assert rows_on_disk(tmp_path, 2) == [(0, 9), (9, 19)]
    points, _, first = flow(None, str(tmp_path), -1, "momentum")
    assert first == 2
    whole, _, _ = flow(None, str(tmp_path / "whole"), -1, "momentum")
    torch.testing.assert_close(points, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_harmed_shard_of_a_rank_leads_to_the_checkpoint_before(tmp_path: Path) -> None:
    pool(2).led(flow, str(tmp_path), 5, "momentum")
    (harmed,) = (tmp_path / "checkpoint").glob("step-5.*.rank-1.*")
    harmed.unlink()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, _, first = flow(None, str(tmp_path), -1, "momentum")
    assert first == 4
    assert [
        harmed.name in str(each.message) for each in said if "going on" in str(each.message)
    ] == [True]
