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


def test_one_folder_per_class(tmp_path):
    dataset = load("image_folder", path=str(_write(tmp_path / "pets", {"cat": 3, "dog": 2})))
    assert dataset.class_names == ("cat", "dog")
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1]
    assert (dataset.modality, dataset.name) == ("image", "pets")
    assert [image.getpixel((0, 0)) for image in dataset.inputs] == [0, 1, 2, 0, 1]
    assert [Path(path).name for path in dataset.inputs.paths][:2] == ["0.png", "1.png"]


def test_a_split_is_a_subfolder(tmp_path):
    _write(tmp_path / "train", {"cat": 3, "dog": 2})
    _write(tmp_path / "val", {"cat": 1, "dog": 1})
    assert len(load("image_folder", path=str(tmp_path))) == 5
    assert len(load("image_folder", path=str(tmp_path), split="val")) == 2
    with pytest.raises(InputError, match=r"unknown split 'test'.*has the folders train, val"):
        load("image_folder", path=str(tmp_path), split="test")


def test_all_is_every_split_together(tmp_path):
    _write(tmp_path / "train", {"cat": 3, "dog": 2})
    _write(tmp_path / "test", {"ant": 1, "cat": 1})
    whole = load("image_folder", path=str(tmp_path), split="all")
    assert whole.class_names == ("ant", "cat", "dog")
    assert np.bincount(whole.labels).tolist() == [1, 4, 2]
    assert whole.name == f"{tmp_path.name} all"
    assert len(load("image_folder", path=str(tmp_path))) == 5


def test_classes_may_be_called_like_splits(tmp_path):
    _write(tmp_path, {"train": 2, "test": 1})
    assert load("image_folder", path=str(tmp_path), split="all").class_names == ("test", "train")


def test_train_is_not_the_splits_as_classes(tmp_path):
    _write(tmp_path / "val", {"cat": 1})
    with pytest.raises(InputError, match=r"unknown split 'train'.*has the folders val"):
        load("image_folder", path=str(tmp_path))


def test_the_draw_reads_no_image(tmp_path):
    folder = _write(tmp_path, {"cat": 6, "dog": 3})
    for file in folder.glob("*/*.png"):
        file.write_bytes(b"damaged")
    dataset = load("image_folder", path=str(folder), max_samples=3)
    assert np.bincount(dataset.labels).tolist() == [2, 1]
    with pytest.raises(InputError, match=r"cannot read .*\.png"):
        dataset.inputs[0]


def test_a_class_folder_without_images_is_left_out(tmp_path):
    folder = _write(tmp_path, {"ant": 1, "bee": 0, "cat": 2})
    with pytest.warns(DataNotice, match="1 of 3 classes have no rows and are left out: bee"):
        dataset = load("image_folder", path=str(folder))
    assert [dataset.class_names[c] for c in dataset.labels] == ["ant", "cat", "cat"]


@pytest.mark.parametrize(
    ("counts", "path", "message"),
    [
        ({}, "nowhere", "path=nowhere does not exist"),
        ({}, ".", "has no class folder"),
        ({"cat": 0}, ".", "is empty"),
        ({"cat": 1}, "cat/0.png", "is a file; name the folder"),
    ],
)
def test_folders_that_hold_no_dataset(tmp_path, counts, path, message):
    _write(tmp_path, counts)
    with pytest.raises(InputError, match=message):
        load("image_folder", path=path if path == "nowhere" else str(tmp_path / path))


def _linked(root, link, to):
    place = root / link
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(root / to)


