from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from otdd_flash.data import load
from otdd_flash.errors import DataNotice, InputError


def _write(folder: Path, counts: dict[str, int]) -> Path:
    """Grey images whose level is the image's number within its class."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for level in range(count):
            Image.new("L", (3 + level, 4), level).save(folder / name / f"{level}.png")
    return folder


def test_one_folder_per_class(tmp_path: Path) -> None:
    dataset = load("image_folder", path=str(_write(tmp_path / "pets", {"cat": 3, "dog": 2})))
    assert dataset.class_names == ("cat", "dog")
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1]
    assert (dataset.modality, dataset.name) == ("image", "pets")
    assert [image.getpixel((0, 0)) for image in dataset.inputs] == [
        (v, v, v) for v in (0, 1, 2, 0, 1)
    ]
    assert [Path(path).name for path in dataset.inputs.paths][:2] == ["0.png", "1.png"]


def test_a_split_is_a_subfolder(tmp_path: Path) -> None:
    _write(tmp_path / "train", {"cat": 3, "dog": 2})
    _write(tmp_path / "val", {"cat": 1, "dog": 1})
    assert len(load("image_folder", path=str(tmp_path))) == 5
    assert len(load("image_folder", path=str(tmp_path), split="val")) == 2
    with pytest.raises(InputError, match=r"unknown split 'test'.*has the folders train, val"):
        load("image_folder", path=str(tmp_path), split="test")


def test_the_draw_reads_no_image(tmp_path: Path) -> None:
    folder = _write(tmp_path, {"cat": 6, "dog": 3})
    for file in folder.glob("*/*.png"):
        file.write_bytes(b"damaged")
    dataset = load("image_folder", path=str(folder), max_samples=3)
    assert np.bincount(dataset.labels).tolist() == [2, 1]
    with pytest.raises(InputError, match=r"cannot read .*\.png"):
        dataset.inputs[0]


def test_a_class_folder_without_images_is_left_out(tmp_path: Path) -> None:
    folder = _write(tmp_path, {"ant": 1, "bee": 0, "cat": 2})
    with pytest.warns(DataNotice, match="1 of 3 classes have no rows and are left out: bee"):
        dataset = load("image_folder", path=str(folder))
    assert [dataset.class_names[c] for c in dataset.labels] == ["ant", "cat", "cat"]


@pytest.mark.parametrize(
    ("counts", "path", "message"),
    [
        ({}, "nowhere", "path=nowhere does not exist"),
        ({}, ".", "Couldn't find any class folder"),
        ({"cat": 0}, ".", "is empty"),
        ({"cat": 1}, "cat/0.png", "is a file; name the folder"),
    ],
)
def test_folders_that_hold_no_dataset(
    tmp_path: Path, counts: dict[str, int], path: str, message: str
) -> None:
    _write(tmp_path, counts)
    with pytest.raises(InputError, match=message):
        load("image_folder", path=path if path == "nowhere" else str(tmp_path / path))
