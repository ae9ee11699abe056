"""The networks of transfer runs: a body that gives features, and a linear head for the classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otdd_flash.errors import InputError
from otdd_flash.extractors.random_weights import seeded_weights
from otdd_flash.importing import user_code
from otdd_flash.study.transfer.settings import Transfer

HIDDEN = 256
# Of LeNet-5: LeCun et al. 1998, Gradient-based learning applied to document recognition.
KERNEL, CHANNELS, WIDTHS = 5, (6, 16), (120, 84)
# Sides of images that two poolings leave something of.
SMALLEST_SIDE = 4


@dataclass(frozen=True, eq=False)
class Network:
    """A body from features (n, d) to (n, k), and a linear head to one logit per class."""

    body: nn.Module
    head: nn.Linear

    def __call__(self, features: Tensor) -> Tensor:
        """Logits (n, V)."""
        logits: Tensor = self.head(self.body(features))
        return logits


def build_body(transfer: Transfer, dim: int, seed: int) -> nn.Module:
    """The body with the weights of a seed.

    Raises:
        InputError: the images are too small, or the user's function gives no such module.
    """
    builder = transfer.builder()
    with seeded_weights(seed):
        if builder is not None:
            return _users(builder, dim, transfer.image_shape)
        if transfer.image_shape is None:
            return nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU())
        return _lenet(transfer.image_shape, dim)


def build_head(body: nn.Module, dim: int, classes: int, seed: int) -> nn.Linear:
    """A head for the features of a body, with the weights of a seed.

    Raises:
        InputError: the body does not give a matrix of features.
    """
    with torch.no_grad():
        features = body.eval()(torch.zeros(2, dim))
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        raise InputError(
            "transfer.network must return a module that turns features (n, d) into (n, k), one row "
            "per input"
        )
    with seeded_weights(seed):
        return nn.Linear(features.shape[1], classes)


def _lenet(shape: tuple[int, ...], dim: int) -> nn.Sequential:
    channels, height, width = shape
    if channels * height * width != dim:
        raise InputError(
            f"transfer.image_shape={list(shape)} has {channels * height * width} values, but the "
            f"tasks have {dim} features; give the shape of their images, or null"
        )
    if min(height, width) < SMALLEST_SIDE:
        raise InputError(
            f"images of {height} x {width} are too small for the built-in network, which needs "
            f"{SMALLEST_SIDE}; set transfer.image_shape=null or transfer.network=module:function"
        )
    sides = [height // 2, width // 2]
    # Where a kernel would not fit twice into the pooled image, its edges are filled up.
    padding = KERNEL // 2 if min(sides) < KERNEL + 1 else 0
    sides = [(side + 2 * padding - KERNEL + 1) // 2 for side in sides]
    first, second = CHANNELS
    layers = nn.Sequential(
        nn.Unflatten(1, (channels, height, width)),
        nn.Conv2d(channels, first, KERNEL, padding=KERNEL // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, KERNEL, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * sides[0] * sides[1], WIDTHS[0]),
        nn.ReLU(),
        nn.Linear(*WIDTHS),
        nn.ReLU(),
    )
    # A quarter faster on small images, both ways.
    return layers.to(memory_format=torch.channels_last)


def _users(builder: Callable[..., nn.Module], dim: int, shape: tuple[int, ...] | None) -> nn.Module:
    with user_code("transfer.network"):
        body = builder(dim, shape)
    if not isinstance(body, nn.Module):
        raise InputError(
            f"transfer.network must return a torch module, got {type(body).__qualname__}"
        )
    return body
