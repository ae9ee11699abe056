"""The number by which maps are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.flows.maps import relative_error
from otdd_flash.samples import LabeledSamples


def two(first: float, second: float, weights: tuple[float, float] = (1, 1)) -> LabeledSamples:
    return LabeledSamples(torch.tensor([[first], [second]]), None, (), torch.tensor(weights))


def identity(samples: LabeledSamples) -> LabeledSamples:
    return samples


def test_it_is_0_for_the_truth_and_1_for_the_identity() -> None:
    samples, truth = two(0, 1), two(3, 5)
    assert relative_error(lambda _: truth, samples, truth) == 0
    assert relative_error(identity, samples, truth) == 1


def test_it_is_a_root_mean_square_by_mass() -> None:
    samples, truth = two(0, 1, (1, 3)), two(2, 2)
    off = lambda given: replace(given, features=given.features + 1.0)  # noqa: E731
    # Errors 1 and 0, distances 2 and 1.
    assert relative_error(off, samples, truth) == pytest.approx((1 / 7) ** 0.5)
    assert relative_error(off, two(0, 1), truth) == pytest.approx((1 / 5) ** 0.5)


def test_a_truth_that_tells_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="where the samples began"):
        relative_error(identity, two(0, 1), two(0, 1))
    with pytest.raises(InputError, match="row i of both"):
        relative_error(identity, two(0, 1), LabeledSamples(torch.zeros(3, 1), None, ()))
