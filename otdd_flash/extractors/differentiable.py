"""Extractors as differentiable functions of images: what a flow that moves pixels needs."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from torch import Tensor, nn

from otdd_flash.errors import InputError
from otdd_flash.extractors.base import Extractor
from otdd_flash.extractors.imported_function import ImportedFunction
from otdd_flash.extractors.network import Network
from otdd_flash.extractors.pixel_values import PixelValues
from otdd_flash.extractors.tensor_preparation import tensor_preparation
from otdd_flash.extractors.timm_models import PreparedImage

ImageFunction = Callable[[Tensor], Tensor]


def differentiable(extractor: Extractor, shape: tuple[int, int, int]) -> ImageFunction:
    """The features of an extractor, as a function that autograd can follow.

    Networks run in evaluation mode, in the precision of their weights and without autocast, on the
    device of the images. They are copied, so the extractor stays as it is. Their features are close
    to, not the same as, those of `embed`, which prepares images in 8 bits; see `TensorPreparation`.

    Args:
        extractor: `pixels`, `timm`, `torchvision`, or a `callable` that takes what the result
            takes, and treats every image by itself and always alike.
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
    """The network in evaluation mode; autograd keeps nothing for the sake of its weights."""
    module = deepcopy(network.module).eval().requires_grad_(False)
    dtype = next(module.parameters()).dtype

    def features(images: Tensor) -> Tensor:
        return network.forward(module.to(images.device), [*prepare(images).to(dtype)])

    return features
