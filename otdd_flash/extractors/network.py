"""`Extractor`, the protocol of feature extractors, and `Network`, the one around a torch module.

An extractor maps a batch of raw inputs to a feature matrix. `vision_models`, `sentence_embedding`
and `module_features` make `Network`s; `otdd_flash.extractors`, `embedding`, `vision_models`,
`commands.sides` and `commands.nearest` take an `Extractor`.

A change must respect that `key` identifies the features of a cacheable extractor (equal keys, equal
features), as they are cached by it; that a network, which may be the user's, is left in its
previous mode and on its previous device; that `prepare` can be pickled, for worker processes that
are not forked; and that no global random generator is advanced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from otdd_flash.data.dataset import LazyItems, item_loader
from otdd_flash.data.images import plain_item
from otdd_flash.errors import InputError
from otdd_flash.files.tensor_file import content_hash
from otdd_flash.shown import display


@runtime_checkable
class Extractor(Protocol):
    """A callable that maps a batch of b raw inputs to features (b, d).

    Attributes:
        key: identifies the features: the extractor's name, parameters and weights.
        modalities: the kinds of input it takes, among "image", "text" and "array".
        cacheable: whether features are cached on disk. They are then expensive, and `key`
            identifies them; otherwise `key` may be a mere description.
    """

    @property
    def key(self) -> str:
        """A text; of cacheable extractors it is equal only if their features are equal."""

    @property
    def modalities(self) -> frozenset[str]:
        """The kinds of input."""

    @property
    def cacheable(self) -> bool:
        """Whether features are cached on disk."""

    def __call__(self, batch: Any) -> Tensor:
        """Return features (b, d) of an array with leading dimension b, or of a list of b items."""


@dataclass(frozen=True, eq=False)
class Network:
    """An extractor around a torch module.

    It computes in the precision of its weights or under autocast. Features are float32, or float64
    if the network returns that.

    Args:
        description: what decides the features besides the weights: a name, settings and a version.
            It and the weights' hash are the key.
        module: the network; it is moved to the device for the extraction and back afterwards.
        modalities: the kinds of input it takes.
        prepare: converts one raw input to an item of the list that `forward` takes. It may run in
            worker processes.
        forward: maps the module and a list of b prepared inputs to features (b, d).
    """

    description: str
    module: nn.Module
    modalities: frozenset[str]
    prepare: Callable[[Any], Any]
    forward: Callable[[nn.Module, list[Any]], Tensor]

    @property
    def cacheable(self) -> bool:
        return True

    @property
    def key(self) -> str:
        """The description and a hash of the current weights."""
        return f"{self.description} weights={content_hash(self.module.state_dict())}"

    def __repr__(self) -> str:
        # The first words of most descriptions are library, version and model.
        named = display(" ".join(self.description.split()[:3]))
        count = sum(parameter.numel() for parameter in self.module.parameters())
        return f"<extractor {named}, {count:,} parameters>"

    def __call__(self, batch: Any) -> Tensor:
        """Compute the features (b, d) of one batch, on the CPU.

        Raises:
            InputError: the batch is empty, or an input cannot be read or prepared.
        """
        # A loader refuses a batch size of 0.
        return next(self.stream(batch, batch_size=max(len(batch), 1), device=torch.device("cpu")))

    def stream(
        self,
        inputs: Sequence[Any] | np.ndarray[Any, Any],
        *,
        batch_size: int,
        device: torch.device,
        autocast: torch.dtype | None = None,
        num_workers: int = 0,
    ) -> Iterator[Tensor]:
        """Yield features (b, d) on the CPU, batch after batch.

        Meanwhile the module is in evaluation mode and on the device; see `evaluating`.

        Args:
            inputs: n raw inputs.
            batch_size: inputs per forward pass.
            device: where the network runs.
            autocast: the type of mixed precision, or None for the precision of the weights.
            num_workers: processes that prepare inputs; 0 prepares them in this process.

        Raises:
            InputError: there is no input, or one cannot be read or prepared.
        """
        if len(inputs) == 0:
            raise InputError(f"{self} needs at least one input, got an empty batch")
        prepared = LazyItems(partial(_prepared, inputs, self.prepare), np.arange(len(inputs)))
        with evaluating(self.module, device):
            for batch in item_loader(prepared, batch_size, num_workers):
                for item in batch:
                    if isinstance(item, InputError):
                        raise item
                with (
                    torch.no_grad(),
                    torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
                ):
                    features = self.forward(self.module, batch).detach().cpu()
                yield features if features.dtype == torch.float64 else features.float()


@contextmanager
def evaluating(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put a module into evaluation mode and on a device, and restore both afterwards.

    Every submodule gets its own previous mode back, as some may have been frozen. A module that is
    spread over several devices is not moved.
    """
    modes = [(part, part.training) for part in module.modules()]
    homes = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    moves = len(homes) == 1 and homes != {device}
    try:
        module.eval()
        if moves:
            module.to(device)
        yield
    finally:
        if moves:
            module.to(homes.pop())
        for part, mode in modes:
            part.training = mode


def _prepared(inputs: Any, prepare: Callable[[Any], Any], row: int) -> Any:
    try:
        return prepare(plain_item(inputs[row], f"row {row}"))
    except InputError as error:
        # The error is returned as a value: an exception would arrive from a worker process inside
        # its traceback.
        return error


def forward_images(module: nn.Module, images: list[Tensor]) -> Tensor:
    """Stack prepared images (c, h, w) and pass them through the module on its device."""
    parameter = next(module.parameters())
    features = module(torch.stack(images).to(parameter.device))
    assert isinstance(features, Tensor)
    return features
