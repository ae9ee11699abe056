"""Plans of many small problems against float64 loops, their autograd, and exact intervals."""

from __future__ import annotations

import math
from itertools import product

import pytest
import reference
import torch
import triton
import triton.language as tl
from tiers import slow
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.kernels.batched.tiles import load_masses

BACKENDS = ("torch", "triton")
GRADIENTS = ("implicit", "unrolled")
WHICH = ("all", "plans", "f", "value")


@triton.jit
def loaded_masses_kernel(masses_ptr, loaded_ptr, count, n, N: tl.constexpr, BATCH: tl.constexpr):
    """Store the masses of rows (N, BATCH) that a program loads."""
    o_batch, o_row = tl.arange(0, BATCH)[None, :], tl.arange(0, N)[:, None]
    m_row = (o_row < n) & (o_batch >= 0)
    loaded = load_masses(masses_ptr, o_batch, o_row, count, m_row, n, tl.float64)
    tl.store(loaded_ptr + o_row * BATCH + o_batch, loaded)


def on(backend: str) -> otdd.ComputeOptions:
    return otdd.ComputeOptions("cpu", backend=backend)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=draw, dtype=torch.float64)


def masses(*shape: int, seed: int = 1) -> Tensor:
    given = drawn(*shape, seed=seed) + 0.1
    return given / given.sum(-1, keepdim=True)


def problems(
    n: int, m: int, count: int = 4, least: float = 0.2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    epsilon = torch.linspace(least, 1, count, dtype=torch.float64)
    return drawn(count, n, m), masses(count, n), masses(count, m, seed=2), epsilon


def solved(costs: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, iterations: Tensor | int):
    """Plans, shifted potentials and values, one problem at a time, differentiable."""
    found = []
    for k in range(len(costs)):
        made = int(iterations if isinstance(iterations, int) else iterations[k])
        p, f, g = reference.entropic_plan(costs[k], a[k], b[k], epsilon[k], made)
        mean = b[k] @ g
        found.append((p, f + mean, g - mean, a[k] @ f + b[k] @ g))
    return tuple(torch.stack(part) for part in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        *(((n, m), "torch") for n, m in ((1, 1), (5, 4))),
        *(((n, m), "triton") for n, m in ((4, 4), (3, 7))),
        *(pytest.param((64, 128), backend, marks=pytest.mark.slow) for backend in BACKENDS),
    ],
)
def test_a_loop_of_each_problem(shape: tuple[int, int], backend: str) -> None:
    costs, a, b, epsilon = problems(*shape)
    found = otdd.sinkhorn_plans(costs, a, b, epsilon=epsilon, tolerance=1e-6, compute=on(backend))
    expected = solved(costs, a, b, epsilon, found.iterations)
    for mine, true in zip((found.plans, found.f, found.g, found.value), expected, strict=True):
        assert torch.allclose(mine, true, atol=1e-13)
    errors = (expected[0].sum(2) - a).abs().sum(1)
    assert torch.allclose(found.marginal_error, errors, atol=1e-14)
    assert found.converged.all()
    before = solved(costs, a, b, epsilon, (found.iterations - 1).clamp_min(1))[0]
    late = (before.sum(2) - a).abs().sum(1) > 1e-6
    assert (late | (found.iterations == 1)).all()


