"""Products of a plan with points and directions where an operator has packed the points.

The points then take the memory of one copy in float32, directions that of another while they are
multiplied, and results, which come for a few points at a time, none. `curvature` builds any plan
with its points by `plan_points`, for second derivatives along directions of the points.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from otdd_flash.derivatives.centred import origin_near
from otdd_flash.derivatives.directions import Directions, Part, Points, Rows
from otdd_flash.derivatives.plan_points import PlanPoints
from otdd_flash.derivatives.plan_system import dense_plan
from otdd_flash.operators.base import Plan
from otdd_flash.operators.comparison import Comparison

if TYPE_CHECKING:
    # These need Triton.
    from otdd_flash.kernels.points.packed_points import PackedPoints
    from otdd_flash.operators.triton_plans import PointProducts


def plan_points(
    comparison: Comparison, name: str, potentials: tuple[Tensor, Tensor | None]
) -> PlanPoints:
    """Build the plan of potentials f (n,) and g (m,) of a term, with its points.

    Without g it is that of the only potential of a cloud with itself. Packed points of an operator
    are used if its products can take them.
    """
    dense = dense_plan(comparison, name, *potentials)
    if dense is not None:
        clouds = [(side.features, side.masses) for side in comparison.sides(name)]
        return PlanPoints(dense, comparison, name, origin_near(clouds, dense.dtype))
    cost = comparison.cost(name)
    operator = comparison.operator(name, cost)
    plan = operator.refined.plan(*potentials, comparison.epsilon).prepared
    # The operator's own centre, which is computed already.
    given = plan, comparison, name, cost.centre
    with_points = plan.with_points
    return PlanPoints(*given) if with_points is None else PackedPlanPoints(*given, with_points)


class PackedPlanPoints(PlanPoints):
    """A plan with packed points, relative to their centre.

    Directions are multiplied one by one, as each has weights of its own.
    """

    def __init__(
        self,
        plan: Plan,
        comparison: Comparison,
        name: str,
        origin: Tensor,
        products: PointProducts,
    ) -> None:
        super().__init__(plan, comparison, name, origin)
        self._products = products

    @property
    def x(self) -> Points:
        """(n, d)."""
        return PackedRows(self._products, 0)

    @property
    def y(self) -> Points:
        """(m, d)."""
        return PackedRows(self._products, 1)

    @cached_property
    def r(self) -> Tensor:
        """P 1 (n,)."""
        return self.here(self.plan.rows)

    @cached_property
    def images(self) -> Tensor:
        """P y (n, d)."""
        return self._images(transposed=False)

    @cached_property
    def transposed_images(self) -> Tensor:
        """P^T x (m, d)."""
        return self._images(transposed=True)

    def _images(self, *, transposed: bool) -> Tensor:
        own = self._sides[transposed]
        found = own.new_empty(own.shape, dtype=self.plan.dtype)
        values = self._products.points[not transposed]
        for part in self._products.times(values, transposed=transposed):
            found[part.rows] = part.points
        return found

    def directions(self, given: Tensor, *, of_y: bool = False) -> PackedDirections:
        """Return centred directions of x (s, n, d), or of y, which are packed on first use."""
        masses = self.c if of_y else self.r
        return PackedDirections(given, masses, self._products, int(of_y))

    def products(
        self, a: Directions, numbers: Tensor, *, transposed: bool = False
    ) -> Iterator[tuple[Part, Tensor]]:
        """Yield P A and P q, or P^T A and P^T q."""
        assert isinstance(a, PackedDirections)
        for k, given in enumerate(numbers):
            found = self._products.times(a.packed(k), None, given, transposed=transposed)
            for some, points, of_numbers in found:
                assert of_numbers is not None
                yield Part(slice(k, k + 1), some, points[None]), self.here(of_numbers)[None]
                # Freed before the next is computed.
                del points

    def columns_change(self, t: Tensor, *, transposed: bool = False) -> Tensor:
        """Return t itself, which `changed` takes."""
        return t

    def columns_change_beside(self, t: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return t itself, and P q."""
        return t, self._times(numbers[..., None], transposed=False)[..., 0]

    def changed(
        self,
        a: Directions,
        b: Directions | None,
        rows: Tensor,
        columns: Tensor,
        *,
        transposed: bool = False,
    ) -> Iterator[Part]:
        """Yield (P o W) y, or (P o W)^T x, in one pass a direction."""
        from otdd_flash.kernels.passes.block_product import Weights

        assert isinstance(a, PackedDirections)
        assert b is None or isinstance(b, PackedDirections)
        x, y = self._products.points
        for k, numbers in enumerate(zip(rows, columns, strict=True)):
            pairs = [(a.packed(k), y)] if b is None else [(a.packed(k), y), (x, b.packed(k))]
            if transposed:
                pairs = [(right, left) for left, right in pairs]
            weights, values = Weights(pairs, self.factor, numbers), x if transposed else y
            found = self._products.times(values, weights, transposed=transposed)
            for some, points, _ in found:
                yield Part(slice(k, k + 1), some, points[None])
                del points


class PackedRows:
    """The packed points of a side (n, d), which are unpacked as they are read.

    Args:
        products: the products that hold them.
        side: 0 for x, 1 for y.
    """

    def __init__(self, products: PointProducts, side: int) -> None:
        self._products, self._side = products, side

    def __getitem__(self, rows: Rows) -> Tensor:
        """Unpack some of the points, (k, d) float32."""
        return self._products.some(self._side, rows)


class PackedDirections(Directions):
    """Centred directions, packed like the points of their side on first use."""

    def __init__(self, given: Tensor, masses: Tensor, products: PointProducts, side: int) -> None:
        super().__init__(given, masses)
        self._products, self._side = products, side
        self._packed: dict[int, PackedPoints] = {}

    def packed(self, k: int) -> PackedPoints:
        """Return the centred direction k, packed."""
        if k not in self._packed:
            largest = self.largest(slice(k, k + 1))
            given = self.given[k], self.mean[k, 0], largest, self._side
            self._packed[k] = self._products.packed(*given)
        return self._packed[k]
