"""What users hold, as members and as queries: arrays, datasets, dicts."""

from __future__ import annotations

import datasets
import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 2)).astype("f4"), np.arange(12) % 2
TENSORS = TensorDataset(torch.tensor(X), torch.tensor(Y))
HUGGING = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})


class Own(Dataset):
    """Items are read one by one."""

    def __len__(self):
        return len(X)

    def __getitem__(self, row):
        return X[row], int(Y[row])


TAKEN = {
    "arrays": (X, Y),
    "labels in a list": (X, Y.tolist()),
    "tensors": (torch.tensor(X), torch.tensor(Y)),
    "a table": (pandas.DataFrame(X), pandas.Series(Y)),
    "samples": otdd.LabeledSamples(X, Y, ("0", "1")),
    "of otdd.load": otdd.load("blobs", samples=12, num_classes=2, dim=2),
    "TensorDataset": TENSORS,
    "Dataset": Own(),
    "Subset": Subset(TENSORS, range(12)),
    "DataLoader": DataLoader(TENSORS, batch_size=5),
    "datasets.Dataset": HUGGING,
}
REFUSED = {
    "a list of arrays": ([*X], "must be LabeledSamples, .*, got list of 12 items"),
    "lists of arrays": (([*X], Y.tolist()), "features must be an array or a tensor, got list"),
    "a list of pairs": ([*zip(X, Y, strict=True)], "must be LabeledSamples, .*, got list"),
    "a dict": ({"x": X, "y": Y}, "must be LabeledSamples, .*, got dict of 2 items"),
    "splits": (datasets.DatasetDict(train=HUGGING), r"holds the splits train .*\['train'\]"),
    "a generator": ((row for row in X), "must be LabeledSamples, .*, got generator"),
    "None": (None, "must be LabeledSamples, .*, got None"),
    "three arrays": ((X, Y, Y), "must be LabeledSamples, .*, got tuple of 3 items"),
}


@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
@pytest.mark.parametrize("called", TAKEN)
def test_what_a_query_takes_a_member_takes(called, tmp_path):
    """The same rows are found at 0, whatever holds them, also in a folder."""
    given = TAKEN[called]
    other = otdd.LabeledSamples(X + 3, Y, ("0", "1"))
    index = otdd.index({"one": given, "other": other}, tmp_path)
    assert index.names == ("one", "other")
    for library in (index, {"one": given, "other": other}, tmp_path):
        ranking = otdd.nearest(given, library, 2)
        assert ranking.rows[0][:3] == ("one", 0.0, 0.0)
        assert ranking.certified
    if called != "of otdd.load":
        arrays = otdd.nearest((X, Y), index, 2)
        assert [row.name for row in arrays.rows] == ["one", "other"]
        assert arrays.rows[0].value == 0
        assert arrays.rows[1].value == pytest.approx(ranking.rows[1].value, rel=1e-6)


@pytest.mark.parametrize("called", REFUSED)
def test_what_a_query_refuses_a_member_refuses(called):
    """With the same words, which name the argument."""
    given, message = REFUSED[called]
    good = {"good": (X, Y)}
    with pytest.raises(InputError, match=rf"library\['bad'\].* {message}"):
        otdd.index({"bad": given, **good})
    with pytest.raises(InputError, match=rf"library\['bad'\].* {message}"):
        otdd.nearest((X, Y), {"bad": given, **good}, 1)
    with pytest.raises(InputError, match=f"query .*{message}"):
        otdd.nearest(given, good, 1)
    with pytest.warns(DataNotice, match=rf"library\['bad'\].* {message}.*left out"):
        assert otdd.index({"bad": given, **good}, skip=True).names == ("good",)


def test_libraries_are_mappings():
    for given in ([(X, Y)], ((X, Y),), [("a", (X, Y))], None, 3):
        with pytest.raises(InputError, match="library must be a mapping such as"):
            otdd.index(given)
        with pytest.raises(InputError, match=r"library must be an index of otdd.index, its folder"):
            otdd.nearest((X, Y), given, 1)
    splits = datasets.DatasetDict(train=HUGGING, test=HUGGING.select(range(6)))
    with pytest.warns(DataNotice):
        assert otdd.index(splits).names == ("train", "test")