@pytest.mark.parametrize(
    ("which", "gradient", "backend"),
    [
        *product(WHICH, GRADIENTS, ["torch"]),
        *(pytest.param("all", way, "triton", marks=pytest.mark.slow) for way in GRADIENTS),
    ],
)
def test_gradients(gradient: str, which: str, backend: str) -> None:
    inputs = tuple(given.requires_grad_() for given in problems(3, 7, 2, least=0.5))
    costs, a, b, epsilon = inputs
    found = otdd.sinkhorn_plans(
        costs, a, b, epsilon=epsilon, gradient=gradient, compute=on(backend),
        tolerance=1e-12 if gradient == "implicit" else 1e-2,
    )  # fmt: skip
    iterations = 40 if gradient == "implicit" else found.iterations
    expected = solved(*inputs, iterations)
    names = ("plans", "f", "g", "value")
    both = [
        sum(
            (part * drawn(*part.shape, seed=9 + place)).sum()
            for place, part in enumerate(parts)
            if which in ("all", names[place])
        )
        for parts in ((found.plans, found.f, found.g, found.value), expected)
    ]
    mine, true = (torch.autograd.grad(one, inputs) for one in both)
    for one, other in zip(mine, true, strict=True):
        if gradient == "implicit" and one.ndim == 2:
            # Masses move along the simplex.
            one, other = (part - part.mean(1, keepdim=True) for part in (one, other))
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("gradient", "backend"),
    [
        ("implicit", "torch"),
        ("unrolled", "torch"),
        *(pytest.param(way, "triton", marks=pytest.mark.slow) for way in GRADIENTS),
    ],
)
def test_a_point_without_mass_has_the_potential_of_a_softmin(gradient: str, backend: str) -> None:
    costs, a, b, epsilon = problems(4, 5, 2, least=0.5)
    a[0, 2] = b[1, 3] = 0
    a, b = (given / given.sum(1, keepdim=True) for given in (a, b))
    leaf = costs.clone().requires_grad_()
    found = otdd.sinkhorn_plans(
        leaf, a, b, epsilon=epsilon, tolerance=1e-12, gradient=gradient, compute=on(backend)
    )
    assert (found.plans[0, 2] == 0).all()
    # Of the problem without it, the potential is a function of the others'.
    f = reference.softmin_rows(costs[0], b[0], found.g[0], 0.5)
    assert torch.allclose(found.f[0], f, atol=1e-11)
    (mine,) = torch.autograd.grad(found.f[0, 2] + found.g[1, 3], leaf)
    other = costs.clone().requires_grad_()
    lightest = [given.clamp_min(1e-300) for given in (a, b)]
    expected = solved(other, *lightest, epsilon, 40)
    (true,) = torch.autograd.grad(expected[1][0, 2] + expected[2][1, 3], other)
    assert torch.allclose(mine, true, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_leave_the_rest_without_influence(backend: str) -> None:
    costs, _, _, epsilon = problems(5, 6)
    sizes = torch.tensor([[5, 6], [2, 3], [1, 4], [4, 1]])
    spoiled = costs.clone()
    for k, (n, m) in enumerate(sizes.tolist()):
        spoiled[k, n:], spoiled[k, :, m:] = math.nan, -math.inf
    leaf = spoiled.clone().requires_grad_()
    found = otdd.sinkhorn_plans(
        leaf, epsilon=epsilon, sizes=sizes, tolerance=1e-8, compute=on(backend)
    )
    (gradient,) = torch.autograd.grad(found.plans.square().sum() + found.value.sum(), leaf)
    for k, (n, m) in enumerate(sizes.tolist()):
        part = costs[k, None, :n, :m].clone().requires_grad_()
        alone = otdd.sinkhorn_plans(part, epsilon=epsilon[k, None], tolerance=1e-8)
        assert torch.allclose(found.plans[k, :n, :m], alone.plans[0], atol=1e-12)
        assert torch.allclose(found.f[k, :n], alone.f[0], atol=1e-12)
        assert torch.allclose(found.value[k], alone.value[0])
        assert (found.bounds[k, 0] <= alone.bounds[0, 1]) & (
            found.bounds[k, 1] >= alone.bounds[0, 0]
        )
        assert found.plans[k, n:].abs().sum() + found.plans[k, :, m:].abs().sum() == 0
        expected = torch.autograd.grad(alone.plans.square().sum() + alone.value.sum(), part)[0]
        assert torch.allclose(gradient[k, :n, :m], expected[0], atol=1e-9)
        assert gradient[k, n:].abs().sum() + gradient[k, :, m:].abs().sum() == 0


@pytest.mark.parametrize(
    ("dtype", "iterations"),
    [(torch.float16, 200), (torch.float32, 1), (torch.float32, 200), (torch.float64, 4)],
)
def test_intervals_hold_the_exact_value(dtype: torch.dtype, iterations: int) -> None:
    costs, a, b, epsilon = problems(6, 5)
    given = costs.to(dtype)
    # Masses that are rounded to 11 bits do not sum to 1.
    a, b = (part.to(torch.promote_types(dtype, torch.float32)) for part in (a, b))
    found = otdd.sinkhorn_plans(given, a, b, epsilon=0.1 * epsilon, max_iterations=iterations)
    for k in range(len(costs)):
        mine = [part[k].double() / part[k].double().sum() for part in (a, b)]
        value, *_ = reference.entropic_transport(given[k].double(), *mine, 0.1 * float(epsilon[k]))
        lower, upper = found.bounds[k].tolist()
        assert lower <= value <= upper
        assert lower <= float(found.value[k]) <= upper
    if iterations == 200 and dtype != torch.float16:
        assert ((found.bounds[:, 1] - found.bounds[:, 0]) < 1e-3 * found.value.double()).all()


@pytest.mark.parametrize("backend", ["torch", *slow(["triton"])])
def test_points_without_mass_may_have_entries_beyond_any_float(backend: str) -> None:
    """Columns bound entries by 1 / a_i, and nothing does where a_i is 0."""
    costs, a, b = drawn(3, 9, 4, seed=5).float().mT.contiguous(), torch.ones(4), torch.ones(9)
    a[0] = b[7] = 0
    a, b = a / a.sum(), b / b.sum()
    found = otdd.sinkhorn_plans(costs, a, b, epsilon=5e-3, max_iterations=20, compute=on(backend))
    for part in (found.plans, found.f, found.g):
        assert part.isfinite().all()
    errors = (found.plans.sum(2) - a).abs().sum(1)
    assert torch.allclose(found.marginal_error, errors, atol=1e-5)
    inner = costs[:, a > 0][:, :, b > 0].double()
    masses = [part / part.sum() for part in (a[a > 0].double(), b[b > 0].double())]
    for k in range(3):
        value, *_ = reference.entropic_transport(inner[k], *masses, 5e-3)
        assert found.bounds[k, 0] <= value <= found.bounds[k, 1]


@pytest.mark.parametrize(
    ("iterations", "backend"),
    [(100, "torch"), (10, "triton")],
)
def test_a_problem_gets_the_same_bits_among_any_others(iterations: int, backend: str) -> None:
    costs, a, b, epsilon = (given.float() for given in problems(3, 5, 9))
    epsilon[2], costs[2] = 0.001, 3 * costs[2]
    options = {"max_iterations": iterations, "compute": on(backend)}
    found = otdd.sinkhorn_plans(costs, a, b, epsilon=epsilon, **options)
    for part in (slice(0, 1), slice(1, 4)):
        alone = otdd.sinkhorn_plans(costs[part], a[part], b[part], epsilon=epsilon[part], **options)
        assert torch.equal(alone.plans, found.plans[part])
        assert torch.equal(alone.iterations, found.iterations[part])


@pytest.mark.parametrize("backend", ["torch", *slow(["triton"])])
def test_forbidden_pairs_get_nothing(backend: str) -> None:
    costs, a, b, epsilon = problems(3, 4, 2)
    costs[0, 1, :3] = math.inf
    a[0] = torch.tensor([0.5, 0.1, 0.4])
    leaf = costs.clone().requires_grad_()
    found = otdd.sinkhorn_plans(leaf, a, b, epsilon=epsilon, tolerance=1e-10, compute=on(backend))
    assert (found.plans[0, 1, :3] == 0).all()
    assert torch.allclose(found.plans.sum(2), a, atol=1e-9)
    (gradient,) = torch.autograd.grad(found.plans.square().sum(), leaf)
    assert gradient.isfinite().all()
    assert (gradient[0, 1, :3] == 0).all()


HALF = torch.full((2,), 0.5)

# x = {0, 10} and y = {1, 10}: any f1 - f2 in [-40, 50] is optimal once the exchange of
# exp(-45 / epsilon) is below rounding.
APART = torch.tensor([[0.5, 50.0], [40.5, 0.0]]).double()
OPEN = "not determined"


@pytest.mark.parametrize("backend", ["torch", *slow(["triton"])])
@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.float64, 0.5), (torch.float32, 2.0)])
def test_potentials_of_a_plan_that_falls_apart_are_reported(
    dtype: torch.dtype, epsilon: float, backend: str
) -> None:
    """Updates in another order end elsewhere, at the same plan; the other problems are whole."""
    costs = torch.stack((0.02 * APART, APART, APART)).to(dtype)
    given = {"epsilon": epsilon, "tolerance": 1e-5, "compute": on(backend)}
    found = otdd.sinkhorn_plans(costs, **given)
    other = otdd.sinkhorn_plans(costs.mT.contiguous(), **given)
    # Nothing is said of what is unique.
    assert torch.allclose(found.plans, other.plans.mT, atol=2e-5)
    assert torch.allclose(found.value, other.value, atol=1e-3)
    assert found.bounds.isfinite().all()
    with pytest.warns(otdd.NotConvergedWarning, match=OPEN) as told:
        f = found.f
    # Said once, for both sides.
    _ = found.g
    assert len(told) == 1
    assert str(told[0].message).startswith("potentials of problem 1 are not determined")
    assert "may move by anything in [-45, 45]" in str(told[0].message)
    with pytest.warns(otdd.NotConvergedWarning, match=OPEN):
        g = other.g
    difference = (f[:, 0] - f[:, 1]) - (g[:, 0] - g[:, 1])
    assert abs(difference[0]) < 0.05
    assert abs(difference[1]) > 0.4


