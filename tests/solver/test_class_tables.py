"""Tables of class distances as no metric has them: asymmetric, negative, far from 0."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from pairwise import pairwise
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.schedules import Converged

CLASSES = 3
LABELS = {"x": torch.arange(33) % CLASSES, "y": torch.arange(27) % CLASSES}
DOUBLE = otdd.ComputeOptions("cpu", precision="double")
COMPUTE = {
    "double": DOUBLE,
    "stored": otdd.ComputeOptions("cpu", precision="high"),
    "streamed": otdd.ComputeOptions("cpu", precision="high", memory_budget=0),
    # On a GPU, else in the interpreter.
    "triton": otdd.ComputeOptions("auto", "triton"),
}


def cloud(side: str) -> LabeledSamples:
    """Points on a grid of 1/16, and masses that are not equal."""
    labels = LABELS[side]
    generator = torch.Generator().manual_seed(ord(side))
    points = torch.randint(-32, 32, (len(labels), 3), generator=generator) / 16
    weights = torch.rand(len(labels), generator=generator) + 0.2
    return LabeledSamples(points, labels, ("a", "b", "c"), weights)


def symmetric_table(seed: int = 0, scale: float = 1.0) -> Tensor:
    """Multiples of 1/16 times the scale, which float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 32, (2 * CLASSES, 2 * CLASSES), generator=generator).double()
    return scale * (drawn + drawn.T) / 16


def with_entry(table: Tensor, row: int, column: int, by: float) -> Tensor:
    """The table with one entry raised."""
    moved = table.clone()
    moved[row, column] += by
    return moved


def by_divergence(table: Tensor, **settings: Any) -> Divergence:
    settings = {"compute": DOUBLE, "epsilon": 2.0, **settings}
    return otdd.sinkhorn_divergence(cloud("x"), cloud("y"), class_table=table, **settings)


def by_loss(table: Tensor, **settings: Any) -> Tensor:
    """With a gradient by the table."""
    x, y = cloud("x"), cloud("y")
    leaf = table.clone().requires_grad_()
    loss = otdd.sinkhorn_loss(
        *(x.features, y.features, x.masses, y.masses),
        **{"epsilon": 2.0, "compute": DOUBLE, **settings},
        labels_x=x.labels,
        labels_y=y.labels,
        class_table=leaf,
    )
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


TABLE = symmetric_table()
REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: by_divergence(with_entry(1e-9 * TABLE, 0, 2, 0.25e-9)),
        r"\[x, x\] of class_table must be symmetric, but differ by 2\.5e-10 from",
    ),
    (
        lambda: by_divergence(with_entry(1e9 * TABLE, 5, 4, 0.25e9)),
        r"\[y, y\] of class_table must be symmetric, but differ by 2\.5e\+08 from",
    ),
    (lambda: by_loss(with_entry(TABLE, 5, 4, 0.25)), r"\[y, y\] of class_table .* by 0\.25 from"),
    (
        lambda: by_divergence(TABLE[torch.tensor([1, 0, 2, 3, 4, 5])]),
        r"debias=False, which reads the block \[x, y\] alone",
    ),
    (
        lambda: otdd.sinkhorn_divergence(
            *[cloud("x")] * 2,
            epsilon=0.5,
            class_table=with_entry(TABLE, 0, 1, 1.0)[:CLASSES, :CLASSES].repeat(2, 2),
        ),
        r"\[x, x\] of class_table must be symmetric",
    ),
]


