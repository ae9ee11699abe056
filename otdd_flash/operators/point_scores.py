"""Scores of labelled points for `torch_operator`: stored, or recomputed in every pass.

    -C_ij = bias[l_i, j] - lambda_x ||x_i||^2 + 2 lambda_x <x_i, y_j>
    bias[c, j] = -lambda_x ||y_j||^2 - lambda_y W[c, l_j]

Points are centred. The bias table (V_x, m) has all terms that depend on a row only through its
class; a tile is that table gathered by class, plus a matrix product. Stored scores, and the costs
that certificates read, are computed in float64, tile by tile: on a processor a tile stays in the
cache until it has been read. Streamed scores take O((n + m) d + V_x m) memory and one block.

`build` chooses between `stored_operator` and `streamed_operator`, and counts the bytes of the
latter. `labels.sinkhorn_pairs` calls `streamed_operator` for a pair of classes with too many costs
to store. `score_pool` makes `StoredScores` of one of its problems, and `solver.exact.pricing` reads
costs by `cost_tiles`. Certificates and exact solves take `cost_errors`, `cost_rounding` and the
`errors` of products as bounds, so these must stay upper bounds
(`tests/operators/test_cost_tiles.py`).

Scores stored in float32 take less time where points are on a lattice, as grey values are, and
float32 computes inner products exactly. In units of the lattice's step, and less a centre on it,
coordinates are integers v. Every partial sum of a product is an integer too, and by Cauchy and
Schwarz

    |sum_k v_ik w_jk| <= ||v_i|| ||w_j||    over any subset of the k.

If the right side is at most 2^24, a float32 product in any order is exact (`IntegerProducts`).
Integers up to 256 are exact in bfloat16 as well, which a processor may be allowed to use for
products of float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.host_points import spans
from otdd_flash.cost.points import Cut, LabelledCost, Masses, in_float64, squared_norms
from otdd_flash.cost.rounding import (
    ROUNDING,
    SCALES,
    magnitudes_about,
    product_errors,
    squares_about,
)
from otdd_flash.operators.torch_operator import Pair, TorchOperator

# Points of a tile along rows and along columns, and tiles whose rows are converted at once. Tiles
# of long vectors have fewer points, for about so many coordinates on either side.
TILE_CPU, TILE_GPU, TILES = 256, 4096, 8
COORDINATES_CPU, COORDINATES_GPU, LEAST_TILE = 1 << 19, 1 << 24, 128


class Products(Protocol):
    """Inner products of two clouds' points, with bounds on the errors of the costs.

    Attributes:
        squares: ||x_i||^2 (n,) and ||y_j||^2 (m,) relative to these products' centre, float64.
        errors: (n,) and (m,) float64: the error of C_ij is at most errors[0]_i + errors[1]_j, with
            rounding in float64.
    """

    squares: Pair
    errors: Pair

    def left(self, rows: slice) -> Tensor:
        """Return x_i (N, d) of some rows."""
        ...

    def right(self, columns: slice) -> Tensor:
        """Return y_j (M, d) of some columns."""
        ...

    def add(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Add 2 lambda_x <x_i, y_j> to `out` (N, M), float64."""
        ...