def test_gradients_by_masses_that_fall_apart_are_reported_before_the_first_result() -> None:
    halves = HALF.double().requires_grad_()
    with pytest.warns(otdd.NotConvergedWarning, match=f"gradients by masses are {OPEN}"):
        otdd.sinkhorn_plans(APART[None], halves, epsilon=0.5)
    with torch.no_grad():
        _ = otdd.sinkhorn_plans(APART[None], halves, epsilon=0.5).plans
    # Those by costs alone, and of the iterations made, are what they are.
    _ = otdd.sinkhorn_plans(APART[None].requires_grad_(), epsilon=0.5).plans
    _ = otdd.sinkhorn_plans(APART[None], halves, epsilon=0.5, gradient="unrolled").value
    _ = otdd.sinkhorn_plans(0.1 * APART[None], halves, epsilon=0.5).value


def test_forbidden_pairs_masses_of_zero_and_sizes_hide_no_groups() -> None:
    costs = torch.full((3, 5, 6), math.inf, dtype=torch.float64)
    costs[:, :2, :2], costs[:, 2:4, 2:4] = drawn(2, 2), drawn(2, 2, seed=1)
    costs[:, 4], costs[:, :, 4:] = 0.5, 0.5
    sizes = torch.tensor([[5, 4], [4, 4], [4, 2]])
    costs[2, 2:4, :2] = 0.0
    with pytest.warns(otdd.NotConvergedWarning, match=r"problem 1 .*\[-inf, inf\].* more pairs"):
        # The last row of the first problem ties both groups, and the third one has two columns.
        _ = otdd.sinkhorn_plans(costs, epsilon=1.0, sizes=sizes).f
    quarters = torch.tensor([0.25] * 4 + [0.0] * 2).double()
    with pytest.warns(otdd.NotConvergedWarning, match=r"2 rows \(2, 3\) and the other 2 rows"):
        _ = otdd.sinkhorn_plans(costs[:1], quarters[:5], quarters, epsilon=1.0).f


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plans_that_are_tied_by_little_are_not_reported(dtype: torch.dtype) -> None:
    """Two groups that exchange a few times the share at which rounding matters, and a chain."""
    shares = {torch.float64: 1e-11, torch.float32: 2e-3}
    pair = -torch.tensor([[0.0, math.log(shares[dtype])], [math.log(shares[dtype]), 0.0]])
    chain = 3.0 * (torch.arange(30)[:, None] - torch.arange(30)).abs()
    for costs in (pair.repeat_interleave(4, 0).repeat_interleave(4, 1), chain):
        _ = otdd.sinkhorn_plans(costs[None].to(dtype), epsilon=1.0).f


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        (torch.zeros(2, 2), {}, r"\(B, n, m\), got shape \(2, 2\); pass costs\[None\] of one"),
        (torch.zeros(1, 129, 2), {}, "129 x 2 each, and a batch takes up to 128"),
        (torch.zeros(1, 2, 2, dtype=torch.int32), {}, "got torch.int32; convert"),
        (torch.zeros(3, 2, 2), {"a": torch.ones(3)}, r"a must have shape \(2,\) or \(3, 2\), got"),
        (torch.zeros(3, 2, 2), {"b": 2 * HALF}, "b must not be negative and must sum to 1"),
        (torch.zeros(3, 2, 2), {"a": torch.tensor([-0.5, 1.5])}, "a must not be negative"),
        (torch.zeros(3, 2, 2), {"a": torch.tensor([1, 0])}, "a must be of a floating type"),
        (torch.full((1, 2, 2), math.nan), {}, "costs must not be NaN or -inf"),
        (torch.full((1, 2, 2), math.inf), {}, "forbid all pairs with mass of a row"),
        (torch.zeros(3, 2, 2), {"epsilon": torch.ones(2)}, r"shape \(\) or \(3,\), .* got"),
        (torch.zeros(3, 2, 2), {"epsilon": -1.0}, "epsilon must be positive and finite"),
        (torch.zeros(3, 2, 2), {"epsilon": torch.tensor(0.0)}, "epsilon must be positive, and"),
        (torch.zeros(1, 2, 2), {"epsilon": 1e-39}, r"within 2\^-126 and 2\^126 unless costs"),
        (torch.zeros(1, 2, 2), {"epsilon": 1e39}, "or give float64 costs"),
        (torch.zeros(1, 2, 2), {"sizes": torch.ones(1, 2)}, r"integers of shape \(1, 2\)"),
        (torch.zeros(1, 2, 2), {"sizes": torch.tensor([[3, 1]])}, r"between 1 and \(2, 2\)"),
    ],
)
def test_what_is_refused(costs: Tensor, options: dict[str, object], message: str) -> None:
    with pytest.raises(otdd.InputError, match=message):
        otdd.sinkhorn_plans(costs, **{"epsilon": 1.0, **options})


@pytest.mark.parametrize("n", [3, 7])
def test_matrices_that_fill_up_a_program_have_one_mass_whatever_their_size(n: int) -> None:
    """Else those of unequal sides had no plan, and went on to the last iteration."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = (masses(2, n) / masses(2, n).sum(1, keepdim=True)).to(device)
    loaded = torch.empty(8, 4, dtype=torch.float64, device=device)
    loaded_masses_kernel[(1,)](given, loaded, 2, n, 8, 4)
    assert torch.equal(loaded[:n, :2], given.T)
    assert loaded.sum(0).tolist() == pytest.approx([1.0] * 4)
