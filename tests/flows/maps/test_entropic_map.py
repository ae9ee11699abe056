"""New points along the velocity fields of a flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from flow_by_hand import DOUBLE, HeldOut, digits, euler_flow

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows.maps import (
    EntropicMap,
    NearestParticleMap,
    ResidualMap,
    VelocityField,
    relative_error,
)
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import Problem


@pytest.mark.slow
def test_without_mass_it_takes_the_particles_where_they_ended(held_out: HeldOut) -> None:
    flow = held_out.flow
    entropic = EntropicMap(flow.fields, flow.step_sizes, mass=0.0)
    assert relative_error(entropic, flow.before, flow.after) < 1e-5


@pytest.mark.slow
def test_held_out_points_go_where_the_flow_takes_them(
    held_out: HeldOut, trained: ResidualMap
) -> None:
    flow, samples, truth = held_out.flow, held_out.samples, held_out.truth
    errors = {
        "entropic": relative_error(flow.entropic, samples, truth),
        "unfelt": relative_error(replace(flow.entropic, mass=0.0), samples, truth),
        "nearest": relative_error(NearestParticleMap(flow.before, flow.after), samples, truth),
        "residual": relative_error(trained, samples, truth),
    }
    assert errors["entropic"] < 0.05
    assert errors["unfelt"] < 0.25
    assert 2 * errors["entropic"] < min(errors["unfelt"], errors["nearest"], errors["residual"])


@pytest.mark.slow
def test_one_more_particle_is_felt_as_in_a_flow_that_has_it() -> None:
    source, target = digits("train", 31), digits("test", 30, rotate=90)
    inside, outside = torch.arange(30), torch.tensor([30])
    features_alone = otdd.GroundCost(0.5, 0.0)
    settings: dict[str, Any] = {
        "epsilon": 0.5,
        "steps": 2,
        "cost": features_alone,
        "compute": DOUBLE,
    }
    source, target = replace(source, labels=None), replace(target, labels=None)
    flow = euler_flow(source.take(inside), target, **settings)
    truth = euler_flow(source, target, **settings).after.take(outside)
    assert relative_error(flow.entropic, source.take(outside), truth) < 0.05


def test_all_but_the_features_stays(small: HeldOut) -> None:
    weights = torch.arange(5, dtype=torch.float64)
    samples = replace(small.samples, weights=weights, name="new")
    moved = small.flow.entropic(samples)
    assert moved.labels is not None
    assert samples.labels is not None
    assert torch.equal(moved.labels, samples.labels)
    assert moved.class_names == samples.class_names
    assert torch.equal(moved.masses, samples.masses)
    assert moved.name == "new"
    assert moved.features.dtype == samples.features.dtype
    assert not torch.equal(moved.features, samples.features)


def test_unlabelled_points_are_of_the_class_of_their_nearest_particle(small: HeldOut) -> None:
    before = small.flow.before
    near = before.take(torch.arange(9))
    close = replace(near, features=near.features + 1e-3)
    entropic = small.flow.entropic
    moved = entropic(replace(close, labels=None))
    assert moved.labels is None
    assert torch.equal(moved.features, entropic(close).features)


def test_the_class_of_an_unlabelled_point_is_chosen_before_the_first_step() -> None:
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


def test_a_box_holds_after_every_step(small: HeldOut) -> None:
    flow, samples = small.flow, small.samples
    boxed = EntropicMap(flow.fields, flow.step_sizes, (0.2, 0.6))
    moved = samples
    for field, size in zip(flow.fields, flow.step_sizes, strict=True):
        moved = EntropicMap([field], [size])(moved)
        moved = replace(moved, features=moved.features.clamp(0.2, 0.6))
    torch.testing.assert_close(boxed(samples).features, moved.features)


def test_fields_are_taken_one_at_a_time_and_in_order(small: HeldOut) -> None:
    taken: list[int] = []

    class Lazy(Sequence[VelocityField]):
        def __len__(self) -> int:
            return len(small.flow.fields)

        def __getitem__(self, index: Any) -> Any:
            field = small.flow.fields[index]
            taken.append(index)
            return field

    flow = small.flow
    lazy = EntropicMap(Lazy(), flow.step_sizes)
    assert taken == []
    expected = flow.entropic(small.samples).features
    assert torch.equal(lazy(small.samples).features, expected)
    assert taken == [0, 1]


def test_impossible_maps_are_refused(small: HeldOut) -> None:
    flow = small.flow
    fields, sizes = flow.fields, flow.step_sizes
    with pytest.raises(InputError, match="at least one step, got 0"):
        EntropicMap([], [])
    with pytest.raises(InputError, match="got 1 sizes for 2 fields"):
        EntropicMap(fields, sizes[:1])
    with pytest.raises(InputError, match="finite, got nan"):
        EntropicMap(fields, [float("nan")] * 2)
    with pytest.raises(InputError, match=r"box must be \(lo, hi\) with lo < hi, got \(1, 0\)"):
        EntropicMap(fields, sizes, (1, 0))
    for mass in (1.0, -0.1, float("nan")):
        with pytest.raises(InputError, match=rf"\[0, 1\), got {mass}"):
            EntropicMap(fields, sizes, mass=mass)


def test_points_that_the_flow_cannot_place_are_refused(small: HeldOut) -> None:
    entropic = small.flow.entropic
    with pytest.raises(InputError, match="3 features, but the particles of the flow had 4"):
        entropic(LabeledSamples(torch.zeros(2, 3), None, ()))
    with pytest.raises(InputError, match="did not move: ten"):
        entropic(LabeledSamples(torch.zeros(1, 4), torch.tensor([0]), ("ten",)))
