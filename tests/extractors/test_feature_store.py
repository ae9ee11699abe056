"""Features that are written to a file as they come, and interruptions of that."""

import json
import os
import resource

import numpy as np
import pytest
import torch
from torch import nn

from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, feature_store, from_callable, identity, pixels
from otdd_flash.extractors.network import Network
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.files.atomic import lock, unlock


class Failing:
    """A network that stops at one of its batches, or gives no number there."""

    def __init__(self, at=None, *, overflows=False):
        self.seen = []
        layer = nn.Linear(4, 3)
        layer.weight.data = torch.arange(12.0).view(3, 4)
        layer.bias.data.zero_()

        def forward(module, items):
            if len(self.seen) == at:
                if overflows:
                    return torch.full((len(items), 3), torch.inf)
                raise KeyboardInterrupt
            self.seen.append(len(items))
            return module(torch.stack(items))

        self.extractor = Network("failing", layer, frozenset({"array"}), torch.as_tensor, forward)

    def __call__(self, dataset, path=None, **more):
        call = {"batch_size": 5, "features_path": path, "device": "cpu", **more}
        return embed(dataset, self.extractor, **call)


@pytest.fixture
def dataset(make_dataset):
    vectors = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
    return make_dataset(vectors, modality="array")


@pytest.fixture
def expected(dataset):
    return Failing()(dataset)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.npy"


@pytest.fixture
def interrupted(dataset, path, monkeypatch):
    """Ten of 23 rows are in a file; the network that goes on with them."""
    monkeypatch.setattr(feature_store, "NOTED_BYTES", 1)
    with pytest.raises(KeyboardInterrupt):
        Failing(2)(dataset, path)
    return Failing()


def test_features_in_a_file_are_those_in_memory(dataset, expected, tmp_path):
    path, seen, network = tmp_path / "made" / "x.npy", [], Failing()
    samples = network(dataset, path, progress=lambda *counts: seen.append(counts))
    assert isinstance(samples.features, FileFeatures)
    assert torch.equal(samples.features, expected.features)
    assert samples.fingerprint == expected.fingerprint
    assert np.array_equal(np.load(path), expected.features.numpy())
    assert seen == [(5, 23), (10, 23), (15, 23), (20, 23), (23, 23)]
    assert {file.name for file in path.parent.iterdir()} == {"x.npy", "x.npy.json"}
    calls = len(network.seen)
    assert torch.equal(network(dataset, path).features, samples.features)
    assert len(network.seen) == calls


@pytest.mark.parametrize(("noted", "batch_size", "left"), [(100, 5, 13), (12, 1, 22)])
def test_an_interruption_costs_what_was_not_noted(
    noted, batch_size, left, dataset, path, monkeypatch
):
    """Two batches of 5 rows of 12 bytes are noted at once, or the first row."""
    monkeypatch.setattr(feature_store, "NOTED_BYTES", noted)
    with pytest.raises(KeyboardInterrupt):
        Failing(3 if left == 13 else 1)(dataset, path, batch_size=batch_size)
    (whole := Failing())(dataset, path, batch_size=batch_size)
    assert sum(whole.seen) == left


def test_what_is_of_something_else_is_not_gone_on_with(dataset, make_dataset, path, interrupted):
    other = make_dataset(dataset.inputs + 1, modality="array")
    found = interrupted(other, path)
    assert interrupted.seen == [5, 5, 5, 5, 3]
    assert torch.equal(found.features, Failing()(other).features)
    with pytest.raises(InputError, match="holds features of other data or of another network"):
        Failing()(dataset, path)


def test_bad_features_and_paths_are_refused(dataset, make_dataset, tmp_path):
    (tmp_path / "file").write_text("")
    shapes = [np.zeros((2, 3), np.uint8)] * 4 + [np.zeros((3, 2), np.uint8)] * 4
    images = make_dataset(shapes, modality="image")
    overflowing = Failing(1, overflows=True).extractor
    for given, extractor, name, message in (
        (dataset, overflowing, "x.npy", "features from row 5 on are not finite"),
        (dataset, identity(), "x.pt", r"must end in \.npy"),
        (dataset, identity(), "file/x.npy", r"cannot write .*choose another features_path"),
        # In whichever batch.
        (images, pixels(), "y.npy", "images differ in shape"),
    ):
        with pytest.raises(InputError, match=message):
            embed(
                given, extractor, batch_size=4 + (given is dataset), features_path=tmp_path / name
            )


