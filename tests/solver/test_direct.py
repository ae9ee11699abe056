"""Linear systems of small plans that are decomposed, against pseudo-inverses and differences."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from pairwise import pairwise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import otdd_flash as otdd
from otdd_flash import CGOptions, ComputeOptions, Converged, NotConvergedWarning
from otdd_flash.operators import memory
from otdd_flash.operators.plan import KeptPlan
from otdd_flash.solver import direct
from otdd_flash.solver.dense_plan import dense_plan
from otdd_flash.solver.direct import Cholesky
from otdd_flash.solver.hessian import DivergenceCurvature
from otdd_flash.solver.schur import SchurSystem, SelfSystem, Solution, Solver, solve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON, CLASSES = 0.6, 3
EXACT, TIGHT = Converged(tolerance=1e-12), CGOptions(tolerance=1e-12)

# One iteration is not enough for anything: what converges was solved without.
ONE = CGOptions(tolerance=1e-9, max_iterations=1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def masses(n: int, seed: int, *, zeros: bool = False) -> Tensor:
    found = drawn(n, seed=seed).sigmoid() + 0.1
    if zeros and n > 2:
        found[:: n // 2] = 0
    return found / found.sum()


def plan(n: int, m: int, *, spread: float = 2.0, zeros: bool = False) -> Tensor:
    entries = (spread * drawn(n, m)).exp()
    if zeros and n > 1 and m > 1:
        entries[n // 2], entries[:, m // 2] = 0, 0
    return entries / entries.sum()


def schur(entries: Tensor, damping: float = 0.0) -> Tensor:
    r, c = entries.sum(1), entries.sum(0)
    per_row = torch.where(r > 0, 1 / r, 0)
    return (1 + damping) * c.diag() - entries.T @ (per_row[:, None] * entries)


def less_constants(values: Tensor, c: Tensor) -> Tensor:
    """Solutions that sum to 0 over the masses, and are 0 where there is none."""
    return torch.where(c[:, None] > 0, values - (c @ values) / c.sum(), 0)


def solved(entries: Tensor, right: Tensor, cg: CGOptions = ONE, *, own: bool = False) -> Solution:
    system: Any = (SelfSystem if own else SchurSystem)(KeptPlan(entries), cg.damping)
    return solve(system, system, right, cg)


@pairwise(
    shape=[(1, 1), (1, 9), (9, 1), (20, 20), (30, 20), (20, 30)],
    zeros=[False, True],
    damping=[0.0, 0.1],
    count=[1, 7],
)
def test_cross_systems(shape: tuple[int, int], zeros: bool, damping: float, count: int) -> None:
    entries = plan(*shape, zeros=zeros)
    matrix, c = schur(entries, damping), entries.sum(0)
    right = matrix @ drawn(shape[1], count, seed=1)
    found = solved(entries, right, CGOptions(1e-9, 1, damping))
    assert bool(found.converged.all())
    assert found.iterations.tolist() == [0] * count
    expected = torch.linalg.pinv(matrix, rtol=1e-10, hermitian=True) @ right
    expected = expected if damping else less_constants(expected, c)
    torch.testing.assert_close(found.values, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(found.left, right - matrix @ found.values, rtol=0, atol=1e-15)
    scale = torch.where(c > 0, 1 / c, 0).sqrt()[:, None]
    size = (scale * right).norm(dim=0).clamp_min(1e-300)
    residual = (scale * found.left).norm(dim=0) / size
    torch.testing.assert_close(found.residual, residual, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("n", [1, 25])
def test_self_systems(n: int, zeros: bool, damping: float) -> None:
    entries = plan(n, n, spread=0.5, zeros=zeros)
    entries = entries + entries.T
    matrix = (1 + damping) * entries.sum(1).diag() + entries
    right = matrix @ drawn(n, 7, seed=1)
    found = solved(entries, right, CGOptions(1e-9, 1, damping), own=True)
    assert found.iterations.tolist() == [0] * 7
    expected = torch.linalg.pinv(matrix, hermitian=True) @ right
    torch.testing.assert_close(found.values, expected, rtol=1e-10, atol=1e-11)


def test_constants_are_left_out() -> None:
    entries = plan(30, 20)
    right = schur(entries) @ drawn(20, 2, seed=1)
    found = solved(entries, right + 1e-3 * entries.sum(0)[:, None])
    assert int(found.iterations.max()) == 0
    torch.testing.assert_close(found.values, solved(entries, right).values, rtol=1e-10, atol=1e-12)
    assert float((entries.sum(0) @ found.values).abs().max()) <= 1e-12


def test_a_plan_of_rank_one() -> None:
    entries = masses(12, 0)[:, None] * masses(9, 1)
    right = schur(entries) @ drawn(9, 2, seed=1)
    found = solved(entries, right)
    assert int(found.iterations.max()) == 0
    expected = less_constants(right / entries.sum(0)[:, None], entries.sum(0))
    torch.testing.assert_close(found.values, expected, rtol=1e-10, atol=1e-12)


BLOCKS = torch.block_diag(plan(10, 8), plan(7, 8)) / 2
UNDECIDED = {
    "blocks": (BLOCKS, False),
    "blocks of fewer rows": (BLOCKS.T.contiguous(), False),
    "nearly blocks": (BLOCKS + 1e-19, False),
    "a permutation": (torch.eye(9, dtype=torch.float64)[torch.randperm(9)] / 9, False),
    "two sides of a self term": (
        torch.block_diag(plan(5, 5), torch.zeros(5, 5).double()).roll(5, 1)
        + torch.block_diag(plan(5, 5), torch.zeros(5, 5).double()).roll(5, 1).T,
        True,
    ),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_pivots_of_rounding_size_leave_it_to_iterations(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, own = UNDECIDED[name]
    matrix = entries.sum(1).diag() + entries if own else schur(entries)
    right, cg = matrix @ drawn(len(matrix), 3, seed=1), CGOptions(1e-10)
    system: Any = (SelfSystem if own else SchurSystem)(KeptPlan(entries))
    assert system.direct is not None
    assert not bool(system.direct.sound)
    found = solved(entries, right, cg, own=own)
    monkeypatch.setattr(direct, "MOST_POINTS", 0)
    expected = solved(entries, right, cg, own=own)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("between", [1e-6, 1e-10])
def test_gaps_above_rounding_are_told(between: float) -> None:
    entries = BLOCKS + between / 300
    right = schur(entries) @ drawn(16, 3, seed=1)
    found = solved(entries, right)
    assert int(found.iterations.max()) == 0
    # What moves one block against the other is as uncertain as the gap is small.
    change = schur(entries) @ found.values - right
    assert float(change.norm() / right.norm()) <= 1e-11
    expected = less_constants(drawn(16, 3, seed=1), entries.sum(0))
    assert float((found.values - expected).norm()) <= 1e-13 / between


def test_what_the_decomposition_refuses_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library leaves in place of a factor then."""
    identity = torch.eye(20, dtype=torch.float64)
    for failed in (0, 3):
        monkeypatch.setattr(
            torch.linalg, "cholesky_ex", lambda _, failed=failed: (identity, torch.tensor(failed))
        )
        found = SchurSystem(KeptPlan(plan(30, 20))).direct
        assert found is not None
        assert bool(found.sound) == (failed == 0)


