"""The spaces in which particles move: features, directions, or images with features of a network.

Transport compares features phi(x_i) (n, d) of particles x_i (n, p). By the chain rule the gradient
of a loss by particle x_i is J_i^T g_i, with J_i = d phi / d x (d, p) at x_i, and g_i (d,) the
gradient by its features. `pull_back` computes it. `flows.flow` holds a space among its options,
`flows.run` and `flows.objective` map points by it, `flows.run` builds `DirectionSpace` for the
cosine cost, and `commands.adapt` builds `ImageSpace`. `key` is stored in checkpoints and compared
when a flow is resumed, so it must differ if features differ. Results hold it too, and
`flows.result` makes entropic maps only where it is "features".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.ground import GroundCost, directions
from otdd_flash.errors import InputError


class Space(Protocol):
    """The interface of a space of particles.

    Attributes:
        key: equal for two spaces only if they give equal features.
    """

    @property
    def key(self) -> str:
        """The identity of the space, compared when a flow is resumed."""

    def features(self, points: Tensor) -> Tensor:
        """Return phi(points) (n, d) of the particles (n, p), without gradient."""

    def pull_back(self, points: Tensor, gradient: Tensor) -> Tensor:
        """Return J^T gradient (n, p), row by row, for a gradient (n, d) by features."""


@dataclass(frozen=True)
class FeatureSpace:
    """The space in which particles are features themselves: phi is the identity."""

    key: str = "features"

    def features(self, points: Tensor) -> Tensor:
        return points

    def pull_back(self, points: Tensor, gradient: Tensor) -> Tensor:
        return gradient


@dataclass(frozen=True)
class DirectionSpace:
    """Features of another space scaled to length 1, as the cosine cost sees them.

    Attributes:
        inner: the space that gives the features.
        cost: a ground cost `cosine`.

    Raises:
        InputError: the features of a particle are 0.
    """

    inner: Space
    cost: GroundCost

    @property
    def key(self) -> str:
        return f"directions of {self.inner.key}"

    def features(self, points: Tensor) -> Tensor:
        """Return directions (n, d), float64."""
        return directions(self.inner.features(points), "the particles")

    def pull_back(self, points: Tensor, gradient: Tensor) -> Tensor:
        """Apply the chain rule through the lengths."""
        by_features = self.cost.pull_back(self.inner.features(points), gradient)
        return self.inner.pull_back(points, by_features)


@dataclass(frozen=True)
class ImageSpace:
    """The space of images, flattened: channel after channel, rows from the top, in [0, 1].

    Images pass through the network chunk by chunk, once for the features and again for the
    gradient, so activations need the memory of one chunk for any n.

    Attributes:
        network: images (b, c, h, w) to features (b, d), differentiable, such as
            `otdd_flash.extractors.vision_models.differentiable` returns. It must treat each image
            independently and always alike: no dropout, no statistics of the batch.
        shape: (c, h, w).
        chunk: images at a time.
        key: identifies the network.

    Raises:
        InputError: a shape or a chunk that is not positive.
    """

    network: Callable[[Tensor], Tensor]
    shape: tuple[int, int, int]
    chunk: int = 256
    key: str = "images"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != 3 or not all(_positive(length) for length in self.shape):
            raise InputError(f"shape must be (channels, height, width), got {self.shape}")
        if not _positive(self.chunk):
            raise InputError(f"chunk must be a positive number of images, got {self.chunk!r}")

    def features(self, points: Tensor) -> Tensor:
        """Return phi(points) (n, d) of the images (n, c h w), in the network's type.

        Raises:
            InputError: the points are not images of this shape, or the network does not return
                one row of features per image.
        """
        with torch.no_grad():
            return torch.cat([self._forward(points[rows]) for rows in self._chunks(points)])

    def pull_back(self, points: Tensor, gradient: Tensor) -> Tensor:
        """Return J^T gradient (n, c h w), in the type of `points`.

        Raises:
            InputError: as `features`; or the network is not differentiable.
        """
        pulled = torch.empty_like(points)
        for rows in self._chunks(points):
            images = points[rows].detach().requires_grad_()
            with torch.enable_grad():
                features = self._forward(images)
            if not features.requires_grad:
                raise InputError(
                    "the network carries no gradient from features to pixels; compute features by "
                    "torch operations, without detach, no_grad or numpy"
                )
            (pulled[rows],) = torch.autograd.grad(features, images, gradient[rows])
        return pulled

    def _chunks(self, points: Tensor) -> Iterator[slice]:
        c, h, w = self.shape
        if points.ndim != 2 or points.shape[1] != c * h * w:
            raise InputError(
                f"points must be {c} x {h} x {w} images, flattened to (n, {c * h * w}), got "
                f"{tuple(points.shape)}"
            )
        for start in range(0, len(points), self.chunk):
            yield slice(start, start + self.chunk)

    def _forward(self, points: Tensor) -> Tensor:
        features: Any = self.network(points.reshape(-1, *self.shape))
        if not isinstance(features, Tensor) or features.shape[:-1] != (len(points),):
            got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise InputError(
                f"the network must return one row of features per image, shape ({len(points)}, d), "
                f"got {got}"
            )
        return features


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
