"""Datasets whose rows can be told apart."""

import numpy as np
import torch

from otdd_flash.samples import LabeledSamples


def numbered(*sizes):
    """Classes of these sizes, mixed; the only feature is the row's number."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = torch.arange(len(labels), dtype=torch.float32).unsqueeze(1)
    return LabeledSamples(rows, torch.from_numpy(labels), tuple("abcdefgh"[: len(sizes)]))


def numbers(samples):
    """The rows of a `numbered` dataset that `samples` holds."""
    return samples.features.squeeze(1).int().tolist()


def mixture(size, generator, shift=0.0):
    """Two Gaussian classes in two dimensions, the first with probability 0.7."""
    labels = (generator.random(size) > 0.7).astype(np.int64)
    points = generator.normal(size=(size, 2)) + 2 * labels[:, None] + shift
    return LabeledSamples(
        torch.from_numpy(points).float(), torch.from_numpy(labels), ("often", "seldom")
    )
