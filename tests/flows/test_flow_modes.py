"""Symmetries of flows, and how the modes are related."""

import itertools
from dataclasses import replace

import pytest
import torch
from refusals import naming
from small_flows import CASES, blobs, bures_table, digits, divergence, flow, mode_of, rough_flow

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows.gaussians import Gaussians
from otdd_flash.flows.modes import jointly_driven
from otdd_flash.flows.modes.feature_driven import FeaturesMode
from otdd_flash.samples import LabeledSamples


def assert_same_end(one, features, labels=None):
    torch.testing.assert_close(one.samples.features, features, rtol=0, atol=1e-6)
    if labels is not None:
        assert torch.equal(one.samples.labels, labels)


def some(*names):
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


@pytest.mark.slow
@some("features, full", "attached, full", "attached, means", "joint, diagonal", "augmented, full")
def test_nothing_but_places_and_masses_matters(case):
    """Weights mean as many points; order, origin and particles without mass mean nothing."""
    source, target = blobs(9), blobs(11, seed=1)
    times = torch.tensor([2, 1, 3, 1, 0, 2, 1, 1, 1])
    rows = torch.arange(9).repeat_interleave(times)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    offset = torch.tensor([20.0, -3.0, 1.0], dtype=torch.float64)
    moved, goal = (
        replace(side, features=side.features + offset) for side in (source.take(rows), target)
    )
    copies = flow(moved, goal, epsilon=4.0, **case)
    before = source.features.clone()
    weighted = flow(replace(source, weights=times.double()), target, epsilon=4.0, **case)
    ends = weighted.samples.features[rows] + offset
    assert_same_end(copies, ends, weighted.samples.labels[rows])
    assert weighted.history[-1].objective == pytest.approx(copies.history[-1].objective, abs=1e-8)
    assert torch.equal(weighted.samples.features[4], before[4])
    # What is given stays as it is.
    assert torch.equal(source.features, before)


@pytest.mark.slow(after=1)
@some("features, full", "attached, diagonal", "joint, full", "augmented, full")
def test_a_dataset_does_not_move_towards_itself(case):
    source = blobs(9)
    # Factors of one class lie on a kink of their distance, where rounding decides its direction.
    result = flow(source, source, stepping=otdd.Stepping(step_size=0.1), epsilon=4.0, **case)
    assert_same_end(result, source.features, source.labels)
    assert result.history[-1].divergence == pytest.approx(0, abs=1e-8)


@pytest.mark.slow
@some("features, full", "attached, full", "joint, means", "augmented, diagonal")
def test_the_objective_falls_on_digits(case):
    source, target = digits("train", 20), digits("test", 20, rotate=60)
    options = {"solver": otdd.Converged(), "stepping": otdd.Stepping(0.2), **case}
    result = flow(source, target, epsilon=2.0, **options)
    objectives = [record.objective for record in result.history]
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[-1] < 0.6 * objectives[0]
    assert result.samples.class_names == source.class_names


@pytest.mark.slow
@some("features, diagonal", "attached, full", "joint, full", "joint, diagonal", "augmented, full")
def test_every_record_is_the_divergence_solved_afresh(case):
    source, target = blobs(9), blobs(11, seed=1)
    mode = mode_of(case["mode"], source, target, case["labels"])
    theirs = Gaussians.of(target, case["labels"])
    points = source.features.clone()
    for step, record in enumerate(flow(source, target, steps=1, **case).history):
        particles = replace(source, features=points)
        own = Gaussians.of(particles, case["labels"])
        if mode.variables:
            own = Gaussians.from_variables(mode.variables)
        if case["mode"] == "augmented":
            names = tuple(map(str, range(9)))
            particles = LabeledSamples(points, torch.arange(9), names)
        fresh = divergence(particles, target, bures_table(own, theirs))
        assert record.divergence == pytest.approx(fresh, abs=1e-8)
        if step > 0:
            mode.measure(points)
        evaluation = mode.evaluate(points)
        points = points - 0.3 * evaluation.features
        for name, velocity in evaluation.variables.items():
            mode.variables[name] -= 0.3 * velocity


