"""Networks that ranks run on some of the batches each: the features of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rank_pool import lead, pool
from torch import Tensor, nn

import otdd_flash as otdd
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError
from otdd_flash.extractors import embedding, feature_store
from otdd_flash.extractors.network import Network

pytestmark = pytest.mark.xdist_group("ranks")

BATCHES: list[int] = []


def as_tensor(item: Any) -> Tensor:
    return torch.from_numpy(np.array(item)).float() / 255


def forward(module: nn.Module, items: list[Tensor]) -> Tensor:
    BATCHES.append(len(items))
    return module(torch.stack(items).flatten(1))


def network(inputs: int) -> Network:
    layer = nn.Linear(inputs, 3, bias=False)
    layer.weight.data = torch.randn(3, inputs, generator=torch.Generator().manual_seed(0))
    return Network("small", layer, frozenset({"image"}), as_tensor, forward)


def images(count: int) -> LabeledDataset:
    values = np.random.default_rng(1).integers(1, 256, (count, 4, 4), dtype=np.uint8)
    labels = np.arange(count, dtype=np.int64) % 2
    return LabeledDataset(values, labels, ("a", "b"), None, modality="image", name="images")


def extracted(count: int, batch_size: int) -> tuple[Any, list[int], list[tuple[int, int]]]:
    """Features, the batches of this rank, and its progress."""
    BATCHES.clear()
    heard: list[tuple[int, int]] = []
    more = {"batch_size": batch_size, "progress": lambda *done: heard.append(done)}
    return lead(features, images(count), more), list(BATCHES), heard


def features(ranks: Ranks, dataset: LabeledDataset, more: dict[str, Any]) -> Tensor:
    return otdd.embed(dataset, network(16), device="cpu", group=ranks, **more).features[:]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("size", "count", "batch_size"), [(2, 13, 4), (3, 2, 1)])
def test_features_are_those_of_one_process(size: int, count: int, batch_size: int) -> None:
    alone = otdd.embed(images(count), network(16), batch_size=batch_size, device="cpu").features
    answers = pool(size).run(extracted, count, batch_size)
    for found, _, _ in answers:
        assert torch.equal(found, alone)
    batches = [batches for _, batches, _ in answers]
    assert sum(map(sum, batches)) == count
    most = -(-count // batch_size)
    assert max(map(len, batches)) == -(-most // size)
    assert answers[0][2][-1] == (count, count)


def folder_of(path: Path, count: int) -> None:
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (path / name).mkdir()
        for row in range(count):
            values = draw.integers(1, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(values).save(path / name / f"{row}.png")


def written(path: str, stop_after: int | None) -> Tensor:
    """Features in a file, by rounds of one batch a rank; perhaps interrupted in between."""
    BATCHES.clear()

    def told(done: int, _: int) -> None:
        if stop_after is not None and done >= stop_after:
            raise InputError("interrupted")

    with pytest.MonkeyPatch.context() as short:
        short.setattr(embedding, "BATCHES_OF_A_ROUND", 1)
        short.setattr(feature_store, "NOTED_BYTES", 1)
        more = {"batch_size": 2, "features_path": path, "progress": told}
        return lead(features, images(13), more)


def test_what_ranks_extract_is_written_to_a_file_and_gone_on_with(tmp_path: Path) -> None:
    alone = otdd.embed(images(13), network(16), batch_size=2, device="cpu").features
    path = str(tmp_path / "features.npy")
    assert all(isinstance(each, InputError) for each in pool(2).run(written, path, 8))
    before = json.loads((tmp_path / "features.npy.json").read_text())["rows"]
    for found in pool(2).run(written, path, None):
        assert torch.equal(found, alone)
    batches = [batch for each in pool(2).run(batches_of) for batch in each]
    assert before == 8
    assert sum(batches) == 13 - before


def batches_of() -> list[int]:
    return list(BATCHES)


CALLS: list[int] = []


def mean_and_size(batch: list[Any]) -> np.ndarray[Any, Any]:
    """A user's function."""
    CALLS.append(len(batch))
    values = np.stack([np.asarray(item, dtype=np.float32) for item in batch])
    return np.stack([values.mean((1, 2, 3)), values.std((1, 2, 3))], 1)


def given(path: str, kind: str) -> tuple[Any, list[int]]:
    CALLS.clear()
    dataset = otdd.load("image_folder", path=path)
    if kind == "pixels":
        extractor = otdd.extractors.pixels()
    elif kind == "local":
        extractor = otdd.extractors.from_callable(lambda batch: mean_and_size(batch))
    else:
        extractor = otdd.extractors.from_callable(globals()[kind])

    def work(ranks: Ranks | None) -> Tensor:
        more = {"batch_size": 3, "device": "cpu", "group": ranks}
        return otdd.embed(dataset, extractor, **more).features

    led = torch.distributed.is_initialized()
    return lead(work) if led else work(None), list(CALLS)


def refused(batch: list[Any]) -> Any:
    if torch.distributed.get_rank() == 1:
        raise KeyError("no such thing")
    return mean_and_size(batch)


DRAWN: list[Tensor] = []


def drawn(batch: list[Any]) -> Any:
    """Random weights, of each process its own."""
    if not DRAWN:
        seed = torch.distributed.get_rank()
        DRAWN.append(torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)))
    return mean_and_size(batch) @ DRAWN[0].numpy()


@pytest.mark.slow
def test_a_function_that_is_another_one_on_another_rank_is_refused(tmp_path: Path) -> None:
    """Two batches, so that of three ranks the first has none."""
    folder_of(tmp_path, 3)
    for answer in pool(3).run(given, str(tmp_path), "drawn"):
        assert isinstance(answer, InputError)
        ranks = "on rank 2 than on rank 1 for the same inputs; draw"
        assert f"extractor test_extraction.drawn gives other features {ranks}" in str(answer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pixels", "mean_and_size", "local"])
def test_pixels_of_files_and_functions_are_shared_out_too(kind: str, tmp_path: Path) -> None:
    folder_of(tmp_path, 5)
    alone, _ = given(str(tmp_path), kind)
    answers = pool(2).run(given, str(tmp_path), kind)
    for found, _ in answers:
        assert found.dtype == alone.dtype
        assert torch.equal(found, alone)
    # Four batches, and the first once more where functions are compared; a function that others
    # cannot have is called by rank 0 alone.
    calls = {"pixels": [0, 0], "mean_and_size": [3, 3], "local": [4, 0]}
    assert [len(called) for _, called in answers] == calls[kind]


@pytest.mark.slow
def test_what_a_function_raises_on_another_rank_is_heard_of(tmp_path: Path) -> None:
    folder_of(tmp_path, 5)
    for answer in pool(2).run(given, str(tmp_path), "refused"):
        assert isinstance(answer, InputError)
        assert str(answer).startswith("rank 1: extractor test_extraction.refused raised KeyError")


@pytest.mark.slow
def test_images_of_another_shape_on_another_rank_are_refused(tmp_path: Path) -> None:
    """Of as many pixels."""
    folder_of(tmp_path, 3)
    for file in (tmp_path / "dog").iterdir():
        Image.fromarray(np.ones((2, 8, 3), dtype=np.uint8)).save(file)
    (said,) = {str(answer) for answer in pool(2).run(given, str(tmp_path), "pixels")}
    assert "images differ in shape (" in said
    assert all(shape in said for shape in ("4 x 4", "2 x 8"))
