"""Symmetries of flows, how the modes are related, and what each moves along, in what time."""

from dataclasses import replace

import pytest
import torch
from small_flows import CASES, blobs, flow, mode_of, rough_flow

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows import joint_modes, run
from otdd_flash.flows.joint_modes import Gaussians, recluster
from otdd_flash.labels import gaussian as fidelity
from otdd_flash.labels.gaussian import fidelities
from otdd_flash.labels.pairs import all_pairs


def assert_same_end(one, features, labels=None):
    torch.testing.assert_close(one.samples.features, features, rtol=0, atol=1e-6)
    if labels is not None:
        assert torch.equal(one.samples.labels, labels)


def some(*names):
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


@pytest.mark.slow
@some("features, full", "attached, means", "joint, diagonal", "augmented, full")
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


@pytest.mark.slow
@some("features, full", "attached, diagonal", "joint, full", "augmented, full")
def test_a_dataset_does_not_move_towards_itself(case):
    source = blobs(9)
    # Factors of one class lie on a kink of their distance, where rounding decides its direction.
    options = {"stepping": otdd.Stepping(step_size=0.1), "steps": 1, "epsilon": 4.0}
    result = flow(source, source, **options, **case)
    assert_same_end(result, source.features, source.labels)
    assert result.history[-1].divergence == pytest.approx(0, abs=1e-8)


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
@pytest.mark.parametrize("method", ["exact", otdd.labels.Sinkhorn(epsilon=1.0)], ids=str)
def test_features_move_at_any_label_method(method):
    source, target = blobs(9), blobs(11, seed=1)
    result = rough_flow(source, target, labels=method, steps=1, epsilon=1.0)
    assert result.after.divergence < result.before.divergence
    # What is kept of the target from step to step changes no bit.
    table = otdd.class_distances([result.samples, target], method).between(0, 1)
    assert torch.equal(result.class_distances.full, table.full)


@pytest.mark.slow
def test_unlabelled_points_move_without_class_distances():
    sides = blobs(9), blobs(11, seed=1)
    bare = (replace(side, labels=None) for side in sides)
    result, labelled = rough_flow(*bare, labels="none"), rough_flow(*sides, labels="none")
    assert result.samples.labels is result.trajectory.labels is None
    assert torch.equal(result.samples.features, labelled.samples.features)


@pytest.mark.slow
def test_factors_of_all_particles_have_to_fit_into_memory(monkeypatch):
    # Six copies of factors (9, 3, 3) and of a table (11, 11), two of roots (9, 3, 3).
    needed = (6 * (81 + 121) + 2 * 81) * 8
    sides, options = (blobs(9), blobs(11, seed=1)), {"mode": "augmented", "steps": 1}
    monkeypatch.setattr(joint_modes, "free_memory", lambda device: needed)
    rough_flow(*sides, **options)
    monkeypatch.setattr(joint_modes, "free_memory", lambda device: needed - 1)
    with pytest.raises(InputError, match=rf"factor of 3 x 3.*{needed:,} bytes.*labels.diagonal"):
        flow(*sides, **options)
    rough_flow(*sides, labels="means", **options)


@pytest.mark.slow
def test_classes_are_groups_of_gaussians_by_mass_with_the_name_of_their_majority():
    """Rotations of factors mean nothing, and a mass as much as many particles."""
    draw, groups = torch.Generator().manual_seed(0), torch.arange(21) // 7
    # The first two groups differ in spread alone.
    means = torch.tensor([[0.0, 0.0], [0.0, 0.0], [9.0, 0.0]], dtype=torch.float64)[groups]
    spreads = torch.tensor([[1.0, 1.0], [5.0, 1.0], [1.0, 1.0]], dtype=torch.float64)[groups]
    turned = torch.linalg.qr(torch.randn(21, 2, 2, generator=draw, dtype=torch.float64)).Q
    found = Gaussians(means, turned @ torch.diag_embed(spreads))
    wrong, even = groups.clone(), torch.ones(21, dtype=torch.float64) / 21
    wrong[[0, 8, 9, 20]] = torch.tensor([2, 0, 2, 1])
    assert torch.equal(recluster(found, wrong, even), groups)
    # A heavy particle keeps the centre of its cluster, which a light one leaves.
    places = Gaussians(torch.tensor([[0.0], [3.0], [6.0], [20.0]], dtype=torch.float64), None)
    for heavy, expected in ((1.0, [0, 0, 0, 1]), (100.0, [0, 0, 1, 1])):
        masses = torch.tensor([1.0, 1.0, heavy, 1.0], dtype=torch.float64)
        assert recluster(places, torch.tensor([0, 0, 1, 1]), masses).tolist() == expected


