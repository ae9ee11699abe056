"""New points along the velocity fields of a flow."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from flow_by_hand import DOUBLE, euler_flow

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows.maps import EntropicMap, NearestParticleMap, VelocityField, relative_error
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import Problem


@pytest.mark.slow
def test_held_out_points_go_where_the_flow_takes_them(held_out, trained):
    flow, samples, truth = held_out.flow, held_out.samples, held_out.truth
    maps = {
        "entropic": flow.entropic,
        "unfelt": replace(flow.entropic, mass=0.0),
        "nearest": NearestParticleMap(flow.before, flow.after),
        "residual": trained,
    }
    errors = {name: relative_error(one, samples, truth) for name, one in maps.items()}
    assert errors["entropic"] < 0.05
    assert errors["unfelt"] < 0.25
    assert errors["nearest"] < 0.4
    assert errors["residual"] < 0.4
    others = errors["unfelt"], errors["nearest"], errors["residual"]
    assert 2 * errors["entropic"] < min(others)
    # Particles go where they ended, and nearly so by what a network has learned.
    assert relative_error(maps["unfelt"], flow.before, flow.after) < 1e-5
    assert relative_error(maps["nearest"], flow.before, flow.after) < 1e-6
    assert relative_error(trained, flow.before, flow.after) < 0.12


@pytest.mark.slow
def test_one_more_particle_is_felt_as_in_a_flow_that_has_it():
    source, target = (
        otdd.load("digits", split=split, max_samples=n, rotate=degrees)
        for split, n, degrees in (("train", 31, 0), ("test", 30, 90))
    )
    source, target = (
        replace(samples, features=samples.features.double(), labels=None)
        for samples in (otdd.embed(each, otdd.extractors.pixels()) for each in (source, target))
    )
    inside, outside = torch.arange(30), torch.tensor([30])
    settings = {"epsilon": 0.5, "steps": 2, "cost": otdd.GroundCost(0.5, 0.0)}
    flow = euler_flow(source.take(inside), target, **settings)
    truth = euler_flow(source, target, **settings).after.take(outside)
    assert relative_error(flow.entropic, source.take(outside), truth) < 0.05


def test_all_but_the_features_stays_and_unlabelled_points_are_of_their_nearest_class(small):
    weights = torch.arange(5, dtype=torch.float64)
    samples = replace(small.samples, weights=weights, name="new")
    moved = small.flow.entropic(samples)
    assert torch.equal(moved.labels, samples.labels)
    assert moved.class_names == samples.class_names
    assert torch.equal(moved.masses, samples.masses)
    assert moved.name == "new"
    assert moved.features.dtype == samples.features.dtype
    assert not torch.equal(moved.features, samples.features)
    near = small.flow.before.take(torch.arange(9))
    close = replace(near, features=near.features + 1e-3)
    bare = small.flow.entropic(replace(close, labels=None))
    assert bare.labels is None
    assert torch.equal(bare.features, small.flow.entropic(close).features)


def test_the_class_of_an_unlabelled_point_is_chosen_before_the_first_step():
    """Two classes that change places between the steps, and whose targets lie far apart."""
    before = LabeledSamples(torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1]), ("west", "east"))
    target = replace(before, features=5 * before.features)
    table = torch.tensor([[0, 100.0], [100.0, 0]], dtype=torch.float64).repeat(2, 2)
    problem = Problem.between(before, target, 0.1, table, None, DOUBLE)
    first = VelocityField.of(problem, problem.solve(otdd.Converged(1e-8)))
    second = replace(first, particles=replace(before, features=-before.features))
    entropic = EntropicMap([first, second], [0.1, 0.1])
    point = LabeledSamples(torch.tensor([[-0.5]]), None, ())
    west = LabeledSamples(point.features, torch.tensor([0]), ("west",))
    assert torch.equal(entropic(point).features, entropic(west).features)


def test_fields_are_taken_one_at_a_time_in_order_and_a_box_holds_after_each(small):
    flow, samples, taken = small.flow, small.samples, []

    class Lazy(Sequence):
        def __len__(self):
            return len(flow.fields)

        def __getitem__(self, index):
            field = flow.fields[index]
            taken.append(index)
            return field

    boxed = EntropicMap(Lazy(), flow.step_sizes, (0.2, 0.6))
    assert taken == []
    found = boxed(samples).features
    assert taken == [0, 1]
    moved = samples
    for field, size in zip(flow.fields, flow.step_sizes, strict=True):
        moved = EntropicMap([field], [size])(moved)
        moved = replace(moved, features=moved.features.clamp(0.2, 0.6))
    torch.testing.assert_close(found, moved.features)


def test_impossible_maps_and_points_are_refused(small):
    fields, sizes = small.flow.fields, small.flow.step_sizes
    bare, ten = LabeledSamples(torch.zeros(2, 3), None, ()), torch.tensor([0])
    for call, message in (
        (lambda: EntropicMap([], []), "at least one step, got 0"),
        (lambda: EntropicMap(fields, sizes[:1]), "got 1 sizes for 2 fields"),
        (lambda: EntropicMap(fields, [float("nan")] * 2), "finite, got nan"),
        (
            lambda: EntropicMap(fields, sizes, (1, 0)),
            r"box must be \(lo, hi\) with lo < hi, got \(1, 0\)",
        ),
        (lambda: EntropicMap(fields, sizes, (1, 1)), r"lo < hi, got \(1, 1\)"),
        *(
            (lambda mass=mass: EntropicMap(fields, sizes, mass=mass), rf"\[0, 1\), got {mass}")
            for mass in (1.0, -0.1, float("nan"))
        ),
        (lambda: small.flow.entropic(bare), "3 features, but the particles of the flow had 4"),
        (
            lambda: small.flow.entropic(LabeledSamples(torch.zeros(1, 4), ten, ("ten",))),
            "did not move: ten",
        ),
    ):
        with pytest.raises(InputError, match=message):
            call()
