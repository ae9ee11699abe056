"""What a certificate asks of a device, once all that is found once is known."""

from __future__ import annotations

import pytest
import torch
from operation_counts import OperationCounts

from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.solver.term.certificate import certify, certify_self

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")

EPSILON = 4.0


def operator_of(*, own: bool) -> KernelOperator:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(count, 8, generator=draw) for count in (48, 33))
    a, b = (torch.full((len(side),), 1 / len(side), dtype=torch.float64) for side in (x, y))
    labels = [torch.arange(len(side)) % 2 for side in (x, y)]
    table = torch.ones(2, 2, dtype=torch.float64).fill_diagonal_(0)
    given = (x, x, a, a) if own else (x, y, a, b)
    cost = LabelledCost(
        *given,
        labels_x=labels[0],
        labels_y=labels[0 if own else 1],
        class_costs=table,
        lambda_x=0.5,
    )
    return KernelOperator(cost, "high")


def check(counts: OperationCounts, operations: int, launches: int) -> None:
    """It reads once, and asks for hardly fewer operations than these."""
    assert 0.8 * operations <= counts.operations <= operations
    assert sum(counts.launches.values()) == launches
    assert counts.reads == 1


@pytest.mark.slow
def test_of_a_cross_term(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = operator_of(own=False)
    g = torch.zeros(33)
    for _ in range(20):
        f = operator.softmin_rows(g, EPSILON)
        g = operator.softmin_columns(f, EPSILON)
    certify(operator, f, g, EPSILON, updated=g)
    with OperationCounts(monkeypatch) as counts:
        found = certify(operator, f, g, EPSILON, updated=g)
    assert found.passes == 1
    check(counts, 140, 3)


def test_of_a_self_term(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = operator_of(own=True)
    f = torch.zeros(48)
    for _ in range(4):
        f = (f + operator.softmin_rows(f, EPSILON)) / 2
    certify_self(operator, f, EPSILON)
    with OperationCounts(monkeypatch) as counts:
        found = certify_self(operator, f, EPSILON)
    assert found.passes == 1
    check(counts, 95, 2)
