"""Work that rank 0 leads: flows, losses, Hessians and plans with shared passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import lead, pool

import otdd_flash as otdd
from otdd_flash.distributed import ranks
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError
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


def of_group(ranks: Ranks, work: Any, options: dict[str, Any]) -> list[Any]:
    return work(otdd.ComputeOptions("cpu", precision="double", group=ranks, **options))


def in_a_ring(work: Any) -> list[Any]:
    """Work with points that no rank holds all of."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharing, "UNASKED", 0)
        return lead(of_group, work, {"backend": "torch", "memory_budget": 0})


SLOW = [flow, derivatives, potentials, classes, subsamples]


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
