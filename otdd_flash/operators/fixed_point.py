"""The sums of a plan in Triton, from points in fixed point, and what these lose of the costs.

Products are those of points in fixed point (`kernels.points.digits`), norms those of the points
themselves (`product_errors`). With three digits costs are off by some 2^-20 of their mean, with
four by 2^-26; integers within 256 values of each other take one digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from otdd_flash.cost.points import LabelledCost, squared_distances
from otdd_flash.cost.rounding import (
    TINY,
    Lattice,
    Pair,
    magnitudes_about,
    product_errors,
)
from otdd_flash.kernels.passes.plan_entries import (
    ADDITION_ERROR,
    ENTRY_ERROR,
    EXPONENT_ERROR,
    LEAST_ENTRY,
)
from otdd_flash.kernels.passes.plan_marginals import DigitSide, plan_marginals
from otdd_flash.kernels.points.digit_losses import digit_losses
from otdd_flash.kernels.points.digits import carry_error, longest
from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.operators.base import Marginals

T = TypeVar("T")

LOG2_E = math.log2(math.e)

# The largest coordinate in units of the first digit.
LARGEST = 127.0

# Stands for an exponent of -inf.
NO_MASS = -1e30

# The marginal error that three digits may hide, about; four take 1.7 times as long.
SMALL = 2.0**-12


# Of fixed points: costs of less than its inverse square are below the least epsilon of float32.
MOST_SCALE = 2.0**100


class _Points(NamedTuple):
    """Of one side (n,): log2 of mass times number, 0 where `absent`, and lambda_x ||x||^2."""

    log2_masses: Tensor
    absent: Tensor
    squares: Tensor


class FixedPoint:
    """Both clouds of a cost in fixed point.

    Args:
        cost: two labelled clouds.
        layouts: the order of each in blocks of rows.
        lattice: where all points lie, if float16 holds them there.
    """

    def __init__(
        self, cost: LabelledCost, layouts: tuple[Layout, Layout], lattice: Lattice | None
    ) -> None:
        self.cost, self.layouts = cost, layouts
        self._lattice = lattice
        self._fixed: dict[int, Pair] = {}

    @cached_property
    def _whole(self) -> Tensor | None:
        """A centre on the lattice from which one digit holds all coordinates, if there is one."""
        return None if self._lattice is None else _whole_centre(self.cost, self._lattice)

    @cached_property
    def _centre(self) -> Tensor:
        return self.cost.centre if self._whole is None else self._whole

    @cached_property
    def _scale(self) -> float:
        if self._lattice is not None and self._whole is not None:
            return self._lattice.scale
        cost = self.cost
        reach = longest(cost.points[0].shape[1]) / max(math.sqrt(cost.farthest), TINY)
        # Its square is finite, also where all points are at their centre.
        return float(min(LARGEST / max(cost.largest, TINY), reach, MOST_SCALE))

    @cached_property
    def squares(self) -> Pair:
        """||x_i||^2 (n,) and ||y_j||^2 (m,) about the centre, float64."""
        if self._whole is None:
            return self.cost.squares
        of_x = self._known(0, "squares", self._squares)
        return of_x, of_x if self.cost.symmetric else self._known(1, "squares", self._squares)

    @cached_property
    def cost_error(self) -> float:
        """Bound on the mean error of costs at full accuracy over any plan between a and b."""
        return self._mean(self._accurate)

    @property
    def accurate_errors(self) -> Pair:
        """A (n,) and B (m,): costs at full accuracy are off by at most A_i + B_j."""
        return self._costs_errors(self._accurate)

    @property
    def _differing(self) -> int:
        """How many of the two sides differ, 1 or 2."""
        return 2 - self.cost.symmetric

    @property
    def _accurate(self) -> int:
        return self._kinds[-1]

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """The numbers of digits that plans are computed with, the least accurate first.

        What they lose is found for all at once: nearly every solve asks for all.
        """
        return (1,) if self._whole is not None else (3, 4)

    def marginals(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        *,
        accurate: bool,
        stripes: Sequence[tuple[int, int]] | None = None,
    ) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,); of one tensor, a symmetric plan.

        With `stripes`, as for `plan_marginals`, sums of a part of the entries.
        """
        cost, digits = self.cost, self._digits(epsilon, accurate)
        symmetric = cost.symmetric and f is g
        scale, sides, errors = LOG2_E / epsilon, [], []
        single = cost.class_costs.numel() == 1
        for side, potential in enumerate((f,) if symmetric else (f, g)):
            logs, absent, squares = self._points[side]
            term = (potential.double() - squares).mul_(scale).add_(logs)
            if single:
                # Half on each side, which may be one.
                term.sub_(cost.class_costs[0], alpha=scale / 2)
            layout = self.layouts[side]
            packed = layout.spread(term.masked_fill_(absent, NO_MASS), NO_MASS)
            sides.append(DigitSide(cost.held[side], layout, self._centre, self._scale, packed))
            of_costs, of_entries = self._fixed_errors(digits)[side], self._entry_errors[side]
            known = torch.add(of_costs, of_entries, alpha=epsilon)
            errors.append(known.add_(potential.abs(), alpha=2 * EXPONENT_ERROR))
        sums = plan_marginals(
            sides[0],
            sides[-1],
            None if single else cost.class_costs * scale,
            2 * cost.lambda_x * scale / self._scale**2,
            digits,
            symmetric=symmetric,
            stripes=stripes,
        )
        found = [
            part[layout.position] / math.prod(cost.shape)
            for part, layout in zip(sums, self.layouts[: len(sides)], strict=False)
        ]
        return Marginals(
            found[0],
            found[-1],
            errors[0],
            errors[-1],
            cost_rounding=0.0,
            relative_error=ADDITION_ERROR,
            lost=LEAST_ENTRY,
        )

    @cached_property
    def _points(self) -> list[_Points]:
        """What the exponents of either side take, besides its potential."""
        cost = self.cost

        def points(masses: Tensor, squares: Tensor) -> _Points:
            absent = masses == 0
            logs = (masses * len(masses)).log2().masked_fill_(absent, 0)
            return _Points(logs, absent, cost.lambda_x * squares)

        of_x = points(cost.a, self.squares[0])
        return [of_x, of_x if cost.symmetric else points(cost.b, self.squares[1])]

    @cached_property
    def _entry_errors(self) -> Pair:
        """Errors of entries and of logarithms of masses (n,) and (m,), in units of epsilon."""
        found = [
            EXPONENT_ERROR * points.log2_masses.abs() + ENTRY_ERROR / 2
            for points in self._points[: self._differing]
        ]
        return found[0], found[-1]

    def _fixed_errors(self, digits: int) -> Pair:
        """Errors of costs (n,) and (m,), and of what their parts lose in exponents."""
        if digits not in self._fixed:
            found = [
                torch.add(of_costs, magnitudes, alpha=2 * EXPONENT_ERROR)
                for of_costs, magnitudes in zip(
                    self._costs_errors(digits)[: self._differing], self._magnitudes, strict=False
                )
            ]
            self._fixed[digits] = found[0], found[-1]
        return self._fixed[digits]

    def _digits(self, epsilon: float, accurate: bool) -> int:
        """How many digits are needed, at this epsilon."""
        if self._whole is not None:
            return 1
        return 3 if not accurate and self._mean(3) <= SMALL * epsilon else 4

    def _mean(self, digits: int) -> float:
        return self._means[self._kinds.index(digits)]

    @cached_property
    def _means(self) -> list[float]:
        """The mean error of costs for each of `_kinds`; read once, so that the host waits once."""
        x, y = self._all_costs_errors
        of_x = x @ self.cost.a
        return (of_x + (of_x if self.cost.symmetric else y @ self.cost.b)).tolist()

    @cached_property
    def _magnitudes(self) -> Pair:
        """`LabelledCost.magnitudes` about the centre; both alike between a cloud and itself."""
        x, y = magnitudes_about(self.cost, self.squares)
        if self.cost.symmetric:
            x = y = torch.maximum(x, y)
        return x, y

    def _costs_errors(self, digits: int) -> Pair:
        """A (n,) and B (m,): what points in fixed point, and float64, lose of costs."""
        x, y = self._all_costs_errors
        kind = self._kinds.index(digits)
        return x[kind], y[kind]

    @cached_property
    def _all_costs_errors(self) -> Pair:
        """Errors of costs for each of `_kinds`, (k, n) and (k, m)."""
        cost = self.cost
        # (k, 2, n) of each side.
        parts = [self._known(side, "digits", self._missing) for side in range(self._differing)]
        lost = parts[0][:, 0], parts[-1][:, 0]
        points = product_errors(cost, self.squares, lost)
        found = [
            errors.add_(part[:, 1], alpha=2 * cost.lambda_x).add_(
                sizes, alpha=cost.cost_error_share
            )
            for errors, part, sizes in zip(points, parts, self._magnitudes, strict=False)
        ]
        return found[0], found[-1]

    def _known(self, side: int, name: str, find: Callable[[int], T]) -> T:
        """Return facts of the points of a side, cached for a block that comes in every pass."""
        known = self.cost.known_of[side]
        if known is None:
            return find(side)
        if name not in known:
            known[name] = find(side)
        found: T = known[name]
        return found

    def _squares(self, side: int) -> Tensor:
        return squared_distances(self.cost.points[side], self._centre)

    def _missing(self, side: int) -> Tensor:
        """Measure what digits lack of the points of one side and of their products, float64.

        (k, 2, n): by each of `_kinds`, ||x_i - x'_i||^2 and shares of the products that scores
        leave out, half of what carries lose of these included.
        """
        points, kinds = self.cost.held[side], self._kinds
        given = points, self._centre, self._scale
        found = torch.stack([digit_losses(*given, digits) for digits in kinds]).div_(self._scale**2)
        for kind, digits in enumerate(kinds):
            found[kind, 1].add_(carry_error(digits, points.shape[1]) / self._scale**2 / 2)
        return found


def _whole_centre(cost: LabelledCost, lattice: Lattice) -> Tensor | None:
    """A centre (d,) on the lattice from which all points are within int8, if there is one."""
    if lattice.highest - lattice.lowest > 255 or 128**2 * cost.points[0].shape[1] >= 2**31:
        return None
    return torch.full_like(cost.centre, (lattice.lowest + 128) / lattice.scale)
