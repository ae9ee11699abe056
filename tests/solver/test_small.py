"""Small divergences, whose terms are solved side by side on stored scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from spying import calls_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import otdd_flash as otdd
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.engine.recording import Recorded
from otdd_flash.errors import InputError
from otdd_flash.formulas.marginals import Constraints, Exact, RelaxedByKL
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.score_pool import Room
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.small import forget, pooled_solve, route
from otdd_flash.solver.term import TransportTerm

pytestmark = pytest.mark.usefixtures("nothing_kept")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_TRITON = ComputeOptions(device=DEVICE, backend="triton")
CLASSES, SIDES = 3, ("rows", "columns")


def side(n: int, seed: int, *, labels: bool = True, weights: bool = False) -> LabeledSamples:
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(n, 4, generator=draw) + seed / 4
    masses = torch.rand(n, generator=draw) + 0.1 if weights else None
    if masses is not None:
        masses[n // 2] = 0.0
    known = torch.arange(n) % CLASSES if labels else None
    names = tuple("abc") if labels else ()
    return LabeledSamples(points, known, names, masses)


def table() -> Tensor:
    means = torch.randn(2 * CLASSES, 3, generator=torch.Generator().manual_seed(9)).double()
    return torch.cdist(means, means).square()


def problem(
    x: LabeledSamples,
    y: LabeledSamples,
    epsilon: float,
    compute: ComputeOptions = IN_TRITON,
    *,
    ground: str = "sqeuclidean",
    debias: bool = True,
) -> Comparison:
    distances = None if x.labels is None else table()
    cost = GroundCost(0.5, 0.5, ground)
    return Comparison.between(x, y, epsilon, distances, cost, compute, debias=debias)


def solved(given: Comparison, options: Converged | None = None, **other: Any) -> Any:
    found = route.solve_small(given, options or Converged(), **other)
    return None if found is None else found.terms


def assert_proved(
    found: dict[str, TransportTerm],
    given: Comparison,
    rho: tuple[float, float] = (math.inf, math.inf),
) -> None:
    """Every interval and marginal error holds, and intervals of what converged are narrow."""
    for name, term in found.items():
        sides, penalties = given.sides(name), rho if name == "xy" else (rho[0], rho[0])
        cost = reference.dense_cost(
            *(side.features for side in sides),
            given.ground.squared.lambda_x,
            given.ground.lambda_y * given.block(name),
            *(
                torch.zeros(len(side)).long() if side.labels is None else side.labels
                for side in sides
            ),
        )
        a, b = (side.masses for side in sides)
        rows, columns = a > 0, b > 0
        cost, a, b = cost[rows][:, columns], a[rows], b[columns]
        exact = min(penalties) == math.inf
        if exact:
            truth, *_ = reference.entropic_transport(cost, a, b, given.epsilon)
        else:
            truth, *_ = reference.unbalanced_transport(cost, a, b, given.epsilon, penalties)
        low, high = term.bounds
        assert low <= truth <= high, name
        # Points without mass have potentials, too.
        assert bool(term.f.isfinite().all() & term.g.isfinite().all())
        assert not term.converged or high - low < 3e-3 * abs(truth) + 1e-6 * exact
        f, g = term.f.cpu()[rows].double(), term.g.cpu()[columns].double()
        plan = reference.plan(cost, a, b, f, g, given.epsilon)
        owed = a * (-f / penalties[0]).exp(), b * (-g / penalties[1]).exp()
        errors = [float((plan.sum(1 - k) - owed[k]).abs().sum()) for k in (0, 1)]
        mass = 1.0 if exact else float(plan.sum())
        assert max(errors) / mass <= term.marginal_error + 1e-9
        assert exact or term.mass == pytest.approx(mass, rel=2e-3)


def assert_gradients(
    found: list[Tensor], x: LabeledSamples, y: LabeledSamples, rtol: float, **settings: Any
) -> None:
    """They are those of the loss, solved to the end; up to a share of the largest entry."""
    points = [one.features.double().requires_grad_() for one in (x, y)]
    if x.labels is not None:
        settings |= {"labels_x": x.labels, "labels_y": y.labels, "class_table": table()}
    options = Converged(tolerance=1e-9)
    loss = otdd.sinkhorn_loss(*points, x.masses, y.masses, options=options, **settings)
    for part, expected in zip(found, torch.autograd.grad(loss, points), strict=True):
        off = (part.double().cpu() - expected).abs().max()
        assert float(off) < rtol * float(expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "labels", "weights", "debias", "ground", "most"),
    [
        (0.3, True, True, False, "sqeuclidean", None),
        (0.3, True, False, True, "cosine", None),
        (100.0, False, True, True, "inner", None),
        (0.02, True, True, True, "sqeuclidean", 3),
    ],
)
def test_terms_are_proved(
    epsilon: float, labels: bool, weights: bool, debias: bool, ground: str, most: int | None
) -> None:
    """Also of a solve that is out of iterations, and says so; every term's progress is told."""
    x = side(18, 0, labels=labels, weights=weights)
    y = side(13, 1, labels=labels)
    given = problem(x, y, epsilon, ground=ground, debias=debias)
    told: dict[str, int] = {}
    found = solved(
        given,
        Converged(max_iterations=most or 1000),
        progress=lambda name, iteration, _: told.update({name: iteration}),
    )
    assert told.keys() == found.keys() == ({"xy", "xx", "yy"} if debias else {"xy"})
    xy = found["xy"]
    # Its certificate takes what the last iteration evaluated.
    assert told["xy"] == xy.iterations
    assert xy.stopped_by == ("tolerance" if most is None else "max_iterations")
    assert xy.converged == (most is None)
    assert most is None or xy.iterations == most - 1
    # Two passes an iteration of a cross term, one of a self term; a certificate takes some more.
    assert 2 * xy.iterations <= xy.passes <= 2 * xy.iterations + 4
    for name in found.keys() - {"xy"}:
        assert found[name].iterations <= found[name].passes <= found[name].iterations + 2
    assert_proved(found, problem(x, y, epsilon, ComputeOptions("cpu"), ground=ground))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("rho", "debias", "weights"),
    [
        ((0.3, math.inf), False, True),
        ((math.inf, 2.0), False, False),
        ((0.5, 0.5), True, True),
        ((1e-2, 1e-2), True, False),
        ((1e3, 1e3), True, False),
    ],
)
def test_relaxed_terms_are_proved(rho: tuple[float, float], debias: bool, weights: bool) -> None:
    """In recordings, with the gradients by points that they compute."""
    x, y = side(18, 0, weights=weights), side(13, 1)
    kinds = [Exact() if each == math.inf else RelaxedByKL(each) for each in rho]
    given = problem(x, y, 0.3, debias=debias)
    given = replace(given, constraints=Constraints(*kinds))
    gradients: list[Tensor] = []
    found = solved(given, gradient_callbacks={0: gradients.append, 1: gradients.append})
    assert all(term.converged for term in found.values())
    assert_proved(found, problem(x, y, 0.3, ComputeOptions("cpu")), rho)
    penalties = [None if each == math.inf else each for each in rho]
    assert_gradients(gradients, x, y, 2e-3, epsilon=0.3, unbalanced=penalties, debias=debias)