@pytest.mark.parametrize(
    ("links", "counts", "notice"),
    [
        pytest.param({"pets/cat/up": "pets"}, {"cat": 6, "dog": 6}, "1 links lead to", id="up"),
        pytest.param({"pets/cat/up": "."}, {"cat": 6, "dog": 6}, "or around it", id="above"),
        pytest.param({"pets/cat/me": "pets/cat"}, {"cat": 6, "dog": 6}, "such as cat/me", id="me"),
        pytest.param({"pets/cat/d": "pets/dog"}, {"cat": 6, "dog": 6}, "1 links lead", id="class"),
        pytest.param(
            {"pets/cat/7.png": "pets/cat/0.png"}, {"cat": 6, "dog": 6}, "counted where", id="file"
        ),
        pytest.param(
            {"pets/a/b": "pets/a/c", "pets/a/c": "pets/a/b"},
            {"cat": 6, "dog": 6, "a": 0},
            "files are no images by their names",
            id="each other",
        ),
        pytest.param({"pets/owl": "store/owl"}, {"cat": 6, "dog": 6, "owl": 4}, "1 links lead out",
                     id="class outside"),
        pytest.param(
            {"pets/owl/0.png": "store/owl/0.png", "pets/owl/1.png": "store/owl/0.png"},
            {"cat": 6, "dog": 6, "owl": 1},
            "such as owl/1.png",
            id="one file outside twice",
        ),
        pytest.param(
            {"pets/owl/a": "store", "pets/owl/b": "store/owl"},
            {"cat": 6, "dog": 6, "owl": 4},
            "1 links lead out of the folder and are followed, such as owl/a",
            id="folder outside twice",
        ),
        pytest.param({"pets/owl/a": "store", "store/back": "pets"}, {"cat": 6, "dog": 6, "owl": 4},
                     "such as owl/a/back", id="outside and back"),
        pytest.param(
            {"pets/cat/.hidden": "store/owl"}, {"cat": 6, "dog": 6}, None, id="hidden"
        ),
    ],
)  # fmt: skip
def test_a_file_counts_once_in_its_class(tmp_path, links, counts, notice):
    """A link to its own parent made 492 images of 12."""
    _write(tmp_path / "pets", {"cat": 6, "dog": 6})
    _write(tmp_path / "store", {"owl": 4})
    for link, to in links.items():
        _linked(tmp_path, link, to)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dataset = load("image_folder", path=str(tmp_path / "pets"))
    found = np.bincount(dataset.labels, minlength=len(dataset.class_names)).tolist()
    expected = {name: count for name, count in counts.items() if count}
    assert dict(zip(dataset.class_names, found, strict=True)) == expected
    texts = [str(each.message) for each in said]
    assert any(notice in text for text in texts) if notice else not texts, texts


def test_a_split_that_is_linked_is_read(tmp_path):
    """As a store of files with links from folders of their own, whose links are files."""
    _write(tmp_path / "store", {"cat": 2})
    for i in range(2):
        _linked(tmp_path, f"pets/train/cat/{i}.png", f"store/cat/{i}.png")
    (tmp_path / "linked").symlink_to(tmp_path / "pets" / "train")
    with pytest.warns(DataNotice, match="2 links lead out of the folder and are followed"):
        assert len(load("image_folder", path=str(tmp_path / "linked"))) == 2


def test_what_is_left_out_is_said(tmp_path):
    folder = _write(tmp_path, {"cat": 2})
    (folder / "cat" / "notes.txt").write_text("two cats")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / "cat" / "._0.png").write_bytes(b"resource fork")
    with pytest.warns(DataNotice, match=r"1 files are no images by .* such as cat/notes.txt"):
        dataset = load("image_folder", path=str(folder))
    assert (len(dataset), dataset.class_names) == (2, ("cat",))


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = _write(tmp_path, {"cat": 2})
    os.mkfifo(folder / "cat" / "9.png")
    with pytest.warns(DataNotice, match="such as cat/9.png"):
        assert len(load("image_folder", path=str(folder))) == 2


def test_a_link_to_nowhere_is_named_when_it_is_read(tmp_path):
    folder = _write(tmp_path, {"cat": 2})
    _linked(tmp_path, "cat/9.png", "gone.png")
    dataset = load("image_folder", path=str(folder))
    with pytest.raises(InputError, match=r"cannot read .*cat/9\.png: .*No such file"):
        dataset.inputs[2]
