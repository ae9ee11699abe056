"""A mixture that several ranks solve: that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import pool

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]


def found(ranks: Ranks | None, debias: bool) -> Any:
    """Weights and bounds."""
    draw = torch.Generator().manual_seed(0)
    each = {}
    for k in range(3):
        x = torch.randn(60, 3, generator=draw) + 3 * k
        each[f"s{k}"] = otdd.LabeledSamples(x, torch.arange(60) % 2, ("a", "b"))
    x = torch.cat([one.features[:30] + 0.1 for one in each.values()][:2])
    target = otdd.LabeledSamples(x, torch.arange(60) % 2, ("a", "b"))
    compute = otdd.ComputeOptions("cpu", group=ranks)
    mixture = otdd.mixture(target, each, debias=debias, compute=compute)
    return dict(mixture.weights), mixture.bounds, mixture.converged


@pytest.mark.parametrize("debias", [False, True])
def test_mixtures_are_those_of_one_process(debias: bool) -> None:
    answers = pool(2).led(found, debias)
    weights, bounds, converged = answers[0]
    alone, ends, _ = found(None, debias)
    assert converged
    assert weights == pytest.approx(alone, abs=5e-3)
    assert bounds == pytest.approx(ends, rel=2e-3)
