"""Small problems on a processor: scores, anchored softmins, sums of plans, and when they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operation_counts import Calls
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.operators import torch_pool
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.score_pool import Room
from otdd_flash.operators.torch_pool import MOST_SHIFT, TILE, TorchPool, TorchTerm, _Anchor
from otdd_flash.solver.small.pooled_solve import Batch
from otdd_flash.solver.small.route import MOST_POINTS, is_small, solve_batch

# The most operations of PyTorch in a certified divergence of 50 points at a tenth of the mean cost.
MOST_OPERATIONS = 1200


def numbers(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=draw, dtype=torch.float64)


def pool(n: int, m: int) -> TorchPool:
    room = Room(1, n, m, 33, 1, torch.float32, torch.device("cpu"), in_triton=False)
    found = TorchPool(room)
    # Rounded to float32, numbers that differ in the last bits of a float64 are equal nearly always.
    found.own_scores = [scores.double() for scores in found.own_scores]
    points = 100 + torch.randn(1, n + m, 33, generator=torch.Generator().manual_seed(n))
    found.points.copy_(points)
    for side, size in zip(room.sides, (n, m), strict=True):
        found.masses[:, side] = numbers(1, size, seed=size)
        found.masses[:, side] /= found.masses[:, side].sum()
    found.of_costs[0] = 0.5
    found.prepare(own=True)
    return found


@pytest.mark.parametrize(("n", "m"), [(40, 40), (TILE + 7, 30)])
def test_scores_of_a_cloud_with_itself_are_symmetric(n: int, m: int) -> None:
    """Bit by bit, of clouds far from 0; and scores between clouds are held in both directions."""
    found = pool(n, m)
    for side in (0, 1):
        own = found.block(side, side)
        assert torch.equal(own, own.mT)
    assert torch.equal(found.block(0, 1), found.block(1, 0).mT)
    x, y = found.points[0].double().split([n, m])
    expected = -0.5 * torch.cdist(x, y).square()
    torch.testing.assert_close(found.block(0, 1)[0].double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_an_anchor_is_the_softmin(count: int) -> None:
    """At its own potential, near it, at another epsilon, too far from it; no mass has no say."""
    scores = -10 * numbers(count, 30, 20).float()
    masses = numbers(count, 20, seed=1)
    masses[:, 3] = 0
    masses /= masses.sum(1, keepdim=True)
    anchor = _Anchor(scores, masses)
    anchor.forget()
    start = numbers(count, 20, seed=2)
    far = start.clone()
    far[:, 5] += 0.1 * (MOST_SHIFT + 1e4)
    near = start + 0.5 * numbers(count, 20, seed=3)
    near[:, 3] = -1e6
    for potential, epsilon in ((start, 0.1), (near, 0.1), (near, 0.03), (far, 0.03), (start, 0.03)):
        found = anchor.softmin(potential, [epsilon] * count)
        exponents = (potential[:, None] + scores.double()) / epsilon + masses[:, None].log()
        expected = -epsilon * exponents.logsumexp(2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [20, 700])
def test_sums_of_a_symmetric_plan_take_half_of_it(n: int) -> None:
    """In one tile, and in several."""
    points = numbers(n, 2)
    scores = -torch.cdist(points, points).square().float()[None]
    masses, f = torch.full((1, n), 1 / n, dtype=torch.float64), numbers(1, n, seed=4)
    sides = (masses, masses), (masses, masses)
    found = TorchTerm(scores, *sides, 0.0, own=True).marginals(f, None, 0.3)
    entries = ((f[:, :, None] + f[:, None] + scores.double()) / 0.3).exp() / n**2
    torch.testing.assert_close(found.rows, entries.sum(2), rtol=1e-12, atol=0)
    assert found.columns is found.rows


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize(("problems", "few"), [(3, 4), (6, 0)])
def test_a_problem_that_is_done_waits_for_the_others(
    problems: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is proved by what it kept, however many iterations others take after it."""
    monkeypatch.setattr(torch_pool, "FEW", few)
    draw = torch.Generator().manual_seed(0)
    scales = torch.logspace(-0.5, 0.5, problems)[:, None, None]
    x = scales * torch.randn(problems, 30, 8, generator=draw)
    y = scales * (torch.randn(problems, 25, 8, generator=draw) + 0.5)
    given = Batch((x, y), (None, None), (None, None), (1, 1), None, (1.0, 0.0))
    solved = solve_batch(given, 0.3, otdd.Converged(), debias=True, wanted=(), in_triton=False)
    assert solved.proved.all()
    expected = [
        float(otdd.sinkhorn_loss(x[k], y[k], epsilon=0.3, lambda_x=1.0)) for k in range(problems)
    ]
    torch.testing.assert_close(solved.values.tolist(), expected, rtol=1e-4, atol=1e-4)


SMALL = {
    "small": (True, {}),
    "many": (False, {"n": MOST_POINTS + 1}),
    "double": (False, {"compute": otdd.ComputeOptions("cpu", precision="double")}),
    "streamed": (False, {"compute": otdd.ComputeOptions("cpu", memory_budget=0)}),
    "width": (False, {"options": otdd.Converged(bound_width=0.1)}),
    "time": (False, {"options": otdd.Converged(max_seconds=1.0)}),
    "one iteration": (False, {"options": otdd.Converged(max_iterations=1)}),
}


@pytest.mark.parametrize("name", SMALL)
def test_what_is_small_on_a_processor(name: str) -> None:
    expected, given = SMALL[name]
    asked: dict[str, Any] = {"n": 30, "compute": otdd.ComputeOptions("cpu"), **given}
    x, y = numbers(asked["n"], 2).float(), numbers(20, 2).float()
    comparison = Comparison.between(x, y, 1.0, compute=asked["compute"])
    assert is_small(comparison, asked.get("options", otdd.Converged())) == expected


def test_a_small_divergence_asks_for_few_operations() -> None:
    """Each takes as long as thousands of additions: the time of a small divergence is theirs."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 16, generator=draw), torch.randn(50, 16, generator=draw) + 0.5
    epsilon = 0.1 * float(torch.cdist(x, y).square().mean())
    options = otdd.Converged(tolerance=1e-3)
    otdd.sinkhorn_loss(x, y, epsilon=epsilon, options=options)
    with Calls() as calls:
        otdd.sinkhorn_loss(x, y, epsilon=epsilon, options=options)
    assert calls.by_name.total() <= MOST_OPERATIONS


@pytest.mark.parametrize("term", ["xy", "xx", "yy"])
@pytest.mark.parametrize("shape", [(3,), (), (14,), (1, 7)])
def test_potentials_of_other_clouds_are_no_start(term: str, shape: tuple[int, ...]) -> None:
    """Part of a room would keep what another problem started from."""
    x, y = numbers(6, 2).float(), numbers(7, 2, seed=1).float()
    with pytest.raises(InputError, match=rf"^start\['{term}'\] must have shape"):
        otdd.sinkhorn_divergence(x, y, epsilon=0.1, start={term: torch.zeros(shape)})
