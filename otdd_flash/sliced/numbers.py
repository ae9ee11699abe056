"""A labelled dataset as sorted numbers on a line, one list per draw.

    z_i = psi_0 theta.x_i + sum_{k=1..5} psi_k M_k(class of x_i)
    M_k(c) = weighted mean over class c of (theta.x)^l_k / l_k!

in float64. Powers are built up by multiplication, p^l / l! = (p^(l - 1) / (l - 1)!) (p / l), up to
the largest order drawn; the classes' means of every order are one matrix product each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.samples import HOW_TO_LABEL, HOW_TO_SCALE, LabeledSamples
from otdd_flash.sliced.draws import Draws

# Rows that are cast to float64 together.
ROWS_AT_ONCE = 4096


class SortedNumbers(NamedTuple):
    """What a dataset is along C draws.

    Attributes:
        values: (C, n) float64, each row ascending.
        masses: (C, n) of the same order, float64; None where all are equal.
    """

    values: Tensor
    masses: Tensor | None


class Projected:
    """A dataset prepared for draws: rows of positive weight, and their shares of their classes.

    Args:
        samples: labelled, on the device that computes.

    Raises:
        InputError: there are no labels.
    """

    def __init__(self, samples: LabeledSamples) -> None:
        if samples.labels is None:
            raise InputError(f"{samples.name} has no labels; {HOW_TO_LABEL}")
        masses = samples.masses
        if samples.weights is not None and not bool((masses > 0).all()):
            samples = samples.take((masses > 0).nonzero().squeeze(1))
            masses = samples.masses
        assert samples.labels is not None
        self.name, self.features, self.labels = samples.name, samples.features, samples.labels
        self.masses = None if bool((masses == masses[0]).all()) else masses
        one_hot = torch.nn.functional.one_hot(samples.labels, samples.class_total).double()
        weighted = one_hot * masses.unsqueeze(1)
        # A class without rows is nobody's.
        self._shares = weighted / weighted.sum(0).clamp_min(torch.finfo(torch.float64).tiny)

    def __len__(self) -> int:
        return len(self.features)

    def along(self, draws: Draws) -> SortedNumbers:
        """The numbers along some draws, on the same device.

        Raises:
            InputError: powers of the projections overflow float64.
        """
        projections = self._project(draws.directions)
        moments = self._moments(projections, draws.orders)
        by_class = (draws.weights[:, 1:, None] * moments).sum(1)
        projections.mul_(draws.weights[:, :1]).add_(by_class[:, self.labels])
        if not bool(torch.isfinite(projections).all()):
            raise InputError(
                f"powers of the features of {self.name} overflow float64 in a sliced distance; "
                f"{HOW_TO_SCALE}"
            )
        values, order = projections.sort(1)
        return SortedNumbers(values, None if self.masses is None else self.masses[order])

    def _project(self, directions: Tensor) -> Tensor:
        """theta.x (C, n) float64."""
        found = directions.new_empty(len(directions), len(self))
        for start in range(0, len(self), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            found[:, rows] = directions @ self.features[rows].double().T
        return found

    def _moments(self, projections: Tensor, orders: Tensor) -> Tensor:
        """M_k of every class, (C, MOMENTS, V)."""
        count = self._shares.shape[1]
        moments = projections.new_zeros(*orders.shape, count)
        power = torch.ones_like(projections)
        for order in range(1, int(orders.max()) + 1):
            power.mul_(projections).div_(order)
            means = power @ self._shares
            moments += (orders == order).unsqueeze(2) * means.unsqueeze(1)
        return moments
