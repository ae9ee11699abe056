"""Row and column sums of a plan in Triton, from points in fixed point, with bounds on cost errors.

Certificates of `triton_operator` read these. Products are those of points that are rounded to a few
digits of int8 (`kernels.points.digits`), norms those of the points themselves
(`cost.rounding.product_errors`). With three digits costs have errors of some 2^-20 of their mean,
with four of 2^-26; coordinates on a lattice (`cost.rounding.lattice_of`), all within 255 steps of
each other, as grey values are, take one digit. A change must keep the errors upper bounds in the
worst case, because `solver.evidence` widens the solver bounds by them
(`tests/operators/test_marginals.py`).
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
from otdd_flash.kernels.passes.plan_marginals import (
    ADDITION_ERROR,
    ENTRY_ERROR,
    EXPONENT_ERROR,
    LEAST_ENTRY,
    DigitSide,
    plan_marginals,
)
from otdd_flash.kernels.points.digits import carry_error, digit_losses, longest
from otdd_flash.kernels.points.packed_points import Layout
from otdd_flash.operators.base import Marginals
from otdd_flash.operators.torch_operator import LOG2_E

T = TypeVar("T")

# The largest coordinate in units of the first digit.
LARGEST = 127.0

# In place of an exponent of -inf.
NO_MASS = -1e30

# Mean cost error over epsilon up to which three digits do; four take 1.7 times as long.
SMALL = 2.0**-12


# Largest scale of fixed point: costs of less than its inverse square are below float32's epsilons.
MOST_SCALE = 2.0**100


class _Points(NamedTuple):
    """Numbers of a side (n,): log2(n a_i), 0 where `absent` (no mass), and lambda_x ||x_i||^2."""

    log2_masses: Tensor
    absent: Tensor
    squares: Tensor


class FixedPoint:
    """Both clouds of a cost in fixed point.

    Args:
        cost: between two labelled clouds.
        layouts: the order of each cloud's points in blocks of rows.
        lattice: on which all points lie; None without one.
    """

    def __init__(
        self, cost: LabelledCost, layouts: tuple[Layout, Layout], lattice: Lattice | None
    ) -> None:
        self.cost, self.layouts = cost, layouts
        self._lattice = lattice
        self._fixed: dict[int, Pair] = {}

    @cached_property
    def _integer_centre(self) -> Tensor | None:
        """A lattice point relative to which one digit holds all coordinates; None without one."""
        return None if self._lattice is None else _find_integer_centre(self.cost, self._lattice)

    @cached_property
    def _centre(self) -> Tensor:
        return self.cost.centre if self._integer_centre is None else self._integer_centre

    @cached_property
    def _scale(self) -> float:
        if self._lattice is not None and self._integer_centre is not None:
            return self._lattice.scale
        cost = self.cost
        reach = longest(cost.points[0].shape[1]) / max(math.sqrt(cost.farthest), TINY)
        # Its square is finite, also if all points are at their centre.
        return float(min(LARGEST / max(cost.largest, TINY), reach, MOST_SCALE))

    @cached_property
    def squares(self) -> Pair:
        """||x_i||^2 (n,) and ||y_j||^2 (m,) relative to the centre, float64."""
        if self._integer_centre is None:
            return self.cost.squares
        of_x = self._known(0, "squares", self._squares)
        return of_x, of_x if self.cost.symmetric else self._known(1, "squares", self._squares)

    @cached_property
    def cost_error(self) -> float:
        """Bound on the mean error of costs at full accuracy over any plan between a and b."""
        return self._mean(self._accurate)

    @property
    def accurate_errors(self) -> Pair:
        """A (n,) and B (m,): the error of C_ij at full accuracy is at most A_i + B_j."""
        return self._costs_errors(self._accurate)

    @property
    def _differing(self) -> int:
        """The number of distinct sides, 1 or 2."""
        return 2 - self.cost.symmetric

    @property
    def _accurate(self) -> int:
        return self._kinds[-1]

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """The numbers of digits that plans are computed with, the least accurate first.

        Their errors are computed together, as nearly every solve needs all.
        """
        return (1,) if self._integer_centre is not None else (3, 4)

    def marginals(
        self,
        f: Tensor,
        g: Tensor | None,
        epsilon: float,
        *,
        accurate: bool,
        stripes: Sequence[tuple[int, int]] | None = None,
    ) -> Marginals:
        """Compute row and column sums of the plan of f (n,) and g (m,); without g, of f and f.

        With `stripes`, see `plan_marginals`, the sums are over a part of the entries.
        """
        cost, digits = self.cost, self._digits(epsilon, accurate)
        scale, sides, errors = LOG2_E / epsilon, [], []
        single = cost.class_costs.numel() == 1
        for side, potential in enumerate((f,) if g is None else (f, g)):
            logs, absent, squares = self._points[side]
            term = (potential.double() - squares).mul_(scale).add_(logs)
            if single:
                # Half of the class distance on each side, as both may be the same.
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
            symmetric=len(sides) == 1,
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
            underflow=LEAST_ENTRY,
            own_costs=cost.own_costs() if g is None else None,
        )

    @cached_property
    def _points(self) -> list[_Points]:
        """The terms of the exponents of either side, without its potential."""
        cost = self.cost

        def points(masses: Tensor, squares: Tensor) -> _Points:
            absent = masses == 0
            logs = (masses * len(masses)).log2().masked_fill_(absent, 0)
            return _Points(logs, absent, cost.lambda_x * squares)

        of_x = points(cost.a, self.squares[0])
        return [of_x, of_x if cost.symmetric else points(cost.b, self.squares[1])]

    @cached_property
    def _entry_errors(self) -> Pair:
        """Errors of exp and of logarithms of masses, (n,) and (m,), in units of epsilon."""
        found = [
            EXPONENT_ERROR * points.log2_masses.abs() + ENTRY_ERROR / 2
            for points in self._points[: self._differing]
        ]
        return found[0], found[-1]

    def _fixed_errors(self, digits: int) -> Pair:
        """Return error bounds (n,) and (m,) of costs, with that of their terms in exponents."""
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
        """Return the number of digits that an epsilon needs."""
        if self._integer_centre is not None:
            return 1
        return 3 if not accurate and self._mean(3) <= SMALL * epsilon else 4

    def _mean(self, digits: int) -> float:
        return self._means[self._kinds.index(digits)]

    @cached_property
    def _means(self) -> list[float]:
        """The mean error of costs for each of `_kinds`, read together: the host waits once."""
        x, y = self._all_costs_errors
        of_x = x @ self.cost.a
        return (of_x + (of_x if self.cost.symmetric else y @ self.cost.b)).tolist()

    @cached_property
    def _magnitudes(self) -> Pair:
        """`LabelledCost.magnitudes` relative to the centre; equal ones for a cloud with itself."""
        x, y = magnitudes_about(self.cost, self.squares)
        if self.cost.symmetric:
            x = y = torch.maximum(x, y)
        return x, y

    def _costs_errors(self, digits: int) -> Pair:
        """Return A (n,) and B (m,): cost errors of points in fixed point and of float64."""
        x, y = self._all_costs_errors
        kind = self._kinds.index(digits)
        return x[kind], y[kind]

    @cached_property
    def _all_costs_errors(self) -> Pair:
        """Error bounds of costs for each of `_kinds`, (k, n) and (k, m)."""
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
        """Return `find(side)`, cached with the points if they are a block that every pass reads."""
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
        """Measure the rounding of the points of one side and of their products, (k, 2, n) float64.

        For each of `_kinds`: ||x_i - x'_i||^2, and this side's share of the digit products that
        scores leave out, with half of the error of carries.
        """
        points, kinds = self.cost.held[side], self._kinds
        given = points, self._centre, self._scale
        found = torch.stack([digit_losses(*given, digits) for digits in kinds]).div_(self._scale**2)
        for kind, digits in enumerate(kinds):
            found[kind, 1].add_(carry_error(digits, points.shape[1]) / self._scale**2 / 2)
        return found


def _find_integer_centre(cost: LabelledCost, lattice: Lattice) -> Tensor | None:
    """Return a lattice point (d,) relative to which int8 holds all points; None without one."""
    if lattice.highest - lattice.lowest > 255 or 128**2 * cost.points[0].shape[1] >= 2**31:
        return None
    return torch.full_like(cost.centre, (lattice.lowest + 128) / lattice.scale)
