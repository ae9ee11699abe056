"""The mass that relaxed transport leaves unmatched, and how numbers of rows change under a plan.

    a_l, r_l: the mass of a class, and the part the plan moves;    1 - r_l / a_l: the share left

Transport with a penalty always leaves some mass, most of it where points are sparse, even between a
dataset and itself. So every class has beside it the share that is left in its own self term: an
excess over that has no counterpart in the other dataset, or too little of one. In the second case
the class has less mass there, or a surplus: where r_l exceeds a_l the penalty has created mass.

The moved mass is r = a e^(-f / rho), computed from the potentials without a pass. Sums of the plan
differ from it by no more than the marginal error, relative to the mass that moves.
`DistanceResult.unmatched` (`result`) returns an `Unmatched`; `report.distance` writes and draws it.

Numbers of rows (`labels="continuous"`) move with the mass: `mean_changes` says by how much, and
`histogram` counts the mass that moves between intervals, both by products with the plan.
`DistanceResult.target_changes` and `target_histogram` return them; `report.distance` writes and
draws them.

The fields of `UnmatchedClass` are columns of unmatched.csv and of `to_frame`, so their names must
stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, get_type_hints

import torch
from torch import Tensor

from otdd_flash.cost.points import class_indices, mass_per_class
from otdd_flash.formulas.marginals import Constraints, Marginal
from otdd_flash.labels.metrics import targets_of
from otdd_flash.operators.base import Applied
from otdd_flash.raw_labels import frame_of
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import shorten
from otdd_flash.solver.divergence import Divergence

if TYPE_CHECKING:
    from pandas import DataFrame


# The note in tables on shares above those of the self terms.
MEANING = "above its self term: no counterpart, or too few of them"


class UnmatchedClass(NamedTuple):
    """The moved and the unmatched mass of a class.

    Attributes:
        side: `source` or `target`.
        name: of the class; "" of unlabelled data.
        mass: a_l.
        moved: r_l.
        unmatched: 1 - r_l / a_l, 0 where r_l is more. Far above `own` the other dataset lacks the
            class, or has less mass of it: its own proportion of that class is smaller.
        own: that share in the self term of its dataset; None without self terms.
        surplus: r_l - a_l, 0 where it is less.
    """

    side: str
    name: str
    mass: float
    moved: float
    unmatched: float
    own: float | None
    surplus: float


@dataclass(frozen=True, eq=False)
class Unmatched:
    """The mass that a distance with relaxed marginals leaves unmatched.

    Attributes:
        moved: the mass that the plan moves in all, of 1 on either side.
        classes: source classes, then target classes, each in its dataset's order; those without
            mass are left out.
        source_rows: (n,) float64 on the CPU, 1 - r_i / a_i of each row of `result.source`, which
            lacks classes that were left out; below 0 where mass was created, NaN without mass.
        target_rows: (m,) float64 on the CPU, that share of each row of `result.target`.
    """

    moved: float
    classes: tuple[UnmatchedClass, ...]
    source_rows: Tensor = field(repr=False)
    target_rows: Tensor = field(repr=False)

    def to_frame(self) -> DataFrame:
        """Return a pandas table, one row a class, with the columns of `UnmatchedClass`."""
        return frame_of(self.classes, get_type_hints(UnmatchedClass))

    def __str__(self) -> str:
        """Return the mass that moves, and a table of classes, those that stand out most first."""
        lines = [f"{self.moved:.4g} of the mass moves"]
        rows = [HEADS, *map(shown, by_excess(self.classes))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for side, name, *numbers in rows:
            cells = [side.ljust(widths[0]), name.ljust(widths[1])]
            cells += [text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        if any(each.own is not None for each in self.classes):
            lines.append(MEANING)
        return "\n".join(lines)


def by_excess(classes: tuple[UnmatchedClass, ...]) -> list[UnmatchedClass]:
    """Return classes of each side by how far they exceed their own self term, the most first."""
    sides = {"source": 0, "target": 1}
    return sorted(classes, key=lambda each: (sides[each.side], (each.own or 0.0) - each.unmatched))


# The longest name of a class, as in the other tables of classes.
LONGEST_NAME = 24

HEADS = "side", "class", "mass", "unmatched", "in its self term", "surplus"


def shown(each: UnmatchedClass) -> tuple[str, ...]:
    """Return a class as texts under `HEADS`."""
    own = "" if each.own is None else f"{each.own:.1%}"
    surplus = f"{each.surplus:.3g}" if each.surplus > 0 else ""
    name = shorten(each.name, LONGEST_NAME)
    return each.side, name, f"{each.mass:.4g}", f"{each.unmatched:.1%}", own, surplus


def unmatched_of(
    source: LabeledSamples,
    target: LabeledSamples,
    divergence: Divergence,
    constraints: Constraints,
) -> Unmatched:
    """Measure the unmatched mass of classes and rows, from the potentials of a divergence."""
    xy, selves = divergence.xy, (divergence.xx, divergence.yy)
    classes: list[UnmatchedClass] = []
    rows = []
    sides = (source, constraints.rows, xy.f), (target, constraints.columns, xy.g)
    for (samples, marginal, potential), own, side in zip(
        sides, selves, ("source", "target"), strict=True
    ):
        masses, moved = _owed(samples, marginal, potential)
        rows.append(1 - moved / masses)
        in_self = None if own is None else _owed(samples, marginal, own.f)[1]
        classes += _of_classes(samples, side, masses, moved, in_self)
    return Unmatched(xy.mass, tuple(classes), rows[0], rows[1])


def _owed(samples: LabeledSamples, marginal: Marginal, potential: Tensor) -> tuple[Tensor, Tensor]:
    """Return masses (n,) and the moved part of each, float64 on the CPU."""
    masses = samples.masses.double().cpu()
    return masses, marginal.owed(masses, potential.double().cpu())


def _of_classes(
    samples: LabeledSamples, side: str, masses: Tensor, moved: Tensor, own: Tensor | None
) -> list[UnmatchedClass]:
    labels, names = class_indices(samples).cpu(), samples.label_names or ("",)
    parts, count = [masses, moved, *([] if own is None else [own])], samples.class_total
    sums = torch.stack([mass_per_class(part, labels, count) for part in parts], 1)
    if samples.label_sets is not None:
        # Each label has its part of a row's mass.
        sums = samples.label_sets.shares.T @ sums
    found = []
    for name, (mass, taken, *in_self) in zip(names, sums.tolist(), strict=True):
        if mass > 0:
            left = max(0.0, 1 - taken / mass)
            of_self = max(0.0, 1 - in_self[0] / mass) if in_self else None
            surplus = max(0.0, taken - mass)
            found.append(UnmatchedClass(side, name, mass, taken, left, of_self, surplus))
    return found


# Groups of neighbouring target numbers whose moves are told apart. Within one, numbers on both
# sides of that of a row cancel.
GROUPS = 512

# Numbers that a product with the plan takes and returns at most, for memory's sake: 512 MiB.
ENTRIES = 1 << 26

# The plan applied to values (m, k), with the product (n, k).
Apply = Callable[[Tensor], Applied]


class TargetHistogram(NamedTuple):
    """The mass that moves between intervals of numbers.

    Attributes:
        masses: (bins, bins), from intervals of the source (rows) to those of the target; the sum is
            1, or the mass that moves where marginals are relaxed.
        edges: (bins + 1,) the ends of all intervals, the same for both sides.
    """

    masses: Tensor
    edges: Tensor


def mean_changes(apply: Apply, source: LabeledSamples, target: LabeledSamples) -> Tensor:
    """Return sum_ij P_ij |t_i - s_j| over the mass of the plan, for each column (q,), float64."""
    found = []
    # Two columns a group, of both sides.
    at_once = max(1, ENTRIES // (2 * (len(source) + len(target))))
    for t, s in zip(targets_of(source).cpu().T, targets_of(target).cpu().T, strict=True):
        distinct, places = torch.unique(s, return_inverse=True)
        count = min(GROUPS, len(distinct))
        groups = places * count // len(distinct)
        # Relative to one of them, so that sums do not cancel.
        origin = distinct[len(distinct) // 2]
        changes = mass = torch.zeros((), dtype=torch.float64)
        for first in range(0, count, at_once):
            some = torch.arange(first, min(first + at_once, count))
            within = (groups[:, None] == some).double()
            values = torch.cat((within, within * (s - origin)[:, None]), 1)
            masses, sums = apply(values).values.cpu().double().chunk(2, 1)
            changes = changes + ((t - origin)[:, None] * masses - sums).abs().sum()
            mass = mass + masses.sum()
        found.append(changes / mass)
    return torch.stack(found)


def histogram(
    apply: Apply,
    source: LabeledSamples,
    target: LabeledSamples,
    column: int,
    bins: int,
    *,
    exact: bool,
) -> TargetHistogram:
    """Return how much mass moves between intervals of one column of numbers.

    With exact marginals (`exact`) the rounding error of its sum, which is 1, is divided out.
    """
    sides = [targets_of(side)[:, column].cpu().contiguous() for side in (source, target)]
    ends = torch.stack((torch.cat(sides).min(), torch.cat(sides).max())).tolist()
    edges = torch.linspace(ends[0], ends[1], bins + 1, dtype=torch.float64)
    rows, columns = (torch.bucketize(side, edges[1:-1], right=True) for side in sides)
    moved = apply(torch.nn.functional.one_hot(columns, bins).double()).values.cpu().double()
    masses = moved.new_zeros(bins, bins).index_add_(0, rows, moved)
    return TargetHistogram(masses / masses.sum() if exact else masses, edges)
