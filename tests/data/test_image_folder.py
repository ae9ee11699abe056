"""Folders of images: one folder a class, splits, links, and what is left out."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from otdd_flash.data import load
from otdd_flash.errors import DataNotice, InputError


def _write(folder, counts):
    """Grey images whose level is the image's number within its class."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for level in range(count):
            Image.new("L", (3 + level, 4), level).save(folder / name / f"{level}.png")
    return folder


def _load(folder, **options):
    return load("image_folder", path=str(folder), **options)


def test_one_folder_per_class_whose_draw_reads_no_image(tmp_path):
    dataset = _load(_write(tmp_path / "pets", {"cat": 3, "dog": 2}))
    assert dataset.class_names == ("cat", "dog")
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1]
    assert (dataset.modality, dataset.name) == ("image", "pets")
    assert [image.getpixel((0, 0)) for image in dataset.inputs] == [0, 1, 2, 0, 1]
    assert [Path(path).name for path in dataset.inputs.paths][:2] == ["0.png", "1.png"]
    for file in tmp_path.glob("pets/*/*.png"):
        file.write_bytes(b"damaged")
    dataset = _load(tmp_path / "pets", max_samples=3)
    assert np.bincount(dataset.labels).tolist() == [2, 1]
    with pytest.raises(InputError, match=r"cannot read .*\.png"):
        dataset.inputs[0]


def test_a_split_is_a_subfolder_and_all_is_every_split_together(tmp_path):
    _write(tmp_path / "train", {"cat": 3, "dog": 2})
    _write(tmp_path / "test", {"ant": 1, "cat": 1})
    assert len(_load(tmp_path)) == 5
    assert len(_load(tmp_path, split="test")) == 2
    with pytest.raises(InputError, match=r"unknown split 'val'.*has the folders test, train"):
        _load(tmp_path, split="val")
    whole = _load(tmp_path, split="all")
    assert whole.class_names == ("ant", "cat", "dog")
    assert np.bincount(whole.labels).tolist() == [1, 4, 2]
    assert whole.name == f"{tmp_path.name} all"
    assert [image.getpixel((0, 0)) for image in whole.inputs] == [0, 0, 0, 1, 2, 0, 1]
    # Classes may be called like splits, but the train split is not the splits as classes.
    _write(tmp_path / "classes", {"train": 2, "test": 1})
    assert _load(tmp_path / "classes", split="all").class_names == ("test", "train")
    _write(tmp_path / "splits" / "val", {"cat": 1})
    with pytest.raises(InputError, match=r"unknown split 'train'.*has the folders val"):
        _load(tmp_path / "splits")


def test_folders_that_hold_no_dataset(tmp_path):
    for name in ("none", "empty", "one"):
        (tmp_path / name).mkdir()
    _write(tmp_path / "empty", {"cat": 0})
    _write(tmp_path / "one", {"cat": 1})
    for path, message in (
        ("nowhere", "path=nowhere does not exist"),
        (tmp_path / "none", "has no class folder"),
        (tmp_path / "empty", "is empty"),
        (tmp_path / "one" / "cat" / "0.png", "is a file; name the folder"),
    ):
        with pytest.raises(InputError, match=message):
            _load(path)


def _linked(root, link, to):
    place = root / link
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(root / to)


OWL = {"owl": 4}
LINKS = {
    "up": ({"cat/up": "pets"}, {}, "1 links lead to"),
    "class": ({"cat/d": "pets/dog"}, {}, "1 links lead"),
    "each other": ({"a/b": "pets/a/c", "a/c": "pets/a/b"}, {}, "are no images by their names"),
    "class outside": ({"owl": "store/owl"}, OWL, "1 links lead out"),
    "one file outside twice": (
        {"owl/0.png": "store/owl/0.png", "owl/1.png": "store/owl/0.png"},
        {"owl": 1},
        "such as owl/1.png",
    ),
    "outside and back": ({"owl/a": "store", "../store/back": "pets"}, OWL, "such as owl/a/back"),
    "hidden": ({"cat/.hidden": "store/owl"}, {}, None),
}


@pytest.mark.parametrize("case", LINKS)
def test_a_file_counts_once_in_its_class(tmp_path, case):
    """A link to its own parent made 492 images of 12."""
    links, counts, notice = LINKS[case]
    _write(tmp_path / "pets", {"cat": 6, "dog": 6})
    _write(tmp_path / "store", OWL)
    for link, to in links.items():
        _linked(tmp_path, f"pets/{link}", to)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dataset = _load(tmp_path / "pets")
    found = np.bincount(dataset.labels, minlength=len(dataset.class_names)).tolist()
    assert dict(zip(dataset.class_names, found, strict=True)) == {"cat": 6, "dog": 6, **counts}
    texts = [str(each.message) for each in said]
    assert any(notice in text for text in texts) if notice else not texts, texts


def test_what_is_left_out_is_said(tmp_path):
    folder = _write(tmp_path, {"cat": 2, "bee": 0})
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / "cat" / "._0.png").write_bytes(b"resource fork")
    with pytest.warns(DataNotice, match="1 of 2 classes have no rows and are left out: bee"):
        _load(folder)
    (folder / "cat" / "notes.txt").write_text("two cats")
    # A pipe is not waited for.
    os.mkfifo(folder / "cat" / "9.png")
    with pytest.warns(DataNotice, match=r"2 files are no images by .* such as cat/9.png"):
        dataset = _load(folder)
    assert (len(dataset), dataset.class_names) == (2, ("cat",))
    # A link to nowhere is named when it is read.
    _linked(tmp_path, "cat/99.png", "gone.png")
    with pytest.raises(InputError, match=r"cannot read .*cat/99\.png: .*No such file"):
        _load(folder).inputs[2]
