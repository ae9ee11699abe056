"""Sums of classes: their order, their error, and that they are as if each class were alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from otdd_flash.operators.class_sums import ClassRows, halved_sum

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 63, 64, 65, 300)


def numbers(count: int, seed: int = 0) -> Tensor:
    """Of both signs and of many sizes, so that any other order rounds otherwise."""
    draw = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** (6 * torch.rand(count, generator=draw, dtype=torch.float64) - 3)
    return sizes * torch.randn(count, generator=draw, dtype=torch.float64)


def by_hand(values: list[float]) -> float:
    """The last part is added to the first."""
    while len(values) > 1:
        half = 1
        while 2 * half < len(values):
            half *= 2
        rest = values[half:]
        values = [v + rest[i] if i < len(rest) else v for i, v in enumerate(values[:half])]
    return values[0]


def bits(values: Tensor) -> list[int]:
    """Unlike the numbers, those of 0.0 and -0.0 differ."""
    return values.view(torch.int64).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_halves_are_added_in_one_order(size: int) -> None:
    values = numbers(size)
    expected = by_hand(values.tolist())
    assert float(halved_sum(values.clone(), 0)) == expected
    across = halved_sum(values[:, None].repeat(1, 5), 0)
    along = halved_sum(values[None].repeat(5, 1), 1)
    assert across.tolist() == along.tolist() == [expected] * 5


@pytest.mark.parametrize("size", SIZES)
def test_the_error_is_that_of_as_many_additions_as_there_are_halves(size: int) -> None:
    for seed in range(20):
        values = numbers(size, seed)
        error = abs(float(halved_sum(values.clone(), 0)) - math.fsum(values.tolist()))
        additions = math.ceil(math.log2(size))
        # One more for the rounding of the truth.
        assert error <= (additions + 1) * 2.0**-53 * float(values.abs().sum())


@pytest.mark.parametrize("order", [SIZES, SIZES[::-1], (300, 1, 65, 3, 64, 2, 63), (64, 64), (3,)])
@pytest.mark.parametrize("width", [(), (5,)])
def test_a_class_is_summed_as_if_it_were_alone(order: tuple[int, ...], width: tuple) -> None:
    parts = [numbers(size * math.prod(width), size).view(size, *width) for size in order]
    values = torch.cat(parts)
    values[::7] = -0.0
    parts = list(torch.split(values.clone(), list(order)))
    rows = ClassRows(order, CPU)
    sums, largest = rows.sums(values.clone()), rows.largest(values.abs())
    for k, part in enumerate(parts):
        assert bits(sums[k]) == bits(halved_sum(part.clone(), 0))
        assert torch.equal(largest[k], part.abs().amax(0))


def test_zeros_keep_their_signs_beside_longer_classes() -> None:
    """A difference from -0.0 has another sign than one from 0.0."""
    rows = ClassRows((3, 4), CPU)
    sums = rows.sums(torch.full((7,), -0.0, dtype=torch.float64))
    assert bits(sums) == bits(torch.full((2,), -0.0, dtype=torch.float64))


def test_rows_know_their_classes() -> None:
    rows = ClassRows((2, 1, 3), CPU)
    assert rows.owners.tolist() == [0, 0, 1, 2, 2, 2]
    assert rows.places.tolist() == [0, 1, 0, 0, 1, 2]


def test_a_sum_keeps_no_more_memory_than_it_takes() -> None:
    found = halved_sum(torch.ones(100, 7), 0)
    assert found.untyped_storage().nbytes() == found.nbytes
