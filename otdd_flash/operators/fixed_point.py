"""The sums of a plan in Triton, from points in fixed point, and what these lose of the costs.

    C'_ij = p_i + q_j - 2 lambda_x <x'_i, y'_j> + lambda_y W[l_i, l_j]

Norms p_i = lambda_x ||x_i||^2 are those of the points themselves, in float64; x' are the points in
fixed point (`kernels.digits`), off by e_i = ||x_i - x'_i||, which is measured. By Cauchy and
Schwarz and s t <= (theta s^2 + t^2 / theta) / 2, products are off by at most

    2 lambda_x (e_i ||y_j|| + ||x'_i|| e_j) <= A_i + B_j,
    A_i = lambda_x (e_i^2 / theta + theta (||x_i|| + e_i)^2),

B_j likewise, for any theta > 0; with theta = rms e / rms ||x|| the two parts are equal. With three
digits e is some 2^-21 of ||x||, with four 2^-28; integers within 256 values of each other take one.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.kernels.digits import pack_digits, padded_dim, product_error
from otdd_flash.kernels.packed_points import Layout
from otdd_flash.kernels.plan_marginals import (
    ADDITION_ERROR,
    ENTRY_ERROR,
    EXPONENT_ERROR,
    DigitSide,
    chunk_sizes,
    plan_marginals,
)
from otdd_flash.operators.base import Marginals
from otdd_flash.operators.labelled_cost import LabelledCost, squared_distances
from otdd_flash.operators.lattice import Lattice

LOG2_E = math.log2(math.e)

# The largest coordinate and norm in units of the first digit.
LARGEST, LONGEST = 127.0, 4095.0

Pair = tuple[Tensor, Tensor]

# Stands for an exponent of -inf.
NO_MASS = -1e30

# The marginal error that three digits may hide, about; four take 1.7 times as long.
SMALL = 2.0**-13


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
        self._whole = None if lattice is None else _whole_centre(cost, lattice)
        if self._whole is None:
            self._centre = cost.centre
            self._scale = min(
                LARGEST / max(cost.largest, TINY), LONGEST / max(math.sqrt(cost.farthest), TINY)
            )
        else:
            assert lattice is not None
            self._centre, self._scale = self._whole, lattice.scale
        self._errors: dict[int, Pair] = {}
        self._means: dict[int, float] = {}

    @cached_property
    def squares(self) -> Pair:
        """||x_i||^2 (n,) and ||y_j||^2 (m,) about the centre, float64."""
        if self._whole is None:
            return self.cost.squares
        x, y = self.cost.points
        of_x = squared_distances(x, self._centre)
        return of_x, of_x if self.cost.symmetric else squared_distances(y, self._centre)

    @cached_property
    def cost_error(self) -> float:
        """Bound on the mean error of costs at full accuracy over any plan between a and b."""
        return self._mean(1 if self._whole is not None else 4)

    def marginals(self, f: Tensor, g: Tensor, epsilon: float, *, accurate: bool) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,); of one tensor, a symmetric plan."""
        cost, digits = self.cost, self._digits(epsilon, accurate)
        symmetric = cost.symmetric and f is g
        log2_masses = [(masses * len(masses)).log2() for masses in (cost.a, cost.b)]
        scale, sides = LOG2_E / epsilon, []
        single = cost.class_costs.numel() == 1
        for side, potential in enumerate((f, g)):
            squares = cost.lambda_x * self.squares[side]
            term = (potential.double() - squares) * scale + log2_masses[side]
            if single:
                # Half on each side, which may be one.
                term = term - cost.class_costs[0] * (scale / 2)
            term = torch.where(log2_masses[side].isfinite(), term, NO_MASS)
            layout = self.layouts[side]
            packed = layout.spread(term, NO_MASS)
            sides.append(DigitSide(cost.points[side], layout, self._centre, self._scale, packed))
        rows, columns = plan_marginals(
            sides[0],
            sides[1],
            None if single else cost.class_costs * scale,
            2 * cost.lambda_x * scale / self._scale**2,
            digits,
            symmetric=symmetric,
        )
        row_errors, column_errors = (
            of_costs
            + 2 * EXPONENT_ERROR * (potential.double().abs() + magnitudes)
            + epsilon * torch.where(logs.isfinite(), EXPONENT_ERROR * logs.abs(), 0)
            + epsilon * ENTRY_ERROR / 2
            for of_costs, potential, magnitudes, logs in zip(
                self._costs_errors(digits), (f, g), self._magnitudes, log2_masses, strict=True
            )
        )
        return Marginals(
            rows[self.layouts[0].position] / math.prod(cost.shape),
            columns[self.layouts[1].position] / math.prod(cost.shape),
            row_errors,
            column_errors,
            cost_rounding=0.0,
            relative_error=ADDITION_ERROR,
        )

    def _digits(self, epsilon: float, accurate: bool) -> int:
        """How many digits are needed, at this epsilon."""
        if self._whole is not None:
            return 1
        return 3 if not accurate and self._mean(3) <= SMALL * epsilon else 4

    def _mean(self, digits: int) -> float:
        x, y = self._costs_errors(digits)
        if digits not in self._means:
            self._means[digits] = float(self.cost.a @ x + self.cost.b @ y)
        return self._means[digits]

    @cached_property
    def _magnitudes(self) -> Pair:
        """As `LabelledCost.magnitudes`, about the centre."""
        x, y = (
            magnitudes + 2 * self.cost.lambda_x * (about - squares)
            for magnitudes, about, squares in zip(
                self.cost.magnitudes, self.squares, self.cost.squares, strict=True
            )
        )
        return x, y

    def _costs_errors(self, digits: int) -> Pair:
        """A (n,) and B (m,): what points in fixed point, and float64, lose of costs."""
        if digits not in self._errors:
            cost, lambda_x = self.cost, self.cost.lambda_x
            lost = [self._lost(side, digits) for side in ((0,) if cost.symmetric else (0, 1))]
            lost = [lost[0], lost[-1]]
            means = [cost.a @ pair[0] + cost.b @ pair[1] for pair in (lost, self.squares)]
            theta = (means[0] / means[1].clamp_min(TINY)).sqrt().clamp_min(TINY)
            products = lambda_x * product_error(digits, cost.points[0].shape[1]) / self._scale**2
            of_x, of_y = (
                lambda_x * (off / theta + theta * (squares.sqrt() + off.sqrt()).square())
                + products
                + cost.cost_error_share * magnitudes
                for off, squares, magnitudes in zip(
                    lost, self.squares, self._magnitudes, strict=True
                )
            )
            self._errors[digits] = of_x, of_y
        return self._errors[digits]

    def _lost(self, side: int, digits: int) -> Tensor:
        """||x_i - x'_i||^2 (n,) of one side, float64, in the order of the points."""
        points, layout = self.cost.points[side], self.layouts[side]
        lost = torch.empty(layout.size, dtype=torch.float64, device=points.device)
        height, _ = chunk_sizes(padded_dim(points.shape[1]) * digits)
        for first in range(0, layout.size, height):
            rows = min(height, layout.size - first)
            packed = pack_digits(points, layout, self._centre, self._scale, digits, first, rows)
            lost[first : first + rows] = packed.lost
        lost = lost[layout.position]
        return lost.div_(self._scale**2)


TINY = torch.finfo(torch.float64).tiny


def _whole_centre(cost: LabelledCost, lattice: Lattice) -> Tensor | None:
    """A centre (d,) on the lattice from which all points are within int8, if there is one."""
    sides = cost.points[: 1 if cost.symmetric else 2]
    ends = torch.stack([end.double() for side in sides for end in torch.aminmax(side)]).tolist()
    lowest, highest = (round(end * lattice.scale) for end in (min(ends), max(ends)))
    if highest - lowest > 255 or 128**2 * cost.points[0].shape[1] >= 2**31:
        return None
    return torch.full_like(cost.centre, (lowest + 128) / lattice.scale)
