"""New points that copy the displacement of a particle, and the error by which maps are compared."""

from dataclasses import replace

import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.flows.maps import NearestParticleMap, relative_error
from otdd_flash.flows.maps import nearest as search
from otdd_flash.samples import LabeledSamples

NAMES = ("a", "b")


def line(*places, labels=None):
    """Points on a line."""
    indices = None if labels is None else torch.tensor(labels)
    return LabeledSamples(torch.tensor(places).unsqueeze(1), indices, NAMES if labels else ())


@pytest.mark.parametrize("block", [1, 1000, 1 << 24])
def test_the_search_is_exact_in_any_chunks_and_far_from_the_origin(block, monkeypatch):
    monkeypatch.setattr(search, "BLOCK_ELEMENTS", block)
    generator = torch.Generator().manual_seed(0)
    particles, samples = (
        LabeledSamples(torch.randn(count, 5, generator=generator), None, ()) for count in (70, 33)
    )
    gaps = samples.features.double()[:, None] - particles.features.double()[None]
    expected = gaps.square().sum(2).argmin(1)
    assert torch.equal(search.nearest_particles(samples, particles), expected)
    offset = 1000.0 + torch.arange(64) / 64
    particles = LabeledSamples(torch.stack((offset, offset), 1), None, ())
    samples = replace(particles, features=particles.features + 0.002)
    assert torch.equal(search.nearest_particles(samples, particles), torch.arange(64))


def test_particles_with_mass_of_the_same_class_lead():
    before, after = (0.0, 1.0, 5.0), (10.0, 21.0, 35.0)

    def moved(labels, samples, weights=None):
        start = replace(line(*before, labels=labels), weights=weights)
        return NearestParticleMap(start, line(*after, labels=labels))(samples).features.squeeze(1)

    expected = torch.tensor([10.1, 20.1, 34.0])
    torch.testing.assert_close(moved([0, 1, 1], line(0.1, 0.1, 4.0, labels=[0, 1, 1])), expected)
    # By name: the same points with the classes numbered the other way round.
    other = LabeledSamples(line(0.1, 0.1, 4.0).features, torch.tensor([1, 0, 0]), ("b", "a"))
    torch.testing.assert_close(moved([0, 1, 1], other), expected)
    # Without labels on either side place alone decides.
    for labels, given in (([0, 1, 1], None), (None, None), (None, [1, 0])):
        found = moved(labels, line(0.1, 0.9, labels=given))
        torch.testing.assert_close(found, torch.tensor([10.1, 20.9]))
    # Those without mass lead nobody.
    for given in ([0, 0], None):
        found = moved([0, 0, 1], line(0.1, 0.1, labels=given), torch.tensor([0.0, 1.0, 2.0]))
        torch.testing.assert_close(found, torch.tensor([20.1, 20.1]))


def test_what_has_no_neighbour_is_refused():
    before = line(0.0, 1.0, labels=[0, 1])
    light = replace(before, weights=torch.tensor([1.0, 0.0]))
    for start, end, samples, message in (
        (
            before,
            before,
            LabeledSamples(torch.zeros(2, 2), None, ()),
            "2 features, but the particles of the flow had 1",
        ),
        (
            before,
            before,
            LabeledSamples(torch.zeros(1, 1), torch.tensor([0]), ("c",)),
            "did not move: c; it moved a, b",
        ),
        (light, before, line(0.0, labels=[1]), "no particle of class 'b' has mass"),
        (before, line(0.0, 1.0, 2.0), None, r"before has shape \(2, 1\) and after \(3, 1\)"),
    ):
        with pytest.raises(InputError, match=message):
            NearestParticleMap(start, end)(samples)


def test_the_error_is_a_root_mean_square_by_mass():
    samples, truth = line(0.0, 1.0), line(2.0, 2.0)
    heavy = replace(samples, weights=torch.tensor([1.0, 3.0]))

    def off(given):
        return replace(given, features=given.features + 1.0)

    def identity(given):
        return given

    assert relative_error(lambda _: truth, samples, truth) == 0
    assert relative_error(identity, samples, truth) == 1
    # Errors 1 and 0, distances 2 and 1.
    assert relative_error(off, heavy, truth) == pytest.approx((1 / 7) ** 0.5)
    assert relative_error(off, samples, truth) == pytest.approx((1 / 5) ** 0.5)
    with pytest.raises(InputError, match="where the samples began"):
        relative_error(identity, samples, samples)
    with pytest.raises(InputError, match="row i of both"):
        relative_error(identity, samples, line(0.0, 0.0, 0.0))
