"""What every way of measuring distances between classes has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from otdd_flash.arguments import check_fields
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.pairs import PairDistances, Progress

# Positions (k,) in a list of pairs, and their distances (k,).
Measured = Generator[tuple[Tensor, Tensor], None, None]


@dataclass(frozen=True)
class LabelMetric(ABC):
    """One way to measure squared distances between classes; its fields are its parameters.

    Attributes:
        name: as `labels=NAME` and in results.
        checks: what the fields may be.
        fixed: whether the distances have nothing to do with where the points are.

    Raises:
        InputError: a field is not what it must be.
    """

    name: ClassVar[str]
    fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self, "labels.")

    @abstractmethod
    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure squared distances of pairs of classes, each independently of the other pairs.

        Args:
            clouds: V classes, points (n, d) each.
            pairs: (P, 2) int64, indices of the classes of each pair, where the points are.
            progress: called with the number of pairs done and their total.

        Returns:
            P distances with bounds, in units of ||.||^2, where the points are.

        Raises:
            InputError: a class is too large for the method, or rounding leaves nothing of it.

        Warns:
            NotConvergedWarning: a solve stopped before its tolerance.
        """

    def in_parts(self, clouds: Sequence[ClassCloud], pairs: Tensor) -> Measured | None:
        """Yield the values of `measure` as they come, if single pairs take long; else None."""
        return None

    def recipe(self, device: torch.device) -> str | None:
        """Return what a cached distance depends on but for its classes; None if it is cheap.

        It is part of the cache's keys: other words for the same make every entry unknown.
        """
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters, for JSON, without the name and the classes."""
        return asdict(self)

    @property
    def single_samples_are_points(self) -> bool:
        """Whether a class of one sample, without such a covariance, counts as a point."""
        return False
