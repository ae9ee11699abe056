"""Labelled Gaussian blobs for the tests of class distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from otdd_flash.samples import LabeledSamples


@pytest.fixture
def blobs():
    """A maker of samples with the given class sizes; each class has its own mean and covariance."""

    def make(sizes, dim, seed=0, *, weights=None, dtype=np.float64, name="blobs"):
        rng = np.random.default_rng(seed)
        classes = [
            rng.normal(size=(size, dim)) @ rng.normal(size=(dim, dim)) / dim**0.5
            + rng.normal(size=dim)
            for size in sizes
        ]
        labels = np.repeat(np.arange(len(sizes)), sizes)
        order = rng.permutation(len(labels))
        features = np.concatenate(classes)[order].astype(dtype)
        return LabeledSamples.from_arrays(
            torch.from_numpy(features), labels[order], weights, name=name
        )

    return make
