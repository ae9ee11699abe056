"""Plans in Triton, prepared for one product after another.

What they multiply goes as sums hi + lo of two float16, sums are float32. Iterations whose result is
corrected afterwards take plans rounded to float16, whose row and column sums are those of the
numbers that are multiplied. Sums are in the order of the points; layouts say where these stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.points import LabelledCost
from otdd_flash.kernels.epsilon import on_device
from otdd_flash.kernels.linear.halves import Unmerged, from_halves, to_halves
from otdd_flash.kernels.linear.row_sums import row_sums
from otdd_flash.kernels.passes.block_product import BlockProduct, Found, Rows, Weights
from otdd_flash.kernels.passes.fused_product import (
    HELD_COORDINATES,
    NARROW,
    FusedProduct,
    apply_plan_fused,
    most_columns,
)
from otdd_flash.kernels.passes.half_step import half_step
from otdd_flash.kernels.passes.plan_application import apply_plan_blocks, hold_plan
from otdd_flash.kernels.passes.plan_terms import LOG2_SCALE, ROW_RANGE, PlanTerms, plan_terms
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.passes.weighted_product import WeightedProduct
from otdd_flash.kernels.points.packed_points import Layout, PackedPoints, pack, power_of_two_scale
from otdd_flash.memory import holds
from otdd_flash.operators.base import Applied, EvaluatedPlan, Factors, KeptPlan, Plan, Products

# The product of a matrix in packed order and values (m, copies, k) float16, and the matrix's sums.
PackedProduct = Callable[[Tensor], tuple[Unmerged, Unmerged]]

# What multiplies, two float16, has 22 bits, and sums have 24.
PRECISION = 2.0**-20


class Way(NamedTuple):
    """Products Q V from one side of a plan to the other, V as sums hi + lo of two float16.

    Attributes:
        multiply: what it finds of (m, 2, s) float16, of hi and of lo parts or of both.
        given: (M,) float64 that values are weighted by before, or None.
        weights: (N,) float64 that products are weighted by.
        layouts: of what is found and of what is multiplied.
    """

    multiply: Callable[[Tensor], Unmerged]
    given: Tensor | None
    weights: Tensor
    layouts: tuple[Layout, Layout]

    def times(self, values: Tensor) -> Tensor:
        """The weighted product (N, s) with values (M, s), float64."""
        found, source = self.layouts
        packed, scales = to_halves(values, source, self.given)
        return from_halves(self.multiply(packed), scales, found, self.weights)


class _RoundedPlan:
    """A plan in float16.

    Args:
        there: products with it.
        back: with its transpose.
        rows: P 1 (N,), float64.

    Attributes:
        ways: there and back.
        rows: P 1 (N,), float64.
    """

    precision = PRECISION

    def __init__(self, there: Way, back: Way, rows: Tensor) -> None:
        self.ways, self.rows = (there, back), rows

    @cached_property
    def columns(self) -> Tensor:
        """P^T 1 (M,), float64."""
        ones = self.rows.new_ones(1, 1).expand(len(self.rows), 1)
        return self.transposed_times(ones)[:, 0]

    def times(self, values: Tensor) -> Tensor:
        """P V (N, k) for V (M, k), float64."""
        return self.ways[0].times(values)

    def transposed_times(self, values: Tensor) -> Tensor:
        """P^T U (M, k) for U (N, k), float64."""
        return self.ways[1].times(values)


class HeldPlan(_RoundedPlan):
    """P_ij = a_i unit Q_ij, of which float16 numbers Q (n, m) are held; a product reads them once.

    Args:
        entries: Q, 0 in rows of padding and of points without mass, and in columns of padding.
        unit: what one of Q stands for; a power of two.
        masses: a (N,) float64, in the order of the points.
        layouts: of the rows and of the columns.
        rows: P 1 (N,) float64, of the numbers that are held.
    """

    def __init__(
        self,
        entries: Tensor,
        unit: float,
        masses: Tensor,
        layouts: tuple[Layout, Layout],
        rows: Tensor,
    ) -> None:
        weights, ones = unit * masses, torch.ones_like(layouts[1].position, dtype=masses.dtype)
        super().__init__(
            Way(partial(_matrix_product, entries), None, weights, layouts),
            Way(partial(_matrix_product, entries.T), weights, ones, layouts[::-1]),
            rows,
        )

    @classmethod
    def of(
        cls, entries: Tensor, unit: float, masses: Tensor, layouts: tuple[Layout, Layout]
    ) -> HeldPlan | None:
        """Build the plan and its row sums; return None if a sum is out of range."""
        found = Unmerged.of(entries.sum(1, dtype=torch.float32)[:, None, None])
        rows, fits = row_sums(found, layouts[0], masses, unit)
        return cls(entries, unit, masses, layouts, rows) if fits else None


class FusedPlan(_RoundedPlan):
    """P_ij = a_i Q_ij = b_j Q'_ji, evaluated anew and rounded to float16 in every product.

    Args:
        products: of Q (n, m) and of Q' (m, n), of one part.
        masses: a (N,) and b (M,) float64, in the order of the points.
        layouts: of the rows and of the columns.
        sums: P 1 (N,) and P^T 1 (M,) float64, of the numbers that are multiplied.
    """

    def __init__(
        self,
        products: tuple[PackedProduct, PackedProduct],
        masses: tuple[Tensor, Tensor],
        layouts: tuple[Layout, Layout],
        sums: tuple[Tensor, Tensor],
    ) -> None:
        of_rows, of_columns = (partial(_fused_product, product) for product in products)
        super().__init__(
            Way(of_rows, None, masses[0], layouts),
            Way(of_columns, None, masses[1], layouts[::-1]),
            sums[0],
        )
        self.columns = sums[1]

    @classmethod
    def of(
        cls,
        products: tuple[PackedProduct, PackedProduct],
        masses: tuple[Tensor, Tensor],
        layouts: tuple[Layout, Layout],
    ) -> FusedPlan | None:
        """Build the plan and its sums; return None if a sum is out of range."""
        sums: list[Tensor] = []
        for side, product in enumerate(products[: 1 if products[0] is products[1] else 2]):
            size, device = layouts[1 - side].size, masses[0].device
            ones = torch.ones((size, 1, 1), dtype=torch.float16, device=device)
            found, fits = row_sums(product(ones)[0], layouts[side], masses[side])
            if not fits:
                return None
            sums.append(found)
        return cls(products, masses, layouts, (sums[0], sums[-1]))


class ExactFusedPlan:
    """P_ij = a_i Q_ij = b_j Q'_ji, evaluated anew in every product as hi + lo of two float16.

    Products tell the sums too. What this form does not take, very many columns and rows whose sums
    are far from their masses, is left to the plan as it was.

    Args:
        streamed: the same plan, which prepares nothing.
        sides: what computes Q (n, m) and Q' (m, n), of three parts; one where P is symmetric.
        most_columns: of what is multiplied at once.
    """

    dtype, precision = torch.float64, PRECISION
    with_points = None

    def __init__(self, streamed: KernelPlan, sides: Sides, most_columns: int) -> None:
        self._streamed, self._sides, self._most = streamed, sides, most_columns
        self._products: tuple[PackedProduct, PackedProduct] = _products(sides)
        self._masses, self._layouts = streamed.masses, streamed.layouts
        self._weighted: dict[int, WeightedProduct] = {}
        # The side of products with P^T: that of products with P where these are the same.
        self._back = int(self._products[0] is not self._products[1])
        # Of sides, once something was multiplied; None where they are out of range.
        self._sums: dict[int, Tensor | None] = {}

    @property
    def rows(self) -> Tensor:
        """P 1 (N,)."""
        return self._sums_of(0)

    @property
    def columns(self) -> Tensor:
        """P^T 1 (M,)."""
        return self._sums_of(self._back)

    @property
    def quick(self) -> Products:
        """One that is rounded to float16, if sums allow."""
        return self._quick or self

    @cached_property
    def _quick(self) -> Products | None:
        return self._streamed.rounded(self._sides[0])

    @cached_property
    def ways(self) -> tuple[Way, Way] | None:
        """Products there and back on tensor cores; None if a sum is out of range."""
        _ = self.rows, self.columns
        if any(sums is None for sums in self._sums.values()):
            return None
        of_rows, of_columns = (partial(_split_product, product) for product in self._products)
        return (
            Way(of_rows, None, self._masses[0], self._layouts),
            Way(of_columns, None, self._masses[1], self._layouts[::-1]),
        )

    def times(
        self, values: Tensor, factors: Factors | None = None, other: Factors | None = None
    ) -> Tensor:
        """P V (N, k) for V (M, k), or (P o A B^T) V, of the sum with C D^T, float64."""
        if factors is None:
            found = self._multiply(values, 0)
        else:
            found = self._weigh(values, [pair for pair in (factors, other) if pair is not None], 0)
        if found is None:
            return self._streamed.times(values, factors, other).double()
        return found

    def transposed_times(
        self, values: Tensor, factors: Factors | None = None, other: Factors | None = None
    ) -> Tensor:
        """P^T U (M, k) for U (N, k), or (P o A B^T)^T U, of the sum with C D^T, float64."""
        if factors is None:
            found = self._multiply(values, self._back)
        else:
            turned = [pair[::-1] for pair in (factors, other) if pair is not None]
            found = self._weigh(values, turned, self._back)
        if found is None:
            return self._streamed.transposed_times(values, factors, other).double()
        return found

    def _sums_of(self, side: int) -> Tensor:
        if side not in self._sums:
            # Of any values, which need not be read.
            size, like = self._layouts[1 - side].size, self._masses[0]
            values = like.new_zeros((size, 2, NARROW), dtype=torch.float16)
            self._tell(side, self._products[side](values)[1])
        found = self._sums[side]
        if found is None:
            return self._streamed.columns if side else self._streamed.rows
        return found

    def _tell(self, side: int, sums: Unmerged) -> None:
        found, fits = row_sums(sums, self._layouts[side], self._masses[side])
        self._sums[side] = found if fits else None

    def _multiply(self, values: Tensor, side: int) -> Tensor | None:
        known = side in self._sums
        if values.shape[1] > self._most or (known and self._sums[side] is None):
            return None
        # Widths that products have anyway, so that they need not copy.
        packed, scales = to_halves(values, self._layouts[1 - side], multiple=NARROW)
        found, sums = self._products[side](packed)
        if not known:
            self._tell(side, sums)
            if self._sums[side] is None:
                return None
        return from_halves(found, scales, self._layouts[side], self._masses[side])

    def _weigh(self, values: Tensor, pairs: Sequence[Factors], side: int) -> Tensor | None:
        _ = self._sums_of(side)
        if self._sums[side] is None:
            return None
        if side not in self._weighted:
            self._weighted[side] = WeightedProduct(*self._sides[side], self._masses[side])
        return self._weighted[side](values, pairs)


# The most that a plan in float64 takes, and coordinates up to which it may fill half of what memory
# is free: computing it then takes no longer than reading it.
KEPT_BYTES, FEW_COORDINATES = 1 << 28, 16

# Columns from which on a plan is written to blocks, over those of a fused product.
FEW_CHUNKS = 2


# A side by the parts of products, 1 or 3, which tell its norms.
Seen = dict[int, Side]

# What computes a plan, and its transpose.
Computed = tuple[Side, Side, Scores, PlanTerms]
Sides = tuple[Computed, Computed]


class KernelPlan(EvaluatedPlan):
    """The plan of two potentials and a cost in Triton; see `EvaluatedPlan`.

    Args:
        cost: two labelled clouds.
        seen: packed points of both.
        scores: how they make scores, and the same with sides exchanged.
        parts: of products while the plan is evaluated.
        f: (N,) potential.
        g: (M,) potential, or None.
        epsilon: in units of the cost.
        most: bytes that may be held.

    Attributes:
        layouts: of the rows and of the columns.
    """

    def __init__(
        self,
        cost: LabelledCost,
        seen: tuple[Seen, Seen],
        scores: tuple[Scores, Scores],
        parts: int,
        f: Tensor,
        g: Tensor | None,
        epsilon: float,
        most: int | None,
    ) -> None:
        super().__init__(torch.float32, (cost.a, cost.b), f, g, epsilon, most)
        self._cost, self._seen, self._scores, self._parts = cost, seen, scores, parts
        self._symmetric = g is None
        x, y = (side[scores[0].parts].points.layout for side in seen)
        self.layouts = x, y

    def applied(
        self, values: Tensor, *, transposed: bool = False, factors: Factors | None = None
    ) -> Applied:
        (f, g, epsilon), own = self._at, int(transposed)
        rows, columns = (self._seen[side][self._scores[0].parts] for side in (own, 1 - own))
        scores = self._scores[own]._replace(parts=self._parts)
        packed = None
        if factors is not None:
            left, right = (
                _packed_matrix(factor, side[self._scores[0].parts])
                for factor, side in zip(factors, self._seen, strict=True)
            )
            packed = (right, left) if transposed else (left, right)
        potentials = (g, f) if transposed else (f, g)
        return _applied(
            rows, columns, scores, self.masses[own], potentials, epsilon, values, packed
        )

    @cached_property
    def quick(self) -> Products:
        """One that is rounded to float16, if sums allow."""
        return self.rounded() or self

    @property
    def prepared(self) -> Plan:
        """The plan of the original points: held in float64 if that is cheap, or fused."""
        (f, g, epsilon), cost, parts = self._at, self._cost, self._scores[0].parts
        (n, m), dim = cost.shape, cost.points[0].shape[1]
        needed = 8 * n * m
        worthwhile = needed <= KEPT_BYTES or dim <= FEW_COORDINATES
        if worthwhile and holds(needed, self._most, f.device):
            quick = self.rounded()
            return KeptPlan(cost.plan_entries(f, g, epsilon), quick)
        columns = most_columns(self._padded_dim, parts, f.device)
        if parts == 1 or columns == NARROW:
            return self
        return ExactFusedPlan(self, self._sides(parts), FEW_CHUNKS * columns)

    def rounded(self, there: Computed | None = None) -> HeldPlan | FusedPlan | None:
        """Prepare the plan in float16: held if memory allows, or evaluated from points of one part.

        Of points far from all others a rounded coordinate moves costs by more than epsilon, and
        what is solved with such a plan is of no use: one that is made once is of all parts.

        None where a row, or a column, has sums that float16 does not. `there` is what computes the
        plan, where that is known.
        """
        of_rows, of_columns = self.layouts
        if holds(2 * of_rows.size * of_columns.size, self._most, self._at[0].device):
            entries = hold_plan(*(there or self._there(self._scores[0].parts)))
            return HeldPlan.of(entries, 2.0**-LOG2_SCALE, self.masses[0], self.layouts)
        return FusedPlan.of(_products(self._sides(1)), self.masses, self.layouts)

    @cached_property
    def with_points(self) -> PointProducts | None:
        """Products with the points, if these have too many coordinates to be fused."""
        (f, g, epsilon), dim = self._at, self._cost.points[0].shape[1]
        if self._parts != 3 or dim <= HELD_COORDINATES:
            return None
        there, back = self._scores
        return PointProducts(
            (self._seen[0][3], self._seen[1][3]),
            (there._replace(parts=3), back._replace(parts=3)),
            (single(f), single(g)),
            epsilon,
            self.masses,
            self,
            dim,
        )

    @property
    def _padded_dim(self) -> int:
        return self._seen[0][1].points.coordinates.shape[1]

    def _there(self, parts: int) -> Computed:
        f, g, epsilon = self._at
        there = self._seen[0][parts], self._seen[1][parts], self._scores[0]._replace(parts=parts)
        return *there, plan_terms(*there, (single(f), single(g)), epsilon, self.masses[0])

    def _sides(self, parts: int) -> Sides:
        """Compute the terms of the plan and of its transpose, once for a symmetric plan."""
        there, (f, g, epsilon) = self._there(parts), self._at
        if self._symmetric:
            return there, there
        back = self._seen[1][parts], self._seen[0][parts], self._scores[1]._replace(parts=parts)
        return there, (*back, plan_terms(*back, (single(g), single(f)), epsilon, self.masses[1]))


def _applied(
    rows: Side,
    columns: Side,
    scores: Scores,
    masses: Tensor,
    potentials: tuple[Tensor, Tensor],
    epsilon: float,
    values: Tensor,
    factors: tuple[PackedPoints, PackedPoints] | None,
) -> Applied:
    f, g = map(single, potentials)
    packed = to_halves(values, columns.points.layout, multiple=8)
    device, dim, count = f.device, rows.points.coordinates.shape[1], values.shape[1]
    fused = factors is None and count <= FEW_CHUNKS * most_columns(dim, scores.parts, device)

    def apply(f: Tensor) -> tuple[Tensor, Tensor]:
        given = rows, columns, scores, (f, g), epsilon
        if fused:
            return apply_plan_fused(*given, packed)
        return apply_plan_blocks(*given, packed, factors)

    out, sums = apply(f)
    low, high = torch.stack(sums.aminmax()).tolist()
    # A NaN is both.
    if not (low >= ROW_RANGE[0] and high <= ROW_RANGE[1]):
        # Far from any marginal: with the potential that makes row sums 1, and corrected after.
        exact = half_step(rows, columns, scores, g, on_device(epsilon, g.device))
        out, sums = apply(exact)
        masses = masses * ((f.double() - exact.double()) / epsilon).exp()
    return Applied(out.mul_(masses.to(out.dtype).unsqueeze(1)), sums * masses)


def _packed_matrix(values: Tensor, side: Side) -> PackedPoints:
    """Pack a matrix with one row per point of a side, rounded like the points."""
    origin = torch.zeros(values.shape[1], dtype=torch.float64, device=values.device)
    scale = power_of_two_scale(float(values.abs().max()))
    return pack(values, side.points.layout, origin, scale)


def _products(sides: Sides) -> tuple[FusedProduct, FusedProduct]:
    there, back = sides
    product = FusedProduct(*there)
    return product, product if back is there else FusedProduct(*back)


def single(potential: Tensor) -> Tensor:
    """Return a potential as kernels read it, contiguous float32."""
    return potential.to(torch.float32).contiguous()


class Sums(Protocol):
    """The sums of a plan."""

    @property
    def rows(self) -> Tensor:
        """P 1 (N,), float64."""
        ...

    @property
    def columns(self) -> Tensor:
        """P^T 1 (M,), float64."""
        ...


class PointProducts:
    """Products with P of what is packed as the columns, and with P^T of what is as the rows.

    Args:
        sides: packed points of the rows and of the columns.
        scores: how they make scores, of three parts, and the same with sides exchanged.
        potentials: f (N,) and g (M,), float32, in units of the cost.
        epsilon: in units of the cost.
        masses: a (N,) and b (M,) float64.
        sums: of the plan; asked for when they are needed.
        dim: coordinates of a point.

    Attributes:
        points: those of both sides.
    """

    def __init__(
        self,
        sides: tuple[Side, Side],
        scores: tuple[Scores, Scores],
        potentials: tuple[Tensor, Tensor],
        epsilon: float,
        masses: tuple[Tensor, Tensor],
        sums: Sums,
        dim: int,
    ) -> None:
        self.points = sides[0].points, sides[1].points
        self._sides, self._scores, self._potentials = sides, scores, potentials
        self._epsilon, self._masses, self._sums, self._dim = epsilon, masses, sums, dim
        self._products: dict[bool, BlockProduct] = {}

    def some(self, side: int, rows: Rows) -> Tensor:
        """Return some points (k, d) of a side, less their centre, float32."""
        return self.points[side].some(rows, self._dim)

    def packed(self, values: Tensor, mean: Tensor, largest: float, side: int) -> PackedPoints:
        """Values (N, d) less their mean (d,), packed as the points of a side.

        Args:
            values: one row for each of the points.
            mean: subtracted.
            largest: of what is left, in absolute value.
            side: 0 for rows, 1 for columns.
        """
        layout = self.points[side].layout
        return pack(values, layout, mean.double().contiguous(), power_of_two_scale(largest))

    def times(
        self,
        values: PackedPoints,
        weights: Weights | None = None,
        numbers: Tensor | None = None,
        *,
        transposed: bool = False,
    ) -> Iterator[Found]:
        """P V and P q, or (P o W) V, for some rows after the other; as `BlockProduct`.

        If `transposed`, the same of P^T, with A of the weights packed as the columns, and B as the
        rows.
        """
        return self._product(transposed)(values, self._dim, weights, numbers)

    def _product(self, transposed: bool) -> BlockProduct:
        if transposed not in self._products:
            own, other = (1, 0) if transposed else (0, 1)
            self._products[transposed] = BlockProduct(
                self._sides[own],
                self._sides[other],
                self._scores[own],
                (self._potentials[own], self._potentials[other]),
                self._epsilon,
                self._masses[own],
                self._sums.columns if transposed else self._sums.rows,
            )
        return self._products[transposed]


def _matrix_product(entries: Tensor, values: Tensor) -> Unmerged:
    """Q V for V (m, 2, s) float16."""
    columns = values.flatten(1)
    if entries.is_cuda:
        found = torch.mm(entries, columns, out_dtype=torch.float32)
    else:
        found = entries.float() @ columns.float()
    return Unmerged.of(found.view(-1, *values.shape[1:]))


def _fused_product(product: PackedProduct, values: Tensor) -> Unmerged:
    """Compute Q V of one part, whose halves are columns."""
    found, _ = product(values.flatten(1)[:, None])
    halves = found.values[:, 0, : 2 * values.shape[2]]
    return found._replace(values=halves.view(len(halves), 2, -1))


def _split_product(product: PackedProduct, values: Tensor) -> Unmerged:
    """Q V of three parts."""
    return product(values)[0]