def test_a_residual_above_the_tolerance_leaves_it_to_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This and all later solves."""
    entries, exact = plan(30, 20), Cholesky.solve
    system = SchurSystem(KeptPlan(entries))
    solver = Solver(system, system, CGOptions(1e-6))
    right = schur(entries) @ drawn(20, 3, seed=1)
    monkeypatch.setattr(Cholesky, "solve", lambda *given: exact(*given) * (1 + 1e-8))
    near = solver.solve(right)
    assert near.iterations.tolist() == [0, 0, 0]
    torch.testing.assert_close(near.residual, torch.full((3,), 1e-8).double(), rtol=1e-6, atol=0)
    monkeypatch.setattr(Cholesky, "solve", lambda *given: exact(*given) * (1 + 1e-4))
    for _ in range(2):
        found = solver.solve(right)
        assert bool(found.converged.all())
        assert int(found.iterations.min()) > 0
    assert solver.directly(right) is None


def test_larger_systems_are_left_to_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the smaller side, on a CPU from fewer points on; or by entries."""
    wide, tall = KeptPlan(plan(3, 9)), KeptPlan(plan(9, 3))
    for name, most, decomposed in (
        ("MOST_POINTS", 3, True),
        ("MOST_POINTS", 2, False),
        ("MOST_POINTS_CPU", 3, True),
        ("MOST_POINTS_CPU", 2, False),
        ("MOST_ENTRIES", 27, True),
        ("MOST_ENTRIES", 26, False),
    ):
        with monkeypatch.context() as limited:
            limited.setattr(direct, name, most)
            for kept in (wide, tall):
                assert (SchurSystem(kept).direct is not None) == decomposed


