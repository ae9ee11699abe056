"""Many small problems side by side: every term as it is alone, with its certificate."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.small import route
from otdd_flash.solver.small.pooled_solve import Batch
from otdd_flash.solver.small.route import solve_terms

EPSILON = 0.2


def padded(clouds: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Clouds (B, n, d), and their masses (B, n), 0 of points that were added."""
    points = torch.zeros(len(clouds), max(map(len, clouds)), clouds[0].shape[1])
    masses = torch.zeros(points.shape[:2], dtype=torch.float64)
    for k, cloud in enumerate(clouds):
        points[k, : len(cloud)], masses[k, : len(cloud)] = cloud, 1 / len(cloud)
    return points, masses


def problems() -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((23, 17), (31, 35), (8, 20))
    x = [torch.randn(n, 3, generator=draw) for n, _ in sizes]
    return x, [torch.randn(m, 3, generator=draw) + 1 for _, m in sizes]


def batch_of(x: list[Tensor], y: list[Tensor]) -> Batch:
    (left, a), (right, b) = padded(x), padded(y)
    return Batch((left, right), (a, b), (None, None), (1, 1), None, (0.5, 0.5))


@pytest.mark.parametrize(
    ("labelled", "in_triton"),
    [(False, False), (True, False), pytest.param(False, True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("at_once", [1, 9])
def test_terms_are_those_of_each_problem(in_triton, debias, labelled, at_once, monkeypatch):
    """With labels each has a table of its own."""
    x, y = problems()
    batch, table = batch_of(x, y), torch.zeros(3, 4, 4, dtype=torch.float64)
    if labelled:
        draw = torch.Generator().manual_seed(1)
        table = 3 * torch.rand(3, 4, 4, generator=draw, dtype=torch.float64)
        table = (table + table.mT) * (1 - torch.eye(4, dtype=torch.float64))
        labels = [torch.arange(part.shape[1]).expand(3, -1) % 2 for part in batch.points]
        batch = batch._replace(labels=tuple(labels), class_totals=(2, 2), table=table)
    if at_once == 1:
        monkeypatch.setattr(route, "MOST_PROBLEMS", 1)
    found = solve_terms(batch, EPSILON, Converged(), debias=debias, in_triton=in_triton)
    assert len(found) == len(x)
    for one, other, terms, classes in zip(x, y, found, table / 2, strict=True):
        assert set(terms) == ({"xy", "xx", "yy"} if debias else {"xy"})
        for name, term in terms.items():
            (left, rows), (right, columns) = (
                (one, slice(0, 2)) if side == "x" else (other, slice(2, 4)) for side in name
            )
            a, b = (torch.full((len(z),), 1 / len(z), dtype=torch.float64) for z in (left, right))
            kinds = (torch.arange(len(z)) % 2 for z in (left, right))
            cost = reference.dense_cost(left, right, 0.5, classes[rows, columns], *kinds)
            value = reference.entropic_transport(cost, a, b, EPSILON)[0]
            assert term.bounds[0] <= value <= term.bounds[1]
            assert term.bounds[1] - term.bounds[0] < 1e-2
            assert term.converged
            f, g = term.f[: len(left)].double(), term.g[: len(right)].double()
            dual = reference.dual_value(cost, a, b, f, g, EPSILON)
            assert float(dual) == pytest.approx(term.value, abs=1e-5)


def test_a_problem_that_needs_another_solve_is_left_and_others_are_not():
    x, y = problems()
    y[1] = y[1] + 1e20
    first, second, third = solve_terms(
        batch_of(x, y), EPSILON, Converged(max_iterations=300), debias=False, in_triton=False
    )
    assert second is None
    assert first is None or first["xy"].converged
    assert third is None or third["xy"].converged
    with pytest.raises(InputError, match="too small for float32"):
        solve_terms(batch_of(*problems()), 1e-9, Converged(), debias=True, in_triton=False)
