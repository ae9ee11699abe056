"""The loop of a flow: what it records and keeps, why it stops, what it warns of and solves."""

import itertools
from dataclasses import replace

import pytest
import torch
from small_flows import CPU, DOUBLE, TIGHT, blobs, flow, rough_flow, setting_of

import otdd_flash as otdd
from otdd_flash.cost.points import LabelledCost
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning
from otdd_flash.flows.functionals import Norm, WeightedFunctional
from otdd_flash.flows.modes import FeaturesMode
from otdd_flash.flows.objective import TargetDivergence
from otdd_flash.flows.result import Recorder, StepRecord
from otdd_flash.flows.run import report_convergence
from otdd_flash.operators import comparison
from otdd_flash.samples import LabeledSamples

SOURCE, TARGET = blobs(9), blobs(11, seed=1)


def test_there_is_one_record_per_step_and_one_of_the_end():
    told = []
    result = flow(SOURCE, TARGET, steps=1, epsilon=4.0, progress=told.append)
    assert list(result.history) == told
    assert [record.step for record in told] == [0, 1]
    assert [record.step_size for record in told] == [0.3, 0.0]
    assert all(record.lower <= record.divergence <= record.upper for record in told)
    assert result.converged
    assert result.stopped_by == "steps"
    assert told[0].row()["objective"] == told[0].objective
    start = otdd.sinkhorn_loss(
        x := SOURCE.features.clone().requires_grad_(),
        TARGET.features,
        epsilon=4.0,
        labels_x=SOURCE.labels,
        labels_y=TARGET.labels,
        class_table=otdd.class_distances([SOURCE, TARGET]).between(0, 1).full,
        options=TIGHT,
    )
    (gradient,) = torch.autograd.grad(start, x)
    assert told[0].gradient_norm == pytest.approx(float(3 * gradient.norm()), rel=1e-6)
    assert told[0].divergence == pytest.approx(float(start.detach()), abs=1e-8)


@pytest.mark.slow
def test_an_objective_has_its_functionals_with_their_weights():
    norm = {"name": "norm", "weight": 0.3}
    twice = WeightedFunctional("twice", 2.0, Norm(SOURCE))
    result = rough_flow(SOURCE, TARGET, functionals=[norm, twice], steps=1)
    for record in result.history:
        assert record.functionals["twice"] == pytest.approx(2 / 0.3 * record.functionals["norm"])
        total = record.divergence + sum(record.functionals.values())
        assert record.objective == pytest.approx(total, rel=1e-12)
        assert record.row()["functional.norm"] == record.functionals["norm"]
    assert result.history[0].functionals["norm"] == pytest.approx(
        0.15 * float(SOURCE.features.square().sum(1).mean())
    )


@pytest.mark.slow
def test_a_flow_stops_once_steps_change_little_also_after_resuming(tmp_path):
    options = {"steps": 30, "tolerance": 0.1}
    kept = otdd.Checkpoints(tmp_path)
    short = rough_flow(SOURCE, TARGET, checkpoints=kept, **options)
    assert short.stopped_by == "tolerance"
    objectives = [record.objective for record in short.history]
    changes = [abs(b - a) / objectives[0] for a, b in itertools.pairwise(objectives)]
    assert changes[-1] <= 0.1 < min(changes[:-1])
    at = short.history[-1].step
    assert 1 < at < 30
    whole = rough_flow(SOURCE, TARGET, steps=at + 1)
    assert objectives == [record.objective for record in whole.history[:-1]]
    again = rough_flow(SOURCE, TARGET, checkpoints=replace(kept, resume=True), **options)
    assert again.stopped_by == "tolerance"
    assert again.samples.fingerprint == short.samples.fingerprint


@pytest.mark.slow
def test_the_last_two_solves_tell_where_the_next_starts():
    """Of a path that is nearly straight: potentials go on as they went."""
    metric = otdd.labels.NoLabels()
    setting = replace(setting_of(SOURCE, TARGET, metric), solver=otdd.Converged(1e-6))
    divergence, points = TargetDivergence(setting), SOURCE.features

    def moved():
        return setting.comparison.with_points(setting.at(points), setting.target)

    for _ in range(2):
        _, gradient = divergence(moved(), frozenset({"x"}))
        points = points - 0.01 * len(SOURCE) * gradient["x"]
    whole, iterations = divergence.state(), []
    for state in (whole, {**whole, "earlier": {}}, {**whole, "earlier": {}, "last": {}}):
        other = TargetDivergence(setting)
        other.restore(state)
        iterations.append(other(moved(), frozenset())[0].xy.iterations)
    assert iterations[0] < iterations[1] < 0.9 * iterations[2]


