"""Plans in Triton, evaluated in every product or prepared for many.

`triton_operator` makes a `KernelPlan`, the plan of a `KernelOperator`. Its `prepared` form is a
`StoredPlan` in float64, an `ExactFusedPlan`, which computes entries as sums hi + lo of two float16
in every product, or, if neither pays, the `KernelPlan` itself. Iterations whose result is refined
afterwards use plans rounded to float16, `HeldPlan` or `FusedPlan`. All but a `StoredPlan` take
values as sums hi + lo of two float16, and add in float32. Row and column sums are in the order of
the points; layouts map it to packed rows.

`derivatives` solves linear systems with these plans: `plan_system` multiplies packed values by
their `HalfProducts`, `plan_points` points by `PointProducts`. The row and column sums of a rounded
plan must be those of the rounded numbers, else the systems are not those of any plan
(`tests/conformance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from otdd_flash.kernels.launch import on_device
from otdd_flash.kernels.linear.cg_step import Image
from otdd_flash.kernels.linear.halves import Unmerged, from_halves, onward, row_sums, to_halves
from otdd_flash.kernels.passes.block_products import (
    BlockProduct,
    Found,
    Rows,
    WeightedProduct,
    Weights,
    apply_plan_blocks,
    hold_plan,
)
from otdd_flash.kernels.passes.fused_product import (
    HELD_COORDINATES,
    NARROW,
    FusedProduct,
    apply_plan_fused,
    most_columns,
)
from otdd_flash.kernels.passes.half_step import half_step
from otdd_flash.kernels.passes.plan_blocks import Pair
from otdd_flash.kernels.passes.score_terms import LOG2_SCALE, ROW_RANGE, PlanTerms, plan_terms
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import Layout, PackedPoints, pack, power_of_two_scale
from otdd_flash.memory import holds
from otdd_flash.operators.base import Applied, EvaluatedPlan, Factors, Plan, Products, StoredPlan

if TYPE_CHECKING:
    # It imports this file.
    from otdd_flash.operators.triton_operator import KernelOperator

# product(values (m, copies, k) float16): Q V in packed order, and the row sums of Q.
PackedProduct = Callable[[Tensor], tuple[Unmerged, Unmerged]]

# Factors, two float16, have 22 bits, and sums 24.
PRECISION = 2.0**-20


class HalfProduct(NamedTuple):
    """Products diag(weights) Q diag(given) V with a plan or its transpose.

    Attributes:
        multiply: computes Q V for V (m, 2, s) float16, the hi and lo parts of values.
        given: (M,) float64 weights of the values; None for ones.
        weights: (N,) float64 weights of the products.
        layouts: of the products and of the values.
    """

    multiply: Callable[[Tensor], Unmerged]
    given: Tensor | None
    weights: Tensor
    layouts: tuple[Layout, Layout]

    def times(self, values: Tensor) -> Tensor:
        """Return the weighted product (N, s) with values (M, s), float64."""
        found, source = self.layouts
        packed, scales = to_halves(values, source, self.given)
        return from_halves(self.multiply(packed), scales, found, self.weights)


class HalfProducts(NamedTuple):
    """Products with a plan P and with its transpose on packed values.

    Images are of matrices of linear systems, in the form that kernels read; see
    `derivatives.plan_system`.

    Attributes:
        there: products with P.
        back: products with P^T.
    """

    there: HalfProduct
    back: HalfProduct

    @property
    def layout(self) -> Layout:
        """The packed order of the columns."""
        return self.there.layouts[1]

    def image(self, packed: Tensor, scales: Tensor, diagonal: Tensor) -> Image:
        """Compute (diag(diagonal) + P) v of a symmetric plan, for packed v with scales (s,)."""
        there = self.there
        found = there.multiply(packed)
        return Image(found, scales, there.weights, diagonal, there.layouts[0].position)

    def between(self, by_row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of both products of -P^T diag(by_row) P, the first in packed order."""
        weights = by_row * self.there.weights
        if self.back.given is not None:
            weights *= self.back.given
        return self.there.layouts[0].spread(weights, 0.0), -self.back.weights

    def schur_image(
        self, packed: Tensor, scales: Tensor, weights: tuple[Tensor, Tensor], diagonal: Tensor
    ) -> Image:
        """Compute (diag(diagonal) - P^T diag(by_row) P) v, with the weights that are `between`."""
        back = self.back
        packed, scales = onward(self.there.multiply(packed), scales, weights[0])
        position = back.layouts[0].position
        return Image(back.multiply(packed), scales, weights[1], diagonal, position)


