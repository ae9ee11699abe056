"""What a feature extractor is: a callable from a batch of raw inputs to a feature matrix."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Extractor(Protocol):
    """Turns a batch of b raw inputs into features (b, d).

    Attributes:
        key: identifies the features that the extractor gives: its name, parameters and weights.
        modalities: which kinds of input it takes, among "image", "text" and "array".
        cacheable: whether the features cost enough to keep on disk; `key` must then be exact.
    """

    @property
    def key(self) -> str:
        """Equal for two extractors only if they give equal features."""

    @property
    def modalities(self) -> frozenset[str]:
        """The kinds of input."""

    @property
    def cacheable(self) -> bool:
        """Whether features are kept on disk."""

    def __call__(self, batch: Any) -> Tensor:
        """Features (b, d) of an array with leading dimension b, or of a list of b items."""
