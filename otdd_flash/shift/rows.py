"""The rows of both sides in one pool: features, classes united by name, weights and units.

`shift.joint` pools both sides once (`PooledRows.of`). All that the statistic is made of, class
distances, epsilon and the unit of effects, is a symmetric function of these rows: were it measured
on one side alone, that side would be special and the p-value wrong. A change must keep that.

Rows are exchanged between the sides in units: single rows, or whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import InputError
from otdd_flash.labels import LabelMetric, NoLabels, class_distances
from otdd_flash.memory import check_memory
from otdd_flash.operators.comparison import check_comparable
from otdd_flash.raw_labels import raw_values
from otdd_flash.samples import HOW_TO_LABEL, LabeledSamples
from otdd_flash.shown import display, listing

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Arrays (N, N) of float64 that a test holds at once: costs, two kernels and what makes them.
ARRAYS = 6


@dataclass(frozen=True, eq=False)
class PooledRows:
    """N rows of both sides, the reference's first, without rows of weight 0.

    Attributes:
        samples: features (N, d), labels (N,) or None, and the V names of united classes.
        weights: (N,) float64 as given: 1 for each row, or on one scale for both sides.
        in_reference: (N,) which rows are the reference's.
        unit: (N,) the unit of each row, from 0.
        unit_in_reference: (U,) which units are the reference's.
        places: (N,) the number of each row on its own side.
        given: rows of each side, those of weight 0 included.
    """

    samples: LabeledSamples
    weights: Tensor
    in_reference: Mask
    unit: Numbers
    unit_in_reference: Mask
    places: Numbers
    given: tuple[int, int]

    @classmethod
    def of(
        cls,
        reference: LabeledSamples,
        sample: LabeledSamples,
        metric: LabelMetric,
        groups: Sequence[Any] | None,
    ) -> PooledRows:
        """Pool two sides.

        Args:
            reference: rows of one law, perhaps.
            sample: rows of another law, perhaps.
            metric: how classes are compared; `NoLabels` leaves labels out.
            groups: two sequences, the group of every row of each side; None: every row by itself.

        Raises:
            InputError: the sides do not compare, share no class, have weights on one side only or
                fewer than two rows or groups on a side; or a group is on both sides.
        """
        sides = [reference, sample]
        if isinstance(metric, NoLabels):
            sides = [replace(side, labels=None, class_names=()) for side in sides]
        check_comparable(*sides)
        if (sides[0].weights is None) != (sides[1].weights is None):
            raise InputError(
                "one side has weights and the other has none; a row's weight is exchanged with it, "
                "so give weights on one scale for both sides, or for none"
            )
        named = [
            _named(side, place) for place, side in zip(("reference", "sample"), sides, strict=True)
        ]
        units = _units(groups, [len(side) for side in sides])
        # `mass` is the sum of the weights that were given.
        weights = [
            torch.ones(len(side), dtype=torch.float64)
            if side.weights is None
            else side.weights.cpu() * side.mass
            for side in sides
        ]
        kept = [(each > 0).nonzero()[:, 0] for each in weights]
        names: tuple[str, ...] = ()
        labels = None
        if not isinstance(metric, NoLabels):
            names, labels = _united(
                [each[rows.numpy()] for each, rows in zip(named, kept, strict=True)]
            )
        features = [
            side.points_of(rows.to(side.features.device))
            for side, rows in zip(sides, kept, strict=True)
        ]
        pooled = LabeledSamples(
            torch.cat([part.double() for part in features]), labels, names, name="all rows"
        )
        in_reference = np.repeat([True, False], [len(rows) for rows in kept])
        chosen = np.concatenate(
            [each[rows.numpy()] for each, rows in zip(units, kept, strict=True)]
        )
        _, unit = np.unique(chosen, return_inverse=True)
        of_units = np.zeros(unit.max() + 1, dtype=bool)
        of_units[unit[in_reference]] = True
        found = cls(
            pooled,
            torch.cat([each[rows] for each, rows in zip(weights, kept, strict=True)]),
            in_reference,
            unit,
            of_units,
            torch.cat(kept).numpy(),
            (len(reference), len(sample)),
        )
        found.check_sizes("groups" if groups is not None else "rows of positive weight")
        return found

    def __len__(self) -> int:
        return len(self.in_reference)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many units each side has."""
        ours = int(self.unit_in_reference.sum())
        return ours, len(self.unit_in_reference) - ours

    @property
    def arrangements(self) -> int:
        """In how many ways the units can be divided between sides of these sizes."""
        return math.comb(sum(self.sizes), self.sizes[0])

    @property
    def least_p(self) -> float:
        """The least p-value that any number of permutations can show.

        Sides of equal size can be exchanged as a whole, at the same distance.
        """
        return min(1.0, (2 if self.sizes[0] == self.sizes[1] else 1) / self.arrangements)

    def check_sizes(self, what: str) -> None:
        """Refuse a side of fewer than two units."""
        for place, count in zip(("reference", "sample"), self.sizes, strict=True):
            if count < 2:
                raise InputError(
                    f"{place} has {count} {what}, and a permutation test needs at least 2 on each "
                    "side; take more of them"
                )

    def of_class(self, label: int) -> PooledRows:
        """Return the rows of a class, without labels; a side may have none."""
        assert self.samples.labels is not None
        rows = (self.samples.labels == label).cpu()
        here = rows.numpy()
        units, unit = np.unique(self.unit[here], return_inverse=True)
        features = self.samples.features[rows.to(self.samples.features.device)]
        return PooledRows(
            LabeledSamples(features, None, (), name=self.samples.class_names[label]),
            self.weights[rows],
            self.in_reference[here],
            unit,
            self.unit_in_reference[units],
            self.places[here],
            self.given,
        )

    def on_sides(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (N,) of rows as (n,) and (m,), NaN for rows of weight 0."""
        found = [torch.full((size,), torch.nan, dtype=values.dtype) for size in self.given]
        for side, own in zip(found, (self.in_reference, ~self.in_reference), strict=True):
            side[self.places[own]] = values[own]
        return found[0], found[1]

    def side_of_rows(self, of_units: Mask) -> Tensor:
        """Expand which units are on a side, (U,) or (U, B), to rows, (N,) or (N, B)."""
        return torch.from_numpy(of_units[self.unit])

    def shares(self, rows: Tensor) -> Tensor:
        """Return masses (N, B) of sum 1 of the rows (N, B) on a side."""
        masses = self.weights[:, None] * rows
        return masses / masses.sum(0)

    def cost(
        self, ground: GroundCost, metric: LabelMetric, device: torch.device, cache_dir: Any = None
    ) -> Tensor:
        """Return lambda_x ||x_i - x_j||^2 + lambda_y W[l_i, l_j] (N, N), W of the pooled classes.

        Separable terms of `ground` are left out, as they cancel in the statistic.

        Raises:
            InputError: memory is short, or class distances cannot be measured.
        """
        needed = ARRAYS * 8 * len(self) ** 2
        check_memory(f"costs of {len(self)} rows of both sides", needed, device, torch.float64)
        samples = self.samples.to(device)
        points = ground.transform(samples).features
        points = points - points.mean(0)
        squares = points.square().sum(1)
        cost = torch.addmm(squares[:, None] + squares, points, points.T, alpha=-2).clamp_min_(0)
        cost = (cost + cost.T).mul_(ground.squared.lambda_x / 2).fill_diagonal_(0)
        if samples.labels is not None and ground.lambda_y > 0:
            table = class_distances(
                [samples], metric, ground=ground.ground, cache_dir=cache_dir
            ).full.to(device)
            cost += ground.lambda_y * table[samples.labels][:, samples.labels]
        return cost


def _named(side: LabeledSamples, place: str) -> NDArray[Any]:
    if side.labels is None:
        return np.empty(len(side), dtype=object)
    found: NDArray[Any] = np.asarray(side.class_names, dtype=object)[side.labels.cpu().numpy()]
    return found


def _united(named: Sequence[NDArray[Any]]) -> tuple[tuple[str, ...], Tensor]:
    """Return the names of the classes of both sides, in their order, and labels (N,)."""
    for place, names in zip(("reference", "sample"), named, strict=True):
        if any(name is None for name in names):
            raise InputError(f"{place} has no labels; {HOW_TO_LABEL}")
    first, second = (dict.fromkeys(names) for names in named)
    if not first.keys() & second.keys():
        raise InputError(
            f"reference and sample share no class: {listing(list(map(display, first)), 6)} against "
            f"{listing(list(map(display, second)), 6)}; name classes alike on both sides, or set "
            "labels=none to compare features alone"
        )
    united = sorted(first | second)
    number = {name: k for k, name in enumerate(united)}
    labels = torch.tensor([number[name] for names in named for name in names])
    return tuple(united), labels


def _units(groups: Sequence[Any] | None, sizes: Sequence[int]) -> list[Numbers]:
    """Return the unit of each row of each side, numbered over both."""
    if groups is None:
        return [np.arange(sizes[0]), sizes[0] + np.arange(sizes[1])]
    if len(groups) != 2:
        raise InputError(
            f"groups must be two sequences, of the rows of reference and of sample, got "
            f"{len(groups)}"
        )
    given = [np.asarray(raw_values(part)).astype(str) for part in groups]
    for place, part, size in zip(("reference", "sample"), given, sizes, strict=True):
        if part.shape != (size,):
            raise InputError(
                f"groups of {place} must be {size}, one a row, got shape {tuple(part.shape)}"
            )
    if both := sorted(set(given[0]) & set(given[1])):
        raise InputError(
            f"group {display(both[0])} is on both sides, and a group is exchanged as a whole; "
            f"{len(both)} are on both; give groups that are on one side each, or leave them out"
        )
    _, number = np.unique(np.concatenate(given), return_inverse=True)
    return [number[: sizes[0]], number[sizes[0] :]]
