"""The parts of a shift: class proportions, the features of each class, and rows that stick out.

`shift.joint` calls `class_permutations`, which chooses the classes to test, before the joint test
and `shift_parts` after it. Every class is tested by itself: its rows of both sides are pooled and
exchanged, with features alone as cost, at an epsilon that is relative to their own mean cost.
Classes whose p-value cannot become small by counts alone, whatever their features are, leave the
family (Tarone 1990, A modified Bonferroni method for discrete data); the others get Holm's p-values
(Holm 1979). Nothing but counts may choose the family, or Holm's p-values would be wrong
(`tests/shift/test_shift.py`). Class proportions have a test of their own (`pooled.label_test`).

Shares of classes and contributions of rows describe the distance, by the solved plan and its
potentials at fixed class distances; they are no tests.

The `ShiftParts` go into the `ShiftReport` (`shift.result`), and `report.shift` draws and writes
them. The fields of `ClassShift` are keys of result.json and columns of classes.csv, so their names
must stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import InputError
from otdd_flash.labels import NoLabels
from otdd_flash.shift.pooled import UNIT, PermutationTest, PooledCost, label_test, permutation_test
from otdd_flash.shift.rows import PooledRows

MOST_PERMUTATIONS = 100_000


@dataclass(frozen=True)
class ClassShift:
    """One class: the test of its features, and its part of the distance.

    Attributes:
        name: the class.
        reference: number of its rows in the reference.
        sample: number of its rows in the sample.
        share: its part of the transport cost that T compares; parts sum to 1, and one may be below
            0.
        p_value: of its own test; None if counts are too small for any p-value to be of use.
        adjusted: by Holm over the classes that are tested.
        statistic: T of its features, in units of the cost.
    """

    name: str
    reference: int
    sample: int
    share: float
    p_value: float | None = None
    adjusted: float | None = None
    statistic: float | None = None


@dataclass(frozen=True, eq=False)
class ShiftParts:
    """The parts of a shift, by class and by row.

    Attributes:
        label_p_value: of class proportions alone; None unless rows have one label each.
        label_statistic: Pearson's chi-square.
        classes: every class of either side; none unless rows have one label each.
        permutations: of each class's test; 0 if none was tested.
        reference_rows: (n,) float64, what each row contributes to the distance to first order; NaN
            without weight.
        sample_rows: (m,) float64, the contributions of the sample's rows.
    """

    label_p_value: float | None
    label_statistic: float | None
    classes: tuple[ClassShift, ...]
    permutations: int
    reference_rows: Tensor = field(repr=False)
    sample_rows: Tensor = field(repr=False)

    @property
    def untestable(self) -> tuple[str, ...]:
        """The classes that have too few rows, or are on one side only."""
        return tuple(each.name for each in self.classes if each.p_value is None)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of result.json, without rows."""
        return {
            "label_p_value": self.label_p_value,
            "label_statistic": self.label_statistic,
            "permutations": self.permutations,
            "classes": [asdict(each) for each in self.classes],
            "untestable": list(self.untestable),
        }


def family_of(least: Sequence[float], alpha: float) -> list[int]:
    """Return which tests can be significant in a family of them, by their least p-values."""
    k = 1
    while sum(p <= alpha / k for p in least) > k:
        k += 1
    return [place for place, p in enumerate(least) if p <= alpha / k]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for a family, after Holm 1979."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def class_permutations(rows: PooledRows, alpha: float, permutations: int) -> tuple[list[int], int]:
    """Return the classes that are tested, and how many permutations each test takes.

    A test takes at least V / alpha for V classes, so that Holm's p-values can reach alpha.

    Raises:
        InputError: they are too many.
    """
    if rows.labels is None:
        return [], 0
    classes = range(len(rows.samples.class_names))
    family = family_of([rows.of_class(label).least_p for label in classes], alpha)
    needed = math.ceil(len(family) / alpha)
    if needed > MOST_PERMUTATIONS:
        raise InputError(
            f"tests of {len(family)} classes at alpha={alpha:g} need {needed} permutations each, "
            f"over {MOST_PERMUTATIONS}; raise alpha, or leave them out with parts=false"
        )
    return family, max(permutations, needed) if family else 0


