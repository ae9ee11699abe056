"""How networks of a study are trained, and how their gain is measured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from otdd_flash.arguments.studies import TRANSFER
from otdd_flash.checks import check_fields
from otdd_flash.errors import InputError, choose
from otdd_flash.importing import import_callable
from otdd_flash.samples import LabeledSamples

PROTOCOLS = ("finetune", "head")
PER_CLASS = 10


@dataclass(frozen=True)
class Transfer:
    """Transfer runs of a study: a source's network goes on with a few rows of the target.

    The baseline is trained on the same rows of the target alone, all layers from the weights that
    the source began with, in the same order and for as many steps.

    Args:
        protocol: `finetune`, all layers go on, or `head`, the source's features stay as they are.
        target_samples: rows of the target in all, drawn in proportion to its classes; None is ten
            for each class.
        seeds: repetitions, each with weights, rows and orders of its own.
        source_epochs: passes over the source.
        target_epochs: passes over the target's rows.
        min_target_steps: more passes are made until there are so many steps.
        batch_size: rows of a step, on the source and on the target.
        learning_rate: of Adam.
        weight_decay: of Adam, as a squared norm in the loss.
        network: where to import a function from, "package.module:function", or the function. It
            takes (dim, image_shape) and returns a module from features (n, dim) to what a linear
            layer classifies. None: LeNet-5 for images, else one hidden layer of 256.
        image_shape: (c, h, w) where features are pixels of images; None where they are not.

    Raises:
        InputError: a field is not what it must be.
    """

    protocol: str = "finetune"
    target_samples: int | None = None
    seeds: int = 5
    source_epochs: int = 20
    target_epochs: int = 10
    min_target_steps: int = 200
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 1e-6
    network: str | Callable[..., nn.Module] | None = None
    image_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, TRANSFER, "transfer.")
        choose("transfer.protocol", self.protocol, PROTOCOLS)

    def target_rows(self, target: LabeledSamples) -> int:
        """Return how many rows of a target are trained on.

        Raises:
            InputError: they are fewer than its classes or more than its rows.
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
        """Import the function that builds networks; None for the built-in ones.

        Raises:
            InputError: there is no such function.
        """
        if isinstance(self.network, str):
            return import_callable(self.network, "transfer.network")
        return self.network

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of study.json; a user's function is its name and a hash of its code."""
        network: str | None = None
        if (builder := self.builder()) is not None:
            code = getattr(builder, "__code__", None)
            content = b"" if code is None else code.co_code + repr(code.co_consts).encode()
            name = getattr(builder, "__qualname__", type(builder).__name__)
            where = getattr(builder, "__module__", "")
            network = f"{where}.{name} {hashlib.sha256(content).hexdigest()[:16]}"
        shape = None if self.image_shape is None else list(self.image_shape)
        plain = {key: value for key, value in vars(self).items() if key != "network"}
        return {**plain, "network": network, "image_shape": shape}
