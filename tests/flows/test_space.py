"""Spaces of particles: features, and the gradient that comes back through a network."""

import pytest
import torch
from refusals import naming

from otdd_flash.errors import InputError
from otdd_flash.extractors import timm
from otdd_flash.extractors.differentiable import differentiable
from otdd_flash.flows.space import FeatureSpace, ImageSpace

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


@pytest.mark.parametrize("chunk", [1, 7, 10, 11, 256])
def test_closed_form_whatever_the_chunk(chunk):
    network = Network()
    space = ImageSpace(network, SHAPE, chunk)
    points, gradient = points_and_gradient()
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_chunks_of_a_network_with_batch_norm_do_not_mix():
    extractor = timm("test_resnet")
    extractor.module.double()
    network = differentiable(extractor, SHAPE)
    points, _ = points_and_gradient(5)
    whole, split = (ImageSpace(network, SHAPE, chunk) for chunk in (256, 2))
    features = whole.features(points)
    torch.testing.assert_close(split.features(points), features)
    gradient = torch.randn(features.shape, generator=torch.Generator().manual_seed(0)).double()
    pulled = whole.pull_back(points, gradient)
    torch.testing.assert_close(split.pull_back(points, gradient), pulled)
    # Every image by itself: without a gradient of its own, a row gets none.
    gradient[1] = 0
    expected = pulled.clone()
    expected[1] = 0
    torch.testing.assert_close(split.pull_back(points, gradient), expected)


def test_nothing_is_left_in_autograd_and_types_are_kept():
    network = Network(torch.float32)
    space = ImageSpace(network, SHAPE, 4)
    points, gradient = points_and_gradient()
    points.requires_grad_()
    with torch.no_grad():
        pulled = space.pull_back(points, gradient)
    features = space.features(points)
    assert features.dtype == torch.float32
    assert pulled.dtype == torch.float64
    assert not features.requires_grad
    assert not pulled.requires_grad
    assert points.grad is None


def test_features_as_points_are_left_alone():
    points, gradient = points_and_gradient()
    assert FeatureSpace().features(points) is points
    assert FeatureSpace().pull_back(points, gradient) is gradient


def test_bad_spaces_points_and_networks_are_refused():
    for shape, chunk, message in (
        ((4, 5), 256, r"shape must be \(channels, height, width\), got \(4, 5\)"),
        ((3, 0, 5), 256, r"got \(3, 0, 5\)"),
        (SHAPE, 0, "chunk must be a positive number of images, got 0"),
        (SHAPE, 2.5, "chunk must be a positive number of images, got 2.5"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            ImageSpace(Network(), shape, chunk)
    message = r"3 x 4 x 5 images, flattened to \(n, 60\), got \(2, 59\)"
    with pytest.raises(InputError, match=message):
        ImageSpace(Network(), SHAPE).features(torch.zeros(2, 59))
    for network, message in (
        (lambda images: images, r"shape \(2, d\), got \(2, 3, 4, 5\)"),
        (lambda images: images.flatten(1)[:1], r"got \(1, 60\)"),
        (lambda images: images.detach().flatten(1).numpy(), "got ndarray"),
        (lambda images: images.detach().flatten(1), "carries no gradient"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            ImageSpace(network, SHAPE).pull_back(torch.zeros(2, 60), torch.zeros(2, 60))
