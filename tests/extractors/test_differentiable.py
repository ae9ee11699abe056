"""Extractors as functions of tensors: the same features, and gradients that are true."""

import copy
from functools import cache, partial

import numpy as np
import pytest
import torch
from pairwise import named, pairwise
from refusals import naming

from otdd_flash.errors import InputError
from otdd_flash.extractors import from_callable, identity, pixels, timm, torchvision
from otdd_flash.extractors.network import Network
from otdd_flash.extractors.vision_models import differentiable, tensor_preparation

pytestmark = pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")

# Bilinear, bicubic with a crop, a transformer, and torchvision's own transform.
NETWORKS = {
    model: cache(partial(factory, model))
    for factory, model in (
        (timm, "test_resnet"),
        (timm, "resnet10t"),
        (timm, "test_vit"),
        (torchvision, "shufflenet_v2_x0_5"),
    )
}


def colour():
    return np.random.default_rng(0).integers(0, 256, (3, 20, 24, 3), dtype=np.uint8)


def grey():
    from sklearn.datasets import load_digits

    return (load_digits().images[:3] / 16 * 255).astype(np.uint8)


def large():
    return np.random.default_rng(1).integers(0, 256, (2, 250, 290, 3), dtype=np.uint8)


def as_tensors(images):
    """Raw images as the images (b, c, h, w) in [0, 1] that particles are."""
    channels = images[..., None] if images.ndim == 3 else images
    return torch.from_numpy(channels).permute(0, 3, 1, 2).float() / 255


def test_pixels_are_the_same():
    for images in (colour(), large()):
        given = as_tensors(images)
        for size in (None, 9):
            for grayscale in (False, True):
                extractor = pixels(size, grayscale)
                found = differentiable(extractor, given.shape[1:])(given)
                assert torch.equal(found, extractor(images)), (images.shape, size, grayscale)


@pytest.mark.slow
@pairwise(images=named({"colour": colour, "grey": grey, "large": large}), network=named(NETWORKS))
def test_networks_agree_but_for_eight_bits(network, images):
    extractor, images = network(), images()
    given = as_tensors(images)
    features = differentiable(extractor, given.shape[1:])(given)
    own = extractor(images)
    assert features.shape == own.shape
    assert (features - own).norm() < 5e-3 * own.norm()
    # Random features of two images are alike: agreement has to be closer than that.
    assert (features - own).norm(dim=1).max() < 0.2 * torch.pdist(own).min()


def sines():
    return from_callable(lambda x: x.flatten(1).sin())


def small_pixels():
    return pixels(11, grayscale=True)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    "make", [small_pixels, sines, *(NETWORKS[name] for name in ("test_vit", "shufflenet_v2_x0_5"))]
)
def test_gradients_are_finite_differences(make):
    extractor = make()
    if isinstance(extractor, Network):
        extractor = copy.deepcopy(extractor)
        extractor.module.double()
    features = differentiable(extractor, (3, 20, 24))
    generator = torch.Generator().manual_seed(0)
    # Away from 0 and 1, where overshoot is cut off.
    images = torch.rand(2, 3, 20, 24, generator=generator, dtype=torch.float64) * 0.4 + 0.3
    direction = torch.randn(images.shape, generator=generator, dtype=torch.float64)
    images.requires_grad_()
    value = features(images)
    cotangent = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(value, images, cotangent)
    # So short that no unit of the networks crosses its kink on the way.
    step = 1e-8
    with torch.no_grad():
        ends = [features(images + sign * step * direction) for sign in (1, -1)]
    difference = ((ends[0] - ends[1]) * cotangent).sum() / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(difference), rel=1e-5)


@pytest.mark.slow
def test_networks_are_copied_and_frozen_and_compute_in_their_own_precision():
    extractor = timm("test_resnet")
    extractor.module.train()
    features = differentiable(extractor, (3, 20, 24))
    images = as_tensors(colour())
    together = features(images)
    assert not together.requires_grad
    # In training mode, features would depend on the batch.
    torch.testing.assert_close(features(images[:1]), together[:1])
    assert extractor.module.training
    assert all(parameter.requires_grad for parameter in extractor.module.parameters())
    with torch.no_grad():
        next(extractor.module.parameters()).zero_()
    assert torch.equal(features(images), together)
    assert features(images.double()).dtype == torch.float32


def test_a_network_in_training_mode_is_refused_as_a_callable():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout())
    with pytest.raises(InputError, match=r"Sequential is in training mode.*call \.eval\(\)"):
        differentiable(from_callable(module), (1, 2, 2))


def test_what_has_no_gradient_is_refused():
    from timm.data import create_transform

    text = Network("text model", torch.nn.Identity(), frozenset({"text"}), str, lambda m, b: b)
    sides = "identity cannot carry gradients.*pixels, timm, torchvision"
    for extractor, shape, message in (
        (identity(), (3, 8, 8), sides),
        (text, (3, 8, 8), "extractor text cannot carry gradients"),
        (pixels(), (2, 8, 8), r"1 or 3 channels, got \(2, 8, 8\)"),
        (pixels(), (8, 8), r"must be \(c, h, w\).*got \(8, 8\)"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            differentiable(extractor, shape)
    transform = create_transform((3, 32, 32), crop_mode="border")
    with pytest.raises(InputError, match="differentiably by CenterCropOrPad"):
        tensor_preparation(transform)
