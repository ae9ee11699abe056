"""Work that rank 0 leads: every entry point has the numbers of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import lead, pool
from test_ring import in_a_ring

import otdd_flash as otdd
from otdd_flash import pairwise
from otdd_flash.distributed import ranks
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError
from otdd_flash.operators.comparison import Comparison
from tests.frozen.cases import CASES, SOURCE, TARGET
from tests.frozen.recording import Record, record

pytestmark = pytest.mark.xdist_group("ranks")

EPSILON = 0.3


def recorded(group: Ranks | None, name: str, options: dict[str, Any]) -> Record:
    compute = otdd.ComputeOptions("cpu", precision="double", group=group, **options)
    return record(CASES[name].compute(compute), precision="double")


# Of points that no rank holds all of.
RING = {"backend": "torch", "memory_budget": 0}
SLOW = (
    *(
        "labels: sinkhorn",
        "labels: cosine",
        "flows: features",
        "flows: minibatches, noise and Adam",
    ),
    *("gradients: loss in double", "gradients: potentials", "hessians: product in double"),
    *("maps: barycentric in double", "sampling: interval", "sampling: noise floor"),
)


@pytest.mark.parametrize(
    ("name", "ring"),
    [
        ("pairwise: default epsilon, means", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in SLOW),
        pytest.param("flows: features", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_led_work_is_that_of_one_process(name: str, ring: bool) -> None:
    way = in_a_ring if ring else lead
    answers = pool(2).run(way, recorded, name, RING if ring else {})
    alone = recorded(None, name, {})
    first, copy = answers
    assert first.keys() == copy.keys() == alone.keys()
    for field, (expected, allowance) in alone.items():
        if allowance is not None:
            assert np.array_equal(first[field].value, copy[field].value, equal_nan=True), field
            # Linear systems end at a residual, wherever they are.
            near = 1e-5 if field == "gradient" else 1e-6
            far = np.abs(expected).max() * near
            assert np.allclose(first[field].value, expected, near, far, equal_nan=True), field


def refused_by_the_leader(ranks: Ranks, epsilon: float) -> float:
    compute = otdd.ComputeOptions("cpu", group=ranks)
    return otdd.dataset_distance(SOURCE, TARGET, epsilon=epsilon, compute=compute).value


def not_converged() -> Any:
    solver = otdd.Converged(1e-3, max_iterations=3, require_convergence=True)
    shard = tuple(
        side.take(torch.arange(torch.distributed.get_rank(), 20, 2)) for side in (SOURCE, TARGET)
    )
    compute = otdd.ComputeOptions("cpu", group="world")
    return otdd.dataset_distance(*shard, epsilon=0.01, solver=solver, compute=compute)


def test_all_ranks_hear_why_nothing_came_of_it() -> None:
    refusals = {
        -1.0: "epsilon must be finite and not negative",
        1e-40: "epsilon=1e-40 underflows in precision=",
    }
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
    from otdd_flash.cost import compute

    with pytest.MonkeyPatch.context() as patched:
        if torch.distributed.get_rank() == 1:
            patched.setattr(compute, "ASSUMED_FREE", 0)
            patched.setattr(compute, "free_memory", lambda device: 1)
        return lead(distance)


def distance(ranks: Ranks) -> float:
    compute = otdd.ComputeOptions("cpu", memory_budget="1GiB", group=ranks)
    return otdd.dataset_distance(SOURCE, TARGET, epsilon=EPSILON, compute=compute).value


def test_a_rank_that_is_short_of_memory_is_named() -> None:
    for answer in pool(2).run(short_of_memory):
        assert isinstance(answer, otdd.InputError), answer
        assert str(answer).startswith("rank 1: memory_budget=")


def solved_terms() -> int:
    """How many terms of four datasets a rank solves, of which two are equal."""
    solved: list[Comparison] = []
    before = pairwise.solve

    def counted(comparison: Comparison, *args: Any) -> Any:
        solved.append(comparison)
        return before(comparison, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pairwise, "solve", counted)
        lead(of_four)
    return len(solved)


def of_four(ranks: Ranks) -> torch.Tensor:
    datasets, compute = [SOURCE, TARGET] * 2, otdd.ComputeOptions("cpu", group=ranks)
    return otdd.pairwise_distances(datasets, epsilon=EPSILON, compute=compute).values


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
        counted = otdd.subsample_interval(SOURCE, TARGET, 1.0, count=39, size=12, **settings)
        with pytest.raises(otdd.ConvergenceError):
            otdd.subsample_interval(
                SOURCE, TARGET, 1.0, count=39, size=12, solver=solver, **settings
            )
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
    kept: list[Comparison] = []

    def work(ranks: Ranks) -> None:
        compute = otdd.ComputeOptions("cpu", group=ranks)
        kept.append(Comparison.between(SOURCE, TARGET, EPSILON, compute=compute, debias=False))

    otdd.led(work)
    try:
        return "" if not kept else kept[0].operator("xy").passes.backend
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