@pytest.mark.slow
@pytest.mark.parametrize("sides", ["both", "rows", "columns"])
def test_penalties_share_a_recording(sides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solve takes the penalty of its own problem, to the last bit, whatever was solved before."""
    made = calls_of(monkeypatch, pooled_solve.PooledSolve, "__init__")

    def terms(rho: float) -> tuple[dict[str, TransportTerm], list[Tensor]]:
        kinds = [Exact() if sides not in ("both", name) else RelaxedByKL(rho) for name in SIDES]
        given = problem(side(9, 2), side(8, 3), 0.5, debias=sides == "both")
        given, gradients = replace(given, constraints=Constraints(*kinds)), list[Tensor]()
        return solved(given, gradient_callbacks={0: gradients.append}), gradients

    penalties = (0.3, 2.0, 1e3)
    together = [terms(rho) for rho in penalties]
    assert len(made) == 1
    for rho, (found, gradients) in zip(penalties, together, strict=True):
        forget()
        fresh, expected = terms(rho)
        assert torch.equal(gradients[0], expected[0])
        for name, term in fresh.items():
            assert torch.equal(term.f, found[name].f)
            assert torch.equal(term.g, found[name].g)
            assert (term.value, term.bounds) == (found[name].value, found[name].bounds)
    values = [found["xy"].value for found, _ in together]
    assert values == sorted({*values}), "a larger penalty costs more"


@pytest.mark.slow
def test_what_stood_there_before_changes_nothing() -> None:
    """A room that served a larger problem, with masses and more classes, to the last bit."""
    given = problem(side(9, 2), side(8, 3), 0.5)
    fresh = solved(given)
    forget()
    solved(problem(side(12, 4, weights=True), side(11, 5), 0.2))
    again = solved(given)
    for name, term in fresh.items():
        assert torch.equal(term.f, again[name].f)
        assert torch.equal(term.g, again[name].g)
        assert (term.value, term.bounds) == (again[name].value, again[name].bounds)
    # Potentials to start from are taken.
    warm = solved(given, start={name: term.g for name, term in fresh.items()})
    assert fresh["xy"].iterations > 3 >= max(term.iterations for term in warm.values())
    assert_proved(warm, problem(side(9, 2), side(8, 3), 0.5, ComputeOptions("cpu")))


@pytest.mark.slow
def test_what_rounding_hides_is_refused() -> None:
    for epsilon in (1e-6, 1e-30):
        given = problem(side(18, 0, labels=False), side(13, 1, labels=False), epsilon)
        with pytest.raises(InputError, match="too small for float32: rounding"):
            solved(given)
    with pytest.raises(InputError, match="rounding alone moves the marginals"):
        solved(problem(side(18, 0), side(13, 1), 0.5), Converged(tolerance=1e-8))


@pytest.mark.slow
@pytest.mark.parametrize(("labels", "debias"), [(False, True), (True, False)])
def test_gradients_by_points(labels: bool, debias: bool) -> None:
    x, y = side(18, 0, labels=labels, weights=True), side(13, 1, labels=labels)
    found: list[Tensor] = []
    gradient_callbacks = {0: found.append, 1: found.append}
    solved(problem(x, y, 0.5, debias=debias), gradient_callbacks=gradient_callbacks)
    assert_gradients(found, x, y, 1e-3, epsilon=0.5, debias=debias)


def test_rooms_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ones used last; one in use twice is there twice, and one that failed is gone."""
    made: list[Any] = []

    def fresh(room: Room, **_: Any) -> object:
        made.append(room)
        return object()

    monkeypatch.setattr(pooled_solve, "PooledSolve", fresh)
    monkeypatch.setattr(pooled_solve, "MOST_KEPT", 2)
    rooms = [Room(1, size, size, 2, 1, torch.float32, torch.device("cpu")) for size in (16, 32, 48)]
    for room in rooms:
        with pooled_solve.kept(room, True) as one, pooled_solve.kept(room, True) as other:
            assert one is not other
    for room, count in ((rooms[2], 6), (rooms[0], 7)):
        with pooled_solve.kept(room, True):
            assert len(made) == count
    with pytest.raises(ValueError, match="lost"), pooled_solve.kept(rooms[0], True):
        raise ValueError("lost")
    with pooled_solve.kept(rooms[0], True):
        assert len(made) == 8
    # Classes take next to no memory.
    assert pooled_solve.is_kept(rooms[0]._replace(classes=32))
    assert not pooled_solve.is_kept(rooms[1])


class Asked(TorchDispatchMode):
    """What would wait for the device, or could not be recorded at all."""

    waits = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"))
    fills = frozenset(("masked_fill", "masked_fill_", "index_fill", "index_fill_"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in self.waits, func
        # What is filled in is read, below what is told of here.
        assert name not in self.fills or not isinstance(args[-1], Tensor), func
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("rho", [(), (0.3, 0.3), (math.inf, 2.0), (2.0, math.inf)])
def test_nothing_that_is_recorded_asks_the_device(
    rho: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of what does would fail, and only on a GPU."""
    launched: list[str] = []
    plain = Recorded.run

    def run(self: Recorded, launch: Callable[[], object]) -> None:
        launched.append(getattr(getattr(launch, "func", launch), "__name__", ""))
        with Asked():
            plain(self, launch)

    monkeypatch.setattr(Recorded, "run", run)
    x, y = side(12, 0, weights=True), side(9, 1)
    given = problem(x, y, 0.5, debias=math.inf not in rho)
    if rho:
        kinds = [Exact() if each == math.inf else RelaxedByKL(each) for each in rho]
        given = replace(given, constraints=Constraints(*kinds))
    solved(given, gradient_callbacks={0: list, 1: list})
    assert {"_prepare", "_iterate", "_certify", "_differentiate"} <= set(launched)


# On a GPU, where kernels are recorded.


def loss_of(seed: int, n: int = 300) -> tuple[float, Tensor]:
    draw = torch.Generator(device="cuda").manual_seed(seed)
    x, y = (torch.randn(n, 8, device="cuda", generator=draw) for _ in range(2))
    x.requires_grad_()
    loss = otdd.sinkhorn_loss(x, y, epsilon=0.3)
    (gradient,) = torch.autograd.grad(loss, x)
    return float(loss), gradient


@pytest.mark.gpu
def test_recordings_repeat_what_was_launched_one_by_one() -> None:
    """The first solve launches, the second records, others replay: the same to the last bit."""
    results = [loss_of(0) for _ in range(4)]
    for value, gradient in results[1:]:
        assert value == results[0][0]
        assert torch.equal(gradient, results[0][1])


@pytest.mark.gpu
def test_results_are_no_part_of_a_recording() -> None:
    first = otdd.sinkhorn_divergence(side(300, 0), side(280, 1), epsilon=0.3, class_table=table())
    kept = {name: (term.f.clone(), term.g.clone()) for name, term in first.terms.items()}
    for seed in range(2, 6):
        otdd.sinkhorn_divergence(side(300, seed), side(280, 7), epsilon=0.3, class_table=table())
    for name, (f, g) in kept.items():
        assert torch.equal(first.terms[name].f, f)
        assert torch.equal(first.terms[name].g, g)


@pytest.mark.gpu
def test_threads_and_streams_get_their_own_results() -> None:
    expected = [loss_of(seed) for seed in range(8)]

    def on_a_stream(seed: int) -> tuple[float, Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = loss_of(seed)
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(on_a_stream, [*range(8)] * 12))
    for k, (value, gradient) in enumerate(found):
        assert value == expected[k % 8][0]
        assert torch.equal(gradient, expected[k % 8][1])


@pytest.mark.gpu
@pytest.mark.parametrize("labels", [False, True])
def test_a_small_solve_is_few_launches_and_waits(labels: bool) -> None:
    from torch.profiler import ProfilerActivity, profile

    sides = [side(1000, seed, labels=labels).to("cuda") for seed in range(4)]
    distances = table().cuda() if labels else None

    def solve(x: LabeledSamples, y: LabeledSamples) -> None:
        otdd.sinkhorn_divergence(x, y, epsilon=0.5, class_table=distances)

    for _ in range(3):
        solve(*sides[:2])
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        solve(*sides[:2])
    counts = {event.key: event.count for event in found.key_averages()}
    launches = sum(counts.get(name, 0) for name in ("cudaLaunchKernel", "cuLaunchKernel"))
    assert launches <= 40, counts
    assert counts.get("cudaStreamSynchronize", 0) <= 5, counts


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "relative"), [(100, 0.1), (1000, 0.01), (5000, 0.1)])
def test_intervals_meet_those_of_streamed_kernels(
    n: int, relative: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = side(n, 0, weights=True).to("cuda"), side(n - 7, 1).to("cuda")
    given = {"epsilon": 4 * relative, "class_table": table().cuda()}
    one = otdd.sinkhorn_divergence(x, y, **given)
    monkeypatch.setattr(route, "MOST_SCORES", 0)
    other = otdd.sinkhorn_divergence(x, y, **given)
    assert (one.backend, other.backend != one.backend) == ("triton, scores kept", True)
    for name, term in one.terms.items():
        (low, high), (lower, higher) = term.bounds, other.terms[name].bounds
        assert max(low, lower) <= min(high, higher), name
    assert one.value == pytest.approx(other.value, rel=2e-3, abs=1e-5)
