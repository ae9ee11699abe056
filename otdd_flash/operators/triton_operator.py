"""A cost of labelled points whose passes run in Triton kernels on a GPU.

`build` makes this operator. Half-steps run in `half_step`, or `symmetric_step` between a cloud and
itself, marginals in `fixed_point`, plans in `triton_plans`. Norms are those of the rounded points,
so that an iteration in `fast` precision is exact for a slightly perturbed cloud. `refined` is the
same cost in `high` precision and shares the packed coordinates. Points on a lattice
(`cost.rounding`) are held exactly by float16, and both precisions are the same.

Certificates read `marginals` and `costs.error`, so both must be of the original points and their
bounds those of `fixed_point`; only half-steps and plans for iterations may round points.

Of a self term that ranks share, a rank has two stripes of the upper triangle, `KernelSelfShare`,
which `sharing` asks for. All ranks must hold the whole cloud in the same packed order. With f as
the shift of all exponentials, partial sums of all ranks simply add up. If `blocked` or `ring` asks
for the softmins of a block with itself (`softmin_pair`), one stripe has all of its pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.points import LabelledCost, Masses
from otdd_flash.cost.rounding import Lattice, float16_rounding, lattice_of
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.fingerprint import remembered
from otdd_flash.kernels.launch import on_device
from otdd_flash.kernels.passes.half_step import bias_of, half_step, repair
from otdd_flash.kernels.passes.sides import LARGEST_SUM, Scores, Side
from otdd_flash.kernels.passes.symmetric_step import pair_sums, symmetric_step, triangle_sums
from otdd_flash.kernels.points.packed_points import (
    Layout,
    PackedPoints,
    arrange,
    pack,
    power_of_two_scale,
)
from otdd_flash.kernels.tiling import BLOCK_ROWS
from otdd_flash.operators.base import Epsilon, Marginals, Passes
from otdd_flash.operators.fixed_point import FixedPoint
from otdd_flash.operators.packed_blocks import Packing
from otdd_flash.operators.self_share import NearShare, folded
from otdd_flash.operators.torch_operator import LOG2_ZERO
from otdd_flash.operators.triton_plans import KernelPlan, SideByParts, single

PARTS = {"fast": 1, "high": 3}

# Number of scores above which saved work pays for more kernel launches.
MANY_SCORES = 1 << 26

# Scores times dimension up to which a pass is about as short as its launch: steps are recorded.
FEW_PRODUCTS = 1 << 36


class KernelOperator:
    """The operator of a cost between labelled points on a GPU, in Triton.

    Args:
        cost: between two labelled clouds.
        precision: `fast` or `high`.
        coarse: the operator that this one refines.

    Attributes:
        packed: both clouds in float16 parts, as kernels read them.
        sides: the same with norms and masses.
        scores: parameters of the scores, and the same with sides exchanged.
        plan_parts: number of products of float16 parts for each score of an evaluated plan.
        passes: how passes run.
    """

    def __init__(
        self, cost: LabelledCost, precision: str, coarse: KernelOperator | None = None
    ) -> None:
        self.cost, self._precision = cost, precision
        # Kernels read masses by their pointers.
        self.a, self.b = cost.a.contiguous(), cost.b.contiguous()
        self.shape = cost.shape
        self._lattice: Lattice | None
        self.packed: tuple[PackedPoints, PackedPoints]
        self._fixed_point: FixedPoint
        self.sides: tuple[SideByParts, SideByParts]
        if coarse is None:
            self._lattice = lattice_of(cost)
            self.packed = x, y = _pack_both(cost, self._lattice)
            self._fixed_point = FixedPoint(cost, (x.layout, y.layout), self._lattice)
            masses = packed_masses(cost.a, x.layout)
            of_x = of_y = _side_by_parts(x, masses, cost.lambda_x)
            if not cost.symmetric:
                of_y = _side_by_parts(y, packed_masses(cost.b, y.layout), cost.lambda_x)
            self.sides = of_x, of_y
            self._costs = cost.class_costs.float().contiguous()
            self._masses = masses.single if cost.symmetric else None
        else:
            self._lattice, self._fixed_point = coarse._lattice, coarse._fixed_point
            self.packed, self.sides = coarse.packed, coarse.sides
            self._costs, self._masses = coarse._costs, coarse._masses
        self._parts = parts = 1 if self._lattice else PARTS[precision]
        x, y = self.packed
        self._rows, self._columns = (by_parts[parts] for by_parts in self.sides)
        scale = 2 * cost.lambda_x / x.scale**2
        there, back = (
            Scores(scale, costs, parts) for costs in (self._costs, self._costs.T.contiguous())
        )
        self.scores = there, back
        # Values that a plan multiplies are on no lattice.
        self.plan_parts = PARTS["high" if self._lattice else precision]
        self._many = x.layout.size * y.layout.size >= MANY_SCORES
        products = self.shape[0] * self.shape[1] * x.coordinates.shape[1]
        backend = f"triton, scores streamed, {precision}"
        recorded = self.a.is_cuda and products <= FEW_PRODUCTS
        self.passes = Passes(torch.float32, backend, in_triton=True, recorded=recorded)

    @cached_property
    def costs(self) -> CostFacts:
        cost, error = self.cost, self._fixed_point.cost_error
        rounding = float16_rounding(cost) if self._rounds and not cost.symmetric else 0.0
        facts = self.passes.dtype, cost.mean_cost, *cost.cost_range, error
        return CostFacts(*facts, rounding=rounding)

    @property
    def accurate_errors(self) -> tuple[Tensor, Tensor]:
        """(n,) and (m,): error bounds of costs in accurate `marginals`."""
        return self._fixed_point.accurate_errors

    @property
    def rounding(self) -> float:
        """The mean rounding error of stored costs: 0, as none is stored."""
        return 0.0

    @property
    def packing(self) -> Packing:
        """How blocks of the cost's points are packed: in float16 parts."""
        return Packing(partial(_pack, self.cost.whole, self._lattice), min(2, self._parts))

    @property
    def refined(self) -> KernelOperator:
        """The operator of the original points, at float32 accuracy."""
        return KernelOperator(self.cost, "high", self) if self._rounds else self

    @property
    def _rounds(self) -> bool:
        """Whether points are rounded to one float16, and that changes them."""
        return self._precision == "fast" and not self._lattice

    def rounded_points(self) -> tuple[Tensor, Tensor]:
        """Return both clouds, less one point and rounded, (n, d) and (m, d) float64."""
        dim = self.cost.points[0].shape[1]
        x, y = (side.rounded(self._parts)[:, :dim] for side in self.packed)
        return x, y

    def softmin_rows(self, g: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute f_i = -epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), shape (n,)."""
        return self._softmin(g, epsilon, guess if self._many else None, columns=False)

    def softmin_columns(self, f: Tensor, epsilon: Epsilon, guess: Tensor | None = None) -> Tensor:
        """Compute g_j = -epsilon log sum_i a_i exp((f_i - C_ij) / epsilon), shape (m,)."""
        return self._softmin(f, epsilon, guess if self._many else None, columns=True)

    def softmin_self(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute T(f) (n,) for the potential f of a self term, which is near T(f)."""
        if not self._many:
            return self.softmin_rows(f, epsilon)
        assert self._masses is not None
        level = on_device(epsilon, f.device)
        return symmetric_step(self._rows, self.scores[0], self._masses, single(f), level)

    def softmin_part(
        self, potential: Tensor, epsilon: Epsilon, near: Tensor | None, *, columns: bool
    ) -> Tensor:
        """Compute the softmin of rows, or of columns; see `BlockOperator.softmin_part`.

        It is infinite where it changes the whole softmin by less than rounding.
        """
        return self._softmin(potential, epsilon, near, columns=columns, partly=near is not None)

    def softmin_pair(self, f: Tensor, g: Tensor | None, epsilon: Epsilon) -> tuple[Tensor, Tensor]:
        """Compute `softmin_part` of rows near f (n,) and columns near g (m,), float64, at once."""
        if g is None:
            found = self.softmin_of_pairs(f, epsilon)
            return found, found
        level = on_device(epsilon, f.device)
        x, y = self.packed
        masses = packed_masses(self.a, x.layout).single, packed_masses(self.b, y.layout).single
        near = single(f), single(g)
        sums = pair_sums(self._rows, self._columns, self.scores[0], masses, near, level)
        rows, columns = (
            potential.double() - level * found.log()
            for potential, found in zip(near, sums, strict=True)
        )
        return rows, columns

    def softmin_of_pairs(
        self, f: Tensor, epsilon: Epsilon, stripes: Sequence[tuple[int, int]] | None = None
    ) -> Tensor:
        """Compute the softmin (n,) of a self term near f, float64.

        It is over the pairs of some stripes of blocks, which may be none, or of all.
        """
        assert self._masses is not None
        layout, potential = self.packed[0].layout, single(f)
        if stripes is None:
            stripes = [(0, layout.size // BLOCK_ROWS)]
        level = on_device(epsilon, f.device)
        given = self._rows, self.scores[0], self._masses, potential, level
        sums = triangle_sums(*given, stripes)
        return potential.double() - level * sums.log_()[layout.position]

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: Epsilon, *, accurate: bool = False
    ) -> Marginals:
        """Compute the row and column sums of the plan of f (n,) and g (m,)."""
        return self._fixed_point.marginals(f, g, float(epsilon), accurate=accurate)

    def plan(
        self, f: Tensor, g: Tensor | None, epsilon: float, most: int | None = None
    ) -> KernelPlan:
        """Build the plan of f (n,) and g (m,); see `Operator.plan`."""
        return KernelPlan(self, f, g, epsilon, most)

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64."""
        return self.cost.expected_costs(masses)

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> KernelOperator:
        """Return the cost between some rows and columns, with other masses."""
        return KernelOperator(self.cost.sample(rows, columns, masses), self._precision)

    def softmin_over(self, columns: Tensor, g: Tensor, epsilon: Epsilon) -> Tensor:
        """Compute the softmin of rows, in their packed form, over some columns (l,), int64."""
        part = self.cost.part(slice(None), columns)
        part.packed = self.packed[0], None
        return KernelOperator(part, self._precision).softmin_rows(g, epsilon)

    def _softmin(
        self,
        potential: Tensor,
        epsilon: Epsilon,
        guess: Tensor | None,
        *,
        columns: bool,
        partly: bool = False,
    ) -> Tensor:
        own, other = (self._columns, self._rows) if columns else (self._rows, self._columns)
        near = None if guess is None else single(guess)
        given = single(potential), on_device(epsilon, potential.device), near
        return half_step(own, other, self.scores[columns], *given, partly=partly)


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


def _side_by_parts(points: PackedPoints, masses: PackedMasses, lambda_x: float) -> SideByParts:
    """Return a side as kernels read it, with the norms for products of 1 and of 3 parts."""
    of_one, of_three = points.squares * lambda_x
    return {1: Side(points, of_one, masses.log2), 3: Side(points, of_three, masses.log2)}


@dataclass(frozen=True, eq=False)
class PackedMasses:
    """The masses of some points in a layout (n,), 0 for padding.

    Attributes:
        layout: the order of the points in blocks of rows.
        values: the masses, float64.
    """

    layout: Layout
    values: Tensor

    @cached_property
    def log2(self) -> Tensor:
        """log2 of the masses, (n,) float32, finite."""
        return self.values.log2().clamp_min_(LOG2_ZERO).float()

    @cached_property
    def single(self) -> Tensor:
        """The masses in float32."""
        return self.values.float()


def packed_masses(masses: Tensor, layout: Layout) -> PackedMasses:
    """Return masses (N,) in a layout; cached for all costs of the cloud in that layout."""
    # The cached value refers to the layout, so that no other one gets its id.
    name = "in blocks", id(layout)
    return remembered(masses, name, lambda: PackedMasses(layout, layout.spread(masses, 0.0)))


class KernelSelfShare(NearShare):
    """A rank's stripes of a self term between labelled points on a GPU.

    Args:
        operator: of the whole cost.
        place: the rank and the number of ranks.
    """

    # Beyond it sums leave the range of float32.
    reach = math.log(LARGEST_SUM)
    repairs_alone = True

    def __init__(self, operator: KernelOperator, place: tuple[int, int]) -> None:
        self._operator, self._place = operator, place
        self._blocks = folded(operator.packed[0].layout.size // BLOCK_ROWS, *place)

    @property
    def refined(self) -> KernelSelfShare:
        return KernelSelfShare(self._operator.refined, self._place)

    def softmin(self, f: Tensor, epsilon: Epsilon) -> Tensor:
        return self._operator.softmin_of_pairs(f, epsilon, self._blocks)

    def repaired(self, f: Tensor, epsilon: Epsilon, rows: Tensor) -> Tensor:
        side, scores, potential = self._operator._rows, self._operator.scores[0], single(f)
        level, layout = on_device(epsilon, f.device), side.points.layout
        marked = torch.zeros_like(layout.block_class)
        blocks = layout.position // BLOCK_ROWS
        marked.scatter_reduce_(0, blocks, rows.to(marked.dtype), "amax")
        bias, found = bias_of(side, scores, potential, level), potential.clone()
        repair(side, side, scores, bias, level, marked, found)
        return found

    def marginals(self, f: Tensor, g: None, epsilon: Epsilon, *, accurate: bool) -> Marginals:
        stripes = [(first * BLOCK_ROWS, end * BLOCK_ROWS) for first, end in self._blocks]
        fixed_point = self._operator._fixed_point
        return fixed_point.marginals(f, g, float(epsilon), accurate=accurate, stripes=stripes)

    def mean_error(self, ranks: Ranks) -> float:
        """Return `CostFacts.error` of the whole cost; every rank computes the same."""
        return self._operator._fixed_point.cost_error