# Seven weighted points, the last of them without mass.
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.5, 1.0, 0.0], dtype=torch.float64)
SOURCE, TARGET = replace(blobs(7, 2), weights=WEIGHTS), blobs(9, 2, seed=1, shift=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.partition(", ")[2] != "means"])
def test_variables_move_along_gradients_over_their_masses(case):
    """At constant class distances, or along the whole of it where they are attached."""
    name, metric = CASES[case].values()
    mode, step = mode_of(name, SOURCE, TARGET, metric), 1e-4
    draw = torch.Generator().manual_seed(3)
    if name == "augmented":
        # Apart, so that no two of a class are at the kink of their distance.
        for part in mode.variables.values():
            part += 0.3 * torch.randn(part.shape, generator=draw, dtype=part.dtype)
    variables = {"features": SOURCE.features.clone(), **mode.variables}
    evaluation = mode.evaluate(variables["features"])
    of_classes = torch.bincount(SOURCE.labels, weights=SOURCE.masses)
    for variable, velocity in {"features": evaluation.features, **evaluation.variables}.items():
        masses = of_classes if name == "joint" and variable != "features" else SOURCE.masses
        moving, start = variables[variable], variables[variable].clone()
        direction = torch.randn(start.shape, generator=draw, dtype=start.dtype)
        ends = []
        for sign in (1, -1):
            moving.copy_(start + sign * step * direction)
            if name == "attached":
                mode.measure(moving)
            ends.append(mode.evaluate(variables["features"]).divergence.value)
        moving.copy_(start)
        gradient = velocity * masses.reshape(-1, *(1,) * (start.ndim - 1))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-6)
        assert not bool(velocity[masses == 0].any())


def apart(count, shift=0.0):
    """Two classes that are far from one another."""
    samples = blobs(count, shift=shift)
    away = torch.tensor([0.0, 30.0], dtype=torch.float64)[samples.labels]
    return otdd.LabeledSamples(
        samples.features + away[:, None], samples.labels, samples.class_names
    )


@pytest.mark.slow
def test_pairs_that_no_mass_moves_between_are_not_measured(monkeypatch):
    measured = []

    def counted(factors, pairs, *rest):
        measured.append(len(pairs))
        return fidelities(factors, pairs, *rest)

    monkeypatch.setattr(joint_modes, "fidelities", counted)
    source, target = apart(20), apart(22, shift=0.5)
    some = mode_of("augmented", source, target, otdd.labels.Gaussian()).evaluate(source.features)
    monkeypatch.setattr(joint_modes, "NO_MASS", 5e-324)
    monkeypatch.setattr(joint_modes.FullAugmentedMode, "_needed", lambda *_: None)
    every = mode_of("augmented", source, target, otdd.labels.Gaussian()).evaluate(source.features)
    # Pairs within both classes, and those with the classes of the target.
    assert measured == [2 * 45 + 40, 190 + 40]
    assert some.divergence.value == pytest.approx(every.divergence.value, rel=1e-14)
    assert some.divergence.bounds == pytest.approx(every.divergence.bounds, rel=1e-13)
    torch.testing.assert_close(some.features, every.features, rtol=0, atol=1e-12)
    for name, velocity in some.variables.items():
        torch.testing.assert_close(velocity, every.variables[name], rtol=0, atol=1e-12)


def test_polar_factors_are_computed_for_what_shows_in_a_gradient(monkeypatch):
    """They are nearly all of the time of an augmented flow."""
    draw, pairs = torch.Generator().manual_seed(0), all_pairs(9)
    factors = [torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(9)]
    factors[4] *= 1e6
    # As in a plan: those far from the diagonal are 0 but for rounding.
    weights = torch.randn(len(pairs), generator=draw, dtype=torch.float64)
    weights *= 10.0 ** (-15 * ((pairs[:, 0] - pairs[:, 1]).double() - 1) - 9)

    def gradient():
        moving = [factor.clone().requires_grad_() for factor in factors]
        return list(torch.autograd.grad(fidelities(moving, pairs), moving, weights))

    decomposed = []
    polar = fidelity.polar_factors
    monkeypatch.setattr(fidelity, "polar_factors", lambda m: decomposed.append(len(m)) or polar(m))
    found = gradient()
    # The 8 neighbours, and what a factor of norm 1e6 brings to light.
    assert 8 < sum(decomposed) < len(pairs) / 2
    monkeypatch.setattr(fidelity._InGradients, "apply", lambda values, *_: values)
    for one, other in zip(found, gradient(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)


@pytest.mark.slow
def test_progress_and_the_expected_time_are_said(caplog, monkeypatch):
    monkeypatch.setattr(run, "LONG", 0.0)
    said, told = [], []
    options = {"mode": "augmented", "stepping": otdd.Stepping(0.1)}
    options |= {"class_progress": lambda *done: told.append(done)}
    options |= {"progress": lambda _: said.append(len(caplog.records))}
    rough_flow(blobs(9), blobs(11, seed=1), **options)
    # At both ends of a step 36 pairs of particles and 18 with the target, and of their gradients
    # those that show, which rounding may decide about.
    assert told[-4::2] == [(54, 54)] * 2
    for done, total in told[-3::2]:
        assert 18 < done == total <= 54
    # Before the first step.
    assert said[0] == 1
    assert "steps to come, 2, will take about 0:0" in caplog.records[0].getMessage()
    assert "labels.diagonal=true" in caplog.records[0].getMessage()
    caplog.clear()
    rough_flow(blobs(9), blobs(11, seed=1), labels=otdd.labels.Gaussian(diagonal=True), **options)
    assert not caplog.records
