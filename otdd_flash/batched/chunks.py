"""Chunks of a batch in PyTorch, and sums along the rows and columns of their matrices.

Where kernels do not run, `cpu` balances chunk by chunk and `adjoint` solves by these sums. `plans`
and `relaxed` divide batches by `parts`. Matrices, s of them side by side, are (n, m, s), numbers of
rows (n, s) and numbers of columns (m, s), whatever their order in memory: s is innermost where
there are many small matrices, else columns are, so that operations run along many numbers.

A matrix must get the same bits among any others (`tests/batched`): the order of a sum depends on
its length alone, so sums here are made of operations on single entries, which round alike wherever
an entry stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.kernels.batched.problems import Problems, computed_in

# Entries of the matrices of a chunk: many, as each operation on them is a call, and few enough for
# the last cache of a processor.
ENTRIES_AT_ONCE = 1 << 19
# A sum of more than FEW terms begins with MOST_PIECES of them in order, a shorter one with two.
FEW, MOST_PIECES = 8, 4


class Chunk(NamedTuple):
    """Problems (n, m, s) side by side.

    Attributes:
        logits: (x - h 1^T) / t, at most 0 (n, m, s).
        highest: h (n, s), the largest of each row of x.
        scale: 1 / t (s,) or (1,).
        a: (n, s) or (n, 1); None where all masses are 1.
        b: (m, s) or (m, 1); None where all masses are 1.
        rows: flags of the rows in use (n, s), None for all.
        columns: flags of the columns in use (m, s), None for all.
    """

    logits: Tensor
    highest: Tensor
    scale: Tensor
    a: Tensor | None
    b: Tensor | None
    rows: Tensor | None
    columns: Tensor | None

    def take(self, which: Tensor) -> Chunk:
        """Keep the problems where the flags (s,) are set."""
        return Chunk(*(taken(values, which) for values in self))

    def log_masses(self) -> tuple[Tensor | None, Tensor | None]:
        """Logarithms of both masses; None where all are 1."""
        return None if self.a is None else self.a.log(), None if self.b is None else self.b.log()


def taken(values: Tensor | None, which: Tensor) -> Any:
    """Values (..., s) of some problems, by flags (s,); those that all share as they are."""
    if values is None or values.shape[-1] == 1 != len(which):
        return values
    return values[..., which]


def parts(matrices: Tensor, *, kept: int = 0) -> list[slice]:
    """Chunks of a batch, for which `kept` more numbers of each matrix are kept."""
    count, n, m = matrices.shape
    height = max(1, ENTRIES_AT_ONCE // max(n * m + kept, 1))
    return [slice(first, min(first + height, count)) for first in range(0, count, height)]


def chunk_of(problems: Problems, part: slice) -> Chunk:
    """Make a chunk of some of the problems."""
    matrices = problems.matrices
    dtype, (n, m) = computed_in(matrices), matrices.shape[1:]
    x = side_by_side(matrices[part], dtype)
    if problems.negated:
        x.neg_()
    rows = columns = None
    if problems.sizes is not None:
        places = torch.arange(max(n, m), device=x.device)[:, None]
        rows, columns = (
            places[:size] < given
            for size, given in zip((n, m), problems.sizes[part].T, strict=True)
        )
        x.masked_fill_(~(rows[:, None] & columns), -torch.inf)
    highest = present(largest(x, 1), rows)
    scale = problems.scale[part] if problems.scale.ndim else problems.scale[None]
    scale = scale.to(dtype)
    a, b = (
        None
        if given is None
        else (given[part] if given.ndim == 2 else given[None]).to(dtype).T.contiguous()
        for given in (problems.a, problems.b)
    )
    return Chunk(x.sub_(highest[:, None]).mul_(scale), highest, scale, a, b, rows, columns)


def side_by_side(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy (n, m, s) of matrices (s, n, m), in the order in memory that suits their number."""
    count, n, m = matrices.shape
    last = matrices.permute(1, 2, 0)
    if count > 2 * max(n, m):
        return last.to(dtype, copy=True, memory_format=torch.contiguous_format)
    first = matrices.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return first.permute(1, 2, 0)


def present(values: Tensor, side: Tensor | None) -> Tensor:
    """Values of rows or columns, 0 beyond them."""
    return values if side is None else torch.where(side, values, 0)


def largest(values: Tensor, dim: int) -> Tensor:
    """The largest of matrices (n, m, s) along their columns (0) or rows (1)."""
    if values.stride(2) == 1:
        return values.amax(dim)
    # In the order of the memory, which results then have as well: several times as fast.
    return values.permute(2, 0, 1).amax(1 + dim).T


