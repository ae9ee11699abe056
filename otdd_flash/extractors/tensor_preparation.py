"""A network's own preparation of images, on batches of tensors and differentiable.

timm and torchvision resize, crop, divide by 255 and normalise PIL images. Their steps take tensors
too, antialiased and differentiable. PIL works in 8 bits, so the results differ:

    rounding     PIL rounds the resized image to 8 bits; here nothing is rounded, or there would be
                 no gradient: about 1 / 255 where the image is resized bilinearly;
    overshoot    bicubic resizing leaves [0, 1] beside edges; PIL cuts that off after the rows and
                 again after the columns, here it is cut off once, after both.

Features of untrained networks then agree to 0.5% of their norm, which the tests hold them to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from otdd_flash.errors import InputError

# Rounding may carry a white pixel beyond 1: cut off there, it would lose its gradient.
SLACK = 1e-5


@dataclass(frozen=True)
class TensorPreparation:
    """See `tensor_preparation`."""

    geometry: tuple[Callable[[Tensor], Tensor], ...]
    normalize: Callable[[Tensor], Tensor]

    def __call__(self, images: Tensor) -> Tensor:
        """Images (b, 1 or 3, h, w) in [0, 1] as the network takes them, (b, 3, h', w')."""
        for step in self.geometry:
            images = step(images)
        return self.normalize(images.clamp(-SLACK, 1 + SLACK).expand(-1, 3, -1, -1))


def tensor_preparation(transform: Any) -> TensorPreparation:
    """The steps of a transform that timm or torchvision made for evaluation.

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
    # The transform of torchvision's weights, which names its steps but holds none.
    resize = Resize(transform.resize_size, transform.interpolation, antialias=transform.antialias)
    return [resize, CenterCrop(transform.crop_size), Normalize(transform.mean, transform.std)]