class CentredProducts:
    """Products in float64 of points less their common centre."""

    def __init__(self, cost: LabelledCost) -> None:
        self._cost = cost
        self.squares = cost.squares
        x, y = cost.magnitudes
        self.errors = cost.cost_error_share * x, cost.cost_error_share * y

    def left(self, rows: slice) -> Tensor:
        """Return x_i (N, d) of some rows, float64."""
        return _centred(self._cost.points[0][rows], self._cost.centre)

    def right(self, columns: slice) -> Tensor:
        """Return y_j (M, d) of some columns, float64."""
        return _centred(self._cost.points[1][columns], self._cost.centre)

    def add(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        out.addmm_(left, right.T, alpha=2 * self._cost.lambda_x)


class CostTile(NamedTuple):
    """-C[rows, columns], float64, in a buffer that the next tile overwrites."""

    rows: slice
    columns: slice
    negative: Tensor


def cost_tiles(
    cost: LabelledCost, products: Products, rows: slice, *, upper: bool = False
) -> Iterator[CostTile]:
    """Yield tiles of -C[rows], from left to right.

    With `upper`, for a cloud with itself, tiles to the left of the diagonal are left out.
    """
    labels_x, labels_y = cost.labels
    squares_x, squares_y = (cost.lambda_x * squares for squares in products.squares)
    tile = _tile(cost)
    buffer = torch.empty(tile * tile, dtype=torch.float64, device=cost.a.device)
    for high in spans(rows.start, rows.stop, TILES * tile):
        left = products.left(high)
        for columns in spans(high.start if upper else 0, cost.shape[1], tile):
            if upper and columns.stop <= high.stop:
                right = left[columns.start - high.start : columns.stop - high.start]
            else:
                right = products.right(columns)
            bias = -squares_y[columns] - cost.class_costs[:, labels_y[columns]]
            stop = min(high.stop, columns.stop) if upper else high.stop
            for part in spans(high.start, stop, tile):
                points = left[part.start - high.start : part.stop - high.start]
                negative = buffer[: len(points) * len(right)].view(len(points), len(right))
                torch.index_select(bias, 0, labels_x[part], out=negative)
                negative.sub_(squares_x[part, None])
                products.add(points, right, negative)
                yield CostTile(part, columns, negative)


def _tile(cost: LabelledCost) -> int:
    """Return the number of points of a tile along rows and along columns."""
    points = cost.points[0]
    most, elements = (TILE_GPU, COORDINATES_GPU) if points.is_cuda else (TILE_CPU, COORDINATES_CPU)
    return max(LEAST_TILE, min(most, elements // points.shape[1]))


def _centred(points: Tensor, centre: Tensor) -> Tensor:
    """Return a copy of points less the centre, float64."""
    return points.to(torch.float64, copy=True).sub_(centre)


# Costs that are converted to float64 at once.
ROWS_ELEMENTS = 1 << 17


class StoredScores:
    """Scores S (n, m) held in memory: n m elements, one read per pass; see `Source`."""

    backend, holds_plans = "torch, scores kept", True

    def __init__(
        self,
        scores: Tensor,
        facts: CostFacts,
        *,
        magnitudes: Pair,
        cost_errors: Pair,
        cost_rounding: float,
    ) -> None:
        self.scores, self.facts = scores, facts
        self.row_offset = torch.zeros_like(scores[:, 0])
        self.magnitudes, self.cost_errors = magnitudes, cost_errors
        self.cost_rounding = cost_rounding

    @classmethod
    def of(cls, cost: LabelledCost, dtype: torch.dtype) -> StoredScores:
        """Compute the costs of labelled points once, in float64, and keep them in a type."""
        scores = torch.empty(cost.shape, dtype=dtype, device=cost.a.device)
        # Costs that are stored in float32 may use points rounded to a lattice: errors are alike.
        whole = integer_products(cost) if dtype == torch.float32 else None
        products = whole or CentredProducts(cost)
        every = slice(0, len(scores))
        for rows, columns, negative in cost_tiles(cost, products, every, upper=cost.symmetric):
            scores[rows, columns] = negative
            if cost.symmetric and columns.start >= rows.stop:
                scores[columns, rows] = scores[rows, columns].T
        return cls(
            scores,
            CostFacts(dtype, cost.mean_cost, *cost.cost_range, error=0.0),
            magnitudes=cost.magnitudes,
            cost_errors=products.errors,
            cost_rounding=0.0 if dtype == torch.float64 else torch.finfo(dtype).eps / 2,
        )

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64: one read of the scores."""
        n, m = self.scores.shape
        found = masses.new_empty(n)
        height = max(1, ROWS_ELEMENTS // m)
        for rows in spans(0, n, height):
            found[rows] = self.scores[rows].double() @ masses
        return -found

    def diagonal(self) -> Tensor:
        return -self.scores.diagonal().double()

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> StoredScores:
        found, (a, b) = self._part(rows, columns), masses
        found.facts = self.facts._replace(mean=-float(a @ (found.scores.double() @ b)))
        return found

    def over(self, columns: Tensor) -> StoredScores:
        return self._part(slice(None), columns)

    def _part(self, rows: Cut, columns: Tensor) -> StoredScores:
        (x, y), (of_x, of_y) = self.magnitudes, self.cost_errors
        return StoredScores(
            self.scores[rows][:, columns],
            self.facts,
            magnitudes=(x[rows], y[columns]),
            cost_errors=(of_x[rows], of_y[columns]),
            cost_rounding=self.cost_rounding,
        )

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the whole matrix as one block."""
        yield 0, self.scores

    def negative_costs(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.scores


# Elements of one block of scores: large enough for the matrix product to run at full speed.
BLOCK_ELEMENTS_CPU = 1 << 23
BLOCK_ELEMENTS_GPU = 1 << 27


class StreamedScores:
    """Scores of labelled points, recomputed block by block; see `Source`.

    Args:
        cost: two labelled clouds.
        dtype: float32 or float64, the type of scores and potentials.
    """

    # Where scores do not fit, a plan does not.
    backend, holds_plans = "torch, scores streamed", False
    cost_rounding = 0.0

    def __init__(self, cost: LabelledCost, dtype: torch.dtype) -> None:
        x, y = cost.centred(dtype)
        self._cost, self._products = cost, CentredProducts(cost)
        # Norms of the rounded points, so that scores are the exact costs of a perturbed cloud.
        squares_x, squares_y = (cost.lambda_x * squared_norms(points) for points in (x, y))
        self.row_offset = squares_x.to(dtype)
        self.facts = CostFacts(dtype, cost.mean_cost, *cost.cost_range, error=0.0)
        self.magnitudes, self.cost_errors = cost.magnitudes, self._products.errors
        self._points, self._labels, self._lambda_x = (x, y), cost.labels[0], cost.lambda_x
        self._bias = (-cost.class_costs[:, cost.labels[1]] - squares_y).to(dtype)

    def expected_costs(self, masses: Tensor) -> Tensor:
        return self._cost.expected_costs(masses)

    def diagonal(self) -> Tensor:
        return self._cost.own_costs()

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> StreamedScores:
        return StreamedScores(self._cost.sample(rows, columns, masses), self.row_offset.dtype)

    def over(self, columns: Tensor) -> StreamedScores:
        return StreamedScores(self._cost.part(slice(None), columns), self.row_offset.dtype)

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield S in blocks of rows, in a buffer that the next block overwrites."""
        n, m = self._cost.shape
        budget = BLOCK_ELEMENTS_CPU if self.row_offset.device.type == "cpu" else BLOCK_ELEMENTS_GPU
        height = max(1, min(n, budget // m))
        buffer = torch.empty(
            (height, m), dtype=self.row_offset.dtype, device=self.row_offset.device
        )
        x, y = self._points
        for rows in spans(0, n, height):
            block = buffer[: rows.stop - rows.start]
            torch.index_select(self._bias, 0, self._labels[rows], out=block)
            yield rows.start, block.addmm_(x[rows], y.T, alpha=2 * self._lambda_x)

    def negative_costs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield -C of the original points in blocks of rows, float64, in a reused buffer."""
        n, m = self._cost.shape
        budget = BLOCK_ELEMENTS_CPU if self.row_offset.device.type == "cpu" else BLOCK_ELEMENTS_GPU
        height = max(1, min(n, budget // 4 // m))
        buffer = self.row_offset.new_empty((height, m), dtype=torch.float64)
        for rows in spans(0, n, height):
            start = rows.start
            block = buffer[: rows.stop - start]
            for part, columns, negative in cost_tiles(self._cost, self._products, rows):
                block[part.start - start : part.stop - start, columns] = negative
            yield start, block


def stored_operator(cost: LabelledCost, dtype: torch.dtype) -> TorchOperator[StoredScores]:
    """Build the operator of labelled points whose scores are stored in a type."""
    return TorchOperator(StoredScores.of(cost, dtype), cost.a, cost.b)


def streamed_operator(cost: LabelledCost, dtype: torch.dtype) -> TorchOperator[StreamedScores]:
    """Build the operator of labelled points whose scores are recomputed in every pass."""
    return TorchOperator(StreamedScores(cost, dtype), cost.a, cost.b)


LARGEST_PRODUCT, LARGEST_INTEGER = 2.0**24, 256

# Least points of a side: for fewer, rounding them takes as long as it saves.
LEAST_ON_LATTICE = 1000

# Rows that are tried first, which rule out a lattice for most points.
FIRST_ROWS = 32


class IntegerProducts:
    """Exact products of points rounded to a lattice; errors are those of the rounding.

    Args:
        cost: between two labelled clouds.
        points: (n, d) and (m, d) float32 integers, near scale (points - centre).
        lost: (n,) and (m,) float64, squared distances of the points from the lattice.
        scale: steps in one unit of the points.
        centre: (d,) float64, on the lattice.
    """

    def __init__(
        self, cost: LabelledCost, points: Pair, lost: Pair, *, scale: float, centre: Tensor
    ) -> None:
        self._points = points
        self.squares = squares_about(cost, centre)
        self._unit = 2 * cost.lambda_x / scale**2
        of_x, of_y = (
            off + cost.cost_error_share * magnitudes
            for off, magnitudes in zip(
                product_errors(cost, self.squares, lost),
                magnitudes_about(cost, self.squares),
                strict=True,
            )
        )
        self.errors = of_x, of_y

    def left(self, rows: slice) -> Tensor:
        """Return the integers (N, d) float32 of some rows."""
        return self._points[0][rows]

    def right(self, columns: slice) -> Tensor:
        """Return the integers (M, d) float32 of some columns."""
        return self._points[1][columns]

    def add(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Add 2 lambda_x <x_i, y_j> by one exact matrix product in float32."""
        out.add_(left @ right.T, alpha=self._unit)


def integer_products(cost: LabelledCost) -> IntegerProducts | None:
    """Return exact products if all points are near one lattice and there are enough; else None."""
    if min(cost.shape) < LEAST_ON_LATTICE:
        return None
    sides = cost.held[: 1 if cost.symmetric else 2]
    for scale in SCALES:
        middle = (cost.centre * scale).round()
        if any(_round(points[:FIRST_ROWS], scale, middle) is None for points in sides):
            continue
        found = [_round(points, scale, middle) for points in sides]
        rounded = [side for side in found if side is not None]
        if len(rounded) < len(found):
            continue
        x, y = rounded[0], rounded[-1]
        if x.longest * y.longest <= LARGEST_PRODUCT:
            points, lost = (x.values, y.values), (x.lost, y.lost)
            return IntegerProducts(cost, points, lost, scale=scale, centre=middle / scale)
    return None


class _Rounded(NamedTuple):
    """Integers (N, d) float32, the longest norm of a row, and squared rounding errors (N,)."""

    values: Tensor
    longest: float
    lost: Tensor


def _round(points: Tensor, scale: float, middle: Tensor) -> _Rounded | None:
    """Round points * scale to integers, less `middle` (d,).

    Returns None if rounding changes a point by more than float32 does, or an integer is too large.
    """
    values = torch.empty(points.shape, dtype=torch.float32, device=points.device)
    lost, longest = points.new_empty(len(points), dtype=torch.float64), 0.0
    for rows, coordinates in in_float64(points):
        multiples = coordinates.mul_(scale)
        whole = multiples.round()
        off = torch.linalg.vector_norm(multiples.sub_(whole), dim=1)
        if bool((off > ROUNDING * torch.linalg.vector_norm(whole, dim=1)).any()):
            return None
        low, high = whole.sub_(middle).aminmax()
        if max(-float(low), float(high)) > LARGEST_INTEGER:
            return None
        longest = max(longest, float(torch.linalg.vector_norm(whole, dim=1).max()))
        values[rows], lost[rows] = whole, (off / scale).square_()
    return _Rounded(values, longest, lost)
