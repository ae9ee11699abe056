"""Arrays of every kind are the numbers that they hold, or are refused in a sentence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch

import otdd_flash as otdd
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.errors import InputError
from otdd_flash.real_numbers import real_tensor

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(30, 4)), DRAW.normal(size=(25, 4)) + 1
KINDS_X, KINDS_Y = np.arange(30) % 3, np.arange(25) % 2


def read_only(x: Any) -> Any:
    x = x.copy()
    x.setflags(write=False)
    return x


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x[::-1].copy()[::-1],
        lambda x: x.astype(x.dtype.newbyteorder()),
        lambda x: x.astype(np.longdouble),
        lambda x: np.asfortranarray(x),
        read_only,
        lambda x: np.ma.masked_array(x, np.zeros_like(x, bool)),
        pd.DataFrame,
        lambda x: torch.tensor(x, requires_grad=True),
        lambda x: torch.nn.Parameter(torch.tensor(x)),
    ],
    ids=[
        *("turned twice", "of the other byte order", "long", "by columns", "read-only"),
        *("nothing masked", "a table", "with a gradient", "a parameter"),
    ],
)
def test_the_same_numbers_in_another_array_are_at_the_same_distance(changed: Any) -> None:
    expected = otdd.dataset_distance((X, KINDS_X), (Y, KINDS_Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = otdd.dataset_distance((changed(X), KINDS_X), (Y, KINDS_Y))
    assert found.value == expected.value
    assert found.bounds == expected.bounds


def test_rows_from_the_end_are_those_rows() -> None:
    assert torch.equal(real_tensor("x", X[::-1]), torch.from_numpy(X.copy()).flip(0))


MASKED = np.ma.masked_array(X, np.zeros_like(X, bool))
MASKED[3, 1] = np.ma.masked


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (MASKED, KINDS_X, "features are masked at row 3; leave those rows out, or fill them"),
        (X, np.ma.masked_array(KINDS_X, KINDS_X == 1), "10 labels are missing, at rows 1, 4,"),
        (X, np.array([b"a", b"\xff", b"b"])[KINDS_X], r"text in UTF-8, got b'\\xff'; decode"),
        (torch.tensor(X).to_sparse(), KINDS_X, "must be dense, got torch.sparse_coo; give them as"),
        (scipy.sparse.csr_array(X), KINDS_X, "features must be an array or a tensor, got csr_arr"),
        (X, KINDS_X.tolist(), "labels must be an array or a tensor, got list of 30 items"),
    ],
)
def test_what_is_not_there_or_no_array_is_not_read_as_numbers(
    features: Any, labels: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        otdd.dataset_distance((features, labels), (Y, KINDS_Y))


def test_masked_weights_are_refused() -> None:
    weights = np.ma.masked_array(np.ones(30), KINDS_X == 2)
    with pytest.raises(InputError, match="weights are masked at rows 2, 5, 8, 11, 14 and 5 more"):
        otdd.LabeledSamples.from_arrays(X, KINDS_X, weights)


@pytest.mark.parametrize("kind", ["i8", "u8", "i4"])
def test_large_integers_keep_their_differences(kind: str) -> None:
    """Beyond 2^24 float32 holds every second integer at best: clouds met in one point."""
    x, y = (np.round(10 * (points + 5)).astype(kind) for points in (X, Y))
    expected = otdd.dataset_distance((x, KINDS_X), (y, KINDS_Y), compute=double())
    far = x.dtype.type(1 << 30)
    found = otdd.dataset_distance((x + far, KINDS_X), (y + far, KINDS_Y), compute=double())
    assert found.value == pytest.approx(expected.value, rel=1e-3)
    small = otdd.LabeledSamples.from_arrays(x, KINDS_X)
    assert small.features.dtype == torch.float32


def array_dataset(values: Any) -> LabeledDataset:
    return LabeledDataset(values, None, (), None, "array", "values")


def double() -> otdd.ComputeOptions:
    return otdd.ComputeOptions("cpu", precision="double")


def test_results_of_samples_have_no_gradient() -> None:
    x = torch.tensor(X, requires_grad=True)
    result = otdd.dataset_distance((x, KINDS_X), (Y, KINDS_Y))
    assert not result.source.features.requires_grad
    assert not otdd.sliced_distances([(x, KINDS_X), (Y, KINDS_Y)]).values.requires_grad
    assert not otdd.extractors.standardize((x, KINDS_X), (Y, KINDS_Y))[0].features.requires_grad


def test_large_integers_of_a_file_keep_their_differences(tmp_path: Path) -> None:
    """Such as seconds since 1970."""
    times = np.arange(40)[:, None] + np.array([1_700_000_000, 0])
    np.savez(tmp_path / "x.npz", x=times, y=np.arange(40) % 2)
    dataset = otdd.load("arrays", path=str(tmp_path / "x.npz"))
    found = otdd.embed(dataset, otdd.extractors.identity(), batch_size=7)
    assert torch.equal(found.features, torch.from_numpy(times).double())


@pytest.mark.parametrize(
    "extractor", [otdd.extractors.identity(), otdd.extractors.from_callable(lambda batch: batch)]
)
def test_large_integers_of_an_extractor_are_refused(extractor: Any) -> None:
    """The type of all features is that of the first batch, which may hold small ones."""
    values = np.array([[1], [2], [1 << 24], [(1 << 24) + 1]])
    assert len(otdd.embed(array_dataset(values[:3]), extractor)) == 3
    with pytest.raises(InputError, match=r"integers up to 16777217, .* float64"):
        otdd.embed(array_dataset(values), extractor, batch_size=1)


def test_what_a_function_returns_and_a_plan_takes_is_read_as_features_are() -> None:
    dataset = array_dataset(X)
    turned = otdd.extractors.from_callable(lambda batch: batch[:, ::-1])
    assert torch.equal(otdd.embed(dataset, turned).features, torch.from_numpy(X.copy()).flip(1))
    masking = otdd.extractors.from_callable(lambda batch: np.ma.masked_less(batch, 0))
    with pytest.raises(InputError, match=r"features .* are masked at rows 0, "):
        otdd.embed(dataset, masking)
    result = otdd.dataset_distance((X, KINDS_X), (Y, KINDS_Y))
    assert torch.equal(result.apply_plan(Y[::-1]), result.apply_plan(Y[::-1].copy()))
