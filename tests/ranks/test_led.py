"""Work that rank 0 leads: flows, losses, Hessians and plans with shared passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import lead, pool

import otdd_flash as otdd
from otdd_flash.distributed import ranks
from otdd_flash.distributed.ranks import Ranks, balanced
from otdd_flash.errors import InputError
from otdd_flash.labels.by_ranks import measured_by_ranks
from otdd_flash.labels.classes import pool as pool_classes
from otdd_flash.labels.metrics import Sinkhorn
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.operators import sharing
from otdd_flash.solver.problem import Problem

pytestmark = pytest.mark.xdist_group("ranks")

DRAW = torch.Generator().manual_seed(4)
X, Y = torch.randn(37, 3, generator=DRAW), torch.randn(29, 3, generator=DRAW) + 0.5
LABELS = torch.arange(37) % 3, torch.arange(29) % 2
EPSILON = 0.3


def sides() -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    one = otdd.LabeledSamples(X, LABELS[0], ("a", "b", "c"))
    return one, otdd.LabeledSamples(Y, LABELS[1], ("a", "b"))


def flow(compute: otdd.ComputeOptions) -> list[Any]:
    moves = otdd.Flow(3, stepping=otdd.Stepping(0.5))
    result = otdd.gradient_flow(*sides(), moves, epsilon=EPSILON, compute=compute)
    assert result.compute.group is None
    return [result.samples.features, torch.tensor(result.to_dict()["value"])]


def derivatives(compute: otdd.ComputeOptions) -> list[Any]:
    """A loss, its gradients, and a product with its Hessian."""
    x, y = X.double().requires_grad_(), Y.double().requires_grad_()
    options = otdd.Converged(1e-8)
    loss = otdd.sinkhorn_loss(x, y, epsilon=EPSILON, options=options, compute=compute)
    loss.backward()
    hessian = otdd.sinkhorn_hessian(
        X.double(), Y.double(), epsilon=EPSILON, options=options, compute=compute
    )
    product = hessian.product(torch.ones_like(X, dtype=torch.float64))
    return [loss.detach(), x.grad, y.grad, product.values]


def potentials(compute: otdd.ComputeOptions) -> list[Any]:
    """Potentials, and their gradient, whose linear system ranks iterate for."""
    x = X.double().requires_grad_()
    options = {"options": otdd.Converged(1e-9), "cg": otdd.CGOptions(1e-10)}
    f, g = otdd.sinkhorn_potentials(x, Y.double(), epsilon=EPSILON, compute=compute, **options)
    (f.sin().sum() + g.cos().sum()).backward()
    return [f.detach(), g.detach(), x.grad]


def pairs(compute: otdd.ComputeOptions) -> list[Any]:
    one, other = sides()
    third = otdd.LabeledSamples(X + 1, LABELS[0], ("a", "b", "c"))
    result = otdd.pairwise_distances([one, other, third], epsilon=EPSILON, compute=compute)
    return [result.values, result.lower, result.upper]


def classes(compute: otdd.ComputeOptions) -> list[Any]:
    """Distances between classes by solves, which ranks deal out; one has weights."""
    one, other = sides()
    weights = torch.arange(1.0, 38.0)
    one = otdd.LabeledSamples(X, LABELS[0], ("a", "b", "c"), weights)
    result = otdd.dataset_distance(
        one, other, epsilon=EPSILON, labels=otdd.labels.Sinkhorn(epsilon=0.2), compute=compute
    )
    return [result.class_distances.full]


def subsamples(compute: otdd.ComputeOptions) -> list[Any]:
    """An interval by 39 draws, of which every rank compares some."""
    # So large that each takes few iterations.
    settings = {"seed": 3, "epsilon": 3.0, "compute": compute}
    found = otdd.subsample_interval(*sides(), 1.0, count=39, size=12, **settings)
    floor = otdd.noise_floor(*sides(), **settings)
    return [torch.tensor(found.values), torch.tensor([found.lower, floor.between.value])]


def minibatches(compute: otdd.ComputeOptions) -> list[Any]:
    """A flow whose steps see a part of both sides."""
    moves = otdd.Flow(3, stepping=otdd.Stepping(0.5, minibatch=11))
    result = otdd.gradient_flow(*sides(), moves, epsilon=EPSILON, compute=compute)
    return [result.samples.features, torch.tensor(result.to_dict()["value"])]


def of_group(ranks: Ranks, work: Any, options: dict[str, Any]) -> list[Any]:
    return work(otdd.ComputeOptions("cpu", precision="double", group=ranks, **options))


def settings(compute: otdd.ComputeOptions) -> list[Any]:
    """What each of some settings leads to."""
    given: list[dict[str, Any]] = [
        {"debias": False},
        {"labels": "none"},
        {"epsilon": None, "epsilon_relative": 0.05},
        {"solver": otdd.Converged(bound_width=1e-3)},
        {"ground": "cosine"},
    ]
    found = [
        otdd.dataset_distance(*sides(), compute=compute, **({"epsilon": EPSILON} | more))
        for more in given
    ]
    return [torch.tensor([each.value, *each.bounds]) for each in found]


def in_a_ring(work: Any) -> list[Any]:
    """Work with points that no rank holds all of."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharing, "UNASKED", 0)
        return lead(of_group, work, {"backend": "torch", "memory_budget": 0})


