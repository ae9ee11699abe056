"""What a flow warns of when it has ended."""

from __future__ import annotations

from typing import Any

import pytest
from small_flows import DOUBLE

import otdd_flash as otdd
from otdd_flash.errors import NotConvergedWarning
from otdd_flash.flows.history import StepRecord
from otdd_flash.flows.run import report_convergence

SOLVER = otdd.Converged(tolerance=1e-3, max_iterations=7, max_seconds=2.0)


def record(step: int, marginal_error: float, stopped_by: Any, **more: Any) -> StepRecord:
    usual = {
        "step": step,
        "objective": 1.0,
        "divergence": 1.0,
        "lower": 0.5,
        "upper": 1.5,
        "functionals": {},
        "gradient_norm": 1.0,
        "step_size": 0.1,
        "iterations": 7,
        "marginal_error": marginal_error,
        "tolerance": 1e-3,
        "converged": stopped_by == "tolerance",
        "stopped_by": stopped_by,
        "seconds": 0.0,
    }
    return StepRecord(**{**usual, **more})


def test_late_steps_are_told_apart_by_what_stopped_them() -> None:
    history = [
        record(0, 0.5, "max_iterations"),
        record(1, 0.25, "max_seconds"),
        record(2, 1e-4, "tolerance"),
        record(3, 0.125, "max_iterations"),
    ]
    with pytest.warns(NotConvergedWarning) as caught:
        report_convergence(history, SOLVER, DOUBLE)
    (warning,) = caught
    first, _, second = str(warning.message).partition("; not converged ")
    assert "after 7 iterations in 2 of 4 evaluations: marginal error 5.00e-01" in first
    assert first.endswith("Raise solver.max_iterations or epsilon")
    assert "within solver.max_seconds=2 in 1 of 4 evaluations: marginal error 2.50e-01" in second
    assert second.endswith("Raise solver.max_seconds, solver.tolerance or epsilon")


def test_late_steps_are_told_apart_by_the_goal_that_they_missed() -> None:
    """Of a dataset that leaves its target: the plan was asked for there, then the bounds."""
    history = [
        record(0, 0.5, "rounding", converged=False),
        record(1, 1e-5, "rounding", converged=False, tolerance=None, bound_width=0.25),
        record(2, 1e-5, "rounding", converged=False, tolerance=None, bound_width=0.125),
    ]
    solver = otdd.Converged(tolerance=1e-3, bound_width=0.01)
    with pytest.warns(NotConvergedWarning) as caught:
        report_convergence(history, solver, DOUBLE)
    (warning,) = caught
    first, _, second = str(warning.message).partition("; not converged ")
    assert "in 1 of 3 evaluations: marginal error 5.00e-01 against solver.tolerance" in first
    assert first.endswith("Raise solver.tolerance or epsilon")
    assert "in 2 of 3 evaluations: the solver bounds are 2.50e-01 of the value wide" in second
    assert second.endswith("Raise solver.bound_width or epsilon")


@pytest.mark.filterwarnings("error")
def test_a_flow_whose_steps_all_converged_warns_of_nothing() -> None:
    report_convergence([record(0, 1e-4, "tolerance")], SOLVER, DOUBLE)
