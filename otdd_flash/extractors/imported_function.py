"""The `callable` extractor: a user's own function, given by import path or as an object.

`otdd_flash.extractors` exports `from_callable`, `extractors.registry` builds it by name,
`extractors.embedding` and `extractors.differentiable` recognise `ImportedFunction`. What a function
computes cannot be identified, so its features are never cached. Its errors are reported with its
name, because they are of the user's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otdd_flash.checks import refused, shown
from otdd_flash.errors import InputError
from otdd_flash.importing import FORM, import_callable, user_code
from otdd_flash.real_numbers import check_integers, dense, real_tensor
from otdd_flash.shown import display


@dataclass(frozen=True)
class ImportedFunction:
    """The extractor around a function; see `from_callable`."""

    function: Callable[[Any], Any]
    name: str
    modalities: frozenset[str] = frozenset({"image", "text", "array"})
    # A function's computation cannot be identified by content.
    cacheable: bool = False

    @property
    def key(self) -> str:
        """The function's name: not exact, hence never a cache key."""
        return f"callable {self.name}"

    def __repr__(self) -> str:
        return f"from_callable({display(self.name)})"

    def __call__(self, batch: Any) -> Tensor:
        """Return the function's features (b, d) for a batch of b inputs, after checking them."""
        with torch.no_grad(), user_code(f"extractor {self.name}"):
            given = self.function(batch)
        what = f"what {self.name} returns, features (b, d),"
        features = real_tensor(what, dense(what, given)).detach().cpu()
        self._check(features, len(batch))
        check_integers(f"extractor {self.name}", features)
        return features if features.dtype == torch.float64 else features.float()

    def on_tensors(self, images: Tensor) -> Tensor:
        """Return features (b, d) of images (b, c, h, w), differentiable by autograd."""
        with user_code(f"extractor {self.name}"):
            features = self.function(images)
        if not isinstance(features, Tensor):
            raise InputError(
                f"{self.name} must return a tensor (b, d) where images move, got {shown(features)}"
            )
        self._check(features, len(images))
        return features

    def _check(self, features: Tensor, count: int) -> None:
        if features.ndim != 2 or len(features) != count:
            raise InputError(
                f"{self.name} must return one row of features per input, shape ({count}, d), "
                f"got {tuple(features.shape)}"
            )
        if features.is_complex():
            raise InputError(f"{self.name} must return real features, got {features.dtype}")


def from_callable(path: str | Callable[[Any], Any]) -> ImportedFunction:
    """Make a function an extractor.

    Args:
        path: its import path, "package.module:function" or "package.module.function", or the
            function itself. It takes a batch of b inputs (an array with leading dimension b, or a
            list of PIL images in the modes L, RGB, I;16 or F, strings or arrays) and returns
            features (b, d).

    Raises:
        InputError: nothing callable has that path.
    """
    if callable(path):
        name = getattr(path, "__qualname__", type(path).__qualname__)
        return ImportedFunction(path, f"{getattr(path, '__module__', '')}.{name}")
    if not isinstance(path, str):
        raise refused("extractor.path", f"be a function, {FORM}", path)
    return ImportedFunction(import_callable(path, "extractor.path"), path)
