"""The points of many classes as kernels read them: what a host asks for, and in what groups."""

from __future__ import annotations

import operation_counts
import pytest
import torch

from otdd_flash.engine.segments import WeightedPoints
from otdd_flash.operators import class_pool
from otdd_flash.operators.class_pool import ClassPool

# Sums of a class are its own, so that they round as if it were alone; all else is of many.
MOST_OF_A_CLASS = 18


def clouds(count: int, dtype: torch.dtype = torch.float32) -> list[WeightedPoints]:
    draw = torch.Generator().manual_seed(count)
    made = []
    for k in range(count):
        points = torch.randn(k % 9 + 1, 13, generator=draw) * 10.0 ** (k % 5 - 2) + 5
        if k % 7 == 0:
            points = points.round()
        if k % 11 == 0:
            points[:] = points[:1]
        masses = torch.rand(len(points), generator=draw).double() + 0.1
        made.append(WeightedPoints(points.to(dtype), masses / masses.sum()))
    return made


def contents(pool: ClassPool) -> list[torch.Tensor]:
    facts = (pool.starts, pool.sizes, pool.mean_distances, pool.variances, pool.units)
    return [*facts, pool.norms, pool.drifts, pool.squares, *pool.pool]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("together", [1, 150, 400])
def test_groups_change_nothing(
    together: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each class by itself, a few, or more at a time."""
    many = clouds(40, dtype)
    expected = contents(ClassPool(many))
    monkeypatch.setattr(class_pool, "TOGETHER", together)
    for value, other in zip(contents(ClassPool(many)), expected, strict=True):
        assert torch.equal(value, other)


def test_facts_are_those_of_a_class_alone() -> None:
    many = clouds(40)
    pool = ClassPool(many)
    for place in (0, 7, 11, 39):
        alone = ClassPool([many[place]])
        for name in ("variances", "units", "norms", "drifts"):
            assert torch.equal(getattr(pool, name)[place], getattr(alone, name)[0])


def test_a_class_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = operation_counts.OperationCounts(monkeypatch)
    found = []
    for count in (20, 60):
        many, before = clouds(count), counts.operations
        with counts:
            ClassPool(many)
        found.append(counts.operations - before)
    assert found[1] - found[0] <= 40 * MOST_OF_A_CLASS
