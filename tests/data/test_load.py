"""`load`: the bundled sets, weights, requests that are refused, and the YAML of every source."""

from pathlib import Path

import numpy as np
import pytest

from otdd_flash.data import load
from otdd_flash.data.registry import SOURCES, known_options
from otdd_flash.errors import InputError

CONF = Path(__file__).resolve().parents[2] / "conf"
SHARED = {"max_samples": None, "seed": 0, "data_root": None, "download": False}
ROOT = {"defaults": ["_self_", {"source": "digits"}, {"target": "digits"}], **SHARED}


def test_digits_are_disjoint_halves_of_bytes_and_turn_counter_clockwise():
    train, test = load("digits", seed=1), load("digits", split="test", seed=2)
    assert np.intersect1d(train.rows, test.rows).size == 0
    everything = load("digits", split="all")
    np.testing.assert_array_equal(np.union1d(train.rows, test.rows), everything.rows)
    gap = np.bincount(train.labels) - np.bincount(test.labels)
    assert np.abs(gap).max() <= 1
    digits, turned = load("digits"), load("digits", rotate=90)
    assert (digits.inputs.dtype, digits.inputs.shape[1:]) == (np.uint8, (8, 8))
    assert (digits.inputs.min(), digits.inputs.max()) == (0, 255)
    assert digits.modality == "image"
    np.testing.assert_array_equal(turned.inputs, np.rot90(digits.inputs, axes=(1, 2)))
    assert "90" in turned.name


def test_blobs_share_centres_between_splits_but_no_points_and_follow_seed_and_spread():
    settings = {"samples": 400, "dim": 3, "num_classes": 4, "spread": 0.01}
    train, test, both = (
        load("blobs", split=split, **settings) for split in ("train", "test", "all")
    )
    means = [
        np.stack([side.inputs[side.labels == c].mean(0) for c in range(4)])
        for side in (train, test)
    ]
    np.testing.assert_allclose(means[0], means[1], atol=0.01)
    assert not np.isin(train.inputs, test.inputs).any()
    np.testing.assert_array_equal(both.inputs, np.concatenate([train.inputs, test.inputs]))
    first, again, other = (load("blobs", seed=seed).inputs for seed in (4, 4, 5))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_weights_come_from_a_file(tmp_path):
    weights = np.linspace(1, 2, 899)
    np.save(tmp_path / "w.npy", weights)
    drawn = load("digits", weights=tmp_path / "w.npy", max_samples=30)
    positions = np.searchsorted(load("digits").rows, drawn.rows)
    np.testing.assert_array_equal(drawn.weights, weights[positions])


def test_bad_requests_name_the_value_and_the_way_out():
    for name, options, message in (
        ("digit", {}, "unknown dataset 'digit'; choose one of: digits, blobs, mnist"),
        ("digits", {"rotat": 3}, "unknown option of digits 'rotat'; choose one of: .*rotate"),
        ("digits", {"split": "valid"}, "unknown split of digits 'valid'; .* train, test, all"),
        ("digits", {"rotate": "far"}, "rotate of digits must be a number, got 'far'"),
        ("digits", {"max_samples": 0}, "max_samples must be at least 1, got 0"),
        ("digits", {"max_samples": 2.5}, "max_samples must be an integer, got 2.5"),
        ("digits", {"seed": -1}, "seed must be at least 0, got -1"),
        ("digits", {"pseudo_labels": "kmeans"}, "unknown option of digits 'pseudo_labels'"),
        ("digits", {"download": "maybe"}, "download must be true or false"),
        ("digits", {"weights": "w.npy"}, "weights=w.npy does not exist"),
        ("blobs", {"samples": "many"}, "samples of blobs must be an integer"),
        ("blobs", {"samples": 3}, "samples=3 for num_classes=5"),
        ("blobs", {"dim": 0}, "dim of blobs must be at least 1"),
        ("blobs", {"spread": -1.0}, "spread of blobs must be finite and not negative, got -1"),
        ("arrays", {}, "arrays needs path=PATH"),
        ("torchvision", {}, "torchvision needs dataset=CLASS"),
    ):
        with pytest.raises(InputError, match=message):
            load(name, **options)


def _compose(*overrides):
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store("datasets_only", ROOT)
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("datasets_only", overrides=list(overrides))
    return OmegaConf.to_container(config, resolve=True)


@pytest.mark.slow
def test_every_source_has_a_file_whose_keys_are_the_options_of_load():
    for folder in ("dataset", "source", "target"):
        assert {path.stem for path in (CONF / folder).glob("*.yaml")} == set(SOURCES), folder
    for name in SOURCES:
        assert known_options(name)[:3] == ("root", "split", "max_samples")
        nodes = _compose(f"source={name}", f"target={name}")
        for side in ("source", "target"):
            assert nodes[side]["name"] == name
            keys = {"name", "pseudo_labels", "k", *known_options(name)}
            assert set(nodes[side]) == keys, f"{side}={name}"
    # Shared keys reach both sides and can be overridden; mappings and lists can be set.
    torchvision = "source=torchvision", "source.arguments={split: letters}", "source.classes=[a,2]"
    config = _compose(*torchvision, "seed=7", "data_root=d", "source.max_samples=5")
    expected = {"arguments": {"split": "letters"}, "classes": ["a", 2], "max_samples": 5}
    assert config["source"] | {"root": "d", "seed": 7, **expected} == config["source"]
    assert config["target"] | {"root": "d", "seed": 7, "max_samples": None} == config["target"]