def test_a_link_in_place_of_the_rows_is_refused_untouched(dataset, path, tmp_path, interrupted):
    """Rows after the last record would be cut off in the file that it leads to."""
    partial, note = path.with_name("x.npy.partial"), path.with_name("x.npy.json")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(partial.read_bytes() + b"more")
    partial.unlink()
    partial.symlink_to(elsewhere)
    for _ in ("the rows", "other rows"):
        before = elsewhere.read_bytes(), note.read_bytes()
        with pytest.raises(InputError, match="is a link, and would be written elsewhere"):
            interrupted(dataset, path)
        assert before == (elsewhere.read_bytes(), note.read_bytes())
        elsewhere.write_bytes(b"other rows")


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def note_says(**changes):
    return lambda _, note: note.write_text(json.dumps(json.loads(note.read_text()) | changes))


# What was written after the last note is written again, and what a note does not vouch for, too.
DAMAGE = {
    "none": (lambda *_: None, 10),
    "half a row more": (lambda file, _: file.write_bytes(file.read_bytes() + b"half a row"), 10),
    # Zeros behind the end of a shortened file were taken for features.
    "shortened": (lambda file, _: os.truncate(file, file.stat().st_size - 4), 0),
    "flipped": (lambda file, _: flipped(file), 0),
    "of other width": (lambda file, _: np.save(file.open("wb"), np.zeros((23, 7))), 0),
    "too many rows": (note_says(rows=23), 0),
    "negative rows": (note_says(rows=-3), 0),
    "rows of another kind": (note_says(rows="many"), 0),
    "another type": (note_says(dtype="float64"), 0),
    "a note in pieces": (lambda _, note: note.write_text("{"), 0),
    "a note that lacks something": (lambda _, note: note.write_text('{"rows": 10}'), 0),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_rows_that_came_to_harm_are_extracted_again(harm, dataset, expected, path, interrupted):
    spoil, left = DAMAGE[harm]
    spoil(path.with_name("x.npy.partial"), path.with_name("x.npy.json"))
    assert not path.exists()
    found = interrupted(dataset, path)
    assert sum(interrupted.seen) == 23 - left
    assert torch.equal(found.features[:], expected.features)


def test_a_complete_file_that_came_to_harm_is_refused(dataset, path):
    embed(dataset, identity(), features_path=path)
    content = np.load(path)
    for harm in (
        flipped,
        lambda path: np.save(path, content + 1),
        # Of fewer rows.
        lambda path: np.save(path, content[:7]),
    ):
        np.save(path, content)
        harm(path)
        with pytest.raises(InputError, match=r"x\.npy is not what was written there: it was damag"):
            embed(dataset, identity(), features_path=path)


def test_another_function_of_the_same_name_is_refused(dataset, path):
    """A function is known by its name, and a changed one found its first one's features."""
    call, seen = {"batch_size": 5, "features_path": path}, []

    def scaled(by):
        return from_callable(lambda batch: seen.append(len(batch)) or by * np.asarray(batch))

    embed(dataset, scaled(1.0), **call)
    with pytest.raises(InputError, match="features of another function of this name, as row 0"):
        embed(dataset, scaled(1.01), **call)
    seen.clear()
    found = embed(dataset, scaled(1.0), **call)
    assert torch.equal(found.features[:], torch.from_numpy(dataset.inputs))
    assert seen == [5, 3]


def test_a_full_disk_is_said_and_what_is_there_is_gone_on_with(
    dataset, expected, path, interrupted
):
    """Written through mapped memory, it would have ended the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 12 * 12, hard))
    try:
        with pytest.raises(InputError, match=r"cannot write .*x\.npy: File too large; free space"):
            interrupted(dataset, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = Failing()
    assert torch.equal(again(dataset, path).features[:], expected.features)
    assert again.seen == [5, 5, 3]


def test_two_processes_do_not_write_one_file(dataset, path):
    place = path.with_name("x.npy.lock")
    descriptor = lock(place)
    assert descriptor is not None
    with pytest.raises(InputError, match=r"another process writes .*x\.npy; wait, or choose"):
        embed(dataset, identity(), features_path=path)
    unlock(place, descriptor)
    embed(dataset, identity(), features_path=path)
    assert {file.name for file in path.parent.iterdir()} == {"x.npy", "x.npy.json"}
