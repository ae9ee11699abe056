"""The loop of a flow: what it records, why it stops, what it does when steps overshoot."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_flows import CPU, DOUBLE, TIGHT, blobs, digits, flow, mode_of, rough_flow, setting_of

import otdd_flash as otdd
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning
from otdd_flash.flows.divergence import TargetDivergence
from otdd_flash.flows.functionals import WeightedFunctional
from otdd_flash.flows.functionals.potentials import Norm
from otdd_flash.flows.history import StepRecord
from otdd_flash.flows.stepping import Stepping
from otdd_flash.operators import build
from otdd_flash.operators.cloud import Cloud
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.samples import LabeledSamples

SOURCE, TARGET = blobs(9), blobs(11, seed=1)


def test_there_is_one_record_per_step_and_one_of_the_end() -> None:
    told: list[StepRecord] = []
    result = flow(SOURCE, TARGET, steps=2, progress=told.append)
    assert list(result.history) == told
    assert [record.step for record in told] == [0, 1, 2]
    assert [record.step_size for record in told] == [0.3, 0.3, 0.0]
    assert all(record.lower <= record.divergence <= record.upper for record in told)
    assert result.converged
    assert result.stopped_by == "steps"
    assert told[0].row()["objective"] == told[0].objective
    start = mode_of("features", SOURCE, TARGET, otdd.labels.Gaussian()).evaluate(SOURCE.features)
    speed = (SOURCE.masses @ start.features.square().sum(1)).sqrt()
    assert told[0].gradient_norm == pytest.approx(float(speed), rel=1e-6)


@pytest.mark.slow
def test_the_start_is_that_of_the_dataset_distance() -> None:
    first = flow(SOURCE, TARGET, steps=1).history[0]
    distance = otdd.dataset_distance(SOURCE, TARGET, epsilon=1.0, solver=TIGHT, compute=DOUBLE)
    assert first.divergence == pytest.approx(distance.value, abs=1e-10)


@pytest.mark.slow
def test_an_objective_has_its_functionals_with_their_weights() -> None:
    norm = {"name": "norm", "weight": 0.3}
    twice = WeightedFunctional("twice", 2.0, Norm(None))
    result = rough_flow(SOURCE, TARGET, functionals=[norm, twice])
    for record in result.history:
        assert record.functionals["twice"] == pytest.approx(2 / 0.3 * record.functionals["norm"])
        total = record.divergence + sum(record.functionals.values())
        assert record.objective == pytest.approx(total, rel=1e-12)
        assert record.row()["functional.norm"] == record.functionals["norm"]
    assert result.history[0].functionals["norm"] == pytest.approx(
        0.15 * float(SOURCE.features.square().sum(1).mean())
    )


@pytest.mark.slow
def test_functionals_move_particles() -> None:
    """From a dataset to itself only the norm moves: every step shrinks all points by its share."""
    result = flow(SOURCE, SOURCE, steps=1, functionals=[{"name": "norm", "weight": 0.5}])
    shrunk = (1 - 0.3 * 0.5) * SOURCE.features
    torch.testing.assert_close(result.samples.features, shrunk, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_a_flow_stops_once_steps_change_little() -> None:
    short = flow(SOURCE, TARGET, steps=30, tolerance=0.1)
    assert short.stopped_by == "tolerance"
    objectives = [record.objective for record in short.history]
    changes = [abs(b - a) / objectives[0] for a, b in itertools.pairwise(objectives)]
    assert changes[-1] <= 0.1 < min(changes[:-1])
    at = short.history[-1].step
    assert 1 < at < 30
    whole = flow(SOURCE, TARGET, steps=at + 1)
    assert objectives == [record.objective for record in whole.history[:-1]]


@pytest.mark.slow
def test_a_tolerance_reached_is_reached_after_resuming_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 30, "tolerance": 0.05}
    kept = otdd.Checkpoints(tmp_path)
    short = rough_flow(SOURCE, TARGET, checkpoints=kept, **options)
    again = rough_flow(SOURCE, TARGET, checkpoints=replace(kept, resume=True), **options)
    assert again.stopped_by == "tolerance"
    assert again.samples.fingerprint == short.samples.fingerprint


def test_a_stopped_flow_returns_where_it_is() -> None:
    asked = iter([False, False, True])
    stopped = rough_flow(SOURCE, TARGET, steps=9, stop=lambda: next(asked))
    whole = rough_flow(SOURCE, TARGET, steps=2)
    assert stopped.stopped_by == "interrupted"
    assert stopped.samples.fingerprint == whole.samples.fingerprint
    assert stopped.trajectory.steps.tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["attached", "augmented"])
def test_the_self_term_of_the_target_is_solved_once(mode: str) -> None:
    solved: list[tuple[str, int]] = []
    rough_flow(
        SOURCE,
        TARGET,
        mode=mode,
        steps=4,
        solver_progress=lambda term, iteration, error: solved.append((term, iteration)),
    )
    first = [term for term, iteration in solved if iteration == 1]
    assert (first.count("xy"), first.count("xx"), first.count("yy")) == (5, 5, 1)


@pytest.mark.slow
def test_solves_start_where_the_last_ended() -> None:
    source, target = digits("train", 20), digits("test", 20, rotate=60)
    options = {"epsilon": 1.0, "labels": "means", "stepping": Stepping(0.02), "steps": 3}
    warm = flow(source, target, solver=otdd.Converged(1e-4), **options)
    iterations = 0
    mode = mode_of("features", source, target, otdd.labels.Means())
    points = source.features
    for _ in range(3):
        points = points - 0.02 * mode.evaluate(points).features
        table = mode.class_distances.full
        setting = replace(
            setting_of(source, target, otdd.labels.Means()),
            solver=otdd.Converged(1e-4),
        )
        cold, _ = TargetDivergence(setting)(setting.at(points), table, frozenset())
        iterations += cold.xy.iterations
    assert sum(record.iterations for record in warm.history[1:]) < 0.7 * iterations


@pytest.mark.slow
def test_the_last_two_solves_tell_where_the_next_starts() -> None:
    """Of a path that is nearly straight: potentials go on as they went."""
    metric = otdd.labels.NoLabels()
    setting = replace(setting_of(SOURCE, TARGET, metric), solver=otdd.Converged(1e-6))
    divergence, points = TargetDivergence(setting), SOURCE.features
    for _ in range(2):
        _, gradient = divergence(setting.at(points), None, frozenset({"x"}))
        points = points - 0.01 * len(SOURCE) * gradient["x"]
    iterations = []
    for state in (divergence.state(), {**divergence.state(), "earlier": {}}):
        other = TargetDivergence(setting)
        other.restore(state)
        iterations.append(other(setting.at(points), None, frozenset())[0].xy.iterations)
    assert iterations[0] < iterations[1]


@pytest.mark.slow
def test_every_step_says_what_its_solve_was_asked_for() -> None:
    single = {"solver": otdd.Converged(), "compute": otdd.ComputeOptions("cpu")}
    rough, fine = (
        flow(SOURCE, TARGET, steps=1, epsilon=epsilon, **single) for epsilon in (2e-4, 1.0)
    )
    for record in rough.history:
        assert record.stopped_by == "rounding"
        assert 1e-3 < record.marginal_error <= record.tolerance
    assert {record.tolerance for record in fine.history} == {1e-3}


def test_a_solve_that_stops_early_is_reported_or_refused() -> None:
    hasty = otdd.Converged(tolerance=1e-6, max_iterations=3)
    with pytest.warns(NotConvergedWarning, match="after 3 iterations in 3 of 3 evaluations"):
        result = flow(SOURCE, TARGET, epsilon=0.05, solver=hasty)
    assert not result.converged
    with pytest.raises(ConvergenceError):
        flow(SOURCE, TARGET, epsilon=0.05, solver=replace(hasty, require_convergence=True))


def test_a_solve_that_is_refused_says_so_with_an_end_to_its_causes() -> None:
    tight = otdd.Converged(tolerance=1e-12)
    with pytest.raises(InputError, match=r"tolerance=1e-12 is too tight") as refused:
        flow(SOURCE, TARGET, solver=tight, compute=otdd.ComputeOptions("cpu"))
    # A command follows causes to that of a user's function.
    assert refused.value.__cause__ is not refused.value


def test_a_relative_epsilon_is_that_share_of_the_mean_cost() -> None:
    result = rough_flow(SOURCE, TARGET, epsilon=None, epsilon_relative=0.2, steps=1)
    table = otdd.class_distances([SOURCE, TARGET]).between(0, 1)
    setting = setting_of(SOURCE, TARGET, otdd.labels.Gaussian())
    expected = 0.2 * setting.mean_cost(SOURCE.features, table)
    assert result.settings["epsilon"] == pytest.approx(expected)
    distances = torch.cdist(SOURCE.features, TARGET.features).square()
    assert SOURCE.labels is not None
    assert TARGET.labels is not None
    dense = (distances + table.xy[SOURCE.labels][:, TARGET.labels]).mean() / 2
    assert expected == pytest.approx(0.2 * float(dense))


@pytest.mark.slow
def test_an_empty_or_small_class_leaves_before_the_flow() -> None:
    assert SOURCE.labels is not None
    source = replace(SOURCE, class_names=("a", "none", "b"), labels=2 * SOURCE.labels)
    result = rough_flow(source, TARGET, mode="joint")
    assert result.samples.class_names == ("a", "b")
    whole = rough_flow(SOURCE, TARGET, mode="joint")
    assert result.samples.fingerprint == whole.samples.fingerprint


def test_another_dimension_is_refused() -> None:
    wide = LabeledSamples(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), ("a",))
    with pytest.raises(InputError, match="5"):
        flow(wide.to(CPU), TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("refresh", [1, 2])
def test_an_evaluation_builds_one_cost_between_both_clouds(
    refresh: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[int, int]] = []

    class Counted(LabelledCost):
        @classmethod
        def between(cls, x: Cloud, y: Cloud, *rest: Any) -> LabelledCost:
            built.append((len(x.masses), len(y.masses)))
            return LabelledCost.between(x, y, *rest)

    monkeypatch.setattr(build, "LabelledCost", Counted)
    rough_flow(SOURCE, TARGET, steps=2, refresh=refresh)
    # The mean cost, then three evaluations; the target's self term is solved at the first.
    assert (built.count((9, 11)), built.count((9, 9)), built.count((11, 11))) == (4, 3, 1)
    assert len(built) == 8
