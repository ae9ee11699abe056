"""Extractors as functions of tensors: the same features, and gradients that are true."""

from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

from otdd_flash.errors import InputError
from otdd_flash.extractors import from_callable, identity, pixels, timm, torchvision
from otdd_flash.extractors.differentiable import differentiable, tensor_preparation
from otdd_flash.extractors.network import Network

pytestmark = pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")

# Bilinear, bicubic with a crop, a transformer, and torchvision's own transform.
NETWORKS = [(timm, "test_resnet"), (timm, "resnet10t"), (timm, "test_vit")]
NETWORKS += [(torchvision, "shufflenet_v2_x0_5")]
DOUBLE = [NETWORKS[0], *NETWORKS[2:]]
IDS = [f"{factory.__name__} {model}" for factory, model in NETWORKS]


@cache
def network(factory, model):
    return factory(model)


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
    for images in (colour(), grey(), large()):
        given = as_tensors(images)
        for size in (None, 9, 33):
            for grayscale in (False, True):
                extractor = pixels(size, grayscale)
                found = differentiable(extractor, given.shape[1:])(given)
                assert torch.equal(found, extractor(images)), (images.shape, size, grayscale)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("images", [colour, grey, large])
@pytest.mark.parametrize(("factory", "model"), NETWORKS, ids=IDS)
def test_networks_agree_but_for_eight_bits(factory, model, images):
    extractor, images = network(factory, model), images()
    given = as_tensors(images)
    features = differentiable(extractor, given.shape[1:])(given)
    own = extractor(images)
    assert features.shape == own.shape
    assert (features - own).norm() < 5e-3 * own.norm()
    # Random features of two images are alike: agreement has to be closer than that.
    assert (features - own).norm(dim=1).max() < 0.2 * torch.pdist(own).min()


def smooth():
    """Waves without edges, which no resizing carries beyond [0, 1]."""
    x = np.linspace(0, 6, 50)[None, :, None, None]
    y = np.linspace(0, 4, 45)[None, None, :, None]
    return (127 + 100 * np.sin(x + y + np.arange(3))).astype(np.uint8)


def test_preparation_differs_by_rounding_alone():
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms._presets import ImageClassification

    for mode in (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC):
        for resize, crop in ((20, 16), (45, 40), (64, 70)):
            transform = ImageClassification(crop_size=crop, resize_size=resize, interpolation=mode)
            own = transform(Image.fromarray(smooth()[0]))
            prepared = tensor_preparation(transform)(as_tensors(smooth()))[0]
            assert prepared.shape == (3, crop, crop)
            # 1.2 of 255 levels, over the deviation that each channel is divided by.
            levels = (prepared - own).abs().amax((1, 2)) * torch.tensor(transform.std) * 255
            assert levels.max() < 1.2, (mode, resize, crop)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "extractor",
    [pixels(11, grayscale=True), from_callable(lambda x: x.flatten(1).sin()), *DOUBLE],
    ids=["pixels", "callable", *(model for _, model in DOUBLE)],
)
def test_gradients_are_finite_differences(extractor):
    if isinstance(extractor, tuple):
        factory, model = extractor
        extractor = factory(model)
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


def test_overshoot_is_cut_off_and_white_keeps_its_gradient():
    prepare = tensor_preparation(network(timm, "test_vit").prepare.transform)
    edge = torch.zeros(1, 1, 10, 10)
    edge[..., 5:] = 1
    assert float(prepare(edge).abs().max()) == pytest.approx(1, abs=1e-4)
    for level in (0.0, 1.0):
        flat = torch.full((1, 1, 10, 10), level, requires_grad=True)
        (gradient,) = torch.autograd.grad(prepare(flat).sum(), flat)
        # 168 / 10 pixels squared for each, three channels, divided by a deviation of 0.5.
        assert torch.allclose(gradient[0, 0, 3:7, 3:7], torch.tensor(6 * 16.8**2), rtol=0.02)


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
    doubled = images.double().requires_grad_()
    value = features(doubled)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, together, rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad(value.sum(), doubled)
    assert gradient.dtype == torch.float64


def test_callables_are_taken_as_they_are():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout())
    with pytest.raises(InputError, match=r"Sequential is in training mode.*call \.eval\(\)"):
        differentiable(from_callable(module), (1, 2, 2))
    images = torch.rand(3, 1, 2, 2, requires_grad=True)
    features = differentiable(from_callable(module.eval()), (1, 2, 2))(images)
    assert torch.equal(features, images.flatten(1))
    assert features.requires_grad


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
        with pytest.raises(InputError, match=message):
            differentiable(extractor, shape)
    transform = create_transform((3, 32, 32), crop_mode="border")
    with pytest.raises(InputError, match="differentiably by CenterCropOrPad"):
        tensor_preparation(transform)
