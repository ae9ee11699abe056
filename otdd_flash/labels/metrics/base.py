"""`LabelMetric`, the abstract class of all methods that measure class distances.

`labels.metrics`, `labels.by_ranks` and metrics of other packages extend it; `labels.measuring`
calls its methods. The names and arguments of methods must stay, because other packages implement
them. A change of `recipe` in a subclass makes its cached distances
unknown; a change of numbers without one lets the cache return old ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from otdd_flash.arguments import Progress, check_fields
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.pairs import PairDistances

# Positions (k,) in a list of pairs, and their distances (k,).
Measured = Generator[tuple[Tensor, Tensor], None, None]


@dataclass(frozen=True)
class LabelMetric(ABC):
    """One method of measuring squared distances between classes; its fields are its parameters.

    The constructor checks the fields by their annotations.

    Attributes:
        name: the name in `labels=NAME` and in results.
        fixed: whether the distances are independent of the points.

    Raises:
        InputError: a field is not valid.
    """

    name: ClassVar[str]
    fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self, "labels.")

    @abstractmethod
    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Measure the squared distances of pairs of classes, each independently of the other pairs.

        Args:
            clouds: V classes, points (n, d) each.
            pairs: (P, 2) int64, indices of the classes of each pair, on the points' device.
            progress: called with the number of pairs done and their total.

        Returns:
            P distances with bounds, in units of ||.||^2, on the points' device.

        Raises:
            InputError: a class is too large for the method, or rounding exceeds the tolerance.

        Warns:
            NotConvergedWarning: a solve stopped before its tolerance.
        """

    def in_parts(self, clouds: Sequence[ClassCloud], pairs: Tensor) -> Measured | None:
        """Yield the values of `measure` in parts if single pairs take long, else return None."""
        return None

    def recipe(self, device: torch.device) -> str | None:
        """Return all that a cached distance depends on except its classes; None: no cache.

        It is part of the cache's keys: any change of its text makes every entry unknown.
        """
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters for JSON, without the name and the classes."""
        return asdict(self)

    @property
    def single_samples_are_points(self) -> bool:
        """Whether a class of one sample lacks an estimated covariance and counts as a point."""
        return False
