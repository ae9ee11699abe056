"""What a flow warns of when it has ended."""

import pytest
from small_flows import DOUBLE

import otdd_flash as otdd
from otdd_flash.errors import NotConvergedWarning
from otdd_flash.flows.history import StepRecord
from otdd_flash.flows.run import report_convergence


def record(step, marginal_error, stopped_by, **more):
    usual = {"step": step, "objective": 1.0, "divergence": 1.0, "lower": 0.5, "upper": 1.5}
    usual |= {"functionals": {}, "gradient_norm": 1.0, "step_size": 0.1, "iterations": 7}
    usual |= {"marginal_error": marginal_error, "tolerance": 1e-3, "seconds": 0.0}
    usual |= {"converged": stopped_by == "tolerance", "stopped_by": stopped_by}
    return StepRecord(**{**usual, **more})


# What stopped late steps, and what is said of them; or the goal that they missed, of a dataset that
# leaves its target: the plan was asked for there, then the bounds.
SAID = {
    "stopped": (
        [
            record(0, 0.5, "max_iterations"),
            record(1, 0.25, "max_seconds"),
            record(2, 1e-4, "tolerance"),
            record(3, 0.125, "max_iterations"),
        ],
        {"max_iterations": 7, "max_seconds": 2.0},
        r"after 7 iterations in 2 of 4 evaluations: marginal error 5.00e-01.*"
        r"Raise solver.max_iterations or epsilon; not converged "
        r"within solver.max_seconds=2 in 1 of 4 evaluations: marginal error 2.50e-01.*"
        r"Raise solver.max_seconds, solver.tolerance or epsilon$",
    ),
    "missed": (
        [
            record(0, 0.5, "rounding", converged=False),
            record(1, 1e-5, "rounding", converged=False, tolerance=None, bound_width=0.25),
            record(2, 1e-5, "rounding", converged=False, tolerance=None, bound_width=0.125),
        ],
        {"bound_width": 0.01},
        r"in 1 of 3 evaluations: marginal error 5.00e-01 against solver.tolerance.*"
        r"Raise solver.tolerance or epsilon; not converged .*"
        r"in 2 of 3 evaluations: the solver bounds are 2.50e-01 of the value wide.*"
        r"Raise solver.bound_width or epsilon$",
    ),
}


@pytest.mark.parametrize("kind", SAID)
def test_late_steps_are_told_apart_by_what_stopped_them_or_what_they_missed(kind):
    history, solver, sentence = SAID[kind]
    with pytest.warns(NotConvergedWarning, match=sentence) as caught:
        report_convergence(history, otdd.Converged(tolerance=1e-3, **solver), DOUBLE)
    assert len(caught) == 1