SLOW = [flow, minibatches, derivatives, potentials, classes, subsamples, settings]


@pytest.mark.parametrize(
    ("work", "ring"),
    [
        (pairs, False),
        *(pytest.param(work, False, marks=pytest.mark.slow) for work in SLOW),
        pytest.param(flow, True, marks=pytest.mark.slow),
    ],
)
def test_led_work_is_that_of_one_process(work: Any, ring: bool) -> None:
    answers = pool(2).run(in_a_ring, work) if ring else pool(2).led(of_group, work, {})
    expected = work(otdd.ComputeOptions("cpu", precision="double"))
    for value, copy, alone in zip(*answers, expected, strict=True):
        assert torch.equal(value, copy)
        assert torch.allclose(value, alone, rtol=1e-6, atol=1e-7)


def rows_of_passes() -> list[int]:
    """How many rows a rank computes in every pass of a step that sees 11 rows a side."""
    from otdd_flash.operators.tiled import TiledOperator

    rows: list[int] = []
    before = TiledOperator.softmin_rows

    def counted(self: Any, *args: Any) -> Any:
        rows.append(len(self.a))
        return before(self, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TiledOperator, "softmin_rows", counted)
        lead(of_group, minibatches, {})
    return rows


@pytest.mark.slow
def test_passes_of_minibatches_are_shared() -> None:
    for rows in pool(2).run(rows_of_passes):
        assert {5, 6} & set(rows)
        assert 11 not in rows


def of_kernels(ranks: Ranks) -> list[Any]:
    """A whole distance in the interpreter, of few iterations."""
    compute = otdd.ComputeOptions("cpu", "triton", group=ranks)
    result = otdd.dataset_distance(*sides(), epsilon=5.0, compute=compute)
    return [result.value, result.bounds, result.divergence.backend, *result.potentials]


@pytest.mark.slow
def test_kernels_are_shared_as_well() -> None:
    found, _ = pool(2).led(of_kernels)
    alone = otdd.dataset_distance(
        *sides(), epsilon=5.0, compute=otdd.ComputeOptions("cpu", precision="double")
    )
    value, (lower, upper), backend, f, g = found
    assert backend == "triton, scores streamed, fast, 2 ranks"
    assert lower <= alone.value <= upper
    assert value == pytest.approx(alone.value, abs=1e-3)
    assert torch.allclose(f.double(), alone.potentials[0].double(), atol=2e-3)
    assert torch.allclose(g.double(), alone.potentials[1].double(), atol=2e-3)


def refused_by_the_leader(ranks: Ranks, epsilon: float) -> float:
    compute = otdd.ComputeOptions("cpu", group=ranks)
    return otdd.dataset_distance(*sides(), epsilon=epsilon, compute=compute).value


def not_converged() -> Any:
    solver = otdd.Converged(1e-3, max_iterations=3, require_convergence=True)
    shard = tuple(side.take(torch.arange(torch.distributed.get_rank(), 20, 2)) for side in sides())
    compute = otdd.ComputeOptions("cpu", group="world")
    return otdd.dataset_distance(*shard, epsilon=0.01, solver=solver, compute=compute)


def test_all_ranks_hear_why_nothing_came_of_it() -> None:
    refusals = {-1.0: "epsilon must be positive", 1e-40: "epsilon=1e-40 underflows in precision="}
    for epsilon, sentence in refusals.items():
        for answer in pool(2).led(refused_by_the_leader, epsilon):
            assert isinstance(answer, otdd.InputError)
            assert sentence in str(answer)
    for answer in pool(2).run(not_converged):
        assert isinstance(answer, otdd.ConvergenceError)
    # They are in step.
    assert all(value > 0 for value in pool(2).led(distance))


def short_of_memory() -> Any:
    """A rank on which the scores do not fit, though the budget says so."""
    from otdd_flash.operators import build

    with pytest.MonkeyPatch.context() as patched:
        if torch.distributed.get_rank() == 1:
            patched.setattr(build, "UNASKED", 0)
            patched.setattr(build, "free_memory", lambda device: 1)
        return lead(distance)


def distance(ranks: Ranks) -> float:
    compute = otdd.ComputeOptions("cpu", memory_budget="1GiB", group=ranks)
    return otdd.dataset_distance(*sides(), epsilon=EPSILON, compute=compute).value


def test_a_rank_that_is_short_of_memory_is_named() -> None:
    for answer in pool(2).run(short_of_memory):
        assert isinstance(answer, otdd.InputError), answer
        assert str(answer).startswith("rank 1: memory_budget=")


def solved_terms() -> int:
    """How many terms of four datasets a rank solves, of which two are equal."""
    solved: list[Problem] = []
    before = Problem.solve

    def counted(self: Problem, *args: Any, **kwargs: Any) -> Any:
        solved.append(self)
        return before(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Problem, "solve", counted)
        lead(of_four)
    return len(solved)


