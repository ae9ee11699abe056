"""New points that copy the displacement of a particle, and the error by which maps are compared."""

from dataclasses import replace

import pytest
import torch
from refusals import naming

from otdd_flash.errors import InputError
from otdd_flash.flows.maps import NearestParticleMap, relative_error
from otdd_flash.flows.maps import nearest as search
from otdd_flash.samples import LabeledSamples


def line(*places, labels=None):
    """Points on a line."""
    indices = None if labels is None else torch.tensor(labels)
    return LabeledSamples(torch.tensor(places).unsqueeze(1), indices, ("a", "b") if labels else ())


@pytest.mark.parametrize("block", [1, 1000, 1 << 24])
def test_the_search_is_exact_in_any_chunks_and_far_from_the_origin(block, monkeypatch):
    monkeypatch.setattr(search, "BLOCK_ELEMENTS", block)
    draw = torch.Generator().manual_seed(0)
    particles, samples = (
        LabeledSamples(torch.randn(count, 5, generator=draw), None, ()) for count in (70, 33)
    )
    expected = torch.cdist(samples.features.double(), particles.features.double()).argmin(1)
    assert torch.equal(search.nearest_particles(samples, particles), expected)
    offset = 1000.0 + torch.arange(64) / 64
    particles = LabeledSamples(torch.stack((offset, offset), 1), None, ())
    samples = replace(particles, features=particles.features + 0.002)
    assert torch.equal(search.nearest_particles(samples, particles), torch.arange(64))


def test_particles_with_mass_of_the_same_class_lead():
    before, after = (0.0, 1.0, 5.0), (10.0, 21.0, 35.0)
    three = line(0.1, 0.1, 4.0, labels=[0, 1, 1])
    # The same points with the classes numbered the other way round.
    other = LabeledSamples(three.features, torch.tensor([1, 0, 0]), ("b", "a"))
    massless = torch.tensor([0.0, 1.0, 2.0])
    for labels, samples, weights, expected in (
        ([0, 1, 1], three, None, [10.1, 20.1, 34.0]),
        ([0, 1, 1], other, None, [10.1, 20.1, 34.0]),
        # Without labels on either side place alone decides.
        ([0, 1, 1], line(0.1, 0.9), None, [10.1, 20.9]),
        (None, line(0.1, 0.9, labels=[1, 0]), None, [10.1, 20.9]),
        # Those without mass lead nobody.
        ([0, 0, 1], line(0.1, 0.1, labels=[0, 0]), massless, [20.1, 20.1]),
        ([0, 0, 1], line(0.1, 0.1), massless, [20.1, 20.1]),
    ):
        start = replace(line(*before, labels=labels), weights=weights)
        found = NearestParticleMap(start, line(*after, labels=labels))(samples)
        with naming(expected):
            torch.testing.assert_close(found.features.squeeze(1), torch.tensor(expected))


def test_the_error_is_a_root_mean_square_by_mass():
    samples, truth = line(0.0, 1.0), line(2.0, 2.0)
    heavy = replace(samples, weights=torch.tensor([1.0, 3.0]))
    for moved, given, expected in (
        (lambda _: truth, samples, 0.0),
        (lambda given: given, samples, 1.0),
        # Errors 1 and 0, distances 2 and 1.
        (lambda _: line(1.0, 2.0), heavy, (1 / 7) ** 0.5),
        (lambda _: line(1.0, 2.0), samples, (1 / 5) ** 0.5),
    ):
        assert relative_error(moved, given, truth) == pytest.approx(expected)


def test_what_has_no_neighbour_is_refused():
    start, two = line(0.0, 1.0, labels=[0, 1]), line(0.0, 1.0)
    light, plane = replace(start, weights=torch.tensor([1.0, 0.0])), torch.zeros(2, 2)
    new = LabeledSamples(torch.zeros(1, 1), torch.tensor([0]), ("c",))
    for call, message in (
        (
            lambda: NearestParticleMap(start, start)(LabeledSamples(plane, None, ())),
            "2 features, but the particles of the flow had 1",
        ),
        (lambda: NearestParticleMap(start, start)(new), "did not move: c; it moved a, b"),
        (
            lambda: NearestParticleMap(light, start)(line(0.0, labels=[1])),
            "no particle of class 'b' has mass",
        ),
        (
            lambda: NearestParticleMap(start, line(0.0, 1.0, 2.0)),
            r"before has shape \(2, 1\) and after \(3, 1\)",
        ),
        (lambda: relative_error(lambda given: given, two, two), "where the samples began"),
        (lambda: relative_error(lambda given: given, two, line(0, 0, 0)), "row i of both"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            call()
