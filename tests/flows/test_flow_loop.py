"""The loop of a flow: what it records, why it stops, and how often it solves and measures."""

import itertools
from dataclasses import replace

import pytest
import torch
from small_flows import CPU, TIGHT, blobs, flow, rough_flow, setting_of

import otdd_flash as otdd
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning
from otdd_flash.flows.divergence import TargetDivergence
from otdd_flash.flows.functionals import WeightedFunctional
from otdd_flash.flows.functionals.potentials import Norm
from otdd_flash.flows.modes.feature_driven import FeaturesMode
from otdd_flash.operators import build
from otdd_flash.operators.labelled_cost import LabelledCost
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
    twice = WeightedFunctional("twice", 2.0, Norm(None))
    result = rough_flow(SOURCE, TARGET, functionals=[norm, twice], steps=1)
    for record in result.history:
        assert record.functionals["twice"] == pytest.approx(2 / 0.3 * record.functionals["norm"])
        total = record.divergence + sum(record.functionals.values())
        assert record.objective == pytest.approx(total, rel=1e-12)
        assert record.row()["functional.norm"] == record.functionals["norm"]
    assert result.history[0].functionals["norm"] == pytest.approx(
        0.15 * float(SOURCE.features.square().sum(1).mean())
    )
    # From a dataset to itself only the norm moves: every step shrinks all points by its share.
    result = flow(SOURCE, SOURCE, steps=1, functionals=[{"name": "norm", "weight": 0.5}])
    shrunk = (1 - 0.3 * 0.5) * SOURCE.features
    torch.testing.assert_close(result.samples.features, shrunk, rtol=0, atol=1e-8)


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
    for _ in range(2):
        _, gradient = divergence(setting.at(points), None, frozenset({"x"}))
        points = points - 0.01 * len(SOURCE) * gradient["x"]
    whole, iterations = divergence.state(), []
    for state in (whole, {**whole, "earlier": {}}, {**whole, "earlier": {}, "last": {}}):
        other = TargetDivergence(setting)
        other.restore(state)
        iterations.append(other(setting.at(points), None, frozenset())[0].xy.iterations)
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
        @classmethod
        def between(cls, x, y, *rest):
            built.append((len(x.masses), len(y.masses)))
            return LabelledCost.between(x, y, *rest)

    monkeypatch.setattr(build, "LabelledCost", Counted)
    monkeypatch.setattr(
        FeaturesMode, "measure", lambda *given: measured.append(1) or measure(*given)
    )
    rough_flow(SOURCE, TARGET, steps=2, refresh=refresh)
    # The mean cost, then three evaluations; the target's self term is solved at the first.
    assert (built.count((9, 11)), built.count((9, 9)), built.count((11, 11))) == (4, 3, 1)
    assert len(built) == 8
    assert len(measured) == 3 - refresh


@pytest.mark.slow
def test_inner_products_flow_as_half_squared_distances():
    inner, squared = (
        rough_flow(SOURCE, TARGET, labels="none", cost=otdd.GroundCost(lambda_x, 0.5, ground))
        for ground, lambda_x in (("inner", 0.5), ("sqeuclidean", 0.25))
    )
    assert torch.equal(inner.samples.features, squared.samples.features)
    assert inner.after.divergence == squared.after.divergence
    with pytest.raises(InputError, match=r"labels=gaussian .* ground=inner"):
        flow(SOURCE, TARGET, cost=otdd.GroundCost(ground="inner"))
