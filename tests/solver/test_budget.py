"""What ends a solve beside the tolerance: the width of the bounds, the time, the iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import NotConvergedWarning
from otdd_flash.solver.divergence import Divergence, relative_width
from otdd_flash.solver.geomloss import GeomlossSchedule
from otdd_flash.solver.schedules import Converged, Schedule
from otdd_flash.solver.shortfall import shortfall

EPSILON = 0.05
DOUBLE = otdd.ComputeOptions("cpu", precision="double")


def cloud(n: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)).double() + shift


def solve(
    precision: str = "double", *, epsilon: float = EPSILON, progress: Any = None, **options: Any
) -> Divergence:
    settings = {"options": Converged(**options), "progress": progress}
    compute = otdd.ComputeOptions("cpu", precision=precision)
    clouds = cloud(70, 0), cloud(53, 1, 1.0)
    return otdd.sinkhorn_divergence(*clouds, epsilon=epsilon, compute=compute, **settings)


@pytest.fixture(scope="module")
def truth() -> float:
    return solve(tolerance=1e-9).value


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "epsilon"), [("fast", 1.0), ("double", EPSILON)])
def test_a_solve_ends_at_the_width_that_was_asked_for(epsilon: float, precision: str) -> None:
    exact = solve(epsilon=epsilon, tolerance=1e-9).value
    passes = []
    for width in (1.0, 0.1, 1e-3):
        found = solve(precision, epsilon=epsilon, bound_width=width)
        assert (found.converged, found.stopped_by) == (True, "bound_width")
        assert (found.bounds[1] - found.bounds[0]) / abs(found.value) <= width
        assert found.bound_width == relative_width(found.value, found.bounds)
        assert found.bounds[0] <= exact <= found.bounds[1]
        assert {term.stopped_by for term in found.terms.values()} == {"bound_width"}
        assert (found.tolerance, found.xy.tolerance) == (None, None)
        passes.append(found.passes)
    assert passes[0] < 0.7 * passes[-1]
    # Without debiasing it is that of the cross term.
    options = Converged(bound_width=1e-3)
    term = otdd.sinkhorn(cloud(70, 0), cloud(53, 1, 1.0), epsilon=epsilon, options=options)
    assert relative_width(term.value, term.bounds) <= 1e-3
    assert (term.converged, term.stopped_by) == (True, "bound_width")


@pytest.mark.slow
def test_a_width_below_rounding_ends_with_what_could_be_reached(truth: float) -> None:
    with pytest.warns(NotConvergedWarning, match=r"solver\.bound_width=1e-07.*precision=double"):
        found = solve("high", bound_width=1e-7)
    assert (found.converged, found.stopped_by) == (False, "rounding")
    assert found.bounds[0] <= truth <= found.bounds[1]
    assert found.bound_width < 1e-4


def test_iterations_of_all_continuations_count_together() -> None:
    with pytest.warns(NotConvergedWarning, match=r"after 30 iterations.*solver\.bound_width=1e-0"):
        found = solve(bound_width=1e-9, max_iterations=30)
    assert found.stopped_by == "max_iterations"
    assert max(term.iterations for term in found.terms.values()) == 30
    # So that the limit was met by a continuation.
    assert solve(tolerance=0.1).xy.iterations < 30


@pytest.mark.slow
def test_the_term_that_stopped_early_says_what_stopped_the_whole() -> None:
    # Less than a machine has been on, whose clock counts from there.
    found, timed = solve(), solve(max_seconds=300)
    assert (timed.value, timed.bounds, timed.stopped_by) == (found.value, found.bounds, "tolerance")
    assert found.xx is not None
    late = replace(found, xx=replace(found.xx, converged=False, stopped_by="max_seconds"))
    assert (found.stopped_by, late.stopped_by) == ("tolerance", "max_seconds")
    rounded = replace(found, xx=replace(found.xx, stopped_by="rounding"))
    assert rounded.stopped_by == "rounding"
    assert replace(rounded, yy=late.xx).stopped_by == "max_seconds"


def test_the_width_of_a_cloud_from_itself_is_0_and_its_plan_converged() -> None:
    for tolerance, reached in ((1e-5, 1e-5), (1e-12, 1e-6)):
        options = Converged(tolerance=tolerance, bound_width=0.5)
        found = otdd.sinkhorn_divergence(cloud(30, 0), cloud(30, 0), epsilon=1.0, options=options)
        assert (found.value, found.bounds, found.bound_width) == (0.0, (0.0, 0.0), 0.0)
        assert found.converged
        # The second is out of reach of float32.
        assert found.marginal_error <= reached


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A clock that goes on by a second with every look at the marginals, as a `progress`."""
    seconds = [0.0]
    fake = SimpleNamespace(perf_counter=lambda: seconds[0])
    for module in ("solve", "divergence"):
        monkeypatch.setattr(f"otdd_flash.solver.{module}.time", fake)

    def tick(*_: object) -> None:
        seconds[0] += 1

    return tick


def test_the_cross_term_gets_the_time_that_self_terms_leave(clock: Any, truth: float) -> None:
    with pytest.warns(NotConvergedWarning, match=r"within solver\.max_seconds=30 in xy: marg"):
        found = solve(tolerance=1e-4, max_seconds=30, progress=clock)
    assert (found.stopped_by, found.xy.stopped_by) == ("max_seconds", "max_seconds")
    # And an iteration that certifies.
    assert sum(term.iterations for term in found.terms.values()) == 30 + 1
    assert found.xy.iterations > 15
    assert found.bounds[0] <= truth <= found.bounds[1]


@pytest.mark.parametrize("goal", [{"tolerance": 1e-10}, {"bound_width": 1e-9}])
def test_without_time_every_term_gets_one_iteration_and_its_bounds(
    truth: float, goal: dict[str, float]
) -> None:
    with pytest.warns(NotConvergedWarning, match=r"solver\.max_seconds=1e-09"):
        found = solve(max_seconds=1e-9, **goal)
    assert [term.iterations for term in found.terms.values()] == [2, 2, 2]
    assert (found.converged, found.stopped_by) == (False, "max_seconds")
    assert found.bounds[0] <= truth <= found.bounds[1]


@pytest.mark.parametrize(
    ("stopped_by", "said"),
    [
        ("max_iterations", ("after 7 iterations", "Raise solver.max_iterations")),
        ("max_seconds", ("within solver.max_seconds=3", "Raise solver.max_seconds")),
        ("rounding", ("as far as rounding allows", "precision=double")),
        ("schedule", ("by the schedule of geomloss", "solver=converged")),
    ],
)
@pytest.mark.parametrize("width", [None, 0.01])
def test_the_warning_names_reason_goal_and_way_out(
    stopped_by: Any, said: tuple[str, str], width: float | None
) -> None:
    options: Schedule = Converged(1e-2, 7, bound_width=width, max_seconds=3.0)
    if stopped_by == "schedule":
        options, width = GeomlossSchedule(tolerance=1e-2), None
    text = shortfall(
        options,
        stopped_by,
        where="xy",
        marginal_error=0.125,
        tolerance=0.01 if width is None else None,
        dtype=torch.float32,
        bound_width=0.25,
    )
    goal = "tolerance" if width is None else "bound_width"
    for part in (*said, "in xy", "the solver bounds still hold"):
        assert part in text
    if stopped_by == "rounding":
        assert text.endswith(f"Raise solver.{goal} or epsilon, or set precision=double")
    missed = "marginal error 1.25e-01" if width is None else "2.50e-01 of the value wide"
    assert f"{missed} against solver.{goal}=0.01" in text
