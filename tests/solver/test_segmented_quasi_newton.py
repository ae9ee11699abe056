"""The iterations of many problems against the quasi-Newton method for one."""

from __future__ import annotations

import pytest
import torch
from otdd_flash.solver.segmented_quasi_newton import QuasiNewton, Start, _sound

from otdd_flash.engine.evidence import CROSS, SELF
from otdd_flash.engine.segments import MEMORY, Look, WeightedPoints
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.stored_segments import StoredSegments
from otdd_flash.solver import quasi_newton
from otdd_flash.solver.alternating import alternate
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.symmetric import average

EPSILON, STEPS = 0.05, 30


def cloud(size, seed):
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(size, 3, generator=draw, dtype=torch.float64)
    masses = torch.rand(size, generator=draw, dtype=torch.float64) + 0.1
    return WeightedPoints(points, masses / masses.sum())


def candidates_together(sides, form):
    """The candidates of all problems after every step (STEPS, S, m)."""
    segments = StoredSegments(sides, (32, 32))
    level = torch.full_like(segments.mean_cost, EPSILON)
    start = Start(level, torch.zeros_like(level))
    rule = QuasiNewton(segments, Converged(1e-10), EPSILON, form, start)
    active = torch.ones(len(sides), dtype=torch.bool)
    seen = []
    for _ in range(STEPS):
        rule.step(active)
        seen.append(segments.potentials[-1].clone())
    return torch.stack(seen)


def candidates_alone(rows, columns, step):
    """Of one problem (STEPS, m), and the step that was not kept first."""
    cost = torch.cdist(rows.points, columns.points).square()
    operator = StoredOperator.from_cost(cost, rows.masses, columns.masses)
    track = quasi_newton.begin(torch.zeros_like(rows.masses), torch.zeros_like(columns.masses))
    seen, rejected = [], None
    for iteration in range(STEPS):
        track = quasi_newton.Track(*step(operator, EPSILON, track))
        seen.append(track.candidate)
        if rejected is None and float(track.named.penalty) > 1:
            rejected = iteration
    return torch.stack(seen), rejected


@pytest.mark.parametrize(("step", "form"), [(alternate, CROSS), (average, SELF)])
def test_candidates_are_those_of_one_problem(step, form, monkeypatch):
    """Up to a constant and rounding, where steps are kept and where they are not."""
    monkeypatch.setattr(quasi_newton, "MEMORY", MEMORY)
    clouds = [cloud(size, size) for size in (30, 17, 25)]
    sides = [
        (one, one) if step is average else (one, clouds[k - 1]) for k, one in enumerate(clouds)
    ]
    together = candidates_together(sides, form)
    rejected = []
    for k, (rows, columns) in enumerate(sides):
        alone, first = candidates_alone(rows, columns, step)
        found = together[:, k, : len(columns.masses)]
        rejected.append(first)
        for one, two in zip(found, alone, strict=True):
            centred = (values - columns.masses @ values for values in (one, two))
            torch.testing.assert_close(*centred, rtol=1e-5, atol=1e-6)
    assert all(first is not None for first in rejected)


def test_curvature_counts_where_it_exceeds_rounding_times_the_step():
    """For steps of these sizes, in units of the cost: a curvature is of the size of a square."""
    numbers = torch.zeros(4, 2 + 14 + 4 * MEMORY, dtype=torch.float64)
    look = Look.of(numbers[:, :2], numbers[:, 2:])._replace(
        mean_step=torch.tensor([0.0, 0.0, 2.0, 0.0]).double(),
        mean_fall=torch.tensor([0.0, 0.0, 1.0, 0.0]).double(),
        step_step=torch.tensor([1e-4, 1e-4, 4.0 + 1e-4, torch.inf]).double(),
        step_fall=torch.tensor([1e-4, 1e-6, 2.0 + 1e-4, torch.inf]).double(),
    )
    sound = _sound(look, torch.full((4,), 1e-3).double())
    assert sound.tolist() == [True, False, True, False]
