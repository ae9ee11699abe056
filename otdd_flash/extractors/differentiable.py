"""Extractors as differentiable functions of images, for flows that move pixels.

`commands.adapt` calls `differentiable`. A network's preparation is rebuilt from its transform as
steps on batches of tensors (`TensorPreparation`): the resizing, cropping and normalising of timm
and torchvision take tensors too, antialiased and differentiable. PIL works in 8 bits, so the
results differ:

    rounding     PIL rounds the resized image to 8 bits. Here nothing is rounded, as a rounded image
                 has no gradient: about 1 / 255 where the image is resized bilinearly;
    overshoot    bicubic resizing leaves [0, 1] beside edges. PIL clips after the rows and again
                 after the columns, here values are clipped once, after both.

Features of untrained networks agree with `embed`'s to 0.5% of their norm, which a test checks.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from otdd_flash.errors import InputError
from otdd_flash.extractors.imported_function import ImportedFunction
from otdd_flash.extractors.network import Extractor, Network
from otdd_flash.extractors.pixel_values import PixelValues
from otdd_flash.extractors.vision_models import PreparedImage

ImageFunction = Callable[[Tensor], Tensor]


def differentiable(extractor: Extractor, shape: tuple[int, int, int]) -> ImageFunction:
    """Return an extractor's features as a function that autograd can follow.

    Networks run in evaluation mode, in the precision of their weights and without autocast, on the
    device of the images. They are copied, so the extractor is unchanged. Their features are close
    to, not the same as, those of `embed`, which prepares images in 8 bits; see `TensorPreparation`.

    Args:
        extractor: `pixels`, `timm`, `torchvision`, or a `callable` that takes the images of the
            result and treats every image independently and deterministically.
        shape: (c, h, w) of the images, with 1 or 3 channels.

    Returns:
        A function from images (b, c, h, w) with values in [0, 1] to features (b, d).

    Raises:
        InputError: an extractor of another kind, a network in training mode or whose preparation is
            not differentiable, or another number of channels.
    """
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InputError(f"images must be (c, h, w) with 1 or 3 channels, got {tuple(shape)}")
    match extractor:
        case PixelValues():
            return lambda images: extractor.resized(images).flatten(1)
        case Network(prepare=PreparedImage(transform=transform)):
            return _frozen(extractor, tensor_preparation(transform))
        case ImportedFunction(function=nn.Module(training=True)):
            raise InputError(
                f"{extractor.name} is in training mode, where features depend on chance or on the "
                "other images; call .eval() on it"
            )
        case ImportedFunction():
            return extractor.on_tensors
    raise InputError(
        f"extractor {extractor.key.split()[0]} cannot carry gradients back to pixels; use pixels, "
        "timm, torchvision, or a callable that takes tensors (b, c, h, w)"
    )


def _frozen(network: Network, prepare: ImageFunction) -> ImageFunction:
    """Return a copy of the network in evaluation mode, without gradients of its weights."""
    module = deepcopy(network.module).eval().requires_grad_(False)
    dtype = next(module.parameters()).dtype

    def features(images: Tensor) -> Tensor:
        return network.forward(module.to(images.device), [*prepare(images).to(dtype)])

    return features


# Rounding may carry a white pixel beyond 1; clipped there, it would lose its gradient.
SLACK = 1e-5


@dataclass(frozen=True)
class TensorPreparation:
    """Preparation of images as tensors; see `tensor_preparation`."""

    geometry: tuple[Callable[[Tensor], Tensor], ...]
    normalize: Callable[[Tensor], Tensor]

    def __call__(self, images: Tensor) -> Tensor:
        """Convert images (b, 1 or 3, h, w) in [0, 1] to the network's input (b, 3, h', w')."""
        for step in self.geometry:
            images = step(images)
        return self.normalize(images.clamp(-SLACK, 1 + SLACK).expand(-1, 3, -1, -1))


def tensor_preparation(transform: Any) -> TensorPreparation:
    """Rebuild the evaluation transform of timm or torchvision for batches of tensors.

    Raises:
        InputError: a step has no counterpart on tensors.
    """
    from timm.data.transforms import MaybeToTensor, ResizeKeepRatio
    from torchvision.transforms import CenterCrop, Normalize, Resize

    *geometry, normalize = (s for s in _steps(transform) if not isinstance(s, MaybeToTensor))
    for step in geometry:
        if not isinstance(step, Resize | ResizeKeepRatio | CenterCrop):
            raise InputError(
                f"images cannot be prepared differentiably by {type(step).__name__}; choose a "
                "model that resizes, crops and normalises"
            )
    assert isinstance(normalize, Normalize)
    return TensorPreparation(tuple(geometry), normalize)


def _steps(transform: Any) -> list[Any]:
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize

    if isinstance(transform, Compose):
        return list(transform.transforms)
    # The transform of torchvision's weights has the parameters of its steps, but not the steps.
    resize = Resize(transform.resize_size, transform.interpolation, antialias=transform.antialias)
    return [resize, CenterCrop(transform.crop_size), Normalize(transform.mean, transform.std)]
