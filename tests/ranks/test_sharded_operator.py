"""Every operation of a cost that ranks share, against dense float64 formulas."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import reference
import torch
from live_bytes import peak
from pairwise import pairwise
from rank_pool import pool
from torch import Tensor

from otdd_flash.distributed.ranks import Ranks, led
from otdd_flash.operators import sharing
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.lattice import lattice_of
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import Problem

pytestmark = pytest.mark.xdist_group("ranks")

EPSILON = 0.3
SIZES = [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))]
# Uneven shares, and more ranks than rows.
SHAPES = [(23, 17), (3, 40), (1, 2)]


def cloud(n: int, seed: int) -> LabeledSamples:
    """Points around far centres, classes of which some have no points, a third without mass."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=draw)
    points = torch.randn(n, 5, generator=draw, dtype=torch.float64) + 4 + labels[:, None]
    weights = torch.rand(n, generator=draw, dtype=torch.float64) + 0.1
    weights[1::3] = 0
    return LabeledSamples(points.float(), labels, ("a", "b", "c", "d"), weights)


def problem(n: int, m: int, group: Ranks | None, **options: Any) -> Problem:
    table = torch.rand(8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    compute = ComputeOptions("cpu", group=group, **options)
    sides = cloud(n, 1), cloud(m, 2)
    return Problem.between(*sides, EPSILON, table + table.T, GroundCost(0.5, 0.7), compute)


def operations(n: int, m: int, term: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """What rank 0 finds, with the others."""
    return led(lambda ranks: _found(ranks, n, m, term, options))


def operations_in_a_ring(n: int, m: int, term: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """The same, where no rank has memory for all points."""
    before, sharing.UNASKED = sharing.UNASKED, 0
    try:
        return operations(n, m, term, options)
    finally:
        sharing.UNASKED = before


def _found(ranks: Ranks, n: int, m: int, term: str, options: dict[str, Any]) -> dict[str, Tensor]:
    whole = problem(n, m, ranks, **options)
    operator = whole.operator(term)
    in_a_ring = sharing.UNASKED == 0
    assert operator.execution.backend.endswith("in a ring") == in_a_ring
    assert ranks.shared.layout == ("ring" if in_a_ring else "replicated")
    rows, columns = len(operator.a), len(operator.b)
    draw = torch.Generator().manual_seed(3)
    f, g = (torch.randn(size, generator=draw, dtype=torch.float64) for size in (rows, columns))
    f = g if term != "xy" else f
    left, right = (torch.randn(size, 2, generator=draw) for size in (rows, columns))
    sums = operator.marginals(f, g, EPSILON)
    applied = operator.apply_plan(f, g, EPSILON, right)
    turned = operator.apply_plan(f, g, EPSILON, left, transposed=True)
    weighted = operator.apply_plan(f, g, EPSILON, right, factors=(left, right))
    back = operator.apply_plan(f, g, EPSILON, left, transposed=True, factors=(left, right))
    near = operator.softmin_rows(g.to(operator.dtype), EPSILON)
    found = {
        "f": operator.softmin_rows(g.to(operator.dtype), EPSILON, near),
        "g": operator.softmin_columns(f.to(operator.dtype), EPSILON, g.to(operator.dtype)),
        "rows": sums.rows,
        "columns": sums.columns,
        "row_errors": sums.row_errors,
        "column_errors": sums.column_errors,
        "numbers": torch.tensor([sums.cost_rounding, sums.relative_error, sums.lost]),
        "P V": applied.values,
        "P 1": applied.masses,
        "P^T U": turned.values,
        "P^T 1": turned.masses,
        "(P o A B^T) V": weighted.values,
        "(P o A B^T)^T U": back.values,
        "expected": operator.expected_costs(operator.b),
        "facts": torch.tensor([operator.costs.mean, operator.costs.error, *operator.costs[2:4]]),
    }
    if term != "xy":
        found["own"] = operator.own_costs()
    over_columns, some = operator.execution.over_columns, torch.arange(0, columns, 3)
    # Scores that are held have no use for it.
    stored = options["memory_budget"] != 0 and not in_a_ring
    assert (over_columns is not None) == (term == "xy" and not stored)
    if over_columns is not None:
        found["f of some"] = over_columns(some, g[some].to(operator.dtype), EPSILON)
    return found


@pairwise(
    size=(2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))),
    way=("kept", "ring", "streamed"),
    shape=SHAPES,
    term=("xy", "yy"),
)
def test_operations_are_their_formulas(
    size: int, shape: tuple[int, int], way: str, term: str
) -> None:
    options = {"precision": "double", "memory_budget": "1GiB" if way == "kept" else 0}
    run = operations_in_a_ring if way == "ring" else operations
    answers = pool(size).run(run, *shape, term, options)
    for name, value in answers[0].items():
        for other in answers[1:]:
            assert torch.equal(value, other[name]), f"ranks disagree on {name}"
    alone = problem(*shape, None, precision="double")
    inputs = alone.inputs(term)
    cost = reference.dense_cost(
        inputs.source.features,
        inputs.target.features,
        0.5,
        0.7 * inputs.class_distances,
        inputs.source.labels,
        inputs.target.labels,
    )
    a, b = inputs.source.masses, inputs.target.masses
    draw = torch.Generator().manual_seed(3)
    f, g = (torch.randn(count, generator=draw, dtype=torch.float64) for count in cost.shape)
    f = g if term != "xy" else f
    left, right = (torch.randn(count, 2, generator=draw).double() for count in cost.shape)
    plan = reference.plan(cost, a, b, f, g, EPSILON)
    held = plan * (left @ right.T)
    expected = {
        "f": reference.softmin_rows(cost, b, g, EPSILON),
        "g": reference.softmin_rows(cost.T, a, f, EPSILON),
        "rows": plan.sum(1),
        "columns": plan.sum(0),
        "P V": plan @ right,
        "P 1": plan.sum(1),
        "P^T U": plan.T @ left,
        "P^T 1": plan.sum(0),
        "(P o A B^T) V": held @ right,
        "(P o A B^T)^T U": held.T @ left,
        "expected": cost @ b,
    }
    if term != "xy":
        expected["own"] = cost.diagonal()
    if "f of some" in answers[0]:
        some = cost[:, ::3]
        expected["f of some"] = reference.softmin_rows(some, b[::3], g[::3], EPSILON)
    for name, value in expected.items():
        assert torch.allclose(answers[0][name], value, rtol=1e-11, atol=1e-12), name
    mean, error, lowest, highest = answers[0]["facts"].tolist()
    assert mean == pytest.approx(float(a @ cost @ b), rel=1e-6)
    support = cost[a > 0][:, b > 0]
    assert lowest <= float(support.min()) + 1e-6
    assert highest >= float(support.max()) - 1e-6
    assert 0 < error < 1e-10


@pytest.mark.slow
def test_what_sums_may_be_off_covers_every_rank() -> None:
    """Errors of columns are the largest of any part; in float32 they are far from those of 0."""
    answers = pool(2).run(operations, 23, 17, "xy", {"precision": "fast", "memory_budget": "1GiB"})
    alone = problem(23, 17, None, memory_budget="1GiB").operator("xy")
    draw = torch.Generator().manual_seed(3)
    f, g = (torch.randn(count, generator=draw, dtype=torch.float64) for count in (23, 17))
    sums = alone.marginals(f, g, EPSILON)
    found = answers[0]
    assert torch.allclose(found["row_errors"], sums.row_errors, rtol=1e-6)
    assert torch.allclose(found["column_errors"], sums.column_errors, rtol=1e-6)
    cost_rounding, relative, lost = found["numbers"].tolist()
    assert cost_rounding == pytest.approx(sums.cost_rounding)
    assert lost == pytest.approx(sums.lost)
    assert relative > 0


def errors_of_columns(wrong: int) -> Tensor:
    """What sums of columns may be off, where those of one rank may be off by more."""

    def work(ranks: Ranks) -> Tensor:
        whole = problem(9, 8, ranks)
        operator = whole.operator("xy")
        ranks.order(_worsen, max(ranks.held), wrong)
        f, g = torch.zeros(9, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
        return operator.marginals(f, g, EPSILON).column_errors

    return led(work)


def _worsen(ranks: Ranks, number: int, wrong: int) -> None:
    part = ranks.held[number].rows.operator
    before = part.marginals

    def worse(*args: Any, **kwargs: Any) -> Any:
        found = before(*args, **kwargs)
        return found._replace(column_errors=found.column_errors + (ranks.rank == wrong))

    part.marginals = worse


def test_columns_may_be_off_by_what_any_rank_says() -> None:
    for wrong in (0, 1):
        for errors in pool(2).run(errors_of_columns, wrong):
            assert bool((errors >= 1).all()), wrong


def ranks_own(count: int) -> tuple[Tensor, Tensor, list[int]]:
    """A tensor put together of shares, one of sums, and what lengths came together."""
    ranks = Ranks()
    own = ranks.share(count)
    gathered = ranks.gathered(torch.arange(2 * count).view(count, 2)[own], count)
    summed = ranks.summed(torch.tensor([2.0**60, 1.0, -(2.0**60)][ranks.rank % 3]).double())
    rows = ranks.concatenated(torch.full((ranks.rank,), ranks.rank))
    return gathered, summed, rows.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_shares_are_put_together_in_the_order_of_ranks(size: int) -> None:
    expected = 0.0
    for rank in range(size):
        expected += [2.0**60, 1.0, -(2.0**60)][rank % 3]
    for count in (0, 1, 7, 12):
        for gathered, summed, rows in pool(size).run(ranks_own, count):
            assert torch.equal(gathered, torch.arange(2 * count).view(count, 2))
            assert float(summed) == expected
            assert rows == [rank for rank in range(size) for _ in range(rank)]


def taken_by_a_gather() -> float:
    """Bytes that putting shares together takes, over those of the whole."""
    ranks = Ranks()
    part = torch.ones(1000, 100)
    return peak(lambda: ranks.gathered(part, 2000), part.device) / (2 * part.nbytes)


def test_equal_shares_come_where_they_belong() -> None:
    """Gloo itself holds all of them once more; NCCL does not."""
    for taken in pool(2).run(taken_by_a_gather):
        assert 1 <= taken <= 2.01


def what_is_held() -> tuple[list[int], list[int]]:
    """Numbers of what a rank holds while an operator lives, and when it is gone."""
    ranks = Ranks()
    found: list[list[int]] = []

    def work() -> None:
        whole = problem(9, 8, ranks)
        operator = whole.operator("xy")
        ranks.order(_count, found)
        del whole, operator
        gc.collect()
        ranks.order(_count, found)

    ranks.led(work)
    return found[0] if found else _COUNTS[-2], found[1] if found else _COUNTS[-1]


_COUNTS: list[list[int]] = []


def _count(ranks: Ranks, found: list[list[int]]) -> None:
    found.append(sorted(ranks.held))
    _COUNTS.append(sorted(ranks.held))


def test_ranks_hold_what_rank_0_does() -> None:
    for held, left in pool(2).run(what_is_held):
        assert len(held) == 3
        assert left == []


def test_parts_lie_where_the_whole_does() -> None:
    """Integers among other points are taken as the others are, so that all parts round alike."""
    points = torch.cat((torch.arange(12.0).view(4, 3), torch.randn(4, 3)))
    samples = LabeledSamples(points, None, ())
    whole = Problem.between(samples, samples, EPSILON)
    cost = whole.inputs("xy").labelled
    integers = Problem.between(points[:4], points[:4], EPSILON).inputs("xy").labelled
    assert lattice_of(integers) is not None
    assert lattice_of(cost) is None
    assert lattice_of(cost.part(slice(0, 4), slice(0, 4))) is None
