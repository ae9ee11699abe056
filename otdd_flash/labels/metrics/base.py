"""`LabelMetric`, the abstract class of all metrics between classes.

`labels.metrics`, `labels.by_ranks` and metrics of other packages extend it, and `labels` exports
it. `labels.measuring` calls its methods; `flows.modes`, `ranking.bounds` and `gromov.distance`,
which make tables of their own, call `by_names` too, and `study.study` calls it for its errors.
`study.setup`, `flows.objective` and `ranking.index` store `to_dict` among the settings of a study,
a flow and an index, which must be the same when these are used again.

The names and arguments of methods must stay, because other packages implement them. If a subclass
changes the text of `recipe`, its cached distances are not found any more; if it changes values
without that, the cache returns old ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from otdd_flash.arguments import Progress, check_fields
from otdd_flash.labels.pairs import ClassCloud, PairDistances

# Yields positions (k,) in a list of pairs, with the squared distances (k,) of those pairs.
Measured = Generator[tuple[Tensor, Tensor], None, None]


@dataclass(frozen=True)
class LabelMetric(ABC):
    """One method of measuring squared distances between classes; its fields are its parameters.

    The constructor checks the fields by their annotations.

    Attributes:
        name: the name in `labels=NAME` and in results.
        fixed: whether distances do not depend on the points, as those of a given table, or 0.

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
            InputError: a class is too large for the method, or rounding exceeds the metric's
                tolerance.

        Warns:
            NotConvergedWarning: a solve stopped before its tolerance.
        """

    def in_parts(self, clouds: Sequence[ClassCloud], pairs: Tensor) -> Measured | None:
        """Return a generator of positions and exact distances, for pairs that take long each.

        It yields distances as they are computed; they count as exact and converged. None: `measure`
        is called instead.
        """
        return None

    def recipe(self, device: torch.device) -> str | None:
        """Return all that a cached distance depends on except its classes.

        That includes the device if devices round differently. None: nothing is cached. The text is
        part of the cache's keys: after any change of it no earlier entry is found.
        """
        return None

    def by_names(self, names: Sequence[str]) -> Tensor | None:
        """Return the part (V, V) of distances that names of classes decide, or None.

        Args:
            names: names of the classes of all datasets.
        """
        return None

    @property
    def measured(self) -> LabelMetric:
        """The metric by which pairs are measured."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters for JSON, without the name."""
        return asdict(self)

    @property
    def single_samples_are_points(self) -> bool:
        """Whether covariances divide by n - 1, so that a class of one sample has none.

        Such a class counts as a point, and `labels.measuring` warns of it.
        """
        return False
