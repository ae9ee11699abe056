"""The identity extractor: arrays unchanged, anything else refused with the ways out."""

import numpy as np
import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.extractors import embed, identity


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.float32, torch.float32),
        (np.float64, torch.float64),
        (np.float16, torch.float32),
        (np.int64, torch.float32),
        (np.uint16, torch.float32),
        (np.bool_, torch.float32),
    ],
)
@pytest.mark.parametrize("lazy", [False, True])
def test_values_are_kept(make_dataset, given, kept, lazy):
    values = np.arange(21).reshape(7, 3).astype(given)
    dataset = make_dataset(list(values) if lazy else values, "array")
    features = embed(dataset, identity(), batch_size=2).features
    assert features.dtype == kept
    assert np.array_equal(features.numpy(), values.astype(features.numpy().dtype))


def test_features_do_not_share_memory_with_the_data(make_dataset):
    values = np.zeros((3, 2), dtype=np.float32)
    features = embed(make_dataset(values, "array"), identity()).features
    values += 1
    assert features.abs().sum() == 0


@pytest.mark.parametrize(
    ("inputs", "modality", "way_out"),
    [
        (
            np.zeros((2, 4, 4), dtype=np.uint8),
            "image",
            "pixels, timm, torchvision, efficientnet_lite0 or callable",
        ),
        (["a text", "another"], "text", "text, wordllama or callable"),
    ],
)
def test_other_modalities_name_what_takes_them(make_dataset, inputs, modality, way_out):
    with pytest.raises(InputError, match=f"tiny holds {modality} data.*use {way_out}"):
        embed(make_dataset(inputs, modality), identity())


@pytest.mark.parametrize(
    "rows", [[np.zeros(2), np.zeros(3)], np.array([["a", "b"], ["c", "d"]])], ids=["ragged", "text"]
)
def test_rows_that_are_no_vectors_are_refused(make_dataset, rows):
    with pytest.raises(InputError, match="rows of numbers of one length"):
        embed(make_dataset(rows, "array"), identity())


def test_rows_that_change_length_between_batches_are_refused(make_dataset):
    dataset = make_dataset([np.zeros(2), np.zeros(3)], "array")
    with pytest.raises(InputError, match="tiny have no common feature dimension: 2 and 3"):
        embed(dataset, identity(), batch_size=1)
