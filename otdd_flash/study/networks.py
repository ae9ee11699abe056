"""The settings of transfer runs, and the networks: a body that gives features, and a linear head.

`Transfer` says how networks are trained. `build_body` and `build_head` make a network whose weights
depend only on a seed; a user's function can replace the built-in bodies. `study.study`,
`study.setup` and `commands.study` use the settings, `study.training` uses settings and
networks.

`Transfer.to_dict` is part of the keys of `TrainedSource` and `TargetRun`, the stored units of
training: if a field is added, renamed or gets another default, finished units are computed again.
Of the built-in networks only the version of this package is in the keys, so a change of them needs
a new version. Networks are built on the CPU, where `training` trains them on one thread, so that a
run is the same to the last bit on one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from otdd_flash.arguments import (
    Count,
    Index,
    NotNegative,
    Positive,
    check_fields,
    count,
    importable,
)
from otdd_flash.checks import optional, sequence
from otdd_flash.errors import InputError, choose
from otdd_flash.extractors.checkpoint import seeded_weights
from otdd_flash.extractors.module_features import Unidentified, content_digest
from otdd_flash.importing import import_callable, user_code
from otdd_flash.samples import LabeledSamples

PROTOCOLS = ("finetune", "head")

# Rows of the target per class, if their number is not given.
PER_CLASS = 10


@dataclass(frozen=True)
class Transfer:
    """Settings of transfer runs: a source's network is trained further on a few rows of the target.

    The baseline is trained on the same rows of the target alone: all layers under either protocol,
    from the weights that the source's network began with, in the same order and for as many steps.

    Args:
        protocol: `finetune` trains all layers on the target, `head` only the last layer.
        target_samples: rows of the target in all, drawn in proportion to its classes; None is ten
            per class.
        seeds: repetitions, each with its own weights, rows and orders.
        source_epochs: passes over the source.
        target_epochs: passes over the target's rows.
        min_target_steps: passes over the target's rows are added until there are at least this many
            steps; 0 adds none.
        batch_size: rows of a step, on the source and on the target.
        learning_rate: that of Adam.
        weight_decay: that of `torch.optim.Adam`, which adds it times the weights to the gradient.
        network: a function, or where to import it from, "package.module:function". It
            takes (dim, image_shape) and returns a module from features (n, dim) to the input of the
            linear head. None: LeNet-5 for images, otherwise one hidden layer of 256.
        image_shape: (c, h, w) if features are pixels of images, otherwise None.

    Raises:
        InputError: a field is invalid.
    """

    protocol: str = "finetune"
    target_samples: Count | None = None
    seeds: Count = 5
    source_epochs: Count = 20
    target_epochs: Count = 10
    min_target_steps: Index = 200
    batch_size: Count = 32
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 1e-6
    network: str | Callable[..., nn.Module] | None = None
    image_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            "transfer.",
            network=optional(importable),
            image_shape=optional(sequence(count, length=3)),
        )
        choose("transfer.protocol", self.protocol, PROTOCOLS)

    def target_rows(self, target: LabeledSamples) -> int:
        """Return the number of rows of a target that are trained on.

        Raises:
            InputError: it is below the number of classes or above the number of rows.
        """
        classes, rows = target.class_total, len(target)
        wanted = PER_CLASS * classes if self.target_samples is None else self.target_samples
        if not classes <= wanted <= rows:
            given = "" if self.target_samples is not None else f", {PER_CLASS} a class,"
            raise InputError(
                f"transfer.target_samples={wanted}{given} must lie between the {classes} classes "
                f"and the {rows} training rows of {target.name}; set transfer.target_samples to a "
                "number in between"
            )
        return wanted

    def builder(self) -> Callable[..., nn.Module] | None:
        """Import the function that builds bodies; None for the built-in ones.

        Raises:
            InputError: there is no such function.
        """
        if isinstance(self.network, str):
            return import_callable(self.network, "transfer.network")
        return self.network

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of study.json; a user's function becomes its name and digest.

        Raises:
            InputError: the function reads an object that has no content to digest.
        """
        shape = None if self.image_shape is None else list(self.image_shape)
        summary = {**vars(self), "network": None, "image_shape": shape}
        if (builder := self.builder()) is not None:
            name = getattr(builder, "__qualname__", type(builder).__name__)
            try:
                digest = content_digest(builder)
            except Unidentified as error:
                raise InputError(
                    f"transfer.network holds what has no content to tell it by ({error}), and a "
                    "study could not know whether it changed; name a function of a module"
                ) from error
            summary["network"] = f"{getattr(builder, '__module__', '')}.{name} {digest[:16]}"
        return summary


# Units of the hidden layer for features that are no images.
HIDDEN = 256

# LeNet-5: LeCun et al. 1998, Gradient-based learning applied to document recognition.
KERNEL, CHANNELS, WIDTHS = 5, (6, 16), (120, 84)

# The smallest side of which two poolings by 2 leave a pixel.
SMALLEST_SIDE = 4


class Network(nn.Module):
    """A body from features (n, d) to (n, k), and a linear head to one logit per class."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (n, V)."""
        logits: Tensor = self.head(self.body(features))
        return logits


def build_body(transfer: Transfer, dim: int, seed: int) -> nn.Module:
    """Build the body with the weights of a seed.

    Raises:
        InputError: the images are too small, or the user's function returns no module.
    """
    builder, shape = transfer.builder(), transfer.image_shape
    with seeded_weights(seed):
        if builder is None:
            if shape is None:
                return nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU())
            return _lenet(shape, dim)
        with user_code("transfer.network"):
            body = builder(dim, shape)
    if not isinstance(body, nn.Module):
        raise InputError(
            f"transfer.network must return a torch module, got {type(body).__qualname__}"
        )
    return body


def build_head(body: nn.Module, dim: int, classes: int, seed: int) -> nn.Linear:
    """Build a head for the features of a body, with the weights of a seed.

    Raises:
        InputError: the body does not return a matrix of features.
    """
    # The body is left in evaluation mode; `training.train` sets the mode that it needs.
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
    # Unpadded, the second convolution and pooling would leave nothing of a side below KERNEL + 1.
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
    # A quarter faster on small images, forward and backward.
    return layers.to(memory_format=torch.channels_last)