class Products:
    """Sums along a dimension of matrices times numbers along it, by views and buffers made once.

    The dimension is cut into pieces, which are added up in order, and the entries of their sum by
    halves: the result of up to 128 terms is rounded nine times at the most, products included.

    Attributes:
        numbers: those of the last call, (m, s) along rows (dim 1) and (n, s) along columns (0).
    """

    def __init__(self, matrices: Tensor, dim: int) -> None:
        if matrices.stride(dim) == 1 and matrices.stride(2) != 1:
            # A copy that has the other dimension innermost, for operations along many numbers.
            copied = matrices.permute(2, dim, 1 - dim).contiguous()
            matrices = copied.permute((2, 1, 0) if dim == 1 else (1, 2, 0))
        pieces = 2 if matrices.shape[dim] <= FEW else MOST_PIECES
        self.numbers = torch.empty_like(matrices.select(1 - dim, 0))
        first, *rest = matrices.chunk(pieces, dim)
        factor, *factors = self.numbers.unsqueeze(1 - dim).chunk(pieces, dim)
        self._first, self._total = (first, factor), torch.empty_like(first)
        self._rest = [
            (_first(self._total, dim, piece.shape[dim]), piece, by)
            for piece, by in zip(rest, factors, strict=True)
        ]
        self._halves, self._sums = _halves(self._total, dim)

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return the sums, which the next call overwrites."""
        self.numbers.copy_(numbers)
        return self.sums()

    def sums(self) -> Tensor:
        """Return the sums with the numbers that stand in `numbers`."""
        torch.mul(*self._first, out=self._total)
        for total, piece, factor in self._rest:
            total.addcmul_(piece, factor)
        for first, second in self._halves:
            first.add_(second)
        return self._sums


@dataclass
class Scaling:
    """1 over sums along a dimension of a kernel times scalings of the other side and their masses.

    Beyond the rows or columns that there are it is 0.
    """

    products: Products
    masses: Tensor | None
    side: Tensor | None

    def __call__(self, other: Tensor) -> Tensor:
        """Return the scalings of a side by those of the other."""
        return self.of(other if self.masses is None else other * self.masses)

    def of(self, numbers: Tensor) -> Tensor:
        """Return the scalings of a side by those of the other times their masses."""
        return present(self.products(numbers).reciprocal(), self.side)


@dataclass
class LogScaling:
    """A `Scaling` by logarithms: of a kernel, of masses, and of scalings.

    These are pairs (2, k, s) whose sum is a logarithm: the largest exponent of a sum, with the
    opposite sign, and the remainder, which is small. Logits and the first of a pair are multiples
    of a number, so that their sums are exact: in float32 those of logits of 1e4 would be rounded by
    1e-3, in every iteration anew. A grid is a number that values are rounded by, as
    (value + grid) - grid.
    """

    logits: Tensor
    dim: int
    masses: Tensor | None
    side: Tensor | None
    grid: Tensor

    def __call__(self, other: Tensor) -> Tensor:
        """Return the pairs of a side by those of the other."""
        dim = self.dim
        high, low = with_masses(other, self.masses, log=True).unsqueeze(2 - dim)
        exponents = self.logits + high
        highest = on_grid((exponents + low).amax(dim), self.grid)
        highest = torch.where(highest == -torch.inf, 0, highest)
        terms = exponents.sub_(highest.unsqueeze(dim)).add_(low)
        # A coarse grid leaves much of the largest in the remainder.
        left = terms.amax(dim)
        left = torch.where(left == -torch.inf, 0, left)
        sums = sum_by_halves(terms.sub_(left.unsqueeze(dim)).exp_(), dim)
        return present(torch.stack((-highest, sums.log_().add_(left).neg_())), self.side)


def grid_of(logits: Tensor) -> Tensor:
    """Return the grid for sums of two logits (s,): twice the range of a matrix's logits."""
    return -2 * torch.where(logits > -torch.inf, logits, 0).amin((0, 1))


def on_grid(values: Tensor, grid: Tensor) -> Tensor:
    """Values (..., s) rounded to the grid; as they are where it is 0."""
    return (values + grid).sub_(grid)


def with_masses(scalings: Tensor, masses: Tensor | None, *, log: bool) -> Tensor:
    """Scalings times masses, which are 1 by default."""
    if masses is None:
        return scalings
    return torch.stack((scalings[0], scalings[1] + masses)) if log else scalings * masses


def scaled(kernel: Tensor, phi: Tensor, gamma: Tensor, *, log: bool) -> Tensor:
    """Return phi_i K_ij gamma_j (n, m, s); with `log` all three are given as logarithms."""
    if log:
        exponents = (kernel + phi[0][:, None]).add_(gamma[0])
        return exponents.add_(phi[1][:, None] + gamma[1]).exp_()
    # Scalings may be far apart, and their product is nearer to 1 than that with an entry.
    return (phi[:, None] * gamma).mul_(kernel)


def sum_by_halves(values: Tensor, dim: int) -> Tensor:
    """Sums along a dimension, in an order that only its length decides; overwrites."""
    halves, sums = _halves(values, dim)
    for first, second in halves:
        first.add_(second)
    return sums


def _halves(values: Tensor, dim: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """The pairs of views to add, one after the other, and the view that then holds the sums."""
    halves = []
    while (size := values.shape[dim]) > 1:
        half = (size + 1) // 2
        second = values.narrow(dim, half, size - half)
        values = values.narrow(dim, 0, half)
        halves.append((_first(values, dim, size - half), second))
    return halves, values.select(dim, 0)


def _first(values: Tensor, dim: int, length: int) -> Tensor:
    """The first values of a dimension; a view of all of them would take as long as a sum."""
    return values if values.shape[dim] == length else values.narrow(dim, 0, length)
