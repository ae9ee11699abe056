"""Features that are written to a file as they come, and interruptions of that."""

import json
import os
import resource
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, feature_store, from_callable, identity, pixels
from otdd_flash.extractors.network import Network
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.files.locks import lock, unlock


class Failing:
    """A network that stops at one of its batches, or gives no number there."""

    def __init__(self, at=None, *, overflows=False):
        self.seen = []
        self.layer = nn.Linear(4, 3)
        self.layer.weight.data = torch.arange(12.0).view(3, 4)

        def forward(module, items):
            if len(self.seen) == at:
                if overflows:
                    return torch.full((len(items), 3), torch.inf)
                raise KeyboardInterrupt
            self.seen.append(len(items))
            return module(torch.stack(items))

        self.extractor = Network(
            "failing", self.layer, frozenset({"array"}), torch.as_tensor, forward
        )


@pytest.fixture
def dataset(make_dataset):
    vectors = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
    return make_dataset(vectors, modality="array")


def test_features_in_a_file_are_those_in_memory(dataset, tmp_path):
    path = tmp_path / "made" / "x.npy"
    seen = []
    network = Failing()
    network.layer.bias.data.zero_()
    samples = embed(
        dataset, network.extractor, batch_size=5, features_path=path, device="cpu",
        progress=lambda *counts: seen.append(counts),
    )  # fmt: skip
    assert isinstance(samples.features, FileFeatures)
    expected = embed(dataset, network.extractor, batch_size=5, device="cpu")
    assert torch.equal(samples.features, expected.features)
    assert samples.fingerprint == expected.fingerprint
    assert np.array_equal(np.load(path), expected.features.numpy())
    assert seen == [(5, 23), (10, 23), (15, 23), (20, 23), (23, 23)]
    assert {file.name for file in path.parent.iterdir()} == {"x.npy", "x.npy.json"}
    calls = len(network.seen)
    again = embed(dataset, network.extractor, batch_size=5, features_path=path, device="cpu")
    assert torch.equal(again.features, samples.features)
    assert len(network.seen) == calls


def test_an_interruption_costs_what_was_not_noted(dataset, tmp_path, monkeypatch):
    """Two batches of 5 rows of 12 bytes are noted at once."""
    monkeypatch.setattr(feature_store, "NOTED_BYTES", 100)
    path, network = tmp_path / "x.npy", Failing(3)
    network.layer.bias.data.zero_()
    call = {"batch_size": 5, "features_path": path, "device": "cpu"}
    with pytest.raises(KeyboardInterrupt):
        embed(dataset, network.extractor, **call)
    assert not path.exists()
    whole = Failing()
    whole.layer.bias.data.zero_()
    found = embed(dataset, whole.extractor, **call)
    assert whole.seen == [5, 5, 3]
    expected = embed(dataset, whole.extractor, batch_size=5, device="cpu")
    assert torch.equal(found.features, expected.features)


def test_what_is_of_something_else_is_not_gone_on_with(
    dataset, make_dataset, tmp_path, monkeypatch
):
    monkeypatch.setattr(feature_store, "NOTED_BYTES", 1)
    path, network = tmp_path / "x.npy", Failing(3)
    network.layer.bias.data.zero_()
    with pytest.raises(KeyboardInterrupt):
        embed(dataset, network.extractor, batch_size=5, features_path=path, device="cpu")
    other, whole = make_dataset(dataset.inputs + 1, modality="array"), Failing()
    whole.layer.bias.data.zero_()
    found = embed(other, whole.extractor, batch_size=5, features_path=path, device="cpu")
    assert whole.seen == [5, 5, 5, 5, 3]
    assert torch.equal(
        found.features, embed(other, whole.extractor, batch_size=5, device="cpu").features
    )
    with pytest.raises(InputError, match="holds features of other data or of another network"):
        embed(dataset, whole.extractor, batch_size=5, features_path=path, device="cpu")


def test_bad_features_and_paths_are_refused(dataset, tmp_path):
    network = Failing(1, overflows=True)
    call = {"batch_size": 5, "device": "cpu"}
    with pytest.raises(InputError, match="features from row 5 on are not finite"):
        embed(dataset, network.extractor, features_path=tmp_path / "x.npy", **call)
    with pytest.raises(InputError, match=r"must end in \.npy"):
        embed(dataset, identity(), features_path=tmp_path / "x.pt", **call)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*choose another features_path"):
        embed(dataset, identity(), features_path=tmp_path / "file" / "x.npy", **call)


def interrupted(dataset, path, monkeypatch):
    """Ten of 23 rows are in a file; the network that goes on with them."""
    monkeypatch.setattr(feature_store, "NOTED_BYTES", 1)
    first, rest = Failing(2), Failing()
    first.layer.bias.data.zero_()
    rest.layer.bias.data.zero_()
    with pytest.raises(KeyboardInterrupt):
        embed(dataset, first.extractor, batch_size=5, features_path=path, device="cpu")
    return rest


def shortened(partial, note):
    os.truncate(partial, partial.stat().st_size - 4)


def flipped(partial, note):
    content = bytearray(partial.read_bytes())
    content[-3] ^= 1
    partial.write_bytes(content)


def of_other_width(partial, note):
    with partial.open("wb") as file:
        np.save(file, np.zeros((23, 7)))


def noted(**changes):
    def change(partial, note):
        note.write_text(json.dumps(json.loads(note.read_text()) | changes))

    return change