def clouds(n: int, m: int, d: int = 3) -> tuple[Tensor, Tensor]:
    return drawn(n, d, seed=1), drawn(m, d, seed=2) + 0.3


def labelled(n: int, m: int) -> dict[str, Any]:
    means = drawn(2 * CLASSES, 2, seed=3)
    return {
        "labels_x": torch.arange(n) % CLASSES,
        "labels_y": torch.arange(m) % CLASSES,
        "class_table": torch.cdist(means, means).square(),
        "class_totals": (CLASSES, CLASSES),
    }


def quiet(call: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        return call(*given, **{"epsilon": EPSILON, "options": EXACT, "cg": TIGHT} | settings)


HESSIANS = pairwise(
    shape=[(1, 1), (1, 5), (20, 20), (33, 21), (21, 33)],
    labels=[False, True],
    zeros=[False, True],
    debias=[False, True],
    count=[1, 7],
    steps=[1000, 3],
)


@pytest.mark.slow(after=8)
@HESSIANS
def test_hessian_products(
    shape: tuple[int, int], labels: bool, zeros: bool, debias: bool, count: int, steps: int
) -> None:
    """Of x alone and of both clouds, also of plans that were stopped early."""
    (n, m), (x, y) = shape, clouds(*shape)
    a, b = masses(n, 0, zeros=zeros), masses(m, 1, zeros=zeros)
    options = labelled(n, m) if labels else {}
    stop = Converged(1e-12, max_iterations=steps)
    given = {"debias": debias, "options": stop, "cg": ONE}
    found = quiet(otdd.sinkhorn_hessian, x, y, a, b, **options, **given)
    v, w = drawn(count, n, 3, seed=4), drawn(count, m, 3, seed=5)
    got = found.product(v)
    assert got.iterations.tolist() == [0] * count
    joint = DivergenceCurvature(found._problem, found.divergence, ONE).along(v, w)
    assert int(joint.iterations.max()) == 0
    plans = couplings(found, {"x": (x, a), "y": (y, b)}, options)
    for k in range(count):
        still = torch.zeros_like(y)
        alone, (by_x, by_y) = (
            dense_product(plans, (x, y), (v[k], along)) for along in (still, w[k])
        )
        size = 1e-3 + float(alone[0].abs().max() + by_x.abs().max() + by_y.abs().max())
        assert float((got.values[k] - alone[0]).abs().max()) <= 1e-9 * size
        assert float((joint.x[k] - by_x).abs().max()) <= 1e-9 * size
        assert joint.y is not None
        assert float((joint.y[k] - by_y).abs().max()) <= 1e-9 * size
        energy = float((v[k] * by_x).sum() + (w[k] * by_y).sum())
        assert abs(float(joint.curvature[k]) - energy) <= 1e-8 * size * float(v[k].norm())


def couplings(found: Any, sides: dict[str, tuple[Tensor, Tensor]], options: Any) -> Any:
    """The plans of the potentials that were returned, dense."""
    plans = {}
    for name, term in found.divergence.terms.items():
        (one, of_one), (two, of_two) = (sides[key] for key in name)
        classes = ()
        if options:
            rows, columns = (slice(0, 3) if key == "x" else slice(3, 6) for key in name)
            labels = (options[f"labels_{key}"] for key in name)
            classes = (0.5 * options["class_table"][rows, columns], *labels)
        cost = reference.dense_cost(one, two, 0.5, *classes)
        plans[name] = reference.plan(cost, of_one, of_two, term.f, term.g, EPSILON)
    return plans


def dense_product(
    plans: Any, points: tuple[Tensor, Tensor], along: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    found = list(reference.hessian_product(plans["xy"], points, along, EPSILON, 0.5))
    for k, name in enumerate(("xx", "yy")):
        if name in plans:
            own = reference.own_hessian_product(plans[name], points[k], along[k], EPSILON, 0.5)
            found[k] = found[k] - own / 2
    return found[0], found[1]


def test_a_hessian_keeps_its_decompositions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], torch.linalg.cholesky_ex
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda *given: calls.append(None) or real(*given)
    )
    found = quiet(otdd.sinkhorn_hessian, *clouds(12, 9))
    for k in range(3):
        found.product(drawn(12, 3, seed=k))
    assert len(calls) == 2


