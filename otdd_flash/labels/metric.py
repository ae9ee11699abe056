"""How distances between classes are measured: a method's name and its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from otdd_flash import arguments
from otdd_flash.checks import check_fields
from otdd_flash.errors import InputError
from otdd_flash.labels.table import ClassDistances

METHODS = arguments.LABEL_METHODS


@dataclass(frozen=True)
class LabelMetric:
    """How distances between classes are measured.

    Args:
        method: one of `METHODS`.
            gaussian: squared Bures-Wasserstein distance of class means and covariances;
            sinkhorn: debiased entropic transport between the classes' points;
            exact: unregularised squared 2-Wasserstein distance between the classes' points;
            means: ||m_i - m_j||^2 (squared);
            upper_bound: ||m_i - m_j||^2 + tr S_i + tr S_j, 0 for identical classes;
            none: 0, plain feature transport, for unlabelled data too;
            given: the table in `given`.
        unbiased: covariances divide by n - 1, else by n (gaussian, upper_bound).
        diagonal: covariances between features are taken as zero (gaussian).
        epsilon: entropic regularisation, in units of ||.||^2 (sinkhorn).
        tolerance: L1 marginal error at which solves stop (sinkhorn).
        given: a table, or the path of its npz (given).

    Raises:
        InputError: an unknown method, or one that lacks its parameter.
    """

    method: str = "gaussian"
    unbiased: bool = True
    diagonal: bool = False
    epsilon: float | None = None
    tolerance: float = 1e-3
    given: ClassDistances | str | Path | None = None

    def __post_init__(self) -> None:
        check_fields(self, arguments.LABEL_METRIC, "labels.")
        if self.method == "sinkhorn" and self.epsilon is None:
            raise InputError("labels=sinkhorn needs labels.epsilon, in units of squared distance")
        if self.method == "given" and self.given is None:
            raise InputError(
                "labels=given needs a table: labels.path=W.npz with arrays xx, xy and yy, or "
                "class_distances= in Python"
            )

    @classmethod
    def of(cls, labels: str | LabelMetric) -> LabelMetric:
        """The metric itself, or that of a method's name.

        Raises:
            InputError: as the metric.
        """
        if isinstance(labels, LabelMetric):
            return labels
        return cls(labels)