class _RoundedPlan:
    """A plan rounded to float16.

    Args:
        there: products with P.
        back: products with P^T.
        rows: P 1 (N,), float64.

    Attributes:
        half_products: products with P and with P^T.
        rows: P 1 (N,), float64.
    """

    precision = PRECISION

    def __init__(self, there: HalfProduct, back: HalfProduct, rows: Tensor) -> None:
        self.half_products, self.rows = HalfProducts(there, back), rows

    @cached_property
    def columns(self) -> Tensor:
        """P^T 1 (M,), float64."""
        ones = self.rows.new_ones(1, 1).expand(len(self.rows), 1)
        return self.times(ones, transposed=True)[:, 0]

    def times(self, values: Tensor, *, transposed: bool = False) -> Tensor:
        """Compute P V (N, k) for V (M, k), or if `transposed` P^T U (M, k), float64."""
        products = self.half_products
        return (products.back if transposed else products.there).times(values)


class HeldPlan(_RoundedPlan):
    """A plan P_ij = a_i unit Q_ij with Q (n, m) held in float16; a product reads Q once."""

    @classmethod
    def of(
        cls, entries: Tensor, unit: float, masses: Tensor, layouts: tuple[Layout, Layout]
    ) -> HeldPlan | None:
        """Build the plan and its row sums; return None if a row sum is out of range.

        Args:
            entries: Q, 0 in rows of padding and of points without mass, and in columns of padding.
            unit: P_ij / a_i for Q_ij = 1; a power of two.
            masses: a (N,) float64, in the order of the points.
            layouts: of the rows and of the columns.
        """
        found = Unmerged.of(entries.sum(1, dtype=torch.float32)[:, None, None])
        rows, fits = row_sums(found, layouts[0], masses, unit)
        if not fits:
            return None
        weights, ones = unit * masses, torch.ones_like(layouts[1].position, dtype=masses.dtype)
        there = HalfProduct(partial(_matrix_product, entries), None, weights, layouts)
        back = HalfProduct(partial(_matrix_product, entries.T), weights, ones, layouts[::-1])
        return cls(there, back, rows)


class FusedPlan(_RoundedPlan):
    """A plan P_ij = a_i Q_ij = b_j Q'_ji that every product computes again, rounded to float16."""

    @classmethod
    def of(
        cls,
        products: tuple[PackedProduct, PackedProduct],
        masses: tuple[Tensor, Tensor],
        layouts: tuple[Layout, Layout],
    ) -> FusedPlan | None:
        """Build the plan and its sums; return None if a sum is out of range.

        Args:
            products: products with Q (n, m) and with Q' (m, n), of one part.
            masses: a (N,) and b (M,) float64, in the order of the points.
            layouts: of the rows and of the columns.
        """
        sums: list[Tensor] = []
        for side, product in enumerate(products[: 1 if products[0] is products[1] else 2]):
            size, device = layouts[1 - side].size, masses[0].device
            ones = torch.ones((size, 1, 1), dtype=torch.float16, device=device)
            of_side, fits = row_sums(product(ones)[0], layouts[side], masses[side])
            if not fits:
                return None
            sums.append(of_side)
        of_rows, of_columns = (partial(_fused_product, product) for product in products)
        there = HalfProduct(of_rows, None, masses[0], layouts)
        found = cls(there, HalfProduct(of_columns, None, masses[1], layouts[::-1]), sums[0])
        found.columns = sums[-1]
        return found


