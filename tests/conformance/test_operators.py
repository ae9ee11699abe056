"""What every way of holding a cost promises, against dense float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import adapter
import pytest
import reference
import torch
from adapter import (
    FILE_KERNELS,
    FILES,
    KERNELS,
    MATRICES,
    MATRIX_KERNELS,
    POINTS,
    RANK_KERNELS,
    RANKS,
)
from allpairspy import AllPairs
from problems import DEVICE, Case, Problem, normal, problem_of
from torch import Tensor

# What a cost may be off by, over the sizes of costs, potentials and epsilon; and products with a
# plan, over the largest that values of one size allow.
COSTS = {"double": 1e-13, "single": 2e-6, "high": 2e-6, "fast": 2e-6, "blocks": 1e-3}
if adapter.DEVICE.type == "cuda":
    # Tensor cores cut sums of products off where others round them: all are too low, and the cost
    # of a point of 300 coordinates far from the others with itself is 3.4e-6 of the largest.
    COSTS["high"] = 4e-6
PRODUCTS = {"double": 1e-12, "single": 4e-6, "high": 4e-6, "fast": 2.0**-9, "blocks": 2.0**-9}

AXES: dict[str, list[Any]] = {
    "shape": [(1, 1, 1), (1, 7, 2), (33, 70, 3), (129, 65, 16)],
    "points": ["random", "duplicates", "equal", "grey", "far from 0", "one far point"],
    "classes": [1, 3, None],
    "massless": [False, True],
    "epsilon": [1e-3, 0.3, 100.0],
    "near": [False, True],
    "own": [False, True],
}
# Points do not matter to a cost that is given, but for its range.
OF_MATRICES = AXES | {
    "points": ["random", "equal", "one far point"],
    "classes": [3],
    "own": [False],
    "matrix": ["", "negative", "forbidden"],
}
FEW = AXES | {
    "points": ["random", "one far point"],
    "shape": [(1, 2, 1), (33, 70, 3)],
    "epsilon": [1e-3, 0.3],
}
# One block and one odd size of every kernel, of labels in pure blocks and in mixed ones.
QUICK = [
    Case((128, 128, 3), "random", 1, massless=True),
    Case((33, 70, 3), "one far point", None, epsilon=0.3, near=False, guess=3.0),
    Case((130, 1, 3), "random", 3, massless=True, own=True),
]
# Operations of kernels take seconds in the interpreter: every value is met once and not with every
# other. Blocks have 128 rows and 256 columns: several of them, and many in one row. Products with
# more than 16 and 128 columns are other ones.
SEVERAL = [
    Case((130, 260, 40), "integers", 3, epsilon=0.3, guess=3.0, columns=20),
    Case((7, 520, 40), "one far point", 1, True, 1e-3, near=False, guess=1e4, columns=1),
    Case((270, 1, 3), "one direction", None, True, 100.0, False, own=True, guess=0.0, columns=1),
    Case((1, 1, 1), "random", epsilon=1e-3, own=True, guess=3.0, columns=150),
]
OF_GIVEN = [
    Case((129, 65, 3), massless=True, epsilon=1e-3, matrix="forbidden"),
    Case((1, 70, 2), "one far point", epsilon=0.3, near=False),
    Case((33, 1, 2), epsilon=100.0, near=False, matrix="negative"),
]
IN_PIECES = [
    Case((33, 40, 3), "one far point", None, epsilon=0.3, near=False, guess=1e4),
    Case((33, 40, 3), "random", 3, True, 1e-3, own=True, guess=0.0),
    Case((1, 2, 1), "random", 1, True, 100.0, near=False),
]
LARGE = AXES | {
    "shape": [(2000, 1700, 128), (1300, 1025, 300), (300, 290, 4096)],
    "points": ["random", "integers", "one far point"],
    "classes": [1, 10, 1000],
}
LARGE_MATRICES = [
    Case((2000, 1700, 128), massless=True, epsilon=1e-3, matrix="forbidden"),
    Case((1300, 1025, 300), epsilon=100.0, near=False, matrix="negative"),
]


def named(rows: Iterable[Any], marks: Iterable[Any], quick: float = math.inf) -> list[Any]:
    return [
        pytest.param(
            *row, marks=marks if k < quick else pytest.mark.slow, id="-".join((row[0], row[1].name))
        )
        for k, row in enumerate(rows)
    ]


def pairs(
    ways: Iterable[str], axes: dict[str, list[Any]], *marks: Any, quick: float = math.inf
) -> list[Any]:
    """Ways with cases in which every two values of different axes meet; the first meet most."""
    rows = AllPairs([list(ways), *axes.values()])
    return named(
        ((way, Case(**dict(zip(axes, row, strict=True)))) for way, *row in rows), marks, quick
    )


def these(ways: Iterable[str], chosen: Iterable[Case], *marks: Any) -> list[Any]:
    """Ways with all of some cases."""
    return named(product(ways, chosen), marks)


ranks = pytest.mark.xdist_group("ranks")
CASES = [
    *pairs(POINTS, AXES, quick=14),
    *pairs(FILES, FEW),
    *pairs(MATRICES, OF_MATRICES, quick=10),
    *these(["fast"], QUICK[:1]),
    *these(["high"], QUICK[1:2]),
    *these(["matrix in rows"], [QUICK[0]._replace(shape=(33, 70, 3), matrix="forbidden")]),
    *these(["matrix in columns"], QUICK[1:2]),
    *these(RANKS, QUICK[1:], ranks),
    *these(KERNELS, SEVERAL, pytest.mark.slow),
    # Rows of one class, and columns of many.
    *these(["fast"], [Case((1, 70, 3), classes=None)], pytest.mark.slow),
    *these(MATRIX_KERNELS, OF_GIVEN, pytest.mark.slow),
    *these(FILE_KERNELS, IN_PIECES, pytest.mark.slow),
    *these(RANKS | RANK_KERNELS, IN_PIECES, ranks, pytest.mark.slow),
    *pairs(KERNELS, LARGE, pytest.mark.gpu),
    *these(MATRIX_KERNELS, LARGE_MATRICES, pytest.mark.gpu),
]
of_all = pytest.mark.parametrize(("way", "case"), CASES)


def all_but(way: str) -> Any:
    """All cases, those of one kernel later: where it takes more than a second."""
    rows = [
        pytest.param(*values, marks=marks or [pytest.mark.slow] * (values[0] == way), id=name)
        for values, marks, name in CASES
    ]
    return pytest.mark.parametrize(("way", "case"), rows)


# Kernels of a cloud with itself: in every commit for what only they do.
OWN = [*these(["high"], QUICK[2:]), *these(["ranks, high"], QUICK[2:], ranks)]
quick = [one.values for one in OWN]
OWN += [one for one in CASES if one.values[1].own and one.values not in quick]
of_own = pytest.mark.parametrize(("way", "case"), OWN)


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for module, name, value in adapter.SMALL:
            patched.setattr(module, name, value)
        yield


@lru_cache(maxsize=256)
def held(way: str, case: Case) -> adapter.Held:
    return adapter.held(way, problem_of(case))


def error(precision: str, given: Problem) -> float:
    """What an exponent times epsilon may be off by."""
    potentials = max(float(side.abs().max()) for side in given.potentials)
    return COSTS[precision] * (given.scale + potentials + given.epsilon)


def assert_softmin(found: Tensor, expected: Tensor, one: adapter.Held, given: Problem) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=error(one.precision, given))


def guess_of(expected: Tensor, case: Case) -> Tensor | None:
    if case.guess is None:
        return None
    draw = torch.Generator().manual_seed(3)
    far = case.guess * problem_of(case).epsilon
    return expected + far * normal(len(expected), draw)


@of_all
def test_softmin_of_rows(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    _, g = given.potentials
    expected = reference.softmin_rows(one.cost, given.b, g, given.epsilon)
    found = one.softmin_rows(g, given.epsilon, guess_of(expected, case))
    assert_softmin(found, expected, one, given)


@of_all
def test_softmin_of_columns(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    f, _ = given.potentials
    expected = reference.softmin_rows(one.cost.T, given.a, f, given.epsilon)
    found = one.softmin_columns(f, given.epsilon, guess_of(expected, case))
    assert_softmin(found, expected, one, given)


@of_own
def test_softmin_of_a_cloud_with_itself(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    f, _ = given.potentials
    draw = torch.Generator().manual_seed(4)
    far = 300 * given.epsilon * normal(len(f), draw)
    for potential in (f, far.float().double()):
        expected = reference.softmin_rows(one.cost, given.a, potential, given.epsilon)
        size = given.scale + float(potential.abs().max()) + given.epsilon
        found, atol = one.softmin_self(potential, given.epsilon), COSTS[one.precision] * size
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@all_but("fast")
def test_sums_of_a_plan_are_within_their_errors(way: str, case: Case) -> None:
    f, g = problem_of(case).potentials
    assert_sums(way, case, f, None if case.own else g)


@pytest.mark.slow
@of_own
def test_sums_of_a_plan_of_a_cloud_with_itself_of_two_potentials(way: str, case: Case) -> None:
    """Whose plan is not symmetric, though its costs are."""
    if held(way, case).precision != "fast":
        f, _ = problem_of(case).potentials
        draw = torch.Generator().manual_seed(5)
        assert_sums(way, case, f, f + problem_of(case).epsilon * normal(len(f), draw))


def assert_sums(way: str, case: Case, f: Tensor, g: Tensor | None) -> None:
    """Without g, of the only potential of a cloud with itself."""
    one, given = held(way, case), problem_of(case)
    # As float32 does not hold them.
    f, g = f * (1 + 1e-9), None if g is None else g * (1 + 1e-9)
    plan = reference.plan(one.exact, given.a, given.b, f, f if g is None else g, given.epsilon)
    if case.massless:
        # Not read where there is no mass.
        f = torch.where(given.a > 0, f, 1e30)
        g = None if g is None else torch.where(given.b > 0, g, 1e30)
    found = one.marginals(f, g, given.epsilon, accurate=case.near)
    assert (found.own_costs is None) == (g is not None)
    sizes = one.exact.where(one.exact.isfinite(), 0).abs()
    errors = found.row_errors[:, None] + found.column_errors + found.cost_rounding * sizes
    # Of both plans: the computed one has the errors, too.
    allowed = torch.where(plan > 0, plan * torch.expm1(errors / given.epsilon), 0)
    for sums, axis in ((found.rows, 1), (found.columns, 0)):
        slack = allowed.sum(axis) + (found.relative_error + 1e-12) * (plan + allowed).sum(axis)
        assert bool(((sums - plan.sum(axis)).abs() <= slack + 1e-30).all())
    carried, units = (each[given.a > 0][:, given.b > 0] for each in (errors, 2.0**-53 * sizes))
    assert bool((carried >= units).all())
    narrow = max(COSTS[one.precision], 1e-12) if one.precision != "blocks" else COSTS["single"]
    assert float(carried.mean()) <= 4 * narrow / COSTS[one.precision] * error(one.precision, given)


@all_but("fast")
def test_products_with_a_plan_and_its_sums(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    f, g = given.potentials_within_reach
    right, left = (given.values(len(side), case.columns) for side in (g, f))
    # Sums are of the numbers that are multiplied, far nearer to each other than to the plan's.
    right = torch.cat((right, torch.ones_like(right[:, :1])), 1)
    for name, plan in one.plans(f, g, given.epsilon).items():
        entries = reference.plan(plan.cost, given.a, given.b, f, g, given.epsilon)
        off = PRODUCTS[plan.precision] + 4 * error(one.precision, given) / given.epsilon
        there, back = plan.times(right), plan.times(left, transposed=True)
        rows, columns = plan.rows[:, None], plan.columns[:, None]
        rounded = plan.precision == "blocks" or (plan.precision == "fast" and plan.weighs)
        near = PRODUCTS["fast"] if rounded else 1e-5
        torch.testing.assert_close(there[:, -1:], rows, rtol=near, atol=1e-30)
        for what, found, weights, values in (
            ("P V", there, entries, right),
            ("P^T U", back, entries.T, left),
            ("P 1", rows, entries, torch.ones_like(right[:, :1])),
            ("P^T 1", columns, entries.T, torch.ones_like(left[:, :1])),
        ):
            allowed = off * weights.sum(1, keepdim=True) * values.abs().amax(0)
            within = (found - weights @ values).abs() <= allowed + 1e-30
            assert bool(within.all()), f"{what} of the plan {name}"


@all_but("high")
def test_products_with_a_plan_whose_entries_are_weighted(way: str, case: Case) -> None:
    """By A B^T, or by A B^T + C D^T, of factors of very different sizes."""
    one, given = held(way, case), problem_of(case)
    f, g = given.potentials_within_reach
    right, left = given.values(len(g), 2), given.values(len(f), 2)
    sizes = ((1e3, 1), (1, 1e3)) if case.near else ((1e3, 1),)
    pairs = tuple((s * given.values(len(f), 4), t * given.values(len(g), 4)) for s, t in sizes)
    for name, plan in one.plans(f, g, given.epsilon).items():
        if not plan.weighs:
            continue
        entries = reference.plan(plan.cost, given.a, given.b, f, g, given.epsilon)
        off = 4 * (PRODUCTS[plan.precision] + error(one.precision, given) / given.epsilon)
        weighted = sum(a @ b.T for a, b in pairs) * entries
        bound = sum(float(a.norm(dim=1).max() * b.norm(dim=1).max()) for a, b in pairs)
        for what, found, weights, sums, values in (
            ("P V", plan.times(right, pairs), weighted, entries.sum(1), right),
            (
                "P^T U",
                plan.times(left, pairs, transposed=True),
                weighted.T,
                entries.sum(0),
                left,
            ),
        ):
            allowed = off * bound * sums[:, None] * values.abs().amax(0)
            within = (found - weights @ values).abs() <= allowed + 1e-30
            assert bool(within.all()), f"{what} of the plan {name}"


@of_all
def test_expected_costs(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    draw = torch.Generator().manual_seed(1)
    masses = torch.rand(len(given.b), generator=draw).double().to(DEVICE)
    expected = one.exact.where(one.exact.isfinite(), 0) @ masses
    atol = COSTS[one.precision] * given.scale * float(masses.sum())
    torch.testing.assert_close(one.expected_costs(masses), expected, rtol=0, atol=atol)


@of_own
def test_own_costs(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    atol = COSTS[one.precision] * max(given.scale, 1e-3)
    torch.testing.assert_close(one.own_costs(), one.exact.diagonal(), rtol=0, atol=atol)


@of_all
def test_what_is_known_of_costs(way: str, case: Case) -> None:
    one, given = held(way, case), problem_of(case)
    finite = one.exact.isfinite()
    known, near = one.facts, COSTS[one.precision] * given.scale
    mean = float(given.a @ one.exact.where(finite, 0) @ given.b)
    assert known.mean == pytest.approx(mean, abs=near)
    carried = one.exact[finite & (given.a > 0)[:, None] & (given.b > 0)]
    lowest, highest = float(carried.min()), float(carried.max())
    if way in MATRICES | MATRIX_KERNELS:
        assert (known.lowest, known.highest) == (lowest, highest)
    # No distance is below 0, and none above twice that from the middle.
    assert lowest - given.scale - near <= known.lowest <= lowest + near
    assert highest - near <= known.highest <= 5 * given.scale + near
    magnitude = float(given.a @ one.exact.where(finite, 0).abs() @ given.b)
    assert (
        2.0**-53 * magnitude <= known.error <= 4 * max(COSTS["single"], near) * (given.scale + 1e-3)
    )
    assert known.forbidden == (not bool(finite.all()))


@of_all
def test_parts(way: str, case: Case) -> None:
    """Some rows and columns in any order, of equal masses; and all rows over some columns."""
    one, given = held(way, case), problem_of(case)
    (n, m), draw = given.cost.shape, torch.Generator().manual_seed(2)
    _, g = given.potentials
    rows, columns = (torch.randperm(k, generator=draw)[: -(-k // 3)].to(DEVICE) for k in (n, m))
    shared = way in RANKS | RANK_KERNELS
    # What lacks pairs tells nothing of the whole; and a sample is rank 0's alone.
    if not (shared or bool(one.exact.isinf().any())):
        part = one.part(rows, columns)
        equal = torch.full_like(g[columns], 1 / len(columns))
        assert torch.equal(part.b, equal)
        expected = reference.softmin_rows(part.cost, equal, g[columns], given.epsilon)
        assert_softmin(part.softmin_rows(g[columns], given.epsilon), expected, one, given)
    # Ranks are asked of two clouds alone.
    if not (shared and case.own):
        found = one.softmin_over(columns, g[columns], given.epsilon)
        expected = reference.softmin_rows(
            one.cost[:, columns], given.b[columns], g[columns], given.epsilon
        )
        there = expected < torch.inf
        assert_softmin(found[there], expected[there], one, given)


@of_all
def test_the_refined_cost_is_that_of_the_points_themselves(way: str, case: Case) -> None:
    one, given = held(way, case).refined(), problem_of(case)
    _, g = given.potentials
    expected = reference.softmin_rows(one.exact, given.b, g, given.epsilon)
    assert_softmin(one.softmin_rows(g, given.epsilon), expected, one, given)
    assert one.refined() is one
