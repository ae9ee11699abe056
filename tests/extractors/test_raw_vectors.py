"""The identity extractor: arrays unchanged, anything else refused with the ways out."""

import numpy as np
import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, identity


def test_values_are_kept(make_dataset):
    kinds = {np.float64: torch.float64}
    for given in (np.float32, np.float64, np.float16, np.int64, np.uint16, np.bool_):
        values = np.arange(21).reshape(7, 3).astype(given)
        for inputs in (values, list(values)):
            features = embed(make_dataset(inputs, "array"), identity(), batch_size=2).features
            assert features.dtype == kinds.get(given, torch.float32), given
            assert np.array_equal(features.numpy(), values.astype(features.numpy().dtype)), given
    # Features do not share memory with the data.
    values = np.zeros((3, 2), dtype=np.float32)
    features = embed(make_dataset(values, "array"), identity()).features
    values += 1
    assert features.abs().sum() == 0


def test_what_is_no_vector_is_refused(make_dataset):
    images = "holds image data.*pixels, timm, torchvision, efficientnet_lite0 or callable"
    rows = "rows of numbers of one length"
    ragged = [np.zeros(2), np.zeros(3)]
    for inputs, modality, size, message in (
        (np.zeros((2, 4, 4), dtype=np.uint8), "image", 9, f"tiny {images}"),
        (["a text", "another"], "text", 9, "tiny holds text data.*use text, wordllama or callable"),
        (ragged, "array", 9, rows),
        (np.array([["a", "b"], ["c", "d"]]), "array", 9, rows),
        (ragged, "array", 1, "tiny have no common feature dimension: 2 and 3"),
    ):
        with pytest.raises(InputError, match=message):
            embed(make_dataset(inputs, modality), identity(), batch_size=size)
