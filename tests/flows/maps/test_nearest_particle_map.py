"""New points that copy the displacement of a particle, and the error by which maps are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flow_by_hand import HeldOut

from otdd_flash.errors import InputError
from otdd_flash.flows.maps import NearestParticleMap, relative_error
from otdd_flash.flows.maps import nearest as search
from otdd_flash.samples import LabeledSamples

NAMES = ("a", "b")


def line(*places: float, labels: list[int] | None = None) -> LabeledSamples:
    """Points on a line."""
    indices = None if labels is None else torch.tensor(labels)
    return LabeledSamples(torch.tensor(places).unsqueeze(1), indices, NAMES if labels else ())


def test_it_takes_the_particles_where_they_ended(small: HeldOut) -> None:
    flow = small.flow
    nearest = NearestParticleMap(flow.before, flow.after)
    torch.testing.assert_close(nearest(flow.before).features, flow.after.features)


@pytest.mark.slow
def test_held_out_points_go_about_where_the_flow_takes_them(held_out: HeldOut) -> None:
    flow = held_out.flow
    nearest = NearestParticleMap(flow.before, flow.after)
    assert relative_error(nearest, held_out.samples, held_out.truth) < 0.3


@pytest.mark.parametrize("block", [1, 1000, 1 << 24])
def test_the_search_is_exact_in_any_chunks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BLOCK_ELEMENTS", block)
    generator = torch.Generator().manual_seed(0)
    particles, samples = (
        LabeledSamples(torch.randn(count, 5, generator=generator), None, ()) for count in (70, 33)
    )
    gaps = samples.features.double()[:, None] - particles.features.double()[None]
    expected = gaps.square().sum(2).argmin(1)
    assert torch.equal(search.nearest_particles(samples, particles), expected)


def test_neighbours_far_from_the_origin_are_told_apart_in_float32() -> None:
    offset = 1000.0 + torch.arange(64) / 64
    particles = LabeledSamples(torch.stack((offset, offset), 1), None, ())
    samples = replace(particles, features=particles.features + 0.002)
    found = search.nearest_particles(samples, particles)
    assert torch.equal(found, torch.arange(64))


def test_only_particles_of_the_same_class_are_near() -> None:
    before = line(0.0, 1.0, 5.0, labels=[0, 1, 1])
    nearest = NearestParticleMap(before, line(10.0, 21.0, 35.0, labels=[0, 1, 1]))
    moved = nearest(line(0.1, 0.1, 4.0, labels=[0, 1, 1]))
    torch.testing.assert_close(moved.features.squeeze(1), torch.tensor([10.1, 20.1, 34.0]))
    # By name: the same points with the classes numbered the other way round.
    other = LabeledSamples(line(0.1, 0.1, 4.0).features, torch.tensor([1, 0, 0]), ("b", "a"))
    assert torch.equal(nearest(other).features, moved.features)


def test_without_labels_on_either_side_place_alone_decides() -> None:
    places, ends = (0.0, 1.0, 5.0), (10.0, 21.0, 35.0)
    labels = [0, 1, 1]
    labelled = NearestParticleMap(line(*places, labels=labels), line(*ends, labels=labels))
    bare = NearestParticleMap(line(*places), line(*ends))
    expected = torch.tensor([10.1, 20.9])
    for nearest, samples in (
        (labelled, line(0.1, 0.9)),
        (bare, line(0.1, 0.9)),
        (bare, line(0.1, 0.9, labels=[1, 0])),
    ):
        torch.testing.assert_close(nearest(samples).features.squeeze(1), expected)


def test_particles_without_mass_lead_nobody() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0])
    before = replace(line(0.0, 1.0, 5.0, labels=[0, 0, 1]), weights=weights)
    nearest = NearestParticleMap(before, line(10.0, 21.0, 35.0, labels=[0, 0, 1]))
    expected = torch.tensor([20.1, 20.1])
    for samples in (line(0.1, 0.1, labels=[0, 0]), line(0.1, 0.1)):
        torch.testing.assert_close(nearest(samples).features.squeeze(1), expected)


def test_the_order_of_particles_does_not_matter(small: HeldOut) -> None:
    flow, order = small.flow, torch.arange(12).flip(0)
    shuffled = NearestParticleMap(flow.before.take(order), flow.after.take(order))
    expected = NearestParticleMap(flow.before, flow.after)(small.samples)
    assert torch.equal(shuffled(small.samples).features, expected.features)


def test_what_has_no_neighbour_is_refused() -> None:
    before = line(0.0, 1.0, labels=[0, 1])
    nearest = NearestParticleMap(before, before)
    with pytest.raises(InputError, match="2 features, but the particles of the flow had 1"):
        nearest(LabeledSamples(torch.zeros(2, 2), None, ()))
    with pytest.raises(InputError, match="did not move: c; it moved a, b"):
        nearest(LabeledSamples(torch.zeros(1, 1), torch.tensor([0]), ("c",)))
    light = replace(before, weights=torch.tensor([1.0, 0.0]))
    with pytest.raises(InputError, match="no particle of class 'b' has mass"):
        NearestParticleMap(light, before)(line(0.0, labels=[1]))
    with pytest.raises(InputError, match=r"before has shape \(2, 1\) and after \(3, 1\)"):
        NearestParticleMap(before, line(0.0, 1.0, 2.0))


def identity(samples: LabeledSamples) -> LabeledSamples:
    return samples


def test_the_error_is_a_root_mean_square_by_mass() -> None:
    samples, truth = line(0.0, 1.0), line(2.0, 2.0)
    heavy = replace(samples, weights=torch.tensor([1.0, 3.0]))
    off = lambda given: replace(given, features=given.features + 1.0)  # noqa: E731
    assert relative_error(lambda _: truth, samples, truth) == 0
    assert relative_error(identity, samples, truth) == 1
    # Errors 1 and 0, distances 2 and 1.
    assert relative_error(off, heavy, truth) == pytest.approx((1 / 7) ** 0.5)
    assert relative_error(off, samples, truth) == pytest.approx((1 / 5) ** 0.5)
    with pytest.raises(InputError, match="where the samples began"):
        relative_error(identity, samples, samples)
    with pytest.raises(InputError, match="row i of both"):
        relative_error(identity, samples, line(0.0, 0.0, 0.0))
