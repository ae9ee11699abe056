"""Files that the project writes or reads, with bits flipped, parts cut off or zeroed.

A damaged file is refused, stepped around with the undamaged result, or, where users write the
format themselves, read as what it then says.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import otdd_flash as otdd
from experiments.fuzzing.verdict import Attempt
from otdd_flash.flows.residual_map import ResidualMap


@dataclass(frozen=True)
class Specimen:
    """A file, or the files of a folder, and what reading it gives.

    Attributes:
        name: of the kind.
        files: of which one is damaged at a time.
        read: computes from them, as numbers that can be compared.
        checked: whether the result has to be that of the undamaged files.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[], list[torch.Tensor]]
    checked: bool = True


def specimens(folder: Path) -> list[Specimen]:
    """Every kind of file, written into a folder."""
    x, y = (
        otdd.embed(otdd.load("blobs", split=split, max_samples=24), otdd.extractors.identity())
        for split in ("train", "test")
    )
    return [
        _distance(folder / "distance", x, y),
        _flow(folder / "flow", x, y),
        _map(folder / "map", x, y),
        _checkpoint(folder / "checkpoint", x, y),
        _class_cache(folder / "classes", x, y),
        _archive(folder / "archive"),
        _text(folder / "text"),
    ]


def damaged(specimen: Specimen, random: np.random.Generator) -> Attempt:
    """Damage one file, read, and put it back."""
    contents = {path: path.read_bytes() for path in specimen.files}
    expected = specimen.read()
    for path, content in contents.items():
        path.write_bytes(content)
    path = specimen.files[int(random.integers(len(specimen.files)))]
    how, content = _damage(contents[path], random)
    path.write_bytes(content)
    kind, what = f"damaged {specimen.name}", f"{path.name}, {how}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = specimen.read()
    except otdd.InputError:
        return Attempt(kind, what, "refused")
    except Exception as error:
        return Attempt(kind, what, "raised", f"{type(error).__name__}: {error}"[:300])
    finally:
        for one in path.parent.iterdir():
            if one.is_file():
                one.unlink()
        for one, before in contents.items():
            one.write_bytes(before)
    alike = len(found) == len(expected) and all(map(torch.equal, found, expected))
    if alike or not specimen.checked:
        return Attempt(kind, what, "same" if alike else "read as it is")
    return Attempt(kind, what, "changed", "another result without a word")


def _damage(content: bytes, random: np.random.Generator) -> tuple[str, bytes]:
    changed = bytearray(content)
    place = int(random.integers(len(content)))
    match int(random.integers(5)):
        case 0 | 1:
            changed[place] ^= 1 << int(random.integers(8))
            return f"a bit of byte {place} flipped", bytes(changed)
        case 2:
            places = random.integers(len(content), size=300)
            for one in places.tolist():
                changed[one] ^= 0xFF
            return "300 bytes flipped", bytes(changed)
        case 3:
            return f"cut off at byte {place}", bytes(changed[:place])
        case _:
            size = min(len(content) - place, int(random.integers(1, 500)))
            changed[place : place + size] = bytes(size)
            return f"{size} bytes from {place} zeroed", bytes(changed)


def _distance(folder: Path, x: Any, y: Any) -> Specimen:
    otdd.dataset_distance(x, y, epsilon=0.5, labels="means").save(folder)

    def read() -> list[torch.Tensor]:
        found = otdd.DistanceResult.load(folder)
        numbers = torch.tensor([found.value, *found.bounds, found.epsilon]).double()
        return [numbers, found.class_distances.xy, found.divergence.xy.f]

    return Specimen("distance", _files(folder), read)


def _flow(folder: Path, x: Any, y: Any) -> Specimen:
    otdd.gradient_flow(x, y, otdd.Flow(2), epsilon=0.5, labels="means").save(folder)

    def read() -> list[torch.Tensor]:
        found = otdd.FlowResult.load(folder)
        numbers = [[step.divergence, step.lower, step.upper] for step in found.history]
        return [found.samples.features, torch.tensor(numbers).double()]

    return Specimen("flow", _files(folder), read)


def _map(folder: Path, x: Any, y: Any) -> Specimen:
    folder.mkdir()
    flow = otdd.gradient_flow(x, y, otdd.Flow(2), epsilon=0.5, labels="means")
    learned = flow.map("residual")
    assert isinstance(learned, ResidualMap)
    learned.save(folder / "map")

    def read() -> list[torch.Tensor]:
        return [ResidualMap.load(folder / "map")(y).features]

    return Specimen("map", _files(folder), read)


def _checkpoint(folder: Path, x: Any, y: Any) -> Specimen:
    def run(place: Path, *, resume: bool) -> list[torch.Tensor]:
        checkpoints = otdd.Checkpoints(place, every=1, resume=resume)
        found = otdd.gradient_flow(
            x, y, otdd.Flow(2, checkpoints=checkpoints), epsilon=0.5, labels="means"
        )
        return [found.samples.features]

    def read() -> list[torch.Tensor]:
        # In a copy: a flow that goes on writes checkpoints of its own.
        with TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            return run(Path(copy), resume=True)

    run(folder, resume=False)
    return Specimen("checkpoint", _files(folder), read)


def _class_cache(folder: Path, x: Any, y: Any) -> Specimen:
    metric = otdd.labels.Sinkhorn(epsilon=0.5)

    def read() -> list[torch.Tensor]:
        return [otdd.class_distances([x, y], metric, cache_dir=folder).full]

    read()
    return Specimen("class distances", _files(folder), read)


def _archive(folder: Path) -> Specimen:
    folder.mkdir()
    random = np.random.default_rng(0)
    np.savez(folder / "a.npz", x=random.normal(size=(20, 3)), y=np.arange(20) % 2)
    return Specimen("npz", _files(folder), _reader(folder / "a.npz"), checked=False)


def _text(folder: Path) -> Specimen:
    folder.mkdir()
    rows = [f"{i / 7:.6f},{i * i / 11:.6f},{i % 2}" for i in range(20)]
    (folder / "a.csv").write_text("\n".join(["u,v,label", *rows]))
    return Specimen("csv", _files(folder), _reader(folder / "a.csv"), checked=False)


def _reader(path: Path) -> Callable[[], list[torch.Tensor]]:
    def read() -> list[torch.Tensor]:
        found = otdd.embed(otdd.load("arrays", path=str(path)), otdd.extractors.identity())
        return [found.features]

    return read


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
