"""The rows of both sides in one pool: features, classes united by name, weights and units.

`shift.joint` pools both sides of a test (`PooledRows.of`) and calls `cost` for the costs of all
pairs. `shift.pooled` and `shift.parts` make the masses of both sides from the rows (`sides`),
`shift.effect` those of halves of a side (`masses`), and `shift.parts` tests the rows of one class
(`of_class`), at costs of their own.

Class distances, epsilon and the unit of effects must stay symmetric functions of the pooled rows.
If one of them were measured on one side alone, that side would be special and the p-value wrong
(`tests/shift/test_shift.py`).

Rows are exchanged between the sides in units: single rows, or whole groups.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.checks import shown
from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.label_sets import Encoded
from otdd_flash.labels import Continuous, Given, LabelMetric, NoLabels, class_distances
from otdd_flash.labels.metrics import scale_of, targets_of, with_numbers
from otdd_flash.memory import check_memory
from otdd_flash.operators.comparison import check_comparable
from otdd_flash.raw_labels import missing_labels, raw_values, without_fractions
from otdd_flash.samples import LabeledSamples, needs_classes
from otdd_flash.sampling.comparison import drawable
from otdd_flash.shown import display, listing

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Arrays (N, N) of float64 that a test holds at once: costs, two kernels and what makes them.
ARRAYS = 6
PLACES = ("reference", "sample")


@dataclass(frozen=True, eq=False)
class PooledRows:
    """N rows of both sides, the reference's first, without rows of weight 0.

    Attributes:
        samples: features (N, d), labels of united classes or numbers, and masses as they are given:
            one for each row, or on one scale for both sides.
        in_reference: (N,) which rows are the reference's.
        unit: (N,) the unit of each row, from 0.
        kept: (N,) the place of each row among all that were given, the reference's first.
        given: how many rows of each side were given.
    """

    samples: LabeledSamples
    in_reference: Mask
    unit: Numbers
    kept: Tensor
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
            reference: the rows of one side.
            sample: the rows of the other side.
            metric: how labels are compared; `NoLabels` leaves them out.
            groups: two sequences, the group of every row of each side; None: every row by itself.

        Raises:
            InputError: the sides do not compare, share no class, have weights on one side only or
                fewer than two rows or groups on a side; or a group is on both sides.
        """
        _, sides = with_numbers(metric, (reference, sample))
        check_comparable(*sides)
        if (reference.weights is None) != (sample.weights is None):
            raise InputError(
                "one side has weights and the other has none; a row's weight is exchanged with it, "
                "so give weights on one scale for both sides, or for none"
            )
        given = len(reference), len(sample)
        kept = torch.cat([side.masses > 0 for side in sides]).nonzero()[:, 0].cpu()
        _, unit = np.unique(_units(groups, given)[kept.numpy()], return_inverse=True)
        sides = [drawable(side, metric, None) for side in sides]
        # `mass` is the sum of the weights that were given.
        weights = torch.cat([side.masses * side.mass for side in sides])
        pooled = LabeledSamples(
            torch.cat([side.points_of(slice(None)).double() for side in sides]),
            None,
            (),
            None if reference.weights is None else weights,
            name="all rows",
        )
        if isinstance(metric, Continuous):
            pooled = replace(pooled, targets=torch.cat(list(map(targets_of, sides))))
        elif not isinstance(metric, NoLabels):
            pooled = replace(pooled, **_united(sides))
        found = cls(pooled, np.repeat([True, False], list(map(len, sides))), unit, kept, given)
        for place, count in zip(PLACES, found.sizes, strict=True):
            if count < 2:
                what = "groups" if groups is not None else "rows of positive weight"
                raise InputError(
                    f"a permutation test needs at least 2 {what} on each side, and {place} has "
                    f"{count}; take more of them"
                )
        return found

    def __len__(self) -> int:
        return len(self.unit)

    @property
    def unit_in_reference(self) -> Mask:
        """Which units (U,) are the reference's."""
        return self.in_reference[np.unique(self.unit, return_index=True)[1]]

    @property
    def sizes(self) -> tuple[int, int]:
        """How many units each side has."""
        ours = self.unit_in_reference
        return int(ours.sum()), int((~ours).sum())

    @property
    def least_p(self) -> float:
        """The share of all exchanges with the same distance: the least p, but for the draw.

        Sides of equal size can be exchanged as a whole.
        """
        ours, others = self.sizes
        return min(1.0, (2 if ours == others else 1) / math.comb(ours + others, ours))

    @property
    def labels(self) -> Tensor | None:
        """The class (N,) of each row, on the CPU; None where rows do not have one each."""
        labels = self.samples.labels
        return None if labels is None or self.samples.label_sets is not None else labels.cpu()

    def of_class(self, label: int) -> PooledRows:
        """Return the rows of a class, without labels; a side may have none."""
        assert self.labels is not None
        rows = (self.labels == label).nonzero()[:, 0]
        own = replace(self.samples.take(rows), labels=None, name=self.samples.class_names[label])
        here = rows.numpy()
        _, unit = np.unique(self.unit[here], return_inverse=True)
        return PooledRows(own, self.in_reference[here], unit, self.kept[rows], self.given)

    def on_sides(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (N,) of rows as (n,) and (m,), NaN for rows of weight 0."""
        found = torch.full((sum(self.given),), torch.nan, dtype=values.dtype)
        found[self.kept] = values.cpu()
        return found[: self.given[0]], found[self.given[0] :]

    def masses(self, units: Mask, device: torch.device) -> Tensor:
        """Return masses (N, B), of sum 1, of the rows whose units (U, B) are on a side."""
        rows = torch.from_numpy(units[self.unit]).to(device)
        masses = self.samples.masses.to(device)[:, None] * rows
        return masses / masses.sum(0)

    def sides(self, units: Mask, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the masses (N, B) of both sides, by the units (U, B) on the reference's."""
        return self.masses(units, device), self.masses(~units, device)

    def cost(
        self, ground: GroundCost, metric: LabelMetric, device: torch.device, cache_dir: Any = None
    ) -> Tensor:
        """Return the costs (N, N) of dataset distances, with W of the pooled classes.

        Separable terms of `ground` are left out, as they cancel in the statistic.

        Raises:
            InputError: memory is short, or class distances cannot be measured.
        """
        needed = ARRAYS * 8 * len(self) ** 2
        check_memory(f"costs of {len(self)} rows of both sides", needed, device, torch.float64)
        metric, (samples,) = with_numbers(metric, [self.samples.to(device)])
        points = ground.transform(samples).features
        cost = _squared_distances(points).mul_(ground.squared.lambda_x)
        if ground.lambda_y == 0:
            return cost
        if (scale := scale_of(metric)) is not None:
            divisors = torch.tensor(scale, dtype=torch.float64, device=device)
            numbers = _squared_distances(targets_of(samples) / divisors)
            return cost.add_(numbers, alpha=ground.lambda_y)
        if samples.labels is not None:
            table = _table(samples, ground, metric, cache_dir).to(device)
            cost.add_(table[samples.labels][:, samples.labels], alpha=ground.lambda_y)
        return cost


def _squared_distances(points: Tensor) -> Tensor:
    """Return ||x_i - x_j||^2 (N, N), symmetric, 0 on the diagonal."""
    points = points - points.mean(0)
    squares = points.square().sum(1)
    found = torch.addmm(squares[:, None] + squares, points, points.T, alpha=-2).clamp_min_(0)
    return (found + found.T).mul_(0.5).fill_diagonal_(0)


def _table(
    samples: LabeledSamples, ground: GroundCost, metric: LabelMetric, cache_dir: Any
) -> Tensor:
    """Return W between classes, or between sets of labels as `operators.label_costs` does."""
    names = samples.label_names
    if isinstance(metric, Given):
        given = metric.read().named_for(names, names)
        if not (torch.equal(given.xx, given.xy) and torch.equal(given.xx, given.yy)):
            raise InputError(
                "class distances that are given to a shift test must not know the sides: xx, "
                "xy and yy must be one table between the classes of both"
            )
        table = given.xx
    else:
        with warnings.catch_warnings():
            # A class of one row is a point, with covariance 0; it stays.
            warnings.simplefilter("ignore", DataNotice)
            found = class_distances([samples], metric, ground=ground.ground, cache_dir=cache_dir)
        table = found.full
    if (sets := samples.label_sets) is None:
        return table
    between = sets.shares @ table @ sets.shares.T
    half = between.diagonal() / 2
    return between - half[:, None] - half


def _united(sides: Sequence[LabeledSamples]) -> dict[str, Any]:
    """Return labels, class names and sets of labels of the rows of both sides, by name.

    Raises:
        InputError: a side has no labels, or they share none.
    """
    for side in sides:
        if side.targets is not None:
            raise needs_classes(side)
        if side.labels is None:
            raise InputError(
                f"{side.name} has no labels; give some, or compare features alone by labels=none"
            )
    first, second = (side.label_names for side in sides)
    if not set(first) & set(second):
        raise InputError(
            f"reference and sample share no class: {listing(list(map(display, first)), 6)} against "
            f"{listing(list(map(display, second)), 6)}; name classes alike on both sides, or set "
            "labels=none to compare features alone"
        )
    names = tuple(dict.fromkeys((*first, *second)))
    indicator = np.zeros((sum(map(len, sides)), len(names)), dtype=np.bool_)
    start = 0
    for side in sides:
        has, columns = side.shares.cpu().numpy() > 0, list(map(names.index, side.label_names))
        indicator[start : start + len(side), columns] = has
        start += len(side)
    if indicator.sum(1).max() == 1:
        return {"labels": torch.from_numpy(indicator.argmax(1)), "class_names": names}
    found = Encoded.of_indicator(indicator, names)
    assert found.labels is not None
    return found._asdict() | {"labels": torch.from_numpy(found.labels)}


def _units(groups: Sequence[Any] | None, sizes: tuple[int, int]) -> Numbers:
    """Return the unit of each row of both sides."""
    if groups is None:
        return np.arange(sum(sizes))
    if not isinstance(groups, list | tuple) or len(groups) != 2:
        raise InputError(
            "groups must be two sequences, (of the rows of reference, of the rows of sample), got "
            f"{shown(groups)}"
        )
    given = []
    for place, part in zip(PLACES, groups, strict=True):
        values = without_fractions(raw_values(part))
        if missing := int(missing_labels(values).sum()):
            raise InputError(
                f"{missing} groups of {place} are missing; give such rows a group each, or leave "
                "them out"
            )
        # Days and nanoseconds of a date are one group.
        given.append((values.astype("M8[ns]") if values.dtype.kind == "M" else values).astype(str))
    for place, part, size in zip(PLACES, given, sizes, strict=True):
        if part.shape != (size,):
            raise InputError(
                f"groups of {place} must be {size}, one a row, got shape {tuple(part.shape)}"
            )
    if both := sorted(set(given[0]) & set(given[1])):
        raise InputError(
            f"group {display(both[0])} is on both sides, and a group is exchanged as a whole; "
            f"{len(both)} are on both; give groups that are on one side each, or leave them out"
        )
    return np.unique(np.concatenate(given), return_inverse=True)[1]
