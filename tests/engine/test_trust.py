"""Which steps are kept, and how long plain updates follow those that are not."""

from __future__ import annotations

import math

import pytest
import torch

from otdd_flash.engine.trust import GROWTH, PATIENCE, Trust

SLACK = 1e-6
PlanEvidence = tuple[float, float, float]


def after(*seen: PlanEvidence) -> Trust:
    """After evaluations of a dual, its gain and a marginal error."""
    trust = Trust.fresh(torch.zeros(1, dtype=torch.float64))
    for numbers in seen:
        trust = trust.judge(
            *(torch.tensor([n], dtype=torch.float64) for n in (*numbers, SLACK))
        ).trust
    return trust


def test_a_step_is_kept_only_if_the_dual_gains_what_the_plain_update_would() -> None:
    first = (1.0, 0.5, 0.1)
    assert float(after(first, (1.6, 0.0, 0.1)).dual) == 1.6
    assert float(after(first, (1.4, 0.0, 0.1)).dual) == 1.0
    # The plain update that follows is kept whatever it brings.
    assert float(after(first, (1.4, 0.0, 0.1), (0.9, 0.0, 0.1)).dual) == 0.9
    assert float(after(first, (math.nan, 0.0, 0.1)).dual) == 1.0


def test_rejections_in_a_row_are_followed_by_ever_more_plain_updates() -> None:
    good, bad = (1.0, 1.0, 0.1), (-1.0, 0.0, 0.1)
    seen, waits = [good], []
    for _ in range(11):
        waits.append(float(after(*seen).plain))
        seen.append(good if waits[-1] else bad)
    assert waits == [0, 1, 0, 2, 1, 0, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("growth", "stale", "kept"),
    [(GROWTH - 0.1, PATIENCE - 1, True), (GROWTH - 0.1, PATIENCE, False), (GROWTH + 0.1, 0, False)],
)
def test_where_the_dual_cannot_tell_the_marginal_error_decides(growth, stale, kept) -> None:
    trust = after((1.0, 0.0, 0.1))._replace(stale=torch.tensor([stale]).double())
    same, gap = torch.ones(1).double(), torch.tensor([0.1 * growth]).double()
    assert bool(trust.judge(same, same * 0, gap, same * SLACK).kept) is kept


def test_a_step_that_gains_restores_trust_by_half() -> None:
    good, bad = (1.0, 1.0, 0.1), (-1.0, 0.0, 0.1)
    trust = after(good, bad, good, bad, good, good)
    assert float(trust.penalty) == 4
    assert float(after(good, bad, good, bad, good, good, (9.0, 0.0, 0.1)).penalty) == 2
