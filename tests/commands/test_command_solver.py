"""Goals, budgets and schedules of the solver from the command line."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.slow
def test_a_width_of_the_bounds_ends_the_solve(command, read):
    ended = command("solver.bound_width=0.05", "save_result=true")
    assert ended.code == 0
    assert re.search(r"converged +│ yes, stopped by bound_width", ended.out)
    result = read("run/result.json")
    assert (result["converged"], result["stopped_by"]) == (True, "bound_width")
    lower, upper = result["bounds"]
    assert upper - lower <= 0.05 * abs(result["value"])
    assert result["marginal_error"] > 1e-3
    assert (result["tolerance"], result["config"]["solver"]["tolerance"]) == (None, None)
    assert {term["stopped_by"] for term in result["terms"].values()} == {"bound_width"}

    from otdd_flash import DistanceResult

    loaded = DistanceResult.load("run")
    assert (loaded.converged, loaded.divergence.stopped_by) == (True, "bound_width")


@pytest.mark.slow
def test_a_tolerance_that_gave_way_to_rounding_is_told(command, read):
    ended = command("epsilon_relative=1e-5", "save_result=true")
    assert ended.code == 0
    assert re.search(r"converged +│ yes, stopped by rounding", ended.out)
    result = read("run/result.json")
    assert (result["converged"], result["stopped_by"]) == (True, "rounding")
    assert 1e-3 < result["marginal_error"] <= result["tolerance"]
    assert result["tolerance"] == max(term["tolerance"] for term in result["terms"].values())
    assert f"≤ {result['tolerance']:.2g}" in ended.out
    refused = command("epsilon_relative=1e-5", "solver.tolerance=1e-3")
    assert refused.code == 2
    assert "solver.tolerance=0.001 is too tight for float32" in refused.error

    from otdd_flash import DistanceResult

    loaded = DistanceResult.load("run")
    assert loaded.divergence.tolerance == result["tolerance"]


@pytest.mark.slow
def test_parts_of_the_data_are_compared_to_the_tolerance(command, monkeypatch):
    from otdd_flash.commands import compare

    asked = []

    def measure(*_, solver, **__):
        asked.append((solver.tolerance, solver.bound_width))
        return {}

    monkeypatch.setattr(compare, "measure_sampling", measure)
    assert command("solver.bound_width=0.05", "solver.tolerance=2e-3", "report=none").code == 0
    assert asked == [(2e-3, None)]


@pytest.mark.slow
def test_a_solve_out_of_time_is_reported_with_its_bounds(command, read):
    ended = command("solver.max_seconds=1e-9", "solver.tolerance=1e-4")
    assert ended.code == 0
    assert ended.err.startswith("warning: not converged within solver.max_seconds=1e-09 in ")
    assert "stopped by max_seconds; only solver bounds can be trusted" in ended.out
    result = read("run/result.json")
    assert (result["converged"], result["stopped_by"]) == (False, "max_seconds")
    assert result["bounds"][0] <= result["value"] <= result["bounds"][1]
    assert result["config"]["solver"]["max_seconds"] == 1e-9


@pytest.mark.slow
def test_a_required_width_out_of_reach_is_code_3(command):
    ended = command("solver.bound_width=1e-9", "solver.require_convergence=true", "report=none")
    assert ended.code == 3
    assert "of the value wide against solver.bound_width=1e-09" in ended.error
    assert "solver.require_convergence is set, and the result was written to" in ended.error


@pytest.mark.slow
def test_geomlosses_value_is_told_from_the_converged_one(command, read):
    ended = command("solver=geomloss")
    assert ended.code == 0
    assert ended.err.startswith("warning: not converged by the schedule of geomloss in ")
    assert "stopped by schedule; the value is geomloss's, the" in ended.out
    result = read("run/result.json")
    assert (result["schedule"], result["stopped_by"]) == ("geomloss", "schedule")
    assert result["converged"] is False
    assert command("hydra.run.dir=other", "report=none").code == 0
    converged = read("other/result.json")
    assert converged["schedule"] == "converged"
    assert result["bounds"][0] <= converged["bounds"][1]
    assert converged["bounds"][0] <= result["bounds"][1]
    assert result["value"] != pytest.approx(converged["value"], rel=1e-6)