DAMAGE = {
    "shortened": shortened,
    "flipped": flipped,
    "empty": lambda partial, _: partial.write_bytes(b""),
    "of other width": of_other_width,
    "too many rows": noted(rows=23),
    "negative rows": noted(rows=-3),
    "rows of another kind": noted(rows="many"),
    "another type": noted(dtype="float64"),
    "a note in pieces": lambda _, note: note.write_text("{"),
    "a note that lacks something": lambda _, note: note.write_text('{"rows": 10}'),
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_rows_that_came_to_harm_are_extracted_again(harm, dataset, tmp_path, monkeypatch):
    """Zeros behind the end of a shortened file were taken for features."""
    path = tmp_path / "x.npy"
    network = interrupted(dataset, path, monkeypatch)
    harm(tmp_path / "x.npy.partial", tmp_path / "x.npy.json")
    call = {"batch_size": 5, "device": "cpu"}
    found = embed(dataset, network.extractor, features_path=path, **call)
    assert network.seen == [5, 5, 5, 5, 3]
    expected = embed(dataset, network.extractor, **call)
    assert torch.equal(found.features[:], expected.features)


def test_what_was_written_after_the_last_note_is_written_again(dataset, tmp_path, monkeypatch):
    path = tmp_path / "x.npy"
    network = interrupted(dataset, path, monkeypatch)
    with (tmp_path / "x.npy.partial").open("ab") as file:
        file.write(b"half a row")
    found = embed(dataset, network.extractor, batch_size=5, features_path=path, device="cpu")
    assert network.seen == [5, 5, 3]
    expected = embed(dataset, network.extractor, batch_size=5, device="cpu")
    assert torch.equal(found.features[:], expected.features)


def test_a_note_of_a_file_that_was_deleted_vouches_for_nothing(dataset, tmp_path, caplog):
    """Less than is noted at once had been written again when the second run was stopped."""
    path, call = tmp_path / "x.npy", {"batch_size": 5, "device": "cpu"}
    networks = [Failing(), Failing(2), Failing()]
    for network in networks:
        network.layer.bias.data.zero_()
    embed(dataset, networks[0].extractor, features_path=path, **call)
    path.unlink()
    with pytest.raises(KeyboardInterrupt):
        embed(dataset, networks[1].extractor, features_path=path, **call)
    found = embed(dataset, networks[2].extractor, features_path=path, **call)
    assert networks[2].seen == [5, 5, 5, 5, 3]
    assert not caplog.records
    expected = embed(dataset, networks[2].extractor, **call)
    assert torch.equal(found.features[:], expected.features)


@pytest.mark.parametrize("harm", ["flipped", "replaced", "of fewer rows"])
def test_a_complete_file_that_came_to_harm_is_refused(harm, dataset, tmp_path):
    path, call = tmp_path / "x.npy", {"features_path": tmp_path / "x.npy"}
    embed(dataset, identity(), **call)
    content = np.load(path)
    if harm == "flipped":
        flipped(path, path)
    else:
        np.save(path, content + 1 if harm == "replaced" else content[:7])
    with pytest.raises(InputError, match=r"x\.npy is not what was written there: it was damaged"):
        embed(dataset, identity(), **call)


@pytest.mark.parametrize("whole", [True, False])
def test_another_function_of_the_same_name_is_refused(whole, dataset, tmp_path, monkeypatch):
    """A function is known by its name, and a changed one found its first one's features."""
    monkeypatch.setattr(feature_store, "NOTED_BYTES", 1)

    def scaled(by, stop=False):
        def function(batch):
            if stop and len(seen) == 2:
                raise KeyboardInterrupt
            seen.append(len(batch))
            return by * np.asarray(batch)

        return from_callable(function)

    call = {"batch_size": 5, "features_path": tmp_path / "x.npy"}
    seen = []
    with nullcontext() if whole else pytest.raises(KeyboardInterrupt):
        embed(dataset, scaled(1.0, stop=not whole), **call)
    with pytest.raises(InputError, match="features of another function of this name, as row 0"):
        embed(dataset, scaled(1.01), **call)
    seen = []
    found = embed(dataset, scaled(1.0), **call)
    assert torch.equal(found.features[:], torch.from_numpy(dataset.inputs))
    assert seen == ([5, 3] if whole else [5, 5, 5, 5, 3])


def test_rows_of_two_shapes_are_refused_in_whichever_batch(make_dataset, tmp_path):
    images = [np.zeros((2, 3), np.uint8)] * 4 + [np.zeros((3, 2), np.uint8)] * 4
    dataset = make_dataset(images, modality="image")
    with pytest.raises(InputError, match="images differ in shape"):
        embed(dataset, pixels(), batch_size=4, features_path=tmp_path / "x.npy")


def test_a_full_disk_is_said_and_what_is_there_is_gone_on_with(dataset, tmp_path, monkeypatch):
    """Written through mapped memory, it would have ended the process."""
    path = tmp_path / "x.npy"
    network = interrupted(dataset, path, monkeypatch)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 12 * 12, hard))
    try:
        with pytest.raises(InputError, match=r"cannot write .*x\.npy: File too large; free space"):
            embed(dataset, network.extractor, batch_size=5, features_path=path, device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = Failing()
    again.layer.bias.data.zero_()
    found = embed(dataset, again.extractor, batch_size=5, features_path=path, device="cpu")
    assert again.seen == [5, 5, 3]
    expected = embed(dataset, again.extractor, batch_size=5, device="cpu")
    assert torch.equal(found.features[:], expected.features)


def test_two_processes_do_not_write_one_file(dataset, tmp_path):
    path, place = tmp_path / "x.npy", tmp_path / "x.npy.lock"
    descriptor = lock(place)
    assert descriptor is not None
    with pytest.raises(InputError, match=r"another process writes .*x\.npy; wait, or choose"):
        embed(dataset, identity(), features_path=path)
    unlock(place, descriptor)
    embed(dataset, identity(), features_path=path)
    assert {file.name for file in tmp_path.iterdir()} == {"x.npy", "x.npy.json"}
