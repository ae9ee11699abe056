"""Products of a plan with points and with directions along which points move, for `curvature`.

`plan_points` builds the `PlanPoints` of a term, a plan with the points of its sides; `curvature`,
the second derivatives of OT_epsilon by the points, takes all products with points and directions
from it. A plan multiplies matrices (m, k): points (m, d), one value a point and direction (s, m),
and directions (s, m, d) are concatenated to one matrix, so that they share a pass.

`PackedPlanPoints` is the same for points that an operator has packed. They take the memory of one
copy in float32, and directions that of another, as they are multiplied one by one. Products with
directions come for a few points at a time, as a `Part`, and are not held as a whole. A change must
keep this, and both classes must give the products of the same plan
(`tests/derivatives/test_plan_points.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.points import less_origin
from otdd_flash.derivatives.centred import origin_near
from otdd_flash.derivatives.plan_system import dense_plan
from otdd_flash.operators.base import Plan
from otdd_flash.operators.comparison import Comparison

if TYPE_CHECKING:
    # These need Triton.
    from otdd_flash.kernels.points.packed_points import PackedPoints
    from otdd_flash.operators.triton_plans import PointProducts

# Some directions, or some points.
Which = slice
Rows = slice | Tensor
ALL = slice(None)

# Coordinates up to which a centred copy of directions is kept; larger ones are centred by so many
# at a time.
LOOKED_AT = 1 << 22


class Points(Protocol):
    """Points (n, d) that are read in parts, such as a tensor."""

    def __getitem__(self, rows: Rows) -> Tensor:
        """Return some of the points, (k, d)."""
        ...


class Part(NamedTuple):
    """Products of a plan with some directions, for some points.

    Attributes:
        which: which of the s directions.
        rows: which of the n points.
        points: the products (s', k, d), which the caller may overwrite.
    """

    which: Which
    rows: Rows
    points: Tensor

    @property
    def at(self) -> tuple[Which, Rows]:
        """The part's place among all directions and points."""
        return self.which, self.rows

    def add(self, out: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """Add values of this part, (s', k) or (s', k, d), to its place in `out`."""
        place = out[self.at].add_(values, alpha=scale)
        if isinstance(self.rows, Tensor):
            out[self.at] = place


class Directions:
    """Centred directions: each less its mean, weighted by masses.

    Args:
        given: (s, n, d).
        masses: (n,), weights of the means.
        centred: False leaves directions as they are, with means of 0.

    Attributes:
        total: sum of the masses.
        mean: (s, 1, d).
    """

    def __init__(self, given: Tensor, masses: Tensor, *, centred: bool = True) -> None:
        self.given, self.total = given, masses.sum()
        if centred:
            self.mean = torch.einsum("n,snd->sd", masses, given)[:, None] / self.total
        else:
            self.mean = given.new_zeros((len(given), 1, given.shape[2]))

    @cached_property
    def _kept(self) -> Tensor | None:
        """The centred directions (s, n, d) if they are small enough to keep, else None."""
        return self.given - self.mean if self.given.numel() <= LOOKED_AT else None

    @property
    def values(self) -> Tensor:
        """The centred directions (s, n, d); read only."""
        return self.given - self.mean if self._kept is None else self._kept

    def at(self, which: Which, rows: Rows) -> Tensor:
        """Return some centred directions of some points (s', k, d); read only."""
        if self._kept is None:
            return self.given[which, rows] - self.mean[which]
        return self._kept[which, rows]

    def dots(self, points: Points) -> Tensor:
        """Return <direction_i, point_i> (s, n), a new tensor."""
        found = [dot(self.at(ALL, rows), points[rows]) for rows in self._rows()]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def largest(self, which: Which) -> float:
        """Return the largest absolute coordinate of some directions."""
        found = [extreme for rows in self._rows() for extreme in self.at(which, rows).aminmax()]
        return float(torch.stack(found).abs().max())

    def _rows(self) -> Iterator[slice]:
        s, n, d = self.given.shape
        height = max(1, LOOKED_AT // (s * d))
        for first in range(0, n, height):
            yield slice(first, min(first + height, n))


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Return <one_i, other_i> over the last dimension."""
    return (one * other).sum(-1)


def inner(one: Tensor, other: Tensor) -> Tensor:
    """Return <one, other> (s,) over points and coordinates."""
    return (one * other).sum((-2, -1))


# The most products y_k y_l, k <= l, of a point whose images under the plan are kept.
MOST_MOMENTS = 256


class PlanPoints:
    """The plan of a term and the points of its sides, relative to an origin near, in its type."""

    def __init__(self, plan: Plan, comparison: Comparison, name: str, origin: Tensor) -> None:
        self.plan, self.epsilon = plan, comparison.epsilon
        self.factor = 2 * comparison.ground.squared.lambda_x
        self._origin = origin.to(plan.dtype)
        self._sides = [side.features for side in comparison.sides(name)]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return len(self._sides[0]), len(self._sides[1])

    @cached_property
    def x(self) -> Points:
        """(n, d)."""
        return less_origin(self._sides[0], self._origin)

    @cached_property
    def y(self) -> Points:
        """(m, d); x itself between a cloud and itself."""
        one = self._sides[0] is self._sides[1]
        return self.x if one else less_origin(self._sides[1], self._origin)

    def here(self, values: Tensor) -> Tensor:
        """Return values in the plan's type."""
        return values.to(self.plan.dtype)

    @cached_property
    def r(self) -> Tensor:
        """P 1 (n,)."""
        # Needed anyway, and any product tells the sums.
        _ = self.images
        return self.here(self.plan.rows)

    @cached_property
    def c(self) -> Tensor:
        """P^T 1 (m,)."""
        return self.here(self.plan.columns)

    @cached_property
    def images(self) -> Tensor:
        """P y (n, d)."""
        return self.plan.times(self.y[ALL])

    @cached_property
    def transposed_images(self) -> Tensor:
        """P^T x (m, d)."""
        return self.plan.times(self.x[ALL], transposed=True)

    def directions(self, given: Tensor, *, of_y: bool = False, centred: bool = True) -> Directions:
        """Return centred directions of x (s, n, d), or of y; or as they are if not `centred`."""
        return Directions(given, self.c if of_y else self.r, centred=centred)

    def products(
        self, a: Directions, numbers: Tensor, *, transposed: bool = False
    ) -> Iterator[tuple[Part, Tensor]]:
        """Yield P A and P q (s', k), or P^T A and P^T q, for directions A and numbers q."""
        found = self._times(beside(a.values, numbers), transposed=transposed)
        yield Part(ALL, ALL, found[..., :-1]), found[..., -1]

    def columns_change(self, t: Tensor, *, transposed: bool = False) -> Any:
        """Return `columns` as `changed` takes it, for t2 (s, m), or if `transposed` t1 (s, n)."""
        values = (self.x if transposed else self.y)[ALL]
        return self._times(t[..., None] * values, transposed=transposed)

    def columns_change_beside(self, t: Tensor, numbers: Tensor) -> tuple[Any, Tensor]:
        """Return `columns_change` of t (s, m), and P q (s, n), in one pass."""
        found = self._times(beside(self.y[ALL], numbers, t), transposed=False)
        return found[..., :-1], found[..., -1]

    def changed(
        self,
        a: Directions,
        b: Directions | None,
        rows: Tensor,
        columns: Any,
        *,
        transposed: bool = False,
    ) -> Iterator[Part]:
        """Yield (P o W) y, W = t1 1^T + 1 t2^T + 2 L (A y^T + x B^T), or (P o W)^T x.

        Args:
            a: directions A of x.
            b: directions B of y; None is 0.
            rows: t1 (s, n), or if `transposed` t2 (s, m).
            columns: `columns_change` of the other of both.
            transposed: apply the transpose, to x.
        """
        images = self.transposed_images if transposed else self.images
        moved = self._moved(a, b, transposed=transposed)
        torch.add(columns, moved, alpha=self.factor, out=moved)
        for part, numbers in zip(moved, rows, strict=True):
            part.addcmul_(numbers[:, None], images)
        yield Part(ALL, ALL, moved)

    def _moved(self, a: Directions, b: Directions | None, *, transposed: bool) -> Tensor:
        """Return (P o (A y^T + x B^T)) y (s, n, d), or (P o (A y^T + x B^T))^T x."""
        y, of_x = self.y[ALL], a.values
        if b is None and not transposed and self._row_moments is not None:
            return torch.einsum("nkl,snl->snk", self._row_moments, of_x)
        # One tensor where both sides are equal: the plan then packs it once.
        x = y if self.x is self.y else self.x[ALL]
        of_y = None if b is None else of_x if b is a else b.values
        values, found = x if transposed else y, []
        for k, left in enumerate(of_x):
            pairs = [(left, y)]
            if of_y is not None:
                pairs.append((x, left if of_y is of_x else of_y[k]))
            found.append(self.plan.times(values, pairs, transposed=transposed))
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def _times(self, values: Tensor, *, transposed: bool) -> Tensor:
        """Return P V (s, n, k) for V (s, m, k), or P^T V."""
        return _apart(self.plan.times(_as_columns(values), transposed=transposed), len(values))

    @cached_property
    def _row_moments(self) -> Tensor | None:
        """sum_j P_ij y_j y_j^T (n, d, d), for few coordinates."""
        return _moments(self.plan.times, self.y[ALL])


def beside(values: Tensor, numbers: Tensor, weights: Tensor | None = None) -> Tensor:
    """Append q (s, m) to V (m, k) or (s, m, k), times weights (s, m) if given: (s, m, k + 1)."""
    found = numbers.new_empty((*numbers.shape, values.shape[-1] + 1))
    if weights is None:
        found[..., :-1] = values
    else:
        torch.mul(values, weights[..., None], out=found[..., :-1])
    found[..., -1] = numbers
    return found


def _moments(times: Callable[[Tensor], Tensor], points: Tensor) -> Tensor | None:
    """Return sum_j P_ij y_j y_j^T (n, d, d); None for too many coordinates."""
    dim = points.shape[1]
    if dim * (dim + 1) // 2 > MOST_MOMENTS:
        return None
    first, second = torch.triu_indices(dim, dim, device=points.device)
    images = times(points[:, first] * points[:, second])
    found = images.new_empty((len(images), dim, dim))
    found[:, first, second] = images
    found[:, second, first] = images
    return found


def _as_columns(values: Tensor) -> Tensor:
    """Reshape (s, m, k) to the columns of one matrix (m, s k)."""
    return values.transpose(0, 1).flatten(1)


def _apart(values: Tensor, count: int) -> Tensor:
    """Reshape a matrix (n, s k) to (s, n, k)."""
    return values.reshape(len(values), count, -1).transpose(0, 1)


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

    def directions(
        self, given: Tensor, *, of_y: bool = False, centred: bool = True
    ) -> PackedDirections:
        """Return centred directions of x (s, n, d), or of y, which are packed on first use."""
        masses = self.c if of_y else self.r
        return PackedDirections(given, masses, self._products, int(of_y), centred=centred)

    def products(
        self, a: Directions, numbers: Tensor, *, transposed: bool = False
    ) -> Iterator[tuple[Part, Tensor]]:
        """Yield P A and P q, or P^T A and P^T q."""
        assert isinstance(a, PackedDirections)
        for k, given in enumerate(numbers):
            found = self._products.times(a.packed(k), given, transposed=transposed)
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
        assert isinstance(a, PackedDirections)
        assert b is None or isinstance(b, PackedDirections)
        x, y = self._products.points
        for k, numbers in enumerate(zip(rows, columns, strict=True)):
            pairs = [(a.packed(k), y)] if b is None else [(a.packed(k), y), (x, b.packed(k))]
            found = self._products.weighted(pairs, self.factor, numbers, transposed=transposed)
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

    def __init__(
        self,
        given: Tensor,
        masses: Tensor,
        products: PointProducts,
        side: int,
        *,
        centred: bool = True,
    ) -> None:
        super().__init__(given, masses, centred=centred)
        self._products, self._side = products, side
        self._packed: dict[int, PackedPoints] = {}

    def packed(self, k: int) -> PackedPoints:
        """Return the centred direction k, packed."""
        if k not in self._packed:
            largest = self.largest(slice(k, k + 1))
            given = self.given[k], self.mean[k, 0], largest, self._side
            self._packed[k] = self._products.packed(*given)
        return self._packed[k]
