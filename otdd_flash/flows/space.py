"""Placeholder until the space module lands."""

from typing import Protocol

from torch import Tensor


class Space(Protocol):
    key: str

    def features(self, points: Tensor) -> Tensor: ...
    def pull_back(self, points: Tensor, gradient: Tensor) -> Tensor: ...


class FeatureSpace:
    key = "features"

    def features(self, points: Tensor) -> Tensor:
        return points

    def pull_back(self, points: Tensor, gradient: Tensor) -> Tensor:
        return gradient
