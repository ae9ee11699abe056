"""What every way of holding a cost promises, against dense float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import adapter
import pytest
import reference
import torch
from adapter import Held
from pairwise import pairwise
from problems import Case, problem_of
from torch import Tensor

# What a softmin may be off by, over the largest cost and potential and epsilon.
TOLERANCE = {"double": 1e-13, "single": 2e-6}

SHAPES = [(1, 1, 1), (1, 7, 2), (33, 70, 3), (129, 65, 16)]
POINTS = ["random", "duplicates", "equal", "integers", "far from 0", "one far point"]


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for module, name, value in adapter.SMALL:
            patched.setattr(module, name, value)
        yield


cases = pairwise(
    way=list(adapter.WAYS),
    shape=SHAPES,
    points=POINTS,
    classes=[1, 3, None],
    massless=[False, True],
    epsilon=[1e-3, 0.1, 100.0],
    near=[False, True],
    own=[False, True],
)


@pytest.fixture
def case(shape, points, classes, massless, epsilon, near, own) -> Case:
    return Case(shape, points, classes, massless, epsilon, near, own)


@lru_cache(maxsize=256)
def held(way: str, case: Case) -> Held:
    return adapter.held(way, problem_of(case))


def size(one: Held, case: Case) -> float:
    """What rounding is relative to."""
    given = problem_of(case)
    potentials = max(float(side.abs().max()) for side in given.potentials)
    return float(one.cost.abs().max()) + potentials + given.epsilon


def assert_softmin(found: Tensor, expected: Tensor, one: Held, case: Case) -> None:
    atol = TOLERANCE[one.precision] * size(one, case)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@cases
def test_softmin_of_rows(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    _, g = given.potentials
    found = one.softmin_rows(g, given.epsilon)
    expected = reference.softmin_rows(one.cost, given.b, g, given.epsilon)
    assert_softmin(found, expected, one, case)


@cases
def test_softmin_of_columns(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    f, _ = given.potentials
    found = one.softmin_columns(f, given.epsilon)
    expected = reference.softmin_rows(one.cost.T, given.a, f, given.epsilon)
    assert_softmin(found, expected, one, case)


@cases
def test_sums_of_a_plan_are_within_their_errors(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    f, g = given.potentials
    found = one.marginals(f, g, given.epsilon)
    plan = reference.plan(one.exact, given.a, given.b, f, g, given.epsilon)
    errors = found.row_errors[:, None] + found.column_errors + found.cost_rounding * one.exact.abs()
    # Of both plans: the computed one has the errors, too.
    allowed = torch.where(plan > 0, plan * torch.expm1(errors / given.epsilon), 0)
    for sums, axis in ((found.rows, 1), (found.columns, 0)):
        slack = allowed.sum(axis) + (found.relative_error + 1e-12) * (plan + allowed).sum(axis)
        assert bool(((sums - plan.sum(axis)).abs() <= slack + 1e-30).all())
