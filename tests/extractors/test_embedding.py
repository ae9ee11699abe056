"""Embedding: batches, bookkeeping, the cache by content, and its errors."""

from __future__ import annotations

import logging
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import naming
from torch import nn

from otdd_flash.data import load
from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, from_callable, identity, pixels
from otdd_flash.extractors.embedding import inputs_hash
from otdd_flash.extractors.network import Network
from otdd_flash.files.tensor_file import read_tensors, save_tensors

IMAGES = np.random.default_rng(1).integers(0, 256, (7, 4, 4), dtype=np.uint8)


class CountedNetwork:
    """A small network that counts its forward passes."""

    def __init__(self, seed=0, description="counted"):
        self.calls = 0
        generator = torch.Generator().manual_seed(seed)
        layer = nn.Linear(16, 3)
        layer.weight.data = torch.randn(3, 16, generator=generator)
        layer.bias.data.zero_()

        def forward(module, items):
            self.calls += 1
            where = next(module.parameters()).device
            return module(torch.stack(items).flatten(1).to(where))

        self.extractor = Network(
            description, layer, frozenset({"image"}), lambda item: as_tensor(item), forward
        )

    def __call__(self, dataset, **options):
        return embed(dataset, self.extractor, **options)


def as_tensor(item):
    return torch.from_numpy(np.array(item)).float() / 255


def test_batches_do_not_change_features(make_dataset):
    dataset, network = make_dataset(IMAGES), CountedNetwork()
    whole, before = network.extractor(IMAGES), torch.get_rng_state()
    for batch_size in (1, 3, 7, 100):
        done = []
        told = {"progress": lambda *counts, done=done: done.append(counts)}
        features = network(dataset, batch_size=batch_size, **told).features
        assert torch.allclose(features, whole, atol=1e-6)
        assert not features.requires_grad
        assert done == [(min(s + batch_size, 7), 7) for s in range(0, 7, batch_size)]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_workers_do_not_change_features_and_their_errors_arrive_unwrapped(make_dataset):
    dataset, network = make_dataset(IMAGES), CountedNetwork()
    alone, shared = (network(dataset, batch_size=2, num_workers=count) for count in (0, 2))
    assert shared.fingerprint == alone.fingerprint

    def refuse(item):
        raise InputError("image 3 is damaged")

    own = network.extractor
    broken = Network("broken", own.module, own.modalities, refuse, own.forward)
    for num_workers in (0, 1):
        with pytest.raises(InputError, match=r"^image 3 is damaged$"):
            embed(dataset, broken, num_workers=num_workers)


def test_features_come_from_the_cache_unless_the_content_changed(make_dataset, tmp_path):
    first, again, done = CountedNetwork(), CountedNetwork(), []
    fresh = first(make_dataset(IMAGES), cache_dir=tmp_path)
    # Other labels and another name: features depend on the inputs alone.
    relabelled = make_dataset(IMAGES, name="other", labels=np.ones(7, dtype=np.int64))
    cached = again(relabelled, cache_dir=tmp_path, progress=lambda *counts: done.append(counts))
    assert (first.calls, again.calls, done) == (1, 0, [(7, 7)])
    assert torch.equal(cached.features, fresh.features)
    assert cached.name == "other"
    for case, changed, network in (
        ("order", IMAGES[::-1].copy(), CountedNetwork()),
        ("subset", IMAGES[:6], CountedNetwork()),
        ("shape", IMAGES.reshape(7, 2, 8), CountedNetwork()),
        ("weights", IMAGES, CountedNetwork(seed=1)),
        ("description", IMAGES, CountedNetwork(description="of another version")),
    ):
        network(make_dataset(changed), cache_dir=tmp_path)
        assert network.calls == 1, case
    before = {*tmp_path.iterdir()}
    for extractor in (pixels(), from_callable(pixels())):
        embed(make_dataset(IMAGES), extractor, cache_dir=tmp_path)
    embed(make_dataset(IMAGES.reshape(7, -1), "array"), identity(), cache_dir=tmp_path)
    # Cheap features are not cached.
    assert {*tmp_path.iterdir()} == before


def test_mixed_precision_has_its_own_entry_and_its_overflow_a_way_out(make_dataset, tmp_path):
    network, dataset = CountedNetwork(), make_dataset(IMAGES)
    full = network(dataset, cache_dir=tmp_path)
    mixed = network(dataset, cache_dir=tmp_path, mixed_precision=True)
    assert network.calls == 2
    assert mixed.features.dtype == torch.float32
    error = (mixed.features - full.features).abs().max()
    assert 0 < error < 0.05 * full.features.abs().max()
    own = network.extractor
    network.extractor = Network(
        "broken", own.module, own.modalities, own.prepare, lambda *a: own.forward(*a) * torch.inf
    )
    for message, precision in (("mixed_precision=false", True), ("NaN or infinite", False)):
        with pytest.raises(InputError, match=message):
            network(dataset, mixed_precision=precision)


def test_an_entry_that_cannot_be_these_features_is_rebuilt(make_dataset, tmp_path, caplog):
    """Whoever can write a cache can also compute checksums."""
    dataset = make_dataset(IMAGES)
    fresh = CountedNetwork()(dataset, cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    texts, nan = read_tensors(path).texts, torch.full((7, 3), torch.nan)
    for features in (torch.zeros(2, 3), torch.zeros(7), nan, torch.zeros(7, 3).int()):
        path.unlink()
        save_tensors(path, {"features": features}, texts)
        network = CountedNetwork()
        with caplog.at_level(logging.WARNING):
            rebuilt = network(dataset, cache_dir=tmp_path)
        assert network.calls == 1
        assert rebuilt.fingerprint == fresh.fingerprint
        assert "something else than features" in caplog.text
        caplog.clear()


def test_files_are_known_by_what_the_file_system_says_of_them(tmp_path):
    """Uncompressed images are of one size, and copying tools set dates: old features were found."""
    folder, other = tmp_path / "photos", tmp_path / "a.bmp"
    (folder / "cat").mkdir(parents=True)
    place = folder / "cat" / "1.bmp"
    for path, level in ((place, 0), (other, 200)):
        Image.fromarray(np.full((4, 4), level, np.uint8)).save(path)
    date = place.stat()
    os.utime(other, ns=(date.st_atime_ns, date.st_mtime_ns))
    hashes = []
    for change in (
        lambda: None,
        lambda: None,
        lambda: shutil.copy2(other, place),
        lambda: place.write_bytes(place.read_bytes() + b"x"),
        lambda: place.rename(folder / "cat" / "2.bmp"),
    ):
        change()
        hashes.append(inputs_hash(load("image_folder", path=str(folder))))
    assert hashes[0] == hashes[1]
    assert len({*hashes}) == 4


def test_bad_arguments_are_refused(make_dataset):
    for arguments, message in (
        ({"batch_size": 0}, "batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"mixed_precision": "sometimes"}, "mixed_precision must be auto, true or false"),
        ({"device": "warp:9"}, "unknown device"),
        ({"extractor": lambda batch: batch}, "from_callable"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            embed(make_dataset(IMAGES), **{"extractor": CountedNetwork().extractor} | arguments)


@pytest.mark.gpu
def test_gpu_matches_cpu(make_dataset):
    network = CountedNetwork()
    on_cpu, on_gpu = (
        network(make_dataset(IMAGES), device=device).features for device in ("cpu", "cuda")
    )
    assert on_gpu.device.type == "cpu"
    assert next(network.extractor.module.parameters()).device.type == "cpu"
    assert 0 < (on_gpu - on_cpu).abs().max() < 0.01 * on_cpu.abs().max()