@pytest.mark.slow
def test_every_step_says_what_its_solve_was_asked_for():
    single = {"solver": otdd.Converged(), "compute": otdd.ComputeOptions("cpu")}
    for epsilon, stopped_by in ((2e-4, "rounding"), (1.0, "tolerance")):
        for record in flow(SOURCE, TARGET, steps=1, epsilon=epsilon, **single).history:
            assert record.stopped_by == stopped_by
            assert record.marginal_error <= record.tolerance
            assert (record.tolerance > 1e-3) == (stopped_by == "rounding")


def test_a_solve_that_stops_early_or_is_refused_says_so():
    hasty = otdd.Converged(tolerance=1e-6, max_iterations=3)
    with pytest.warns(NotConvergedWarning, match="after 3 iterations in 2 of 2 evaluations"):
        result = flow(SOURCE, TARGET, epsilon=0.05, solver=hasty, steps=1)
    assert not result.converged
    with pytest.raises(ConvergenceError):
        flow(SOURCE, TARGET, epsilon=0.05, solver=replace(hasty, require_convergence=True))
    tight = otdd.Converged(tolerance=1e-12)
    with pytest.raises(InputError, match=r"tolerance=1e-12 is too tight") as refused:
        flow(SOURCE, TARGET, solver=tight, compute=otdd.ComputeOptions("cpu"))
    # A command follows causes to that of a user's function.
    assert refused.value.__cause__ is not refused.value
    wide = LabeledSamples(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), ("a",))
    with pytest.raises(InputError, match="5"):
        flow(wide.to(CPU), TARGET)


def test_a_relative_epsilon_is_that_share_of_the_mean_cost():
    result = rough_flow(SOURCE, TARGET, epsilon=None, epsilon_relative=2.0, steps=1)
    table = otdd.class_distances([SOURCE, TARGET]).between(0, 1)
    distances = torch.cdist(SOURCE.features, TARGET.features).square()
    dense = (distances + table.xy[SOURCE.labels][:, TARGET.labels]).mean() / 2
    assert result.settings["epsilon"] == pytest.approx(2.0 * float(dense))


@pytest.mark.slow
def test_functions_of_the_user_see_one_default_type_whatever_a_script_has_set():
    def energy(points, labels, masses):
        return (points.float() @ torch.ones(3)).sum()

    def moved():
        term = WeightedFunctional("energy", 0.1, energy)
        return rough_flow(SOURCE, TARGET, functionals=[term], steps=1).samples.features

    expected, before = moved(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(moved(), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow
def test_an_empty_or_small_class_leaves_before_the_flow():
    source = replace(SOURCE, class_names=("a", "none", "b"), labels=2 * SOURCE.labels)
    result = rough_flow(source, TARGET, mode="joint", steps=1)
    assert result.samples.class_names == ("a", "b")
    whole = rough_flow(SOURCE, TARGET, mode="joint", steps=1)
    assert result.samples.fingerprint == whole.samples.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("refresh", [1, 2])
def test_an_evaluation_builds_one_cost_and_measures_no_class_twice(refresh, monkeypatch):
    built, measured, measure = [], [], FeaturesMode.measure

    class Counted(LabelledCost):
        def __init__(self, x, y, *rest):
            built.append((len(x.masses), len(y.masses)))
            super().__init__(x, y, *rest)

    monkeypatch.setattr(comparison, "LabelledCost", Counted)
    monkeypatch.setattr(
        FeaturesMode, "measure", lambda *given: measured.append(1) or measure(*given)
    )
    rough_flow(SOURCE, TARGET, steps=2, refresh=refresh)
    # The mean cost, then three evaluations; the target's self term is solved at the first.
    assert (built.count((9, 11)), built.count((9, 9)), built.count((11, 11))) == (4, 3, 1)
    assert len(built) == 8
    assert len(measured) == 3 - refresh


def recorded(steps, most):
    """Of points that are at k after k steps."""
    recorder, points = Recorder(torch.tensor([0, 2]), most), torch.zeros(3, 1)
    for step in range(steps + 1):
        points.fill_(step)
        if recorder.wants(step):
            recorder.keep(step, points, torch.tensor([step, 0, 1]))
    return recorder.trajectory(steps, points, torch.tensor([steps, 0, 1]))


@pytest.mark.parametrize("most", [2, 5, 32])
def test_few_moments_evenly_spread_from_the_first_to_the_last(most):
    for steps in (1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 100):
        seen = recorded(steps, most)
        assert len(seen.steps) <= most, steps
        assert (seen.steps[0], seen.steps[-1]) == (0, steps)
        gaps = seen.steps.diff()
        assert len(set(gaps[:-1].tolist())) <= 1, steps
        assert int(gaps[-1]) <= int(gaps[0]), steps
        # Room is used: at half the distance there would be too many.
        assert len(seen.steps) > most // 2 or len(seen.steps) == steps + 1, steps
        # What was kept is a copy.
        assert torch.equal(seen.points[:, :, 0], seen.steps[:, None].expand(-1, 2).float())
        assert torch.equal(seen.labels, torch.stack((seen.steps, torch.ones_like(seen.steps)), 1))


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