@pytest.mark.parametrize(("solve", "message"), REFUSED)
def test_an_asymmetric_self_block_is_refused_before_any_work(
    solve: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AssertionError("never to be called")

    monkeypatch.setattr("otdd_flash.operators.comparison.build_operator", fails)
    with pytest.raises(InputError, match=message):
        solve()


def test_what_is_not_read_may_be_anything() -> None:
    """The block [y, x] always, both self blocks without debiasing."""
    table = symmetric_table()
    lower = with_entry(table, 4, 1, 5.0)
    assert by_divergence(lower).value == by_divergence(table).value
    odd = with_entry(with_entry(table, 0, 1, 3.0), 3, 4, 5.0)
    expected = by_divergence(table, debias=False).value
    assert by_divergence(odd, debias=False).value == expected
    clouds = cloud("x"), cloud("y")
    cross = otdd.sinkhorn(*clouds, epsilon=2.0, class_table=odd, compute=DOUBLE)
    assert cross.value == expected
    torch.testing.assert_close(by_loss(odd, debias=False), by_loss(table, debias=False))


@pytest.mark.slow
def test_an_asymmetry_of_rounding_is_averaged_out() -> None:
    table = symmetric_table()
    rounded = with_entry(with_entry(table, 0, 1, 1e-5), 4, 5, -1e-5)
    found, transposed = (by_divergence(one) for one in (rounded, rounded.T))
    mean = by_divergence((rounded + rounded.T) / 2)
    assert found.xx is not None
    assert found.xx.value == mean.xx.value == transposed.xx.value
    assert found.xx.value != by_divergence(table).xx.value
    assert found.yy.value == mean.yy.value == transposed.yy.value
    gradient = by_loss(rounded)
    for block in (gradient[:CLASSES, :CLASSES], gradient[CLASSES:, CLASSES:]):
        assert torch.equal(block, block.T)
    given = otdd.ClassDistances.from_full(rounded, CLASSES)
    assert torch.equal(given.xx, given.xx.T)
    assert given.xx[0, 1] == pytest.approx(float(rounded[0, 1] + rounded[1, 0]) / 2, abs=1e-15)


def shifted(by: float, of_each: Tensor | None = None) -> Tensor:
    """Every distance lower by as much, or by a share of it for each."""
    return symmetric_table() - (by if of_each is None else by * of_each)


# Some pairs of classes, those between the two sides, and every pair by another share.
SOME = torch.randint(0, 2, (2 * CLASSES,) * 2, generator=torch.Generator().manual_seed(3))
SOME = (SOME + SOME.T).clamp_max(1)
SIDE = torch.arange(2 * CLASSES) >= CLASSES
TABLES = {
    "all": shifted,
    "some": lambda by: shifted(by, SOME),
    "cross": lambda by: shifted(by, SIDE[:, None] != SIDE),
    "spread": lambda by: shifted(by, symmetric_table(seed=1) / 4),
    "raised": lambda by: shifted(-by),
}


def dense_cost(term: str, table: Tensor) -> Tensor:
    """C of a term at lambda_x = lambda_y = 1/2; exact, as all inputs are multiples of 1/16."""
    spans = {"x": slice(0, CLASSES), "y": slice(CLASSES, None)}
    x, y = (cloud(side) for side in term)
    block = table[spans[term[0]], spans[term[1]]] / 2
    return reference.dense_cost(x.features, y.features, 0.5, block, x.labels, y.labels)


def truth(term: str, table: Tensor, epsilon: float) -> float:
    """OT_epsilon in float64, of costs from 0 up, so that an offset is rounded once."""
    cost = dense_cost(term, table)
    lowest = cost.min()
    a, b = (cloud(side).masses for side in term)
    return reference.entropic_transport(cost - lowest, a, b, epsilon)[0] + float(lowest)


def assert_proved(divergence: Divergence, table: Tensor, epsilon: float) -> None:
    """The float64 optimum is in the bounds of every term, and the plan no worse than it says."""
    for name, term in divergence.terms.items():
        cost = dense_cost(name, table)
        a, b = (cloud(side).masses for side in name)
        value = truth(name, table, epsilon)
        # What the reference itself rounds, or leaves open.
        slack = 4 * torch.finfo(torch.float64).eps * float(cost.abs().max()) + 1e-12
        lower, upper = term.bounds
        assert lower <= upper, f"{name}: {term.bounds}"
        assert lower - slack <= value <= upper + slack, f"{name}: {value} in {term.bounds}"
        f, g = (potential.cpu() for potential in (term.f, term.g))
        gap = (reference.plan(cost, a, b, f, g, epsilon).sum(0) - b).abs().sum()
        assert float(gap) <= term.marginal_error + slack / epsilon


def solved_or_refused(table: Tensor, **settings: Any) -> Divergence | str:
    """The divergence, or the sentence that refuses it."""
    try:
        return by_divergence(table, **settings)
    except InputError as error:
        return str(error)


@pytest.mark.slow(after=2)
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
@pairwise(
    name=TABLES,
    by=[1e3, 1e4, 1e6],
    epsilon=[1.0, 1e3, 1e6],
    compute=["double", "stored", "streamed"],
)
def test_bounds_hold_for_entries_far_from_0(
    name: str, by: float, epsilon: float, compute: str
) -> None:
    """Or float32 cannot hold them: it resolves costs of 5e5 to 0.03."""
    if name in ("some", "spread"):
        # Beyond this the reference does not converge.
        by = min(by, 1e4 * epsilon)
    table, options = TABLES[name](by), Converged(max_iterations=60)
    found = solved_or_refused(table, epsilon=epsilon, options=options, compute=COMPUTE[compute])
    if isinstance(found, str):
        assert compute != "double", found
        assert by / epsilon >= 1e3, found
        assert re.search("raise epsilon|precision=double", found)
    else:
        assert_proved(found, table, epsilon)


@pytest.mark.parametrize("precision", ["high", "double"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_entries_that_overflow_are_refused_in_one_sentence(precision: str, sign: int) -> None:
    largest = torch.finfo(torch.float64 if precision == "double" else torch.float32).max
    for size, epsilon in ((largest, 1.0), (largest, largest / 8), (largest / 100, largest / 100)):
        table = torch.full((2 * CLASSES, 2 * CLASSES), sign * size, dtype=torch.float64)
        compute = otdd.ComputeOptions("cpu", precision=precision)
        found = solved_or_refused(table, epsilon=epsilon, compute=compute)
        if isinstance(found, str):
            assert re.search("overflow|too (small|tight)", found)
        else:
            assert size < largest
            assert all(math.isfinite(end) for end in found.bounds)
            assert found.bounds[0] <= found.bounds[1]


@pytest.mark.slow(after=1)
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.NotConvergedWarning")
@pytest.mark.parametrize(
    ("compute", "height"),
    [
        ("stored", 70.3),
        ("double", 20.1),
        ("double", 6_000.9),
        ("streamed", 700.7),
        ("triton", 70.3),
    ],
)
def test_a_plan_that_starts_with_hardly_any_mass_proves_no_more_than_it_has(
    compute: str, height: float
) -> None:
    """All costs are one: OT is that cost, and a plan of potential f has the mass e^(2 f - cost)."""
    x = LabeledSamples(torch.zeros(7, 2), torch.zeros(7, dtype=torch.int64), ("a",))
    table = torch.tensor([[height, height + 1], [height + 1, height]], dtype=torch.float64)
    found = otdd.sinkhorn_divergence(
        x,
        x.take(torch.arange(5)),
        epsilon=1.0,
        class_table=table,
        cost=otdd.GroundCost(1.0, 1.0),
        options=Converged(max_iterations=1),
        compute=COMPUTE[compute],
    )
    for name in ("xx", "yy"):
        term = found.terms[name]
        assert term.bounds[0] <= height <= term.bounds[1]
        masses = (2 * term.f.double() - height).exp()
        assert float((masses.mean() - 1).abs()) <= term.marginal_error
