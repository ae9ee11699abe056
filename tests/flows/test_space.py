"""Spaces of particles: features, and the gradient that comes back through a network."""

import pytest
import torch
from refusals import naming

from otdd_flash.errors import InputError
from otdd_flash.extractors.vision_models import differentiable
from otdd_flash.flows.space import ImageSpace

SHAPE = (3, 4, 5)


class Network:
    """phi(x) = sin(A x), which also tells channels, rows and columns apart; counts its images."""

    def __init__(self, dtype=torch.float64):
        generator = torch.Generator().manual_seed(3)
        self.matrix = torch.randn(7, 60, generator=generator, dtype=torch.float64).to(dtype)
        self.seen = []

    def __call__(self, images):
        assert images.shape[1:] == SHAPE
        self.seen.append(len(images))
        return (images.flatten(1).to(self.matrix) @ self.matrix.T).sin()


def points_and_gradient(n=11):
    generator = torch.Generator().manual_seed(4)
    points = torch.rand(n, 60, generator=generator, dtype=torch.float64)
    return points, torch.randn(n, 7, generator=generator, dtype=torch.float64)


def test_closed_form_whatever_the_chunk():
    points, gradient = points_and_gradient()
    for chunk in (1, 7, 11, 256):
        network = Network()
        space = ImageSpace(network, SHAPE, chunk)
        scalars = points @ network.matrix.T
        torch.testing.assert_close(space.features(points), scalars.sin())
        expected = (gradient * scalars.cos()) @ network.matrix
        torch.testing.assert_close(space.pull_back(points, gradient), expected)
        assert max(network.seen) == min(chunk, 11)
        assert sum(network.seen) == 2 * 11


def test_pixels_are_in_the_order_of_the_pixels_extractor():
    from otdd_flash.extractors import pixels

    images = torch.arange(2 * 60).reshape(2, 4, 5, 3).to(torch.uint8).numpy()
    extractor = pixels()
    points = extractor(images)
    space = ImageSpace(differentiable(extractor, SHAPE), SHAPE)
    assert torch.equal(space.features(points), points)
    gradient = torch.arange(120.0).reshape(2, 60)
    assert torch.equal(space.pull_back(points, gradient), gradient)


def test_bad_spaces_points_and_networks_are_refused():
    flat, zeros = torch.zeros(2, 60), torch.zeros(2, 59)

    def pulled(network):
        return ImageSpace(network, SHAPE).pull_back(flat, flat)

    for call, message in (
        (lambda: ImageSpace(Network(), (4, 5)), r"\(channels, height, width\), got \(4, 5\)"),
        (lambda: ImageSpace(Network(), (3, 0, 5)), r"got \(3, 0, 5\)"),
        (lambda: ImageSpace(Network(), SHAPE, 0), "chunk must be a positive .* images, got 0"),
        (lambda: ImageSpace(Network(), SHAPE, 2.5), "chunk must be a positive .*, got 2.5"),
        (
            lambda: ImageSpace(Network(), SHAPE).features(zeros),
            r"3 x 4 x 5 images, flattened to \(n, 60\), got \(2, 59\)",
        ),
        (lambda: pulled(lambda images: images), r"shape \(2, d\), got \(2, 3, 4, 5\)"),
        (lambda: pulled(lambda images: images.flatten(1)[:1]), r"got \(1, 60\)"),
        (lambda: pulled(lambda images: images.detach().flatten(1).numpy()), "got ndarray"),
        (lambda: pulled(lambda images: images.detach().flatten(1)), "carries no gradient"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            call()