@pytest.mark.slow
def test_augmented_means_are_a_plain_flow_of_longer_vectors():
    source, target = blobs(9), blobs(11, seed=1)
    metric, none = otdd.labels.Means(), otdd.labels.NoLabels()
    scale = torch.tensor([0.7, 0.2], dtype=torch.float64).sqrt().repeat_interleave(3)

    def longer(samples):
        means = Gaussians.of(samples, metric).means[samples.labels]
        vectors = torch.cat((samples.features, means), 1) * scale
        return LabeledSamples(vectors, None, ())

    cost, alone = otdd.GroundCost(0.7, 0.2), otdd.GroundCost(1.0, 0.0)
    augmented = flow(source, target, mode="augmented", labels=metric, cost=cost)
    # Both halves of a vector are scaled, so that each has a step size of its own.
    plain = longer(source)
    for _ in range(2):
        mode = mode_of("features", plain, longer(target), none, cost=alone)
        velocity = mode.evaluate(plain.features).features
        plain = replace(plain, features=plain.features - 0.3 * scale.square() * velocity)
    assert_same_end(augmented, plain.features[:, :3] / scale[:3])


@pytest.mark.slow
def test_augmented_particles_take_the_class_of_where_they_go():
    target = blobs(20)
    apart = torch.tensor([[8.0, 0, 0], [-8.0, 0, 0]], dtype=torch.float64)[target.labels]
    target = replace(target, features=target.features + apart)
    wrong = target.labels.clone()
    wrong[:6] = 1 - wrong[:6]
    source = replace(target, features=target.features + 0.5, labels=wrong)
    options = {"cost": otdd.GroundCost(1.0, 0.1), "steps": 10, "stepping": otdd.Stepping(1.0)}
    options |= {"mode": "augmented", "solver": otdd.Converged(), "epsilon": 4.0}
    for metric in (otdd.labels.Gaussian(), otdd.labels.Means()):
        result = flow(source, target, labels=metric, **options)
        assert torch.equal(result.samples.labels, target.labels), metric
        assert torch.equal(result.trajectory.labels[0], wrong)


@pytest.mark.slow
def test_class_distances_are_measured_every_refresh_steps(monkeypatch):
    evaluate, tables = FeaturesMode.evaluate, []

    def told(self, features, batch=None):
        tables.append(self.class_distances.full)
        return evaluate(self, features, batch)

    monkeypatch.setattr(FeaturesMode, "evaluate", told)
    rough_flow(blobs(9), blobs(11, seed=1), steps=8, refresh=3)
    changed = [not torch.equal(one, next_one) for one, next_one in itertools.pairwise(tables)]
    # The last one is of the end, which is told as it is.
    assert changed == [False, False, True, False, False, True, False, True]


def test_modes_name_what_there_is_and_the_label_methods_that_they_work_with():
    sides = blobs(9), blobs(11, seed=1)
    for mode in ("attached", "joint", "augmented"):
        for method in ("upper_bound", "none"):
            sentence = f"labels=gaussian and labels=means, got labels={method}"
            with naming(mode), pytest.raises(InputError, match=sentence):
                flow(*sides, mode=mode, labels=method)
    with pytest.raises(InputError, match=r"flow.mode 'feature'.*features, attached, joint, augm"):
        flow(*sides, mode="feature")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["upper_bound", "exact", otdd.labels.Sinkhorn(epsilon=1.0)], ids=str
)
def test_features_move_at_any_label_method(method):
    source, target = blobs(9), blobs(11, seed=1)
    result = rough_flow(source, target, labels=method, epsilon=1.0)
    assert result.after.divergence < 0.7 * result.before.divergence
    # What is kept of the target from step to step changes no bit.
    table = otdd.class_distances([result.samples, target], method).between(0, 1)
    assert torch.equal(result.class_distances.full, table.full)


@pytest.mark.slow
def test_unlabelled_points_move_without_class_distances():
    sides = [replace(side, labels=None) for side in (blobs(9), blobs(11, seed=1))]
    result = rough_flow(*sides, labels="none")
    assert result.samples.labels is None
    assert result.trajectory.labels is None
    labelled = rough_flow(blobs(9), blobs(11, seed=1), labels="none")
    assert torch.equal(result.samples.features, labelled.samples.features)


@pytest.mark.slow
def test_factors_of_all_particles_have_to_fit_into_memory(monkeypatch):
    # Six copies of factors (9, 3, 3) and of a table (11, 11), two of roots (9, 3, 3).
    needed = (6 * (81 + 121) + 2 * 81) * 8
    sides, options = (blobs(9), blobs(11, seed=1)), {"mode": "augmented", "steps": 1}
    monkeypatch.setattr(jointly_driven, "free_memory", lambda device: needed)
    rough_flow(*sides, **options)
    monkeypatch.setattr(jointly_driven, "free_memory", lambda device: needed - 1)
    with pytest.raises(InputError, match=rf"factor of 3 x 3.*{needed:,} bytes.*labels.diagonal"):
        flow(*sides, **options)
    rough_flow(*sides, labels="means", **options)