def inputs_of(function: str, n: int, m: int, *, labels: bool, zeros: bool) -> dict[str, Tensor]:
    """What the function is differentiated by."""
    found = {"a": masses(n, 3, zeros=zeros), "b": masses(m, 4, zeros=zeros)}
    if function == "matrix_plan":
        return {"costs": 2 * drawn(n, m, seed=1).square()} | found
    found |= dict(zip(("x", "y"), clouds(n, m), strict=True))
    found["lambda_x"] = torch.tensor(0.5, dtype=torch.float64)
    if labels:
        found["class_table"] = labelled(n, m)["class_table"]
    if function == "transport_map":
        found["values"] = drawn(m, 4, seed=6)
    return found


def gradients(
    function: str, given: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Tensor]:
    leaves = {key: part.clone().requires_grad_() for key, part in given.items()}
    result = quiet(getattr(otdd, function), **leaves, **settings)
    results = result if isinstance(result, tuple) else (result,)
    cotangents = [drawn(*part.shape, seed=7 + k) for k, part in enumerate(results)]
    found = torch.autograd.grad(results, list(leaves.values()), cotangents)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.slow(after=12)
@pairwise(
    function=["transport_map", "sinkhorn_potentials", "matrix_plan"],
    shape=[(1, 1), (1, 6), (9, 9), (21, 33), (33, 21)],
    labels=[False, True],
    zeros=[False, True],
    damping=[0.0, 0.05],
    steps=[1000, 2],
)
def test_gradients_are_those_of_iterations(
    function: str,
    shape: tuple[int, int],
    labels: bool,
    zeros: bool,
    damping: float,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which other files compare with dense solves and unrolled autograd."""
    labels = labels and function != "matrix_plan"
    given = inputs_of(function, *shape, labels=labels, zeros=zeros)
    settings: dict[str, Any] = {"options": Converged(1e-12, max_iterations=steps)}
    if labels:
        settings |= {key: part for key, part in labelled(*shape).items() if key != "class_table"}
    without = CGOptions(1e-9, 1, damping)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="conjugate gradients")
        found = gradients(function, given, settings | {"cg": without})
    monkeypatch.setattr(direct, "MOST_POINTS", 0)
    expected = gradients(function, given, settings | {"cg": CGOptions(1e-13, 1000, damping)})
    for key, part in found.items():
        most = 1 + float(expected[key].abs().max())
        assert float((part - expected[key]).abs().max()) <= 1e-10 * most, key


@pytest.mark.parametrize("function", ["transport_map", "sinkhorn_potentials", "matrix_plan"])
@pytest.mark.parametrize("shape", [(7, 5), (5, 7)])
def test_gradients_are_differences(function: str, shape: tuple[int, int]) -> None:
    given = inputs_of(function, *shape, labels=False, zeros=False)
    key = "costs" if function == "matrix_plan" else "x"
    found, along = gradients(function, given, {"cg": ONE})[key], drawn(*given[key].shape, seed=9)

    def value(step: float) -> float:
        results = quiet(getattr(otdd, function), **given | {key: given[key] + step * along})
        results = results if isinstance(results, tuple) else (results,)
        pairs = ((part, drawn(*part.shape, seed=7 + k)) for k, part in enumerate(results))
        return float(sum((part * cotangent).sum() for part, cotangent in pairs))

    h = 1e-3
    slope = (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h)
    assert float((found * along).sum()) == pytest.approx(slope, rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("function", ["transport_map", "sinkhorn_potentials"])
def test_cotangents_that_are_not_finite(function: str) -> None:
    given = inputs_of(function, 6, 5, labels=False, zeros=False)
    x = given["x"].requires_grad_()
    result = quiet(getattr(otdd, function), **given)
    result = result if isinstance(result, Tensor) else result[0]
    cotangent = drawn(*result.shape)
    cotangent[2] = torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = torch.autograd.grad(result, x, cotangent)
    assert bool(found.isnan().all())


def cross_term(n: int, m: int, **settings: Any) -> tuple[Any, Any]:
    """What the cost of two labelled clouds with masses of 0 is made of, and their term."""
    options = labelled(n, m) | settings
    weights = masses(n, 0, zeros=True), masses(m, 1, zeros=True)
    found = quiet(otdd.sinkhorn_hessian, *clouds(n, m), *weights, debias=False, **options)
    return found._problem.inputs("xy"), found.divergence.xy


def test_a_plan_is_made_of_its_clouds() -> None:
    inputs, term = cross_term(9, 7)
    found = dense_plan(inputs, term.f, term.g, EPSILON)
    assert found is not None
    options, (x, y) = labelled(9, 7), clouds(9, 7)
    block = 0.5 * options["class_table"][:CLASSES, CLASSES:]
    cost = reference.dense_cost(x, y, 0.5, block, options["labels_x"], options["labels_y"])
    weights = inputs.source.masses, inputs.target.masses
    expected = reference.plan(cost, *weights, term.f, term.g, EPSILON)
    torch.testing.assert_close(found.entries, expected, rtol=1e-12, atol=0)
    # Whatever potentials are where there is no mass.
    f = torch.where(weights[0] > 0, term.f, torch.nan)
    again = dense_plan(inputs, f, term.g, EPSILON)
    assert again is not None
    assert torch.equal(again.entries, found.entries)


def test_where_no_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many points, or more than the memory that is stated or free."""
    inputs, term = cross_term(9, 7)

    def made(given: Any = inputs) -> bool:
        return dense_plan(given, term.f, term.g, EPSILON) is not None

    assert made()
    for budget, enough in ((8 * 9 * 7, True), (8 * 9 * 7 - 1, False)):
        compute = ComputeOptions(precision="double", memory_budget=budget)
        assert made(cross_term(9, 7, compute=compute)[0]) == enough
    with monkeypatch.context() as limited:
        limited.setattr(direct, "MOST_POINTS", 6)
        assert not made()
    monkeypatch.setattr(memory, "UNASKED", 0)
    monkeypatch.setattr(memory, "free_memory", lambda _: 8 * 9 * 7)
    assert not made()


class Calls(TorchDispatchMode):
    """Counts what PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_name[str(func)] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("function", "most"), [("sinkhorn_potentials", 160), ("transport_map", 210)]
)
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_backward_pass_asks_for_little(
    function: str, most: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator is built, and nothing repeats; the gradient is that of many points' way."""
    x, y = (points.float().to(DEVICE) for points in clouds(300, 300, 20))
    x.requires_grad_()
    compute = ComputeOptions(DEVICE, backend=backend, precision="high")
    settings = {"epsilon": 2.0, "options": Converged(1e-3), "compute": compute}
    result = quiet(getattr(otdd, function), x, y, cg=CGOptions(), **settings)
    result = result if isinstance(result, Tensor) else result[0]
    cotangent = drawn(*result.shape).to(result)
    with Calls() as calls:
        (found,) = torch.autograd.grad(result, x, cotangent, retain_graph=True)
    assert calls.by_name.total() <= most
    assert calls.by_name["aten._local_scalar_dense.default"] <= 2
    monkeypatch.setattr(direct, "MOST_POINTS", 0)
    (expected,) = torch.autograd.grad(result, x, cotangent)
    assert float((found - expected).norm() / expected.norm()) <= 1e-4