class ExactFusedPlan:
    """A plan P_ij = a_i Q_ij = b_j Q'_ji, computed in every product as hi + lo of two float16.

    Products return the sums of the plan as well. Values with more than `most_columns` columns, and
    plans whose sums are far from the masses, are left to `streamed`.

    Args:
        streamed: the same plan, not prepared.
        sides: operands of Q (n, m) and of Q' (m, n), of three parts; the same if P is symmetric.
        most_columns: of the values of one product.
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
        # Sums by side, once a product has computed them; None if they are out of range.
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
        """The plan rounded to float16; this one if sums are out of range."""
        return self._quick or self

    @cached_property
    def _quick(self) -> Products | None:
        return self._streamed.rounded(self._sides[0])

    @cached_property
    def half_products(self) -> HalfProducts | None:
        """Products with P and with P^T on packed values; None if a sum is out of range."""
        _ = self.rows, self.columns
        if any(sums is None for sums in self._sums.values()):
            return None
        of_rows, of_columns = (partial(_split_product, product) for product in self._products)
        return HalfProducts(
            HalfProduct(of_rows, None, self._masses[0], self._layouts),
            HalfProduct(of_columns, None, self._masses[1], self._layouts[::-1]),
        )

    def times(
        self, values: Tensor, pairs: Sequence[Factors] = (), *, transposed: bool = False
    ) -> Tensor:
        """Compute P V or P^T U, or these of P o W, float64; see `Plan.times`."""
        side = self._back if transposed else 0
        if pairs:
            turned = [pair[::-1] for pair in pairs] if transposed else pairs
            found = self._weigh(values, turned, side)
        else:
            found = self._multiply(values, side)
        if found is None:
            return self._streamed.times(values, pairs, transposed=transposed).double()
        return found

    def _sums_of(self, side: int) -> Tensor:
        if side not in self._sums:
            # A product with any values: its result is not read.
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
        # Padded to the widths that products have anyway, to save a copy.
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


# Most bytes of a plan held in float64, unless points have so few coordinates that computing it
# takes no longer than reading it: then it may fill half of free memory.
KEPT_BYTES, FEW_COORDINATES = 1 << 28, 16

# Columns of values above which blocks of the plan are stored, over those of one fused product.
FEW_CHUNKS = 2


# A side of the cost by the number of parts of its products, 1 or 3, for which its norms differ.
SideByParts = dict[int, Side]

# The operands of a kernel that computes a plan, and those for both the plan and its transpose.
Computed = tuple[Side, Side, Scores, PlanTerms]
Sides = tuple[Computed, Computed]


class KernelPlan(EvaluatedPlan):
    """The plan of two potentials and a cost in Triton; see `EvaluatedPlan`."""

    operator: KernelOperator

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """The packed order of the rows and of the columns."""
        x, y = self.operator.packed
        return x.layout, y.layout

    @property
    def _parts(self) -> int:
        """The number of products of float16 parts for each score of the operator."""
        return self.operator.scores[0].parts

    def applied(
        self, values: Tensor, *, transposed: bool = False, factors: Factors | None = None
    ) -> Applied:
        operator, (f, g, epsilon), own = self.operator, self._at, int(transposed)
        sides = [by_parts[self._parts] for by_parts in operator.sides]
        rows, columns = sides[own], sides[1 - own]
        scores = operator.scores[own]._replace(parts=operator.plan_parts)
        packed_factors = None
        if factors is not None:
            left, right = map(_packed_matrix, factors, sides)
            packed_factors = (right, left) if transposed else (left, right)
        f, g = map(single, (g, f) if transposed else (f, g))
        packed = to_halves(values, columns.points.layout, multiple=8)
        dim, count = self._padded_dim, values.shape[1]
        fused = factors is None and count <= FEW_CHUNKS * most_columns(dim, scores.parts, f.device)

        def apply(f: Tensor) -> tuple[Tensor, Tensor]:
            given = rows, columns, scores, (f, g), epsilon
            if fused:
                return apply_plan_fused(*given, packed)
            return apply_plan_blocks(*given, packed, packed_factors)

        out, sums = apply(f)
        masses = self.masses[own]
        low, high = torch.stack(sums.aminmax()).tolist()
        # Comparisons with NaN are False.
        if not (low >= ROW_RANGE[0] and high <= ROW_RANGE[1]):
            # Sums are far from the masses: rescale what the f that makes row sums 1 gives.
            exact = half_step(rows, columns, scores, g, on_device(epsilon, g.device))
            out, sums = apply(exact)
            masses = masses * ((f.double() - exact.double()) / epsilon).exp()
        return Applied(out.mul_(masses.to(out.dtype).unsqueeze(1)), sums * masses)

    @cached_property
    def quick(self) -> Products:
        """The plan rounded to float16; this one if sums are out of range."""
        return self.rounded() or self

    @property
    def prepared(self) -> Plan:
        """The plan of the original points for many products: held in float64, or fused."""
        (f, g, epsilon), cost, parts = self._at, self.operator.cost, self._parts
        (n, m), dim = cost.shape, cost.points[0].shape[1]
        needed = 8 * n * m
        worthwhile = needed <= KEPT_BYTES or dim <= FEW_COORDINATES
        if worthwhile and holds(needed, self._most, f.device):
            quick = self.rounded()
            return StoredPlan(cost.plan_entries(f, g, epsilon), quick)
        columns = most_columns(self._padded_dim, parts, f.device)
        if parts == 1 or columns == NARROW:
            return self
        return ExactFusedPlan(self, self._sides(parts), FEW_CHUNKS * columns)

    def rounded(self, there: Computed | None = None) -> HeldPlan | FusedPlan | None:
        """Prepare the plan in float16: held if memory allows, else computed from rounded points.

        Rounding the coordinates of points far from all others changes costs by more than epsilon,
        which makes the plan useless as a preconditioner. So a plan that is held, and computed once,
        is computed from all parts of the points.

        Returns None if row sums, or if the plan is not held column sums, are far from the masses
        (`ROW_RANGE`). `there` are the operands of the plan, if they were computed before.
        """
        of_rows, of_columns = self.layouts
        if holds(2 * of_rows.size * of_columns.size, self._most, self._at[0].device):
            entries = hold_plan(*(there or self._computed(self._parts)))
            return HeldPlan.of(entries, 2.0**-LOG2_SCALE, self.masses[0], self.layouts)
        return FusedPlan.of(_products(self._sides(1)), self.masses, self.layouts)

    @cached_property
    def with_points(self) -> PointProducts | None:
        """Products with packed points, if they have too many coordinates for fused products."""
        few = self.operator.cost.points[0].shape[1] <= HELD_COORDINATES
        return None if few or self.operator.plan_parts != 3 else PointProducts(self)

    @property
    def _padded_dim(self) -> int:
        return self.operator.packed[0].coordinates.shape[1]

    def _computed(self, parts: int, *, transposed: bool = False) -> Computed:
        """Return the operands of a kernel that computes the plan, or its transpose."""
        operator, (f, g, epsilon), own = self.operator, self._at, int(transposed)
        rows, columns = (operator.sides[side][parts] for side in (own, 1 - own))
        given = rows, columns, operator.scores[own]._replace(parts=parts)
        potentials = (single(g), single(f)) if transposed else (single(f), single(g))
        return *given, plan_terms(*given, potentials, epsilon, self.masses[own])

    def _sides(self, parts: int) -> Sides:
        """Return the operands of the plan and of its transpose; the same twice if symmetric."""
        there = self._computed(parts)
        return there, there if self.symmetric else self._computed(parts, transposed=True)


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


class PointProducts:
    """Products of P with values packed like the column points, and of P^T with those of the rows.

    Args:
        plan: P, whose sums are read when they are needed.

    Attributes:
        points: the packed points of both sides.
    """

    def __init__(self, plan: KernelPlan) -> None:
        self._plan, self.points = plan, plan.operator.packed
        self._dim = plan.operator.cost.points[0].shape[1]
        self._products: dict[bool, BlockProduct] = {}

    def some(self, side: int, rows: Rows) -> Tensor:
        """Return some points (k, d) of a side, less the centre, float32."""
        return self.points[side].some(rows, self._dim)

    def packed(self, values: Tensor, mean: Tensor, largest: float, side: int) -> PackedPoints:
        """Pack values (N, d), less their mean (d,), like the points of a side.

        Args:
            values: one row per point.
            mean: subtracted from each row.
            largest: absolute value of the differences.
            side: 0 for rows, 1 for columns.
        """
        layout = self.points[side].layout
        return pack(values, layout, mean.double().contiguous(), power_of_two_scale(largest))

    def times(
        self,
        values: PackedPoints,
        numbers: Tensor | None = None,
        *,
        transposed: bool = False,
    ) -> Iterator[Found]:
        """Yield P V and P q, or P^T V and P^T q, for blocks of rows; see `BlockProduct`."""
        return self._product(transposed)(values, self._dim, None, numbers)

    def weighted(
        self,
        pairs: Sequence[Pair],
        factor: float,
        numbers: tuple[Tensor, Tensor],
        *,
        transposed: bool = False,
    ) -> Iterator[Found]:
        """Yield (P o W) y for blocks of rows, W = s 1^T + 1 t^T + factor (A B^T + ...).

        Args:
            pairs: one or two of A, packed like the points x of the rows, and B, like the points y.
            factor: of their products, positive.
            numbers: s (N,) and t (M,), or if `transposed` t and s.
            transposed: yield (P o W)^T x.
        """
        if transposed:
            pairs = [(right, left) for left, right in pairs]
        values, weights = self.points[not transposed], Weights(pairs, factor, numbers)
        return self._product(transposed)(values, self._dim, weights, None)

    def _product(self, transposed: bool) -> BlockProduct:
        if transposed not in self._products:
            plan, own = self._plan, int(transposed)
            operator, (f, g, epsilon) = plan.operator, plan._at
            self._products[transposed] = BlockProduct(
                operator.sides[own][3],
                operator.sides[1 - own][3],
                operator.scores[own]._replace(parts=3),
                (single(g), single(f)) if transposed else (single(f), single(g)),
                epsilon,
                plan.masses[own],
                plan.columns if transposed else plan.rows,
            )
        return self._products[transposed]


def _matrix_product(entries: Tensor, values: Tensor) -> Unmerged:
    """Compute Q V for V (m, 2, s) float16."""
    columns = values.flatten(1)
    if entries.is_cuda:
        found = torch.mm(entries, columns, out_dtype=torch.float32)
    else:
        found = entries.float() @ columns.float()
    return Unmerged.of(found.view(-1, *values.shape[1:]))


def _fused_product(product: PackedProduct, values: Tensor) -> Unmerged:
    """Compute Q V for V (m, 2, s) by a product of one part, which takes hi and lo as columns."""
    found, _ = product(values.flatten(1)[:, None])
    halves = found.values[:, 0, : 2 * values.shape[2]]
    return found._replace(values=halves.view(len(halves), 2, -1))


def _split_product(product: PackedProduct, values: Tensor) -> Unmerged:
    """Compute Q V for V (m, 2, s) by a product of three parts."""
    return product(values)[0]