def shift_parts(
    pooled: PooledCost,
    rows: PooledRows,
    ground: GroundCost,
    family: Sequence[int],
    count: int,
    permutations: int,
    seed: int,
    *,
    stop_after: int | None,
) -> ShiftParts:
    """Test and describe the parts of a shift.

    Args:
        pooled: the costs of the joint test; tests of classes have its epsilon over the mean cost.
        rows: all rows.
        ground: the cost between features.
        family: the classes that are tested, as `class_permutations` returns them.
        count: permutations of each of their tests, from the same function.
        permutations: of class proportions.
        seed: of the draws.
        stop_after: as in the joint test.
    """
    shares, contributions = describe(pooled, rows)
    of_rows = rows.on_sides(contributions)
    if rows.labels is None:
        return ShiftParts(None, None, (), 0, *of_rows)
    found: dict[int, PermutationTest] = {}
    for label in family:
        own = rows.of_class(label)
        cost = own.cost(ground, NoLabels(), pooled.cost.device)
        found[label] = permutation_test(
            PooledCost(cost, own.samples.masses, None, pooled.epsilon / (pooled.mean or 1.0)),
            own,
            count,
            (seed, label),
            stop_after=stop_after,
            null_width=math.inf,
        )
    adjusted = dict(zip(family, holm([test.p_value for test in found.values()]), strict=True))
    classes = []
    for label, name in enumerate(rows.samples.class_names):
        here = rows.labels == label
        ours = int((here.numpy() & rows.in_reference).sum())
        each = ClassShift(name, ours, int(here.sum()) - ours, float(shares[here].sum()))
        if label in found:
            p_value, statistic = found[label].p_value, found[label].statistic
            each = replace(each, p_value=p_value, adjusted=adjusted[label], statistic=statistic)
        classes.append(each)
    return ShiftParts(*label_test(rows, permutations, seed), tuple(classes), count, *of_rows)


def describe(pooled: PooledCost, rows: PooledRows) -> tuple[Tensor, Tensor]:
    """Return shares and contributions (N,) of rows, from plans and potentials of the joint test.

    The share of a row is its half of the cost of the cross plan less its half of that of its own
    side's plan with itself, as rows and columns; shares sum to 1, or are 0 without any cost.
    Contributions are those of `otdd_flash.contributions`, of both sides.
    """
    a, b = rows.sides(rows.unit_in_reference[:, None], pooled.cost.device)
    f, g, own = pooled.potentials(a, b)
    a, b = a[:, 0], b[:, 0]

    def costs(u: Tensor, v: Tensor, one: Tensor, other: Tensor) -> Tensor:
        """Return the plan's costs (N, N); rows and columns without mass have none."""
        plan = ((u[:, None] + v - pooled.cost) / pooled.epsilon).clamp_max_(700).exp_()
        return plan.mul_(one[:, None]).mul_(other).mul_(pooled.cost)

    cross = costs(f, g, a, b)
    shares = cross.sum(1) + cross.sum(0)
    contributions = torch.zeros_like(shares)
    for masses, potential in ((a, f), (b, g)):
        shares -= costs(own, own, masses, masses).sum(1)
        slopes = torch.where(masses > 0, potential - own, 0.0)
        # A row of nearly all mass may round to 1.
        rest = (1 - masses).clamp_min(UNIT)
        contributions += torch.where(masses > 0, (slopes - masses @ slopes) / rest, 0.0)
    total = float(shares.sum())
    return (shares / total if total > 0 else torch.zeros_like(shares)).cpu(), contributions.cpu()
