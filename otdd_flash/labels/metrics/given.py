"""`labels=given`: a table of two datasets that is there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import ClassVar

from torch import Tensor

from otdd_flash.arguments.values import TABLE_CLASS
from otdd_flash.checks import Declaration, instance, optional, path
from otdd_flash.errors import InputError
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.metrics.base import LabelMetric
from otdd_flash.labels.pairs import PairDistances, Progress
from otdd_flash.labels.table import ClassDistances


@dataclass(frozen=True)
class Given(LabelMetric):
    """The distances of a table, whatever the points are.

    Args:
        table: `ClassDistances` of the two datasets, or the path of their npz; must be given.

    Raises:
        InputError: it is missing, or neither of both.
    """

    name = "given"
    checks: ClassVar[Declaration] = {
        "table": optional(
            lambda name, value: (
                path(name, value)
                if isinstance(value, str | PurePath)
                else instance("be ClassDistances or the path of their npz", TABLE_CLASS)(
                    name, value
                )
            )
        )
    }
    fixed = True

    table: ClassDistances | str | Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table is None:
            raise InputError(
                "labels=given needs a table: labels.path=W.npz with arrays xx, xy and yy, or "
                "otdd.labels.Given(table) in Python"
            )

    def read(self) -> ClassDistances:
        """Return the table, read from its file if it is in one.

        Raises:
            InputError: as `ClassDistances.load`.
        """
        if isinstance(self.table, ClassDistances):
            return self.table
        assert self.table is not None
        return ClassDistances.load(self.table)

    def measure(
        self, clouds: Sequence[ClassCloud], pairs: Tensor, progress: Progress | None = None
    ) -> PairDistances:
        """Raise an `InputError`: a table knows classes by their places and not by their points."""
        raise measures_nothing()


def measures_nothing() -> InputError:
    """The error where a table is to be measured."""
    return InputError(
        "labels=given is the table of two datasets and measures nothing; choose a method, or "
        "pass a table of class_distances([...]) on as class_distances="
    )
