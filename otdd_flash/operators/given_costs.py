"""A given cost: a matrix held in its own type, or a function that is called for blocks.

A pass allocates nothing of the size of the matrix. It reads the matrix once, in blocks of rows that
are converted to scores in the type of the potentials while they are in a cache. An entry of +inf
forbids a pair: its score is -inf and its entry of the plan is 0.

`CostBlocks`, which `otdd_flash` exports, is a user's function; `FunctionCosts` calls it in every
pass and checks its results. `matrix_facts` computes range, mean and forbidden pairs of a matrix
from blocks of its rows. `solver.matrix_comparison` makes `FunctionCosts`, calls `matrix_facts` and,
as `solver.matrix.gradients` does, builds operators by `matrix_operator`. On a GPU `matrix_kernel`
wraps such an operator: it runs half-steps, plan sums and, for contiguous rows, expected costs in
Triton, computes `MatrixFacts`, and leaves the rest to the operator.

Modules that need the costs themselves read a `CostSource` (`solver.exact.pricing`,
`derivatives.plan_links`), most of them by `exact_blocks`, whose blocks are small enough to be
converted to float64 (`solver.matrix_comparison`, `solver.matrix.result`, `solver.matrix.transport`,
`derivatives.groups`). All bounds are of one matrix, so `FunctionCosts.rows` must refuse a function
that returns other costs for the same rows (`tests/matrix/test_blocks.py`); `between`, for samples
and groups of points, does not compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from otdd_flash.arguments import Count, check_fields
from otdd_flash.checks import shown
from otdd_flash.cost.facts import CostFacts, CostRange
from otdd_flash.cost.host_points import spans
from otdd_flash.cost.points import Masses
from otdd_flash.errors import InputError
from otdd_flash.operators.torch_operator import TILE_ELEMENTS_CPU, TorchOperator
from otdd_flash.plugins import user_code
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
        for rows, block in _blocks(self, self.block_entries):
            found[rows] = block
        return found

    def _exactly(self, rows: slice, columns: slice) -> Tensor:
        block = self._call(rows, columns)
        if block.dtype not in BITS:
            block = in_double(f"costs that {_called(rows, columns)} returned", block)
        return block.to(self.device, self.dtype)

    def _call(self, rows: slice, columns: slice) -> Tensor:
        called = _called(rows, columns)
        with user_code(called):
            block: Any = self._blocks.block(rows, columns)
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


# Costs that are converted to float64 at once; on a GPU the size of a block of scores as well.
EXACT_ELEMENTS_CPU, EXACT_ELEMENTS_GPU = 1 << 16, 1 << 22


class CostSource(Protocol):
    """Access to the entries of a cost C (n, m), by rows."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def block_entries(self) -> int | None:
        """Entries per call of a user's function; None if the matrix is in memory."""
        ...

    def rows(self, rows: slice) -> Tensor:
        """Return C[rows]; do not write to it."""
        ...

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return C (k, l) of some rows (k,) and columns (l,), int64."""
        ...


class HeldCosts:
    """A matrix in memory, of any strides."""

    block_entries = None

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.shape: tuple[int, int] = (matrix.shape[0], matrix.shape[1])
        self.dtype, self.device = matrix.dtype, matrix.device

    def rows(self, rows: slice) -> Tensor:
        """Return C[rows], a view."""
        return self.matrix[rows]

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Copy C (k, l) of some rows (k,) and columns (l,)."""
        return self.matrix[rows[:, None], columns]


