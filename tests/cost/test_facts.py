"""Numbers that are a float or a tensor behave alike."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from otdd_flash.cost.facts import larger, lesser

VALUES = (math.nan, -math.inf, -1.0, 0.0, 2.0, math.inf)


@pytest.mark.parametrize("choose", [lesser, larger])
def test_floats_are_chosen_as_entries_of_tensors_are(choose) -> None:
    """NaN on either side is NaN: a bound of what is no number is none."""
    for one, other in itertools.product(VALUES, VALUES):
        found = choose(one, other)
        of_tensors = choose(*(torch.tensor([value]).double() for value in (one, other)))
        assert isinstance(found, float)
        case = one, other
        torch.testing.assert_close(
            torch.tensor([found]).double(),
            of_tensors,
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=str(case),
        )
        assert math.isnan(found) == (math.isnan(one) or math.isnan(other)), case