def of_four(ranks: Ranks) -> torch.Tensor:
    one, other = sides()
    compute = otdd.ComputeOptions("cpu", group=ranks)
    return otdd.pairwise_distances(
        [one, other, one, other], epsilon=EPSILON, compute=compute
    ).values


def test_terms_of_pairs_are_dealt() -> None:
    # Four self terms and the four pairs of which both differ; the others are 0.
    first, second = pool(2).run(solved_terms)
    assert first + second == 8
    assert 2 <= first <= 6


def test_units_go_to_the_least_loaded_rank() -> None:
    assert balanced([1, 5, 2, 2], 2) == [1, 0, 1, 1]
    assert balanced([], 3) == []
    assert balanced([1.0, 1.0, 1.0], 2) == [0, 1, 0]


def measured(ranks: Ranks, pairs: torch.Tensor, classes: int) -> tuple[list[torch.Tensor], int]:
    """Distances of pairs, and the bytes that these took once ranks had the classes."""
    metric = measured_by_ranks(otdd.labels.Sinkhorn(epsilon=0.2), ranks)
    clouds = uneven(classes)
    metric.measure(clouds, pairs[:1])
    before = ranks.shared.bytes_moved
    return list(metric.measure(clouds, pairs)), ranks.shared.bytes_moved - before


def uneven(classes: int) -> Any:
    """Classes of 1, 2, 3, ... points, so that pairs are not dealt in the order of their list."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.repeat_interleave(torch.arange(classes), torch.arange(classes) % 5 + 1)
    points = torch.randn(len(labels), 3, generator=draw)
    names = tuple(map(str, range(classes)))
    return pool_classes([otdd.LabeledSamples(points, labels, names)])[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_numbers_of_pairs_come_in_the_order_of_their_list(size: int) -> None:
    # Of one pair some ranks measure nothing.
    for pairs in (all_pairs(7), all_pairs(7)[2:17:3], all_pairs(7)[:1]):
        (found, _), *_ = pool(size).led(measured, pairs, 7)
        alone = Sinkhorn(epsilon=0.2).measure(uneven(7), pairs)
        for value, expected in zip(found, alone, strict=True):
            assert torch.equal(value, expected)


@pytest.mark.slow
def test_a_table_of_all_classes_is_no_list_that_is_sent() -> None:
    pairs = all_pairs(40)
    (table, sent), _ = pool(2).led(measured, pairs, 40)
    (turned, more), _ = pool(2).led(measured, pairs.flip(0).contiguous(), 40)
    # Three numbers a pair of the other rank come, and orders go.
    assert 24 * len(pairs) // 2 <= sent <= 24 * len(pairs) // 2 + 1000
    assert more - sent == pytest.approx(16 * len(pairs), abs=400)
    assert torch.equal(table[0], turned[0].flip(0))


def late_subsamples() -> Any:
    """Draws of which none converges, where convergence is required."""
    seen: list[tuple[int, int]] = []
    solver = otdd.Converged(1e-4, max_iterations=2, require_convergence=True)

    def work(ranks: Ranks) -> Any:
        compute = otdd.ComputeOptions("cpu", group=ranks)
        settings = {"epsilon": EPSILON, "compute": compute, "progress": lambda *d: seen.append(d)}
        counted = otdd.subsample_interval(*sides(), 1.0, count=39, size=12, **settings)
        with pytest.raises(otdd.ConvergenceError):
            otdd.subsample_interval(*sides(), 1.0, count=39, size=12, solver=solver, **settings)
        return counted.values, seen

    return otdd.led(work)


@pytest.mark.slow
def test_draws_that_stop_early_are_heard_of_on_every_rank() -> None:
    (values, seen), _ = pool(2).run(late_subsamples)
    assert len(values) == 39
    assert seen[:2] == [(2, 39), (4, 39)]
    assert seen[19] == (39, 39)
    assert all(done <= total for done, total in seen)


def too_late() -> str:
    """What rank 0 hears of an operator whose other processes have been dismissed."""
    kept: list[Problem] = []

    def work(ranks: Ranks) -> None:
        compute = otdd.ComputeOptions("cpu", group=ranks)
        kept.append(Problem.between(*sides(), EPSILON, compute=compute, debias=False))

    otdd.led(work)
    try:
        return "" if not kept else kept[0].operator("xy").execution.backend
    except otdd.InputError as error:
        return str(error)


def test_dismissed_processes_are_not_waited_for() -> None:
    first, second = pool(2).run(too_late)
    assert "have been dismissed" in first
    assert second == ""


def of_another_version() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        if torch.distributed.get_rank() == 1:
            patched.setattr(ranks, "__version__", "0.0.9")
        return otdd.led(lambda _: "led")


def test_processes_of_other_versions_are_refused() -> None:
    for answer in pool(2).run(of_another_version):
        assert isinstance(answer, InputError), answer
        assert "ranks disagree on versions: rank 0 has" in str(answer)
        assert "'otdd_flash': '0.0.9'" in str(answer)
