"""Costs that users give: a function of blocks, and the facts of any matrix from one pass over it.

`CostBlocks` is a user's function, `FunctionCosts` calls it in every pass and checks its results.
`matrix_facts` computes range, mean and forbidden pairs of a matrix from blocks of its rows.
`solver.matrix_comparison` makes `FunctionCosts` and calls `matrix_facts`; `operators.given_costs`
reads both, and `operators.matrix_kernel` computes `MatrixFacts` on a GPU. `otdd_flash` exports
`CostBlocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.arguments import Count, check_fields
from otdd_flash.checks import shown
from otdd_flash.cost.facts import CostRange
from otdd_flash.errors import InputError, UserCodeError
from otdd_flash.real_numbers import in_double, in_one_row

# Entries per call of a user's function, which may need many times their memory.
BLOCK_ENTRIES_CPU, BLOCK_ENTRIES_GPU = 1 << 20, 1 << 24

# The types of costs that are kept as they are (integers become float64), each with the integer type
# as which their bits are added for a checksum.
BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int32,
}


@dataclass(frozen=True)
class CostBlocks:
    """A cost matrix C (n, m) that is never stored: blocks are computed when they are needed.

    Args:
        n: rows.
        m: columns.
        block: called as block(rows, columns) with two slices; returns C[rows, columns], a dense
            real tensor. Equal slices must give equal values. All blocks have one type and are on
            one device.

    Raises:
        InputError: a size is not positive, or `block` is not callable.
    """

    n: Count
    m: Count
    block: Callable[[slice, slice], Tensor]

    def __post_init__(self) -> None:
        check_fields(self, "costs.")


class FunctionCosts:
    """Costs that a user's function computes again in every pass.

    Args:
        blocks: the function; it is called for one entry to learn the type and the device.
        device: to which blocks are moved; None leaves them where the function returns them.

    Raises:
        InputError: the function does not return real blocks of the right shape, or raises.
    """

    def __init__(self, blocks: CostBlocks, device: torch.device | None = None) -> None:
        self._blocks, self.shape = blocks, (blocks.n, blocks.m)
        self._type: torch.dtype | None = None
        self._marks: dict[tuple[int, int], int] = {}
        first = self._call(slice(0, 1), slice(0, 1))
        self._type = first.dtype
        self.device = first.device if device is None else device
        self.dtype = first.dtype if first.dtype in BITS else torch.float64
        self.block_entries = BLOCK_ENTRIES_CPU if self.device.type == "cpu" else BLOCK_ENTRIES_GPU

    def rows(self, rows: slice) -> Tensor:
        """Return C[rows].

        Raises:
            InputError: the function returned other costs for these rows before.
        """
        columns = slice(0, self.shape[1])
        block = self._exactly(rows, columns)
        # Bounds hold for one matrix. A sum of integers is the same in any order.
        mark = int(in_one_row(block).view(BITS[self.dtype]).sum())
        if self._marks.setdefault((rows.start, rows.stop), mark) != mark:
            raise InputError(
                f"{_called(rows, columns)} returned other costs than before; it must return the "
                "same for the same slices: draw what is random first, or pass the matrix itself"
            )
        return block

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return C (k, l) of some rows (k,) and columns (l,), int64; whole rows are computed."""
        found = torch.empty((len(rows), len(columns)), dtype=self.dtype, device=self.device)
        for place, row in enumerate(rows.tolist()):
            block = self._exactly(slice(row, row + 1), slice(0, self.shape[1]))
            found[place] = block[0, columns]
        return found

    def held(self) -> Tensor:
        """Return the whole C (n, m), in memory."""
        found = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        n, m = self.shape
        height = max(1, self.block_entries // m)
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            found[rows] = self.rows(rows)
        return found

    def _exactly(self, rows: slice, columns: slice) -> Tensor:
        block = self._call(rows, columns)
        if block.dtype not in BITS:
            block = in_double(f"costs that {_called(rows, columns)} returned", block)
        return block.to(self.device, self.dtype)

    def _call(self, rows: slice, columns: slice) -> Tensor:
        called = _called(rows, columns)
        try:
            block: Any = self._blocks.block(rows, columns)
        except InputError:
            raise
        except Exception as error:
            raise UserCodeError(f"{called} raised {type(error).__name__}: {error}") from error
        shape = rows.stop - rows.start, columns.stop - columns.start
        if not isinstance(block, Tensor) or tuple(block.shape) != shape or not _is_dense(block):
            raise InputError(f"{called} must return a dense real tensor {shape}, got {_got(block)}")
        if self._type not in (None, block.dtype):
            raise InputError(
                f"{called} returned {block.dtype}, and the first block was {self._type}; return "
                "one type"
            )
        return block.detach()


def _called(rows: slice, columns: slice) -> str:
    return f"costs.block({rows.start}:{rows.stop}, {columns.start}:{columns.stop})"


def _is_dense(block: Tensor) -> bool:
    """Whether a tensor is dense and holds real numbers."""
    dense = block.layout == torch.strided and not block.is_meta and not block.is_quantized
    return dense and (block.dtype in BITS or not (block.is_floating_point() or block.is_complex()))


def _got(block: Any) -> str:
    """Describe an invalid block, for an error."""
    if not isinstance(block, Tensor):
        return shown(block)
    return f"{shown(block)}, {block.dtype}, {block.layout}, on {block.device}"


class MatrixFacts(NamedTuple):
    """Facts of a cost C (n, m) between masses a and b; entries of +inf are forbidden pairs.

    Attributes:
        range: of the finite entries between points with mass.
        mean: sum_ij a_i b_j C_ij over the finite entries.
        magnitudes: (n,) and (m,) float64; |C_ij| is at most row_i + column_j for the entries of
            `range`.
        extreme: the largest |C_ij| of all finite entries.
        partners: (n,) and (m,) bool, whether a row or column has a finite entry with a point that
            has mass; None if no pair is forbidden.
    """

    range: CostRange
    mean: float
    magnitudes: tuple[Tensor, Tensor]
    extreme: float
    partners: tuple[Tensor, Tensor] | None

    @property
    def forbidden(self) -> bool:
        return self.partners is not None


def matrix_facts(
    blocks: Iterable[tuple[slice, Tensor]], a: Tensor, b: Tensor, name: str = "costs"
) -> MatrixFacts:
    """Compute the facts of a matrix from blocks of its rows.

    Args:
        blocks: ranges of rows, in order, and C[rows], of any floating type.
        a: (n,) masses, float64.
        b: (m,) masses, float64.
        name: of the matrix, for messages.

    Raises:
        InputError: an entry is NaN or -inf, or all pairs of a point with mass are forbidden.
    """
    rows, columns = a > 0, b > 0
    every = bool(rows.all()) and bool(columns.all())
    largest, forbidden = torch.zeros_like(a), False
    partners = torch.zeros_like(rows), torch.zeros_like(columns)
    lowest, highest, extreme, mean = math.inf, -math.inf, 0.0, 0.0
    for part, block in blocks:
        costs = block.double()
        ends = torch.aminmax(costs, dim=1)
        low, high = float(ends.min.amin()), float(ends.max.amax())
        if not low > -math.inf:
            raise _not_a_cost(name, part.start, costs)
        if every and high < math.inf:
            partners[0][part] = partners[1][:] = True
            extreme = max(extreme, abs(low), abs(high))
        else:
            allowed = costs < math.inf
            forbidden |= high == math.inf
            costs = costs.where(allowed, 0)
            extreme = max(extreme, float(costs.abs().max()))
            partners[0][part] = (allowed & columns).any(1)
            partners[1].logical_or_((allowed & rows[part, None]).any(0))
            counted = allowed & columns & rows[part, None]
            ends = torch.aminmax(costs.where(counted, 0), dim=1)
            low = float(costs.where(counted, math.inf).min())
            high = float(costs.where(counted, -math.inf).max())
        largest[part] = torch.maximum(ends.min.abs(), ends.max.abs())
        mean += float(a[part] @ (costs @ b))
        lowest, highest = min(lowest, low), max(highest, high)
    for side, masses, has in (("row", rows, partners[0]), ("column", columns, partners[1])):
        if bool((masses & ~has).any()):
            raise InputError(
                f"{name} forbids all pairs of {side} {int((masses & ~has).nonzero()[0])}, which "
                "has mass, with points that have; allow one, give it the mass 0, or, where "
                "unbalanced relaxes its marginal, give its pairs a finite cost far above the "
                "penalty and epsilon, both in units of the cost, as the mean would count that cost"
            )
    found = partners if forbidden else None
    magnitudes = largest, torch.zeros_like(b)
    return MatrixFacts(CostRange(lowest, highest), mean, magnitudes, extreme, found)


def _not_a_cost(name: str, first: int, costs: Tensor) -> InputError:
    row, column = (~(costs > -math.inf)).nonzero()[0].tolist()
    return InputError(
        f"{name} must not be NaN or -inf; {name}[{first + row}, {column}] is "
        f"{float(costs[row, column])}; +inf forbids a pair"
    )
