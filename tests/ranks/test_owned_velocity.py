"""Velocities of a flow that stay with the ranks that move the rows, against one process."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from rank_pool import pool
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.flows.stepping import Stepper
from otdd_flash.operators import sharing
from otdd_flash.solver.small import route

pytestmark = pytest.mark.xdist_group("ranks")

COUNT, DIM = 11, 3


def sides(case: str) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    draw = torch.Generator().manual_seed(5)
    count = 2 if case == "fewer points than ranks" else COUNT
    labels, weights, names = torch.arange(count) % 2, None, ("a", "b")
    if case == "one class":
        labels, names = torch.zeros_like(labels), ("a",)
    if case == "some of no mass":
        # Of three ranks the first has none: these are its points in the order of the classes.
        weights = (torch.arange(count) % 2 + (torch.arange(count) > 7)).double()
    source, target = (
        otdd.LabeledSamples(torch.randn(count, DIM, generator=draw) + k, labels, names, weights)
        for k in range(2)
    )
    return source, source if case == "one cloud" else target


def moved(ranks: Ranks | None, case: str) -> tuple[Tensor, list[float], set[str]]:
    """Where a flow leads, gradient norms of its steps, and of what kind velocities were."""
    kinds, held, step = set[str](), list[int](), Stepper.step

    def seen(self: Stepper, velocities: Any, *others: Any) -> None:
        kinds.add(type(velocities["points"]).__name__)
        held.append(0 if ranks is None else len(ranks.held))
        step(self, velocities, *others)

    classes = 1 if case == "one class" else 2
    table = torch.ones(2 * classes, 2 * classes, dtype=torch.float64).fill_diagonal_(0)
    options: dict[str, dict[str, Any]] = {
        "momentum": {"optimizer_options": {"momentum": 0.5}},
        "noise and a box": {"noise": 0.1, "box": (-1.0, 1.5)},
        "a minibatch": {"minibatch": 6},
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Stepper, "step", seen)
        # Terms in turn, as ranks solve them.
        patched.setattr(route, "MOST_POINTS", 0)
        if case == "cross terms in a ring":
            patched.setattr(sharing, "_in_a_ring", lambda clouds, *_: clouds[0] is not clouds[1])
        if case == "all in a ring":
            patched.setattr(sharing, "_in_a_ring", lambda *_: True)
        result = otdd.gradient_flow(
            *sides(case),
            otdd.Flow(3, stepping=otdd.Stepping(0.2, **options.get(case, {}))),
            epsilon=0.5,
            labels=otdd.labels.Given(otdd.ClassDistances.from_full(table, classes)),
            solver=otdd.Converged(tolerance=1e-5),
            compute=otdd.ComputeOptions("cpu", group=ranks),
            unbalanced=1.0 if case == "relaxed marginals" else None,
        )
    assert held[-1] == held[-2], "what a step leaves on the ranks adds up"
    norms = [step.gradient_norm for step in result.history]
    return result.samples.features, norms, kinds


CASES = {
    "labels": "OwnedVelocity",
    "momentum": "OwnedVelocity",
    "noise and a box": "OwnedVelocity",
    "one class": "OwnedVelocity",
    "relaxed marginals": "OwnedVelocity",
    "some of no mass": "OwnedVelocity",
    "fewer points than ranks": "OwnedVelocity",
    "one cloud": "OwnedVelocity",
    "a minibatch": "Tensor",
    "cross terms in a ring": "Tensor",
    "all in a ring": "Tensor",
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("case", "kind"), CASES.items())
def test_a_flow_leads_where_one_process_does(case: str, kind: str) -> None:
    points, norms, kinds = pool(3).led(moved, case)[0]
    alone, alone_norms, _ = moved(None, case)
    assert kinds == {kind}
    torch.testing.assert_close(points, alone, rtol=1e-4, atol=1e-4)
    assert norms == pytest.approx(alone_norms, rel=1e-3, abs=1e-5)


def derivatives_held(ranks: Ranks) -> list[str]:
    """What a flow that ends with an error leaves of derivatives on every rank."""
    solver = otdd.Converged(1e-5, max_iterations=1, require_convergence=True)
    compute = otdd.ComputeOptions("cpu", group=ranks)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(route, "MOST_POINTS", 0)
        with pytest.raises(otdd.ConvergenceError):
            otdd.gradient_flow(
                *sides("labels"), otdd.Flow(1), epsilon=0.5, solver=solver, compute=compute
            )
    gc.collect()
    return ranks.order(names_of_held)


def names_of_held(ranks: Ranks) -> list[str]:
    every = ranks.all_gathered_objects([type(each).__name__ for each in ranks.held.values()])
    return [name for names in every for name in names]


def test_a_flow_that_ends_with_an_error_leaves_no_derivatives() -> None:
    found = pool(2).led(derivatives_held)[0]
    assert "_Derivatives" not in found, found
