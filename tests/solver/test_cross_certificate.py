"""What rounding adds to the bounds of a cross term, and when its plan is evaluated once more."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.engine.evidence.primal import filled_value, filling_of
from otdd_flash.operators.base import Marginals
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.solver.term.certificate import certify

EPSILON = 0.1


def operator_of(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, kind: type[StreamedOperator] = StreamedOperator
) -> StreamedOperator:
    labels = [torch.zeros(len(side), dtype=torch.int64) for side in (x, y)]
    none = torch.zeros(1, 1, dtype=torch.float64)
    cost = LabelledCost(
        x, y, a, b, labels_x=labels[0], labels_y=labels[1], class_costs=none, lambda_x=1.0
    )
    return kind(cost, torch.float64 if x.dtype == torch.float64 else torch.float32)


def masses(*shares: float) -> Tensor:
    return torch.tensor(shares, dtype=torch.float64) / sum(shares)


class Summed(StreamedOperator):
    """Entries without errors, of which sums are off by a share that shows in the bounds."""

    share = 1e-3

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: float, *, accurate: bool = False
    ) -> Marginals:
        found = super().marginals(f, g, epsilon, accurate=accurate)
        none = torch.zeros_like(found.rows), torch.zeros_like(found.columns)
        return found._replace(
            row_errors=none[0], column_errors=none[1], relative_error=self.share, lost=0.0
        )


def test_bounds_move_by_what_sums_may_be_off() -> None:
    """Far points of little mass: the bound by the filled plan is the lesser."""
    x = torch.tensor([[0.0], [0.1], [3.0]], dtype=torch.float64)
    y = torch.tensor([[0.0], [0.2], [4.0]], dtype=torch.float64)
    a, b = masses(1, 1, 0.01), masses(1, 0.5, 0.02)
    operator, relative = operator_of(x, y, a, b, Summed), Summed.share
    cost = reference.dense_cost(x, y, 1.0)
    value, f, g = reference.entropic_transport(cost, a, b, EPSILON)
    f, g = f + 2.0, g - 2.0
    found = certify(operator, f, g, EPSILON, updated=g)
    size, spread = float(a @ f.abs() + b @ g.abs()), operator.costs.spread
    additions = (sum(operator.shape) + 16) * 2.0**-53 * (size + EPSILON)
    rounding = relative * EPSILON + additions
    assert found.bounds[0] == pytest.approx(value - rounding, rel=1e-9)
    kappa = 1 / (1 + relative)
    both, scale = torch.cat((a, b)), torch.tensor(kappa, dtype=torch.float64)
    filling = filling_of(operator, both, both == 0, both, scale)
    paid = kappa * float(a @ f + b @ g + EPSILON * math.log(kappa))
    primal = filled_value(filling._make(map(float, filling)), paid, kappa, EPSILON)
    added = relative * (size + 4 * spread + 2 * EPSILON * (1 - math.log(relative)))
    assert found.bounds[1] == pytest.approx(primal + added + rounding, rel=1e-8)


def test_additions_are_of_the_size_of_both_potentials() -> None:
    """At 1e9 and -1e9 the sums over points are off, where their entries would not be."""
    operator = operator_of(*2 * (torch.zeros(2, 1).double(),), *2 * (masses(1, 1),), Summed)
    large = torch.full((2,), 1e9, dtype=torch.float64)
    found = certify(operator, large, -large, EPSILON, updated=-large)
    additions = (4 + 16) * 2.0**-53 * (2e9 + EPSILON)
    rounding = Summed.share * EPSILON + additions
    assert found.value - found.bounds[0] == pytest.approx(rounding, rel=1e-3)


@pytest.mark.parametrize(
    ("columns", "passes"),
    [
        pytest.param((1.0, 1.0), 1, id="exact"),
        pytest.param((1.0, 0.5), 1, id="too small"),
        pytest.param((1.25, 0.73), 3, id="one too large"),
        pytest.param((1.001, 0.999), 3, id="one a little too large"),
    ],
)
def test_a_plan_whose_columns_are_too_large_is_corrected_by_exact_sums(
    columns: tuple[float, float], passes: int
) -> None:
    """One pass is enough where scaling the plan down costs little beside what is missing."""
    points, a = torch.zeros(2, 1), masses(1, 1)
    operator = operator_of(points, points.clone(), a, a.clone())
    g = EPSILON * torch.tensor(columns).log()
    found = certify(operator, torch.zeros(2), g, EPSILON, updated=g)
    assert found.passes == passes
    assert found.bounds[0] <= 0 <= found.bounds[1]
    if columns == (1.0, 1.0):
        assert found.bounds[1] - found.bounds[0] < 1e-6
