"""Tiny datasets for the tests of extractors."""

import numpy as np
import pytest

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.samples import LabeledSamples


@pytest.fixture
def make_dataset():
    def make(inputs, modality="image", **fields):
        labels = np.arange(len(inputs), dtype=np.int64) % 2
        known = {"class_names": ("even", "odd"), "weights": None, "name": "tiny", "labels": labels}
        return LabeledDataset(inputs=inputs, modality=modality, **{**known, **fields})

    return make


@pytest.fixture
def colour_images():
    return np.random.default_rng(0).integers(0, 256, (5, 20, 24, 3), dtype=np.uint8)


@pytest.fixture
def make_samples():
    def make(features, name="samples"):
        labels = np.zeros(len(features), dtype=np.int64)
        return LabeledSamples(features, labels, ("only",), name=name)

    return make
