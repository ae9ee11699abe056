"""What is kept of a tensor: found once, anew where that has changed, and gone with it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from otdd_flash.operators.owned import Owned
from otdd_flash.operators.remembered import remembered


class Doubled:
    """Twice a tensor, how often it was found, and what weakly refers to it."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, tensor: Tensor, name: str = "double") -> Tensor:
        def find() -> Tensor:
            self.times += 1
            return 2 * tensor

        return remembered(tensor, name, find)


def test_it_is_found_once_by_each_name() -> None:
    labels, double = torch.arange(5), Doubled()
    first = double(labels)
    assert double(labels) is first
    assert double.times == 1
    assert double(labels, "other") is not first
    # Equal content is another tensor.
    assert double(torch.arange(5)) is not first
    assert double.times == 3


def test_it_is_found_anew_of_what_has_changed() -> None:
    array = np.arange(5)
    labels, double = torch.from_numpy(array), Doubled()
    double(labels)
    labels[2] = 7
    assert double(labels).tolist() == [0, 2, 14, 6, 8]
    # As others change it who share its memory.
    array[0] = 9
    assert double(labels).tolist() == [18, 2, 14, 6, 8]
    assert double.times == 3


def test_nothing_is_kept_of_what_counts_no_changes() -> None:
    double = Doubled()
    with torch.inference_mode():
        labels = torch.arange(5)
    double(labels)
    double(labels)
    assert double.times == 2


def test_it_goes_with_the_tensor() -> None:
    labels, double = torch.arange(5), Doubled()
    kept = weakref.ref(double(labels))
    assert kept() is not None
    del labels
    assert kept() is None


@pytest.mark.parametrize("ordered", [False, True])
def test_who_owns_which_points_goes_with_their_labels(ordered: bool) -> None:
    class OneOfTwo:
        rank, size = 1, 2

        def share(self, count: int, rank: int | None = None) -> slice:
            return slice(count // 2, count)

    labels = torch.tensor([0, 1, 2, 3] if ordered else [2, 0, 3, 1])
    owned, ranks = Owned.by_class(labels), OneOfTwo()
    own = owned.labels_of(ranks, labels)  # type: ignore[arg-type]
    assert own.tolist() == [2, 3]
    assert Owned.by_class(labels) is owned
    assert owned.labels_of(ranks, labels) is own  # type: ignore[arg-type]
    kept = weakref.ref(labels)
    del labels
    assert kept() is None
    kept = weakref.ref(owned)
    del owned
    assert kept() is None
