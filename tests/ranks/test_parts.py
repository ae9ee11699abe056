"""What ranks say of a cost together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators.parts import Part, Parts, facts


class TwoRanks:
    """Rank 0 of two, and what the other one says."""

    size = 2

    def __init__(self, parts: Any, each: list[float]) -> None:
        self.held, self._each = {0: parts}, each

    def all_gathered(self, mine: Tensor) -> Tensor:
        return torch.stack((mine, mine.new_tensor(self._each)))


def cross_parts(over_columns: Any = None) -> Any:
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    errors = torch.ones_like(half), torch.tensor([0.0, 4.0], dtype=torch.float64)
    operator = SimpleNamespace(a=half, b=half, accurate_errors=errors, rounding=0.25)
    operator.execution = SimpleNamespace(over_columns=over_columns)
    return SimpleNamespace(
        cost=SimpleNamespace(b=half), share=None, rows=Part(cast(Any, operator), 0.5)
    )


def test_a_plan_may_give_all_of_a_column_to_the_rank_that_errs_more_there() -> None:
    ranks = TwoRanks(cast(Parts, cross_parts()), [4.0, 0.0, 0.125, 0.0, 0.5])
    # Rows 1 / 2 + 1 / 2, columns 4 wherever they are, and the most rounding.
    assert facts(cast(Ranks, ranks), 0).error == pytest.approx(1 + 4 + 0.25, rel=1e-12)


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_some_columns_are_asked_of_all_ranks_or_of_none(here: bool, there: bool) -> None:
    parts = cross_parts(len if here else None)
    ranks = TwoRanks(cast(Parts, parts), [0.0, 0.0, 0.0, float(not there), 0.5])
    assert facts(cast(Ranks, ranks), 0).takes_columns == (here and there)
