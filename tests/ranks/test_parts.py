"""What ranks say of a cost together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.parts import Part, Parts, mean_error


class TwoRanks:
    """Rank 0 of two, and what the other one says."""

    size = 2

    def __init__(self, parts: Any, each: list[float], summed: float) -> None:
        self.held, self._each, self._summed = {0: parts}, each, summed

    def all_gathered(self, mine: Tensor) -> Tensor:
        return torch.stack((mine, mine.new_tensor(self._each)))

    def summed(self, mine: Tensor) -> Tensor:
        return mine + self._summed


def test_a_plan_may_give_all_of_a_column_to_the_rank_that_errs_more_there() -> None:
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    errors = torch.ones_like(half), torch.tensor([0.0, 4.0], dtype=torch.float64)
    # What is left of it is rounding.
    operator = SimpleNamespace(a=half, b=half, accurate_errors=errors)
    operator.costs = SimpleNamespace(error=3.0 + 0.25)
    parts = SimpleNamespace(
        cost=SimpleNamespace(b=half), share=None, rows=Part(cast(Any, operator), 0.5)
    )
    ranks = TwoRanks(cast(Parts, parts), [4.0, 0.0, 0.125], 0.5)
    # Rows 1 / 2 + 1 / 2, columns 4 wherever they are, and the most rounding.
    assert mean_error(cast(Ranks, ranks), 0) == pytest.approx(1 + 4 + 0.25, rel=1e-12)
