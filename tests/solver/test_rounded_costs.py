"""Iterations on rounded points never end a solve whose original points miss the tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch

from otdd_flash.operators.base import CostFacts
from otdd_flash.operators.given_costs import matrix_operator
from otdd_flash.operators.torch_operator import TorchOperator
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_term


class Rounded:
    """An operator that is refined to another, and says how far it is from that."""

    def __init__(self, inner: TorchOperator[Any], exact: TorchOperator[Any], off: float) -> None:
        self.inner, self.exact, self.off = inner, exact, off

    @property
    def refined(self) -> TorchOperator[Any]:
        return self.exact

    @property
    def costs(self) -> CostFacts:
        return self.inner.costs._replace(rounding=self.off)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("digits", "said", "relative", "little"),
    [(13, 1.0, 0.1, True), (5, 0.0, 0.01, False), (13, 1e6, 10.0, False)],
)
def test_the_original_points_go_on_where_rounding_is_not_little(
    digits: int, said: float, relative: float, little: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the estimate is wrong, either way; else they certify alone."""
    draw, unit = torch.Generator().manual_seed(0), 2.0**-digits
    x, y = torch.randn(100, 24, generator=draw), torch.randn(80, 24, generator=draw) + 0.7
    a, b = (torch.full((size,), 1 / size, dtype=torch.float64) for size in (100, 80))
    exact = reference.dense_cost(x, y)
    rounded = reference.dense_cost(*((side / unit).round() * unit for side in (x, y)))
    error = float((exact - rounded).square().mean().sqrt())
    original = matrix_operator(exact, a, b)
    passes: list[str] = []
    for name in ("softmin_rows", "softmin_columns"):
        run = getattr(original, name)
        monkeypatch.setattr(
            original, name, lambda *given, run=run, **more: passes.append("") or run(*given, **more)
        )
    operator = Rounded(matrix_operator(rounded, a, b), original, said * error)
    epsilon = relative * original.costs.mean
    term = solve_term(operator, epsilon, Converged())
    truth, *_ = reference.entropic_transport(exact, a, b, epsilon)
    assert term.converged
    assert term.bounds[0] <= truth <= term.bounds[1]
    plan = reference.plan(exact, a, b, term.f, term.g, epsilon)
    errors = (plan.sum(0) - b).abs().sum(), (plan.sum(1) - a).abs().sum()
    assert float(max(errors)) <= term.marginal_error * (1 + 1e-6) <= 1e-3
    assert (not passes) == little
