"""Files that came to harm: what this package wrote is refused, what users write is a sentence."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.extractors.checkpoint import load_checkpoint
from otdd_flash.files.tensor_file import content_hash
from otdd_flash.flows.residual_map import ResidualMap
from otdd_flash.samples import LabeledSamples

FLIPS = 40


def blobs(count: int, seed: int) -> LabeledSamples:
    rng = np.random.default_rng(seed)
    return LabeledSamples(
        torch.from_numpy(rng.normal(size=(count, 2)) + seed),
        torch.arange(count) % 2,
        ("a", "b"),
    )


SOURCE, TARGET = blobs(6, 0), blobs(7, 1)
MOVE = {"epsilon": 1.0, "compute": otdd.ComputeOptions(device="cpu")}


def fingerprint(*tensors: Any) -> str:
    return content_hash({str(k): torch.as_tensor(tensor) for k, tensor in enumerate(tensors)})


def write_distance(folder: Path) -> None:
    otdd.dataset_distance(SOURCE, TARGET, epsilon=1.0).save(folder)


def read_distance(folder: Path) -> str:
    result = otdd.DistanceResult.load(folder)
    f, g = result.potentials
    table, features = result.class_distances.full, result.source.features
    return fingerprint(result.value, result.bounds, f, g, table, features)


def write_flow(folder: Path) -> None:
    otdd.gradient_flow(SOURCE, TARGET, otdd.Flow(2), **MOVE).save(folder)


def read_flow(folder: Path) -> str:
    flow = otdd.FlowResult.load(folder)
    values = [record.objective for record in flow.history]
    return fingerprint(flow.samples.features, flow.trajectory.points, values)


def write_pairs(folder: Path) -> None:
    otdd.pairwise_distances([SOURCE, TARGET], epsilon=1.0).save(folder)


def read_pairs(folder: Path) -> str:
    result = otdd.PairwiseResult.load(folder)
    return fingerprint(result.values, result.lower, result.upper, result.class_distances.full)


def write_map(folder: Path) -> None:
    after = TARGET.take(torch.arange(6))
    fitted = ResidualMap.fit(SOURCE, after, hidden=4, epochs=1, device="cpu")
    fitted.save(folder / "map.safetensors")


def read_map(folder: Path) -> str:
    return fingerprint(ResidualMap.load(folder / "map.safetensors", device="cpu")(SOURCE).features)


def write_checkpoint(folder: Path) -> None:
    otdd.gradient_flow(SOURCE, TARGET, otdd.Flow(2, checkpoints=otdd.Checkpoints(folder)), **MOVE)


def read_checkpoint(folder: Path) -> str:
    # In a copy: a flow that goes on writes checkpoints of its own.
    with TemporaryDirectory(dir=folder.parent, prefix=folder.name) as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        checkpoints = otdd.Checkpoints(Path(copy), resume=True)
        flow = otdd.gradient_flow(SOURCE, TARGET, otdd.Flow(2, checkpoints=checkpoints), **MOVE)
    return fingerprint(flow.samples.features, [record.objective for record in flow.history])


def network() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def write_weights(folder: Path) -> None:
    torch.save(network().state_dict(), folder / "weights.pt")


def write_table(folder: Path) -> None:
    zero = torch.zeros(3, 3)
    otdd.ClassDistances(zero[:2, :2], zero[:2] + 1, zero).save(folder / "given.npz")


def read_table(folder: Path) -> str:
    return fingerprint(otdd.ClassDistances.load(folder / "given.npz").full)


def read_weights(folder: Path) -> str:
    module = network()
    load_checkpoint(module, str(folder / "weights.pt"), ())
    return content_hash(module.state_dict())


# Files: where one is, what writes it into a folder, and a fingerprint of what is read back.
KEPT: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], str]]] = {
    "distance": ("result.safetensors", write_distance, read_distance),
    "flow": ("result.safetensors", write_flow, read_flow),
    "pairs": ("result.json", write_pairs, read_pairs),
    "table of pairs": ("class_distances.npz", write_pairs, read_pairs),
    "map": ("map.safetensors", write_map, read_map),
    "checkpoint": ("checkpoint.json", write_checkpoint, read_checkpoint),
    "rows of a checkpoint": ("checkpoint/*", write_checkpoint, read_checkpoint),
    "weights": ("weights.pt", write_weights, read_weights),
    "given table": ("given.npz", write_table, read_table),
}


def with_flipped_bits(file: Path, read: Callable[[], str]) -> list[str | InputError]:
    """What is read from a file as it is, and then with one or another of its bits flipped."""
    found: list[str | InputError] = [read()]
    whole = file.read_bytes()
    for bit in np.random.default_rng(0).integers(8 * len(whole), size=FLIPS):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        try:
            found.append(read())
        except InputError as error:
            found.append(error)
    return found


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_damaged_files_are_refused_and_never_used(kind: str, tmp_path: Path) -> None:
    """Every flipped bit is refused in a sentence or, where it says nothing, changes nothing."""
    place, write, read = KEPT[kind]
    write(tmp_path)
    (file,) = tmp_path.glob(place)
    undamaged, *found = with_flipped_bits(file, lambda: read(tmp_path))
    refusals = [str(one) for one in found if isinstance(one, InputError)]
    assert {one for one in found if not isinstance(one, InputError)} <= {undamaged}
    # What torch and zip leave unused, such as padding and dates, may change.
    assert len(refusals) > FLIPS / 3
    for refusal in refusals:
        assert str(tmp_path) in refusal
        assert "\n" not in refusal
        assert "weights_only" not in refusal


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_no_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (pickle.dumps(Evil()), None):
        if content is None:
            torch.save(Evil(), "weights.pt")
        else:
            Path("weights.pt").write_bytes(content)
        with pytest.raises(InputError):
            read_weights(tmp_path)
    assert not Path("ran").exists()
