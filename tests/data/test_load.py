import numpy as np
import pytest

from otdd_flash.data import load
from otdd_flash.data.registry import SOURCES, known_options
from otdd_flash.errors import InputError


def test_digit_halves_are_disjoint_and_complete_for_any_seeds():
    train, test = load("digits", seed=1), load("digits", split="test", seed=2)
    assert np.intersect1d(train.rows, test.rows).size == 0
    everything = load("digits", split="all")
    np.testing.assert_array_equal(np.union1d(train.rows, test.rows), everything.rows)
    gap = np.bincount(train.labels) - np.bincount(test.labels)
    assert np.abs(gap).max() <= 1


def test_digits_fill_the_range_of_bytes():
    digits = load("digits")
    assert digits.inputs.dtype == np.uint8
    assert digits.inputs.shape[1:] == (8, 8)
    assert (digits.inputs.min(), digits.inputs.max()) == (0, 255)
    assert digits.modality == "image"


def test_a_quarter_turn_rotates_counter_clockwise():
    upright, turned = load("digits"), load("digits", rotate=90)
    np.testing.assert_array_equal(turned.inputs, np.rot90(upright.inputs, axes=(1, 2)))
    assert "90" in turned.name


def test_blobs_share_centres_between_splits_but_no_points():
    train, test = (
        load("blobs", split=split, samples=400, dim=3, num_classes=4, spread=0.01)
        for split in ("train", "test")
    )
    means = [
        np.stack([side.inputs[side.labels == c].mean(0) for c in range(4)])
        for side in (train, test)
    ]
    np.testing.assert_allclose(means[0], means[1], atol=0.01)
    assert not np.isin(train.inputs, test.inputs).any()
    both = load("blobs", split="all", samples=400, dim=3, num_classes=4, spread=0.01)
    np.testing.assert_array_equal(both.inputs, np.concatenate([train.inputs, test.inputs]))
    assert both.rows.tolist() == [*train.rows, *test.rows] == list(range(800))


def test_blobs_follow_their_seed_and_spread():
    first, again = load("blobs", seed=4), load("blobs", seed=4)
    np.testing.assert_array_equal(first.inputs, again.inputs)
    assert not np.array_equal(first.inputs, load("blobs", seed=5).inputs)
    wide = load("blobs", seed=4, spread=3.0)
    assert wide.inputs.std() > 2 * first.inputs.std()


def test_weights_come_from_a_file(tmp_path):
    weights = np.linspace(1, 2, 899)
    np.save(tmp_path / "w.npy", weights)
    drawn = load("digits", weights=tmp_path / "w.npy", max_samples=30)
    full = load("digits")
    positions = np.searchsorted(full.rows, drawn.rows)
    np.testing.assert_array_equal(drawn.weights, weights[positions])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, "unknown dataset 'digit'; choose one of: digits, blobs, mnist"),
        ("digits", {"rotat": 3}, "unknown option of digits 'rotat'; choose one of: .*rotate"),
        ("digits", {"split": "valid"}, "unknown split of digits 'valid'; .* train, test, all"),
        ("digits", {"rotate": "far"}, "rotate of digits must be a number, got 'far'"),
        ("digits", {"max_samples": 9}, "max_samples=9 is below the 10 classes"),
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
    ],
)
def test_bad_requests_name_the_value_and_the_way_out(name, options, message):
    with pytest.raises(InputError, match=message):
        load(name, **options)


@pytest.mark.parametrize("name", SOURCES)
def test_known_options_hold_the_shared_ones_first(name):
    assert known_options(name)[:3] == ("root", "split", "max_samples")
    assert "request" not in known_options(name)
