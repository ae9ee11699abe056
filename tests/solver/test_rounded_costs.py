"""Where iterations on rounded points end a solve, and how the original ones go on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.operators.base import Execution
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.term.alternating import solve_alternating

N, M, DIM = 100, 80, 24


def cost_of(x: Tensor, y: Tensor) -> LabelledCost:
    draw = torch.Generator().manual_seed(1)
    a, b = (torch.rand(len(side), generator=draw).double() + 0.1 for side in (x, y))
    labels = [torch.arange(len(side)) % 3 for side in (x, y)]
    table = torch.tensor([[0.0, 2.0, 5.0], [1.0, 0.0, 3.0], [4.0, 2.0, 0.0]]).double()
    masses = a / a.sum(), b / b.sum()
    return LabelledCost(
        x, y, *masses, labels_x=labels[0], labels_y=labels[1], class_costs=table, lambda_x=0.5
    )


def clouds(shift: float = 0.7) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(N, DIM, generator=draw), torch.randn(M, DIM, generator=draw) + shift


class Counted:
    """An operator that counts its passes by name."""

    def __init__(self, inner: StreamedOperator, execution: dict[str, Any] | None = None) -> None:
        self.inner, self.passes, self.given = inner, Counter[str](), execution or {}

    @property
    def execution(self) -> Execution:
        return self.inner.execution._replace(sampled=None, **self.given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("softmin", "marginals")):
            self.passes[name] += 1
        return getattr(self.inner, name)


def rounding_pair(digits: int) -> tuple[Counted, Counted, LabelledCost]:
    """The cost of points of so many binary digits, and what it is refined to."""
    x, y = clouds()
    exact, unit = cost_of(x, y), 2.0**-digits
    rounded = cost_of(*((side / unit).round() * unit for side in (x, y)))
    dense = [
        reference.dense_cost(*c.points, 0.5, c.class_costs, *c.labels) for c in (exact, rounded)
    ]
    error = float((dense[0] - dense[1]).square().mean().sqrt())
    refined = Counted(StreamedOperator(exact, torch.float64))
    given = {"refined": lambda: refined, "rounded_by": lambda: error}
    return Counted(StreamedOperator(rounded, torch.float64), given), refined, exact


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("relative", "little"), [(0.1, True), (0.003, False)])
def test_rounded_points_end_a_solve_where_rounding_is_little(relative: float, little: bool) -> None:
    operator, refined, cost = rounding_pair(13)
    epsilon = relative * cost.mean_cost
    term = solve_alternating(operator, epsilon, Converged())
    dense = reference.dense_cost(*cost.points, 0.5, cost.class_costs, *cost.labels)
    truth, *_ = reference.entropic_transport(dense, cost.a, cost.b, epsilon)
    assert term.converged
    assert term.bounds[0] <= truth <= term.bounds[1]
    # With the original points the certificate alone, or iterations before it.
    assert refined.passes["marginals"] == 1
    assert (sum(refined.passes.values()) == 1) == little


def test_where_the_estimate_is_wrong_the_original_points_go_on() -> None:
    operator, refined, cost = rounding_pair(5)
    operator.given["rounded_by"] = lambda: 0.0
    term = solve_alternating(operator, 0.01 * cost.mean_cost, Converged())
    assert term.converged
    assert term.marginal_error <= 1e-3
    assert refined.passes["softmin_rows"] >= 1
