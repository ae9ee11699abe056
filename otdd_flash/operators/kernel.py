"""A cost of labelled points whose passes run in Triton kernels on a GPU.

Half-steps by `half_step`, or `symmetric_step` between a cloud and itself; plans by
`apply_plan_blocks`. Norms are those of the rounded points, so that an iteration in `fast` precision
is exact for one slightly perturbed cloud. `refined` is the same cost in `high` precision; it shares
the coordinates. Points that float16 holds exactly (`lattice`) are never rounded: both precisions
then are one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.points import LabelledCost
from otdd_flash.cost.rounding import Lattice, float16_rounding, lattice_of
from otdd_flash.fingerprint import remembered
from otdd_flash.kernels.epsilon import on_device
from otdd_flash.kernels.linear.halves import to_halves
from otdd_flash.kernels.passes.fused_product import apply_plan_fused, most_columns
from otdd_flash.kernels.passes.half_step import half_step
from otdd_flash.kernels.passes.pair_sums import pair_sums
from otdd_flash.kernels.passes.plan_application import apply_plan_blocks
from otdd_flash.kernels.passes.plan_terms import ROW_RANGE
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.passes.symmetric_step import symmetric_step
from otdd_flash.kernels.points.packed_points import (
    Layout,
    PackedPoints,
    arrange,
    pack,
    power_of_two_scale,
)
from otdd_flash.operators.base import Applied, Epsilon, Execution, Marginals, refined
from otdd_flash.operators.fixed_point import FixedPoint
from otdd_flash.operators.kernel_plans import FEW_CHUNKS, KernelPlans, Seen, single
from otdd_flash.operators.kernel_self_share import KernelSelf, KernelSelfShare
from otdd_flash.operators.packed_blocks import Packing
from otdd_flash.operators.packed_masses import PackedMasses, packed_masses
from otdd_flash.operators.plan import KeptPlan, StreamedPlan
from otdd_flash.operators.triton_plans import ExactFusedPlan

PARTS = {"fast": 1, "high": 3}

# Scores from which on saving work pays for launching more kernels.
MANY_SCORES = 1 << 26

# Products (scores times dimension) up to which a pass takes no longer than launching it.
FEW_PRODUCTS = 1 << 36


class KernelOperator:
    """Labelled points on a GPU.

    Args:
        cost: two labelled clouds.
        precision: `fast` or `high`.
        coarse: the operator that this one is to refine.

    Attributes:
        packed: both clouds.
    """

    def __init__(
        self, cost: LabelledCost, precision: str, coarse: KernelOperator | None = None
    ) -> None:
        self.cost, self._precision = cost, precision
        # Kernels read masses by their pointers.
        self.a, self.b = cost.a.contiguous(), cost.b.contiguous()
        self.shape, self.dtype = cost.shape, torch.float32
        self._lattice: Lattice | None
        self.packed: tuple[PackedPoints, PackedPoints]
        self._fixed_point: FixedPoint
        self._seen: tuple[Seen, Seen]
        if coarse is None:
            self._lattice = lattice_of(cost)
            self.packed = x, y = _pack_both(cost, self._lattice)
            self._fixed_point = FixedPoint(cost, (x.layout, y.layout), self._lattice)
            masses = packed_masses(cost.a, x.layout)
            of_x = of_y = _seen(x, masses, cost.lambda_x)
            if not cost.symmetric:
                of_y = _seen(y, packed_masses(cost.b, y.layout), cost.lambda_x)
            self._seen = of_x, of_y
            self._costs = cost.class_costs.float().contiguous()
            self._masses = masses.single if cost.symmetric else None
        else:
            self._lattice, self._fixed_point = coarse._lattice, coarse._fixed_point
            self.packed, self._seen = coarse.packed, coarse._seen
            self._costs, self._masses = coarse._costs, coarse._masses
        self._parts = parts = 1 if self._lattice else PARTS[precision]
        x, y = self.packed
        self._rows, self._columns = (by_parts[parts] for by_parts in self._seen)
        scale = 2 * cost.lambda_x / x.scale**2
        self._scores = Scores(scale, self._costs, parts)
        self._transposed = Scores(scale, self._costs.T.contiguous(), parts)
        self._plans = KernelPlans(cost, self._seen, self._scores, self._transposed)
        # A plan's entries and what it is applied to are on no lattice.
        self._plan_parts = PARTS["high" if self._lattice else precision]
        self._many = x.layout.size * y.layout.size >= MANY_SCORES
        products = self.shape[0] * self.shape[1] * x.coordinates.shape[1]
        self.recorded = self.a.is_cuda and products <= FEW_PRODUCTS

    @property
    def costs(self) -> CostFacts:
        cost = self.cost
        return CostFacts(self.dtype, cost.mean_cost, *cost.cost_range, self._fixed_point.cost_error)

    @property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): what costs of accurate `marginals` are off by."""
        return self._fixed_point.accurate_errors

    @property
    def rounding(self) -> float:
        """0: no cost is stored."""
        return 0.0

    @property
    def packing(self) -> Packing:
        """Points are packed in float16."""
        return Packing(partial(_pack, self.cost.whole, self._lattice), min(2, self._parts))

    @property
    def execution(self) -> Execution:
        """In Triton; recorded where there is little to compute."""
        return Execution(
            f"triton, scores streamed, {self._precision}",
            self.sample,
            None if self._precision == "high" or self._lattice else self._refine,
            True,
            self.recorded,
            self._prepared_plan,
            self._plans.rounded,
            rounded_by=partial(float16_rounding, self.cost),
            over_columns=self._over_columns,
            point_products=self._plans.with_points if self._plan_parts == 3 else None,
        )

    def _over_columns(self, columns: Tensor, g: Tensor, epsilon: float) -> Tensor:
        """The softmin (n,) over some columns (l,), int64, rows packed as they are."""
        part = self.cost.part(slice(None), columns)
        part.packed = self.packed[0], None
        return KernelOperator(part, self._precision).softmin_rows(g, epsilon)

    def _refine(self) -> KernelOperator:
        """The cost of the original points, to float32 accuracy."""
        return KernelOperator(self.cost, "high", self)

    def _prepared_plan(
        self, f: Tensor, g: Tensor, epsilon: float, most: int | None
    ) -> KeptPlan | ExactFusedPlan | None:
        return self._plans.prepared(StreamedPlan(self, f, g, epsilon, most), f, g, epsilon, most)

    def seen_points(self) -> tuple[Tensor, Tensor]:
        """Both clouds less one point, as this precision rounds them, (n, d) and (m, d) float64."""
        dim = self.cost.points[0].shape[1]
        x, y = (side.rounded(self._parts)[:, :dim] for side in self.packed)
        return x, y

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        if self._masses is not None and guess is g and self._many:
            masses, potential = self._masses, single(g)
            level = on_device(epsilon, g.device)
            return symmetric_step(self._rows, self._scores, masses, potential, level)
        return self._half_step(self._rows, self._columns, self._scores, g, epsilon, guess)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        return self._half_step(self._columns, self._rows, self._transposed, f, epsilon, guess)

    def softmin_part(
        self, potential: Tensor, epsilon: Epsilon, near: Tensor | None, *, columns: bool
    ) -> Tensor:
        """The softmin of rows, or of columns, where `near` is that of a cost this is a part of.

        Infinite where it is not worth adding to the rest.
        """
        sides = (self._columns, self._rows, self._transposed)
        if not columns:
            sides = (self._rows, self._columns, self._scores)
        guess = None if near is None else single(near)
        level = on_device(epsilon, potential.device)
        return half_step(*sides, single(potential), level, guess, partly=guess is not None)

    def softmin_pair(self, f: Tensor, g: Tensor, epsilon: Epsilon) -> tuple[Tensor, Tensor]:
        """`softmin_part` of rows and of columns near f (n,) and g (m,), float64, in one pass."""
        level = on_device(epsilon, f.device)
        if self._masses is not None and f is g:
            one = KernelSelf(self._rows, self._scores, self._masses, self._fixed_point)
            found = one.softmin(f, level)
            return found, found
        x, y = self.packed
        masses = packed_masses(self.a, x.layout).single, packed_masses(self.b, y.layout).single
        near = single(f), single(g)
        sums = pair_sums(self._rows, self._columns, self._scores, masses, near, level)
        rows, columns = (
            potential.double() - level * found.log()
            for potential, found in zip(near, sums, strict=True)
        )
        return rows, columns

    def marginals(
        self, f: Tensor, g: Tensor, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Row and column sums of the plan of f (n,) and g (m,)."""
        return self._fixed_point.marginals(f, g, float(epsilon), accurate=accurate)

    def apply_plan(
        self,
        f: Tensor,
        g: Tensor,
        epsilon: float,
        values: Tensor,
        *,
        transposed: bool = False,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> Applied:
        """P V (n, k) and P 1 (n,), or P^T U (m, k) and P^T 1 (m,); of P o A B^T with `factors`."""
        packed = None
        if factors is not None:
            left, right = factors
            packed = _packed_matrix(left, self._rows), _packed_matrix(right, self._columns)
        if transposed:
            scores = self._transposed._replace(parts=self._plan_parts)
            sides = self._columns, self._rows, scores
            turned = None if packed is None else packed[::-1]
            return _applied(*sides, self.b, (g, f), epsilon, values, turned)
        scores = self._scores._replace(parts=self._plan_parts)
        sides = self._rows, self._columns, scores
        return _applied(*sides, self.a, (f, g), epsilon, values, packed)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,), float64."""
        return self.cost.expected_costs(masses)

    def own_costs(self) -> Tensor:
        """C_ii (n,) for the cost of a cloud with itself, float64."""
        return self.cost.own_costs()

    def sample(self, rows: Tensor, columns: Tensor) -> KernelOperator:
        """The cost between some rows (k,) and columns (l,), int64; on each side of equal masses."""
        return KernelOperator(self.cost.sample(rows, columns), self._precision)

    def self_share(self, rank: int, size: int) -> KernelSelfShare:
        """What a rank of so many computes of this cost of a cloud with itself."""
        assert self._masses is not None
        return KernelSelfShare(
            KernelSelf(self._rows, self._scores, self._masses, self._fixed_point),
            (rank, size),
            lambda: _refined_of(self).self_share(rank, size),
        )

    def _half_step(
        self,
        rows: Side,
        columns: Side,
        scores: Scores,
        potential: Tensor,
        epsilon: Epsilon,
        guess: Tensor | None,
    ) -> Tensor:
        near = None if guess is None or not self._many else single(guess)
        level = on_device(epsilon, potential.device)
        return half_step(rows, columns, scores, single(potential), level, near)


def _refined_of(operator: KernelOperator) -> KernelOperator:
    whole = refined(operator)
    assert isinstance(whole, KernelOperator)
    return whole


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


def _pack_both(cost: LabelledCost, lattice: Lattice | None) -> tuple[PackedPoints, PackedPoints]:
    x, y = cost.packed
    if x is None:
        x = _pack(cost, lattice, 0, cost.labels[0], cost.held[0])
    if y is None:
        y = x if cost.symmetric else _pack(cost, lattice, 1, cost.labels[1], cost.held[1])
    return x, y


def _pack(
    cost: LabelledCost,
    lattice: Lattice | None,
    side: int,
    labels: Tensor,
    points: Tensor,
    layout: Layout | None = None,
) -> PackedPoints:
    """Pack some points (k, d) of a side, with labels (k,)."""
    if layout is None:
        classes = cost.class_costs.shape[side]
        layout = remembered(labels, f"{classes} in blocks", lambda: arrange(labels, classes))
    if lattice:
        return pack(points, layout, lattice.centre, lattice.scale)
    return pack(points, layout, cost.centre, power_of_two_scale(cost.largest))


def _packed_matrix(values: Tensor, side: Side) -> PackedPoints:
    """Pack a matrix with one row per point of a side, rounded like the points."""
    origin = torch.zeros(values.shape[1], dtype=torch.float64, device=values.device)
    scale = power_of_two_scale(float(values.abs().max()))
    return pack(values, side.points.layout, origin, scale)


def _seen(points: PackedPoints, masses: PackedMasses, lambda_x: float) -> Seen:
    """A side as products of one part see it, and as those of three do."""
    of_one, of_three = points.squares * lambda_x
    return {1: Side(points, of_one, masses.log2), 3: Side(points, of_three, masses.log2)}