class SomeColumns:
    """Some columns (l,), int64, of another source, which are read from it in every pass."""

    def __init__(self, source: CostSource, columns: Tensor) -> None:
        self._source, self._columns = source, columns
        self.shape = source.shape[0], len(columns)
        self.dtype, self.device = source.dtype, source.device

    @property
    def block_entries(self) -> int | None:
        """Entries that make as many rows per call as those of the whole source."""
        entries, m = self._source.block_entries, self._source.shape[1]
        return None if entries is None else max(1, entries // m) * self.shape[1]

    def rows(self, rows: slice) -> Tensor:
        """Copy some of the rows."""
        return self._source.rows(rows)[:, self._columns]

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Copy C (k, l) of some rows (k,) and some of these columns (l,)."""
        return self._source.between(rows, self._columns[columns])


class GivenCosts:
    """Scores of a given cost C (n, m); see `torch_operator.Source`.

    Args:
        costs: C.
        known: facts of C between the masses.
        dtype: of scores and potentials, float32 or float64.
        errors: (n,) float64; the error of C_ij is at most errors_i.
    """

    holds_plans, cost_rounding = True, 0.0

    def __init__(
        self, costs: CostSource, known: MatrixFacts, dtype: torch.dtype, errors: Tensor
    ) -> None:
        (n, m), device = costs.shape, costs.device
        self.costs, self._known = costs, known
        self.row_offset = torch.zeros(n, dtype=dtype, device=device)
        self.facts = CostFacts(dtype, known.mean, *known.range, 0.0, known.forbidden)
        self.magnitudes = known.magnitudes
        self.cost_errors = errors, errors.new_zeros(m)

    @property
    def backend(self) -> str:
        return (
            "torch, costs given" if self.costs.block_entries is None else "torch, costs asked for"
        )

    def expected_costs(self, masses: Tensor) -> Tensor:
        """Compute sum_j C_ij q_j (n,) for masses q (m,), float64, over allowed pairs: one read."""
        found = masses.new_empty(self.costs.shape[0])
        for rows, block in exact_blocks(self.costs):
            costs = block.double()
            if self.facts.forbidden:
                costs = costs.where(costs < torch.inf, 0)
            found[rows] = costs @ masses
        return found

    def diagonal(self) -> Tensor:
        found = [block[:, rows].diagonal().double() for rows, block in exact_blocks(self.costs)]
        return torch.cat(found)

    def sample(self, rows: Tensor, columns: Tensor, masses: Masses) -> GivenCosts:
        held = HeldCosts(self.costs.between(rows, columns))
        known, exact = matrix_facts(exact_blocks(held), *masses), torch.zeros_like(masses[0])
        return GivenCosts(held, known, self.row_offset.dtype, exact)

    def over(self, columns: Tensor) -> GivenCosts:
        x, y = self.magnitudes
        known = self._known._replace(magnitudes=(x, y[columns]))
        some = SomeColumns(self.costs, columns)
        return GivenCosts(some, known, self.row_offset.dtype, self.cost_errors[0])

    def score_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield -C in blocks of rows, in a buffer that the next block overwrites."""
        elements = TILE_ELEMENTS_CPU if self.costs.device.type == "cpu" else EXACT_ELEMENTS_GPU
        return self._negative(elements, self.row_offset.dtype)

    def negative_costs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield -C in blocks of rows, float64, in a buffer that is overwritten."""
        return self._negative(_exact_elements(self.costs.device), torch.float64)

    def _negative(self, elements: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        zero = torch.zeros(self.costs.shape[1], dtype=dtype, device=self.costs.device)
        buffer = zero[:0]
        for rows, block in _blocks(self.costs, elements):
            if len(block) > len(buffer):
                buffer = zero.new_empty(block.shape)
            # Negation and conversion in one operation, for any two types.
            yield rows.start, torch.sub(zero, block, out=buffer[: len(block)])


def matrix_operator(
    given: Tensor | CostSource,
    a: Tensor,
    b: Tensor,
    *,
    dtype: torch.dtype | None = None,
    facts: MatrixFacts | None = None,
    errors: Tensor | None = None,
) -> TorchOperator[GivenCosts]:
    """Build the operator of a given cost C (n, m), with passes in PyTorch.

    Args:
        given: C as a matrix of a floating type, or as a source.
        a: (n,) masses, float64.
        b: (m,) masses, float64.
        dtype: of scores and potentials: float32 or float64; by default float64 for float64 costs.
        facts: of C, if they were computed before.
        errors: (n,) float64; the error of C_ij is at most errors_i. By default 0.
    """
    costs = HeldCosts(given) if isinstance(given, Tensor) else given
    known = facts or matrix_facts(exact_blocks(costs), a, b)
    errors = torch.zeros_like(a) if errors is None else errors
    dtype = dtype or torch.promote_types(costs.dtype, torch.float32)
    return TorchOperator(GivenCosts(costs, known, dtype, errors), a, b)


def exact_blocks(source: CostSource) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of rows and C[rows], small enough to be converted to float64 at once."""
    return _blocks(source, _exact_elements(source.device))


def _exact_elements(device: torch.device) -> int:
    return EXACT_ELEMENTS_CPU if device.type == "cpu" else EXACT_ELEMENTS_GPU


def _blocks(source: CostSource, elements: int) -> Iterator[tuple[slice, Tensor]]:
    n, m = source.shape
    height = max(1, min(n, (source.block_entries or elements) // m))
    for rows in spans(0, n, height):
        yield rows, source.rows(rows)
